"""All settings in one class, their sources, and their display."""
