"""Weights stored as MXFP4: blocks of 32 4-bit numbers, each with a power of two (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Size, Tensor

from engine.backends.native.gemm import Blocks
from engine.errors import ModelLoadError
from engine.model.stored.scheme import Packed, Scheme, Tensors, matrices

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of a matrix's two tensors."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The 4-bit numbers without a sign."""
_BIAS = 127
_BYTES = 16  # bytes of a block without its exponent


class Mxfp4(Scheme):
    """Blocks and scales, under the name of the blocks: their axes are in another order than those of the plain
    matrix."""

    title = "MXFP4"

    def find(self, tensors: Tensors) -> Iterator[Packed]:
        for module, name in matrices(tensors, BLOCKS):
            scales = module + SCALES
            if scales in tensors.names and tensors.format(name) == tensors.format(scales) == "U8":
                blocks, found = tensors.shape(name), tensors.shape(scales)
                if len(blocks) < 4:
                    raise ModelLoadError(
                        f"{tensors.path}: {name} should have at least four dimensions, of matrices, rows, blocks and "
                        f"bytes, but is stored as {list(blocks)}. Download it again."
                    )
                if found != blocks[:-1]:
                    raise ModelLoadError(
                        f"{tensors.path}: the tensor {scales} should have a number for each block of {name}, which is "
                        f"stored as {list(blocks)}, but is stored as {list(found)}."
                    )
                packed = Packed(name, (name, scales), decoded_shape(blocks), decode, format="BF16")
                yield replace(packed, own="mxfp4", quantised=as_blocks) if blocks[-1] == _BYTES else packed


def decoded_shape(blocks: Size) -> Size:
    """The shape of the matrix in blocks [..., rows, blocks, bytes]: [..., rows, inputs]."""
    return Size((*blocks[:-2], 2 * blocks[-2] * blocks[-1]))


def as_blocks(blocks: Tensor, scales: Tensor) -> Blocks:
    """The same numbers as GGUF blocks, [..., rows, bytes]: an exponent, and bytes with two numbers that are 16 apart.
    `blocks`, `scales`: see `decode`; 32 numbers per block."""
    shape = decoded_shape(blocks.shape)
    values = torch.empty(*blocks.shape[:-1], 1 + _BYTES, dtype=torch.uint8)
    for part, exponents, to in zip(
        blocks.flatten(0, -4), scales.flatten(0, -3), values.flatten(0, -4), strict=True
    ):  # matrix by matrix, so that intermediate results stay small
        numbers = torch.stack((part & 15, part >> 4), -1).flatten(-2)
        to[..., 0] = exponents
        to[..., 1:] = numbers[..., :_BYTES] | numbers[..., _BYTES:] << 4
    return Blocks("mxfp4", values.flatten(-2), shape[-1])


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers [..., rows, inputs] in bfloat16, which represents all of them.

    Args:
        blocks: [..., rows, blocks, bytes] uint8, two numbers each, the first in the lower bits.
        scales: [..., rows, blocks] uint8, exponents of two plus 127.
    """
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    byte = torch.arange(256)
    # Both numbers of a byte are looked up at once.
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).view(torch.int32).view(-1)
    out = torch.empty(decoded_shape(blocks.shape), dtype=torch.bfloat16)
    width = 2 * blocks.shape[-1]
    for part, exponents, to in zip(
        blocks.flatten(0, -4), scales.flatten(0, -3), out.flatten(0, -3), strict=True
    ):  # matrix by matrix, so that intermediate results stay small
        numbers = pairs[part.int().view(-1)].view(torch.bfloat16).view(-1, width)
        powers = torch.ldexp(torch.ones(len(numbers), 1), exponents.int().view(-1, 1) - _BIAS).to(torch.bfloat16)
        torch.mul(numbers, powers, out=to.view(-1, width))
    return out
