"""Weights of 8-bit floating point with scales (quant_method fp8 and fbgemm_fp8; arXiv:2209.05433, 2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Size

from engine.errors import ModelLoadError
from engine.model.stored.scheme import REALS, Packed, Scheme, Tensors, block_size, expect, scaled

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
    return Packed(name, (name, scale), shape, partial(scaled, block=block if per_block else None))
