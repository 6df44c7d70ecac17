"""Attention, operations and sampling by torch: any device, and the reference for the others."""
