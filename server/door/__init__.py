"""The stages of a request before its route: sockets, HTTP, its id, the drain, the key, the limits."""
