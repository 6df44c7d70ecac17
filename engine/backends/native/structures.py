"""Structures that Python and the library share: declared here, and compared with the library's by their bytes and by
the number of their fields, because a small field may fit into padding.

A field on only one side would shift all later ones, and kernels would read addresses as numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_TYPES: dict[str, type] = {"pointer": ctypes.c_void_p, "int": ctypes.c_int64, "double": ctypes.c_double}
TWINS: dict[str, tuple[int, int]] = {}
"""Bytes and number of fields of each structure, by its name in `src` (`OCTAVO_TWIN`)."""


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """The Python counterpart of a structure in `src`, by its name there (`src/structures.cpp` lists them). `fields`:
    "TYPE field field ... | TYPE field ..."; types are pointer, int, double, and structures made before."""
    made = []
    for part in fields.split("|"):
        kind, *names = part.split()
        made += [(field, _TYPES[kind]) for field in names]
    twin = type(name, (ctypes.Structure,), {"_fields_": made})
    _TYPES[name], TWINS[name] = twin, (ctypes.sizeof(twin), len(made))
    return twin


def check(function: Callable[[str, str], Callable[..., None]]) -> None:
    """Compare all structures with a library's. `function`: `Library.function`. Raises RuntimeError if a structure has
    other bytes or fields in the library, or does not exist there."""
    for name, here in TWINS.items():
        there = (ctypes.c_int64 * 2)()
        try:
            function(f"twin_{name}", "p")(ctypes.addressof(there))
            said = "has {} bytes in {} fields".format(*there)
        except AttributeError:
            said = "is not known"
        if tuple(there) != here:
            raise RuntimeError(
                f"The structure {name} has {here[0]} bytes in {here[1]} fields in Python and {said} in the native "
                "library: its fields in engine/backends/native must be those in engine/backends/native/src."
            )
