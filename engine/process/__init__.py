"""The engine's process: its client, its start, and the messages between the two."""
