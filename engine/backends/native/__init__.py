"""Kernels of our own for CPUs, in C++: what torch lacks, or does in too many steps.

    src/         the sources: every *.cpp is compiled and linked, whatever is in it
    build.py     makes the library; loading.py finds and loads it
    norms.py ... typed functions on tensors, one file for each family of kernels

A new kernel is a file src/NAME.cpp with functions OCTAVO_EXPORT(name), and a function in Python that checks what it is
given and calls `Kernel("name", signature)`. Rules that all kernels keep, because tests hold them:

- What becomes of a row depends on that row alone, bit for bit: not on the number of rows or threads.
- Nothing is read or written outside of what the arguments describe.
- Where torch (or numpy) can compute the same, a test compares them, for each instruction set that the machine has.
"""

from __future__ import annotations

from engine.backends.native.loading import Kernel, Library, available, current, kernels, load, prospect, use

__all__ = ["Kernel", "Library", "available", "current", "kernels", "load", "prospect", "use"]
