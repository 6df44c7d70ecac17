"""What tests of kernels share: every library that this machine can run, and numbers of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from engine import native
from engine.native.build import find_compiler, supported_sets

ISAS = supported_sets()
needs_native = pytest.mark.skipif(not native.available(), reason="there is no native library, nor a compiler")


@contextlib.contextmanager
def kernels_of(isa: str, threads: int = 1) -> Iterator[None]:
    """Kernels of an instruction set, with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with native.use(native.load(isa)):
            yield
    finally:
        torch.set_num_threads(before)


def can_build() -> bool:
    return find_compiler() is not None
