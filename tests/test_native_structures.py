"""Structures that Python shares with the library: a difference is an error that says where, not a crash."""

from __future__ import annotations

import ctypes
from unittest import mock

import pytest
import torch
from support.native import needs_native

from engine.backends import native
from engine.backends.native import norms, structures

pytestmark = needs_native


@pytest.mark.parametrize("name", sorted(structures.TWINS))
def test_a_field_that_one_side_lacks_is_an_error(name: str) -> None:
    twin = structures.TWINS[name]
    broken = type(name, (ctypes.Structure,), {"_fields_": [("all", twin), ("more", ctypes.c_int64)]})
    x = torch.randn(2, 8)
    said = f"The structure {name} has {ctypes.sizeof(broken)} bytes in Python and has {ctypes.sizeof(twin)} bytes in"
    with (
        native.use(native.current()),  # kernels are looked up anew
        mock.patch.dict(structures.TWINS, {name: broken}),
        pytest.raises(RuntimeError, match=said),
    ):
        norms.rms_norm(x, None, 1e-5)
    norms.rms_norm(x, None, 1e-5)


def test_a_structure_that_the_library_does_not_know_is_an_error() -> None:
    more = {"Nothing": type("Nothing", (ctypes.Structure,), {"_fields_": [("one", ctypes.c_int64)]})}
    found = native.current()
    assert found is not None
    with mock.patch.dict(structures.TWINS, more), pytest.raises(RuntimeError, match="Nothing has 8 bytes in Python"):
        found.check()
