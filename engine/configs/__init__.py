"""Reads a checkpoint's config.json, without the code of any model and without torch."""
