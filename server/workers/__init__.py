"""Processes for work that may run away: they can be killed, and what they take is their own."""
