"""Vectors as JSON: every float32 comes back as itself."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch

from engine.pooled.vectors import EmbedDtype, json_base64, json_matrix, packed

RANDOM = np.random.default_rng(0)
ANY = RANDOM.integers(0, 2**32, size=200_000, dtype=np.uint32).view(np.float32)
VALUES = {
    "usual": (RANDOM.standard_normal(50_000) / 20).astype(np.float32),
    "any": ANY[np.isfinite(ANY)],
    "edges": np.array(
        [0.0, -0.0, 1, -1, 1e-45, 1.1754944e-38, 3.4028235e38, 0.1, 1 / 3, 1e-14, 1e9, 16777215, 0.99999994, 999.99994],
        np.float32,
    ),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("as_base64", [False, True])
def test_numbers_are_the_same_bits(name: str, as_base64: bool) -> None:
    values = VALUES[name]
    written = json_base64(packed(values[None], "float32")) if as_base64 else json_matrix(values[None])
    read = json.loads(written)
    back = np.frombuffer(base64.b64decode(read), "<f4") if as_base64 else np.array(read).astype(np.float32)
    assert (back.view(np.uint32) == values.view(np.uint32)).all()


def test_numbers_are_no_longer_than_they_must_be() -> None:
    matrix = np.array([[0.1, 0.25, -2, 1 / 3], [1, 2, 3, 4]], np.float32)
    assert json_matrix(matrix) == b"[0.100000001,0.25,-2.0,0.333333343]"
    assert json_matrix(matrix, rows=True) == b"[[0.100000001,0.25,-2.0,0.333333343],[1.0,2.0,3.0,4.0]]"
    for number in json_matrix(VALUES["usual"][None]).strip(b"[]").split(b","):
        digits = number.lstrip(b"-").partition(b"e")[0].replace(b".", b"").lstrip(b"0")
        assert len(digits) <= 9, number


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", VALUES)
def test_in_fewer_bits_as_torch_has_them(name: str, dtype: EmbedDtype) -> None:
    values = VALUES[name][: len(VALUES[name]) // 2 * 2].reshape(2, -1)
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).flatten()
    for big in (False, True):
        bits = np.frombuffer(packed(values, dtype, big_endian=big), f"{'>' if big else '<'}i{expected.itemsize}")
        read = torch.from_numpy(bits.astype(bits.dtype.newbyteorder("="))).view(expected.dtype)
        assert torch.equal(read, expected)
        assert torch.equal(read.signbit(), expected.signbit())
