"""CPU kernels in C++ for operations that torch lacks or divides into too many steps.

    src/         the sources: every *.cpp is compiled and linked, whatever is in it
    build.py     makes the library; loading.py finds and loads it
    norms.py ... typed functions on tensors, one file for each family of kernels

A new kernel is a file src/NAME.cpp with functions OCTAVO_EXPORT(name), and a Python function that checks its arguments
and calls `Kernel("name", signature)`. Tests enforce these rules for all kernels:

- A row's result depends on that row alone, bit for bit: not on the number of rows or threads.
- A kernel reads and writes only the memory that its arguments describe.
- If torch (or numpy) can compute the same, a test compares them for each instruction set of the machine.
"""

from __future__ import annotations

from engine.backends.native.loading import Kernel, Library, available, current, kernels, load, prospect, use

__all__ = ["Kernel", "Library", "available", "current", "kernels", "load", "prospect", "use"]
