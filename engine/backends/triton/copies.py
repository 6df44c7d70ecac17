"""Copies whole pages on a GPU, in all tensors of the cache at once, because a step of beams waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.triton import upload

_BLOCK = 1024  # words that a program copies


@triton.jit
def copy_kernel(memory, begins, sizes, copies, BLOCK: tl.constexpr):
    """Program (c, t, p): part p of the page that copy c takes from source to target in tensor t."""
    tensor, size = tl.program_id(1), tl.load(sizes + tl.program_id(1))
    pair = copies + 2 * tl.program_id(0)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first = memory + tl.load(begins + tensor)
    source, target = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    wanted = (at < size) & (source != target)
    words = tl.load(first + source * size + at, mask=wanted)
    tl.store(first + target * size + at, words, mask=wanted)


class PageCopier:
    """Copies pages of tensors in one memory.

    Args:
        memory: the bytes of that memory.
        begins: for each tensor, the bytes before its page 0.
        sizes: for each tensor, the bytes of a page.
    """

    def __init__(self, memory: Tensor, begins: Sequence[int], sizes: Sequence[int]):
        # The widest words of which every size and offset is a multiple.
        wide = all(number % 8 == 0 for number in (*begins, *sizes, memory.numel()))
        width = 8 if wide else 1
        self._memory = memory.view(torch.int64) if wide else memory
        self._begins, self._sizes = (
            upload(np.array(numbers, dtype=np.int64) // width, memory.device) for numbers in (begins, sizes)
        )
        self._parts = triton.cdiv(max(sizes) // width, _BLOCK)

    def copy(self, copies: Tensor) -> None:
        """Copy pages [C, 2] int32 (source, target); a pair of equal numbers does nothing. No page is the target of one
        copy and the source of another."""
        grid = (len(copies), len(self._begins), self._parts)
        copy_kernel[grid](self._memory, self._begins, self._sizes, copies, BLOCK=_BLOCK)
