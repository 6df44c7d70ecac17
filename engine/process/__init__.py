"""The engine's own process: its client, its start, and the messages between the two."""
