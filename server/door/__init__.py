"""What a request passes before its route: sockets, HTTP, its id, the drain, the key, the limits."""
