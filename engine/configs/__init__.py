"""A checkpoint's config.json, read without the code of any model and without torch."""
