"""Weights that are stored in few bits: what a config says of them, and how their tensors become plain ones."""
