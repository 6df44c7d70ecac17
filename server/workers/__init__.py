"""Processes for work that may run out of control: they can be killed, and their memory is separate."""
