"""The layers that a request passes before its route: sockets, HTTP, the request id, the drain, the key, the limits."""
