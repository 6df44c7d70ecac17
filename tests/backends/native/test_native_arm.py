"""Kernels for Arm, under an emulator, compute the bits that this machine's compute, wherever sums are integers.

Other tests compare them with references, as they do with this machine's (`support.native.each_isa`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from support.blocks import random_blocks
from support.emulated import EmulatedLibrary, compiled, what_lacks
from support.native import EMULATED, ISAS, kernels_of, needs_native
from torch import Tensor

from engine.backends import native
from engine.backends.native import gemm
from engine.backends.native.gemm import BlockKind, Packed, matmul

pytestmark = needs_native
ROWS = (1, 2, 3, 5, 12, 29)


def _activations(inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(45)
    return torch.randn(ROWS[-1], inputs, generator=generator) * torch.rand(ROWS[-1], 1, generator=generator).exp2()


def _weights(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(8))


def test_a_sample_of_kernels_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample is a single source file, which is compiled in seconds."""
    if reason := what_lacks():
        pytest.skip(reason)
    x = _activations(147)
    with kernels_of(ISAS[0]):
        made = gemm.quantise_int8_fast(_weights(21, 147))
        wanted = matmul(gemm.pack_int8_fast(made), x)
    library = EmulatedLibrary("neon-i8mm", compiled("neon-i8mm", ["gemm_int8_fast.cpp"]))
    monkeypatch.setattr(library, "check", lambda: None)  # structures are in another source
    with native.use(library):
        packed = gemm.pack_int8_fast(made)
        for rows in ROWS:
            assert torch.equal(matmul(packed, x[:rows]), wanted[:rows])
        library._process.kill()
        with pytest.raises((RuntimeError, BrokenPipeError)):
            matmul(packed, x)
        assert torch.equal(matmul(packed, x), wanted), "a crash is one test's"
    library.close()


def _packers() -> dict[str, Callable[[], Packed]]:
    """Functions that pack weights for the library in use, for each kind with products of integers."""
    weight = _weights(77, 172)
    with kernels_of(ISAS[0]):
        plain, rotated = gemm.quantise_int8(weight), gemm.quantise_int8(weight, "rotated")
        fast, four = gemm.quantise_int8_fast(weight), gemm.quantise_int4(weight)
    kinds = [kind for kind in get_args(BlockKind) if kind != "e4m3"]
    blocks = {kind: random_blocks(kind, 77, 768) for kind in kinds}
    return {
        "int8": lambda: gemm.pack_int8(plain, amx=False),
        "int8_rotated": lambda: gemm.pack_int8(rotated, amx=False),
        "int8_fast": lambda: gemm.pack_int8_fast(fast),
        "int4": lambda: gemm.pack_int4(four, amx=False),
        **{kind: partial(gemm.pack_blocks, blocks[kind]) for kind in kinds},
    }


@pytest.mark.parametrize("isa", EMULATED)
def test_products_of_integers_have_the_same_bits(isa: str) -> None:
    for kind, pack in _packers().items():
        with kernels_of(ISAS[0]):
            packed = pack()
            x = _activations(packed.inputs)
            wanted = matmul(packed, x)
        with kernels_of(isa):
            packed = pack()
            for rows in ROWS:
                assert torch.equal(matmul(packed, x[:rows]), wanted[:rows]), (kind, rows)
