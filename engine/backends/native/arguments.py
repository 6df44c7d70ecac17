"""Descriptions of tensors for kernels, and the checks before them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FORMATS = (torch.float32, torch.bfloat16)


class Rows(NamedTuple):
    """The rows of a tensor as they are in memory: outer times inner rows of `size` contiguous numbers. `tensor`: the
    tensor, which must live as long as the address is used."""

    tensor: Tensor
    address: int
    outer: int
    inner: int
    size: int
    outer_stride: int
    inner_stride: int


def rows_of(x: Tensor) -> Rows:
    """The rows of x [..., size], copied only if their layout is too irregular. Raises ValueError if x is not on a CPU,
    not float32 or bfloat16, or has no dimension."""
    if x.dtype not in FORMATS or not x.is_cpu or not x.dim():
        raise ValueError(f"kernels need rows of float32 or bfloat16 on a CPU, got {_said(x)}")
    shape, strides = x.shape, x.stride()
    size = shape[-1]
    if strides[-1] == 1 or size == 1:
        if len(shape) == 2:
            return Rows(x, x.data_ptr(), 1, shape[0], size, 0, strides[0])
        if len(shape) == 3:
            return Rows(x, x.data_ptr(), shape[0], shape[1], size, strides[0], strides[1])
    x = x.contiguous()
    return Rows(x, x.data_ptr(), 1, x.numel() // size if size else 0, size, 0, size)


def vector_of(vector: Tensor | None, size: int, dtype: torch.dtype) -> int | None:
    """The address of a parameter [size]; None for none. Raises ValueError if it has another shape or format, or is not
    contiguous."""
    if vector is None:
        return None
    if vector.dtype != dtype or vector.shape != (size,) or not vector.is_contiguous() or not vector.is_cpu:
        raise ValueError(f"a parameter must be [{size}] of {dtype}, contiguous and on a CPU, got {_said(vector)}")
    return vector.data_ptr()


def empty_like(x: Tensor) -> Tensor:
    """Contiguous memory for as many numbers as x has."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _said(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype} on {x.device}"
