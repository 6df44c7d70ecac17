"""Quantised weights: their description in a config, and the conversion of their tensors to plain ones."""
