"""Structures that Python and the library share: declared here, and compared by size with those of the library.

A field that one side alone has would shift all that follow, and kernels would read addresses as numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_TYPES: dict[str, type] = {"pointer": ctypes.c_void_p, "int": ctypes.c_int64, "double": ctypes.c_double}
TWINS: dict[str, type[ctypes.Structure]] = {}


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """The twin of a structure in `src`, by the name that it has there (`src/structures.cpp` lists them).

    Args:
        fields: "TYPE field field ... | TYPE field ...", the types being pointer, int, double, and structures that were
            made before.
    """
    made = []
    for part in fields.split("|"):
        kind, *names = part.split()
        made += [(field, _TYPES[kind]) for field in names]
    twin = type(name, (ctypes.Structure,), {"_fields_": made})
    _TYPES[name] = TWINS[name] = twin
    return twin


def check(size_of: Callable[[int, int], None]) -> None:
    """Compare the sizes of all structures with a library's.

    Args:
        size_of: its `structure_size`.

    Raises:
        RuntimeError: a structure has another size there, or there is none of this name.
    """
    for name, twin in TWINS.items():
        text, size = ctypes.create_string_buffer(name.encode()), ctypes.c_int64()
        size_of(ctypes.addressof(text), ctypes.addressof(size))
        if size.value != ctypes.sizeof(twin):
            there = "is not known to" if size.value < 0 else f"has {size.value} bytes in"
            raise RuntimeError(
                f"The structure {name} has {ctypes.sizeof(twin)} bytes in Python and {there} the native library: "
                "its fields in engine/backends/native must be those in engine/backends/native/src."
            )
