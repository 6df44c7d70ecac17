"""Structures that Python shares with the library: a difference is an error that says where, not a crash."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.native import needs_native

from engine.backends import native
from engine.backends.attention import selection
from engine.backends.native import norms, sampling, structures

pytestmark = needs_native
DECLARING = (selection, sampling)  # modules with twins, which are known once these are imported


@pytest.mark.parametrize("name", sorted(structures.TWINS))
@pytest.mark.parametrize("more", [(8, 1), (0, 1), (8, 0)])
def test_a_field_that_one_side_lacks_is_an_error(name: str, more: tuple[int, int]) -> None:
    """Also where it fits into padding, as one more column of the sampling table may, or only the size differs."""
    size, fields = structures.TWINS[name]
    x = torch.randn(2, 8)
    said = (
        f"The structure {name} has {size + more[0]} bytes in {fields + more[1]} fields in Python "
        f"and has {size} bytes in {fields} fields in"
    )
    with (
        native.use(native.current()),  # kernels are looked up anew
        mock.patch.dict(structures.TWINS, {name: (size + more[0], fields + more[1])}),
        pytest.raises(RuntimeError, match=said),
    ):
        norms.rms_norm(x, None, 1e-5)
    norms.rms_norm(x, None, 1e-5)


def test_a_structure_that_the_library_does_not_know_is_an_error() -> None:
    found = native.current()
    assert found is not None
    said = "Nothing has 8 bytes in 1 fields in Python and is not known in the native library"
    with mock.patch.dict(structures.TWINS, {"Nothing": (8, 1)}), pytest.raises(RuntimeError, match=said):
        found.check()
