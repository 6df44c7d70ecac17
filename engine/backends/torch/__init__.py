"""Attention, operations and sampling in torch: for any device, and the reference for the other backends."""
