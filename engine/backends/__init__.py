"""The code that computes: attention, operations and sampling by torch, by the native library, by Triton."""
