"""What tests of kernels share: every library that this machine can run, numbers of threads, poisoned memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from engine.backends import native
from engine.backends.native import gemm
from engine.backends.native.build import EMULATED_TILES, supported_sets
from support.emulated import CPUS, EmulatedLibrary, what_lacks

ISAS = supported_sets()
# `make test` tries this machine's best one; the others, which have to be compiled for that, are for `make test-all`.
# Those of Arm take an hour under an emulator, so they run only by name (CONTRIBUTING.md).
_LACKING = what_lacks()
EMULATED = [
    pytest.param(
        isa, marks=[pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.skipif(bool(_LACKING), reason=_LACKING)]
    )
    for isa in sorted(CPUS.keys() - set(ISAS))
]
each_isa = pytest.mark.parametrize(
    "isa", [*(isa if isa == ISAS[0] else pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS), *EMULATED]
)
needs_amx = pytest.mark.skipif(
    not (native.available() and gemm.has_amx()), reason="this CPU has no AMX, or it is not given"
)
# Kernels for matrix tiles: of this machine's CPU, and emulated where it has what else they need.
each_amx = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(ISAS[0], marks=needs_amx),
        pytest.param(
            EMULATED_TILES,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif("avx512-vnni" not in ISAS, reason="this CPU has no AVX-512 to emulate AMX with"),
            ],
        ),
    ],
)
needs_native = pytest.mark.skipif(not native.available(), reason="there is no native library, nor a compiler")
# Kernels that are in another library as well, which the tests need anyway: it takes a minute to compile one.
STAND_INS = {"avx512-vnni": EMULATED_TILES} if "avx512-vnni" in ISAS[1:] else {}
_MARGIN = 64  # bytes


@contextlib.contextmanager
def kernels_of(isa: str, threads: int = 1) -> Iterator[None]:
    """Kernels of an instruction set, with so many threads; what they are given to write to is poisoned, and what
    lies around it must stay as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    tiles = mock.patch.object(gemm, "has_amx", return_value=False) if isa in STAND_INS else contextlib.nullcontext()
    try:
        with native.use(loaded(STAND_INS.get(isa, isa))), tiles, poisoned_memory():
            yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def loaded(isa: str) -> native.Library:
    """The library for an instruction set of this CPU, or of one that is emulated."""
    return EmulatedLibrary(isa) if isa in CPUS.keys() - set(ISAS) else native.load(isa)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives memory of NaN (0xff in each byte) with margins that nothing may write to."""
    made: list[tuple[Tensor, int]] = []

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        assert device is None or torch.device(device).type == "cpu"
        like = real(*shape, dtype=dtype, device="meta")
        size = like.numel() * like.element_size()
        memory = torch.full((size + 2 * _MARGIN,), 0xFF, dtype=torch.uint8)
        made.append((memory, size))
        return memory[_MARGIN : _MARGIN + size].view(dtype).view(like.shape)

    def empty_like(x: Tensor, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return empty(x.shape, dtype=dtype or x.dtype)

    real = torch.empty
    with mock.patch.object(torch, "empty", empty), mock.patch.object(torch, "empty_like", empty_like):
        yield
    for memory, size in made:
        assert (memory[:_MARGIN] == 0xFF).all(), "written before the beginning"
        assert (memory[_MARGIN + size :] == 0xFF).all(), "written behind the end"
