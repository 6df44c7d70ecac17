"""Weights of 8-bit floating point with scales (quant_method fp8 and fbgemm_fp8; arXiv:2209.05433, 2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor

from engine.backends.native.gemm import FLOAT8_GROUP, Blocks
from engine.errors import ModelLoadError
from engine.model.stored.scheme import REALS, Packed, Scheme, Tensors, as_float, block_size, expect, scaled

_FORMATS = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
"""Ends of the names of scales, all of them factors: DeepSeek calls them inverse, others scale."""


class Fp8(Scheme):
    """FP8 matrices with one scale, one per output, or one per block."""

    unread = (".input_scale", ".input_scale_ub", ".activation_scale", ".k_scale", ".v_scale", ".q_scale")

    def __init__(self, config: Mapping[str, Any]):
        self._block = block_size(config.get("weight_block_size"), "weight_block_size")
        self.title = "FP8"

    def find(self, tensors: Tensors) -> Iterator[Packed]:
        for name in list(tensors.names):
            if tensors.format(name) in _FORMATS:
                yield scaled_matrix(tensors, name, self._block)


def scaled_matrix(tensors: Tensors, name: str, block: tuple[int, int] | None) -> Packed:
    """A matrix, or several of one shape, times its stored scale: one number, one per row or per group of a row, or one
    per block. `block`: rows and columns per scale, if the shape of the scales says that. Raises ModelLoadError if the
    scale is missing, or has another shape or format."""
    stored = [name + ending for ending in _SCALES]
    scale = next((one for one in stored if one in tensors.names), stored[-1])
    shape = tensors.shape(name)
    if len(shape) < 2:
        raise ModelLoadError(f"{tensors.path}: {name} is stored as {tensors.format(name)}, but is not a matrix.")
    lead, (rows, columns) = shape[:-2], shape[-2:]
    shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (*lead, 1, 1), (*lead, rows, 1)]
    groups = tensors.shape(scale)[-1] if scale in tensors.names and tensors.shape(scale) else 1
    if groups and columns % groups == 0:
        shapes.append((*lead, rows, groups))
    if block is not None:
        shapes.append((*lead, -(-rows // block[0]), -(-columns // block[1])))
    formats = (*REALS, "F8_E8M0", "U8") if tensors.format(name) in _FORMATS else REALS
    expect(tensors, scale, *shapes, formats=formats)
    per_block = block is not None and tensors.shape(scale) == Size(shapes[-1])
    found = Packed(name, (name, scale), shape, partial(scaled, block=block if per_block else None))
    size = tensors.shape(scale)
    wide = block[1] if block is not None and per_block else columns // (size[-1] if len(size) > 1 else 1)
    if tensors.format(name) != "F8_E4M3" or (wide < columns and wide % FLOAT8_GROUP):
        return found
    tall = block[0] if block is not None and per_block else 1
    return replace(found, own="e4m3", quantised=partial(as_blocks, tall=tall, wide=wide))


def as_blocks(values: Tensor, scales: Tensor, tall: int, wide: int) -> Blocks:
    """The same numbers, [..., rows, bytes], in groups of `FLOAT8_GROUP`, each followed by its scale in float32; numbers
    past a row's end are 0.

    Args:
        values: FLOAT8 [..., rows, columns].
        scales: one number, [rows], or one for each `tall` rows and `wide` columns: a multiple of the group's size, or
            all columns.

    Raises:
        ModelLoadError: a number is NaN.
    """
    rows, columns = values.shape[-2:]
    octets = values.view(torch.uint8)
    groups = -(-columns // FLOAT8_GROUP)
    out = torch.zeros(*octets.shape[:-1], groups, FLOAT8_GROUP + 4, dtype=torch.uint8)
    factors = as_float(scales)
    if factors.numel() == 1:
        factors = factors.reshape(1, 1).expand(*octets.shape[:-1], 1)
    elif factors.dim() == 1:
        factors = factors[:, None]
    if factors.shape[-2] < rows:
        factors = factors.repeat_interleave(rows if factors.shape[-2] == 1 else tall, -2)[..., :rows, :]
    places = torch.arange(groups) * FLOAT8_GROUP // max(wide, 1)
    out[..., FLOAT8_GROUP:] = factors[..., places, None].contiguous().view(torch.uint8)
    whole = columns // FLOAT8_GROUP
    # Matrix by matrix, so that intermediate results stay small.
    for part, to in zip(octets.view(-1, rows, columns), out.view(-1, rows, *out.shape[-2:]), strict=True):
        if bool((part & 0x7F == 0x7F).any()):
            raise ModelLoadError("A matrix stored as FP8 holds numbers that are not finite. Download it again.")
        to[:, :whole, :FLOAT8_GROUP] = part[:, : whole * FLOAT8_GROUP].view(rows, whole, FLOAT8_GROUP)
        if whole < groups:
            to[:, whole, : columns - whole * FLOAT8_GROUP] = part[:, whole * FLOAT8_GROUP :]
    return Blocks("e4m3", out.flatten(-2), columns)
