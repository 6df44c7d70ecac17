"""GGUF, the file format of llama.cpp: one file contains metadata, a vocabulary and all tensors, most of them quantised.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
