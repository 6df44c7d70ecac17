"""Converts 4-bit matrices from checkpoints to the order of our own 4 bits."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from engine.backends.native.gemm import GROUP
from engine.backends.native.loading import Kernel

Layout = Literal["awq", "gptq", "rows"]
"""Layouts of words with eight integers. "awq": [inputs, outputs / 8], in AWQ's order. "gptq": [inputs / 8, outputs],
and "rows": [outputs, inputs / 8]; in both, the first input is in the lowest bits."""

_KERNELS = {layout: Kernel(f"repack_{layout}", "ppii") for layout in get_args(Layout)}
_EIGHT = 8


def repack(words: Tensor, layout: Layout) -> Tensor:
    """The `gemm.Quantised.values` of a matrix: uint8 [outputs, inputs / GROUP, GROUP / 2]. `words`: int32 in this
    layout; the number of inputs is a multiple of `GROUP`. Raises ValueError if it is not such a matrix on a CPU."""
    if words.dtype != torch.int32 or words.dim() != 2 or words.device.type != "cpu":
        raise ValueError(f"words must be a matrix of int32 on a CPU, got {list(words.shape)} of {words.dtype}")
    rows, columns = words.shape
    shapes = {"awq": (columns * _EIGHT, rows), "gptq": (columns, rows * _EIGHT), "rows": (rows, columns * _EIGHT)}
    outputs, inputs = shapes[layout]
    if inputs % GROUP:
        raise ValueError(f"the number of 4-bit inputs must be a multiple of {GROUP}, got {inputs}")
    words = words.contiguous()
    values = torch.empty(outputs, inputs // GROUP, GROUP // 2, dtype=torch.uint8)
    _KERNELS[layout].call(words.data_ptr(), values.data_ptr(), outputs, inputs // _EIGHT)
    return values
