"""One module a family: its configurations that are tested against transformers, as `SHAPES`."""
