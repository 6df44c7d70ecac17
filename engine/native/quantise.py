"""Rows of activations as int8 with a scale each, for products with int8 weights on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.native.arguments import rows_of
from engine.native.loading import kernels

_QUANTISE = kernels("quantise", "pppp iiiii")


class QuantisedRows(NamedTuple):
    """x = (steps - offset) * scales[:, None], within half a scale.

    Attributes:
        steps: [T, padded size], int8, or uint8 where an offset was asked for; the padding stands for 0.
        scales: [T] float32; NaN of a row that is not finite everywhere.
        sums: [T] int32 of each row's steps without the offset.
    """

    steps: Tensor
    scales: Tensor
    sums: Tensor


def quantise_rows(x: Tensor, *, offset: int = 0, multiple: int = 1) -> QuantisedRows:
    """Rows x [T, size], float32 or bfloat16, as steps of -127 to 127.

    Args:
        offset: added to all steps: 128 for instructions that multiply unsigned bytes with signed ones.
        multiple: rows are padded to a multiple of so many steps.
    """
    if x.dim() != 2:
        raise ValueError(f"rows are [T, size], not {list(x.shape)}")
    if offset not in (0, 128):
        raise ValueError(f"the offset is 0 or 128, not {offset}")
    rows = rows_of(x)
    padded = -(-rows.size // multiple) * multiple
    steps = torch.empty(rows.inner, padded, dtype=torch.uint8 if offset else torch.int8)
    scales = torch.empty(rows.inner, dtype=torch.float32)
    sums = torch.empty(rows.inner, dtype=torch.int32)
    _QUANTISE[x.dtype].call(
        rows.address,
        steps.data_ptr(),
        scales.data_ptr(),
        sums.data_ptr(),
        rows.inner,
        rows.size,
        rows.inner_stride,
        padded,
        offset,
    )
    return QuantisedRows(steps, scales, sums)
