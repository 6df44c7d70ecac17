"""The engine's own process: its client, its start, what is said between the two."""
