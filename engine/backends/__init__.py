"""The code that computes: attention, operations and sampling in torch, the native library and Triton."""
