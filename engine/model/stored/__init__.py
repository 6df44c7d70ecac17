"""Quantised weights: what a config says of them, and how their tensors become plain ones."""
