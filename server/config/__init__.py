"""All settings in one class, where their values come from, and how they are shown."""
