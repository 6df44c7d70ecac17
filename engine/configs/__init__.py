"""What a checkpoint's config.json says, read without the code of any model and without torch."""
