"""Small integers in 32-bit words, the first in the lowest bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Size, Tensor

from engine.backends import native
from engine.backends.native.gemm import GROUP, BlockKind, Blocks, Quantised, join_levels
from engine.backends.native.repacking import Layout, repack
from engine.errors import ModelLoadError

HALVES = ("F16", "BF16")
"""Formats of scales that float16 represents exactly, under safetensors' names; for bfloat16 only within float16's
range."""

_WIDE = 128


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """The integers of an int32 matrix as uint8: along `dim` (0 or 1) there are 32 / bits times as many. `bits`: bits of
    each integer, 1 to 8. If their width does not divide 32, integers cross words."""
    if dim == 0:  # a copy, because a view of one row keeps strides that bytes cannot have
        return unpacked(words.t().clone(memory_format=torch.contiguous_format), bits, 1).t()
    rows = words.shape[0]
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if 8 % bits == 0:
        return torch.stack([octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).view(rows, -1)
    stream = (octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).view(rows, -1)
    whole = stream[:, : stream.shape[1] // bits * bits].reshape(rows, -1, bits)
    return (whole << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def packed(integers: Tensor, bits: int) -> Tensor:
    """The words that `unpacked` reads along dim 1: [rows, columns * bits / 32] of uint8 [rows, columns]. `bits`: bits
    of each integer, 4 or 8; a row fills whole words."""
    if bits == 4:
        integers = integers[:, 0::2] | integers[:, 1::2] << 4
    return integers.contiguous().view(torch.int32)


def grouped(values: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None = None) -> Tensor:
    """(values - zeros) * scales [rows, columns], in float32: exact except for one rounding of the product. Raises
    ModelLoadError if a group does not exist.

    Args:
        values: [rows, columns] integers.
        scales: [rows, groups], each for as many adjacent columns.
        zeros: in the form of scales; None for none.
        groups: [columns] group of each column, if the columns of a group are not adjacent.
    """
    scales = scales.float()
    zeros = None if zeros is None else zeros.float()
    if groups is not None:
        chosen = groups.long()
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < scales.shape[1]:
            raise ModelLoadError(
                f"g_idx of a quantised matrix must lie from 0 to {scales.shape[1] - 1}, its groups; it holds "
                f"{int(chosen.min())} to {int(chosen.max())}. Download the checkpoint again."
            )
        numbers = values.float()
        if zeros is not None:
            numbers -= zeros[:, chosen]
        return numbers.mul_(scales[:, chosen])
    rows, columns = values.shape
    count = scales.shape[1]
    size = -(-columns // count)
    if columns % count:  # the last group is shorter
        return grouped(values, scales, zeros, torch.arange(columns) // size)
    numbers = values.float().view(rows, count, size)
    if zeros is not None:
        numbers -= zeros[..., None]
    return numbers.mul_(scales[..., None]).view(rows, columns)


def fits_groups(shape: Size, groups: int) -> bool:
    """Whether groups of a matrix's inputs, all of one size, consist of whole groups of ours."""
    return shape[1] % GROUP == 0 and groups > 0 and shape[1] % (groups * GROUP) == 0


def own_kind(shape: Size, groups: int) -> BlockKind | None:
    """4-bit weights as blocks with one scale and one minimum for each 128 inputs."""
    return "int4_128" if shape[1] % (groups * _WIDE) == 0 else None


def as_blocks(made: Quantised) -> Blocks:
    """4-bit weights with an `own_kind`, in that kind."""
    rows = len(made.values)
    lines = made.scales[:, :: _WIDE // GROUP].contiguous().view(torch.uint8).view(rows, -1, 4)
    values = torch.cat((made.values.view(rows, -1, _WIDE // 2), lines), -1)
    return Blocks("int4_128", values.view(rows, -1), made.inputs)


def check_halves(scales: Tensor) -> None:
    """Refuse scales and minima that are infinite in float16. Raises ModelLoadError: names the setting that expands the
    weights instead."""
    if scales.numel() and not all(bool(end.isfinite()) for end in scales.aminmax()):  # NaN is both
        raise ModelLoadError(
            "A quantised matrix has scales that are not numbers, or are beyond 65,504, the largest float16. Use "
            "--quantization none, which widens it."
        )


def as_lines(
    words: Tensor, layout: Layout, levels: Callable[[Tensor], Tensor], scales: Tensor, zeros: Tensor
) -> Quantised:
    """(levels - zeros) * scales as our own 4 bits, if `fits_groups`; -zeros * scales are rounded to float16.

    Args:
        levels: makes uint8 [rows, columns] from 0 to 15 from the words. It is called if there is no native library.
        scales, zeros: [rows, groups].
    """
    if native.available():
        values = repack(words, layout)
    else:
        values = join_levels(levels(words).contiguous().view(len(scales), -1, GROUP))
    factors = scales.float()
    lines = torch.stack((factors, -zeros.float() * factors), -1).half()
    check_halves(lines)
    repeats = values.shape[1] // scales.shape[1]
    pairs = lines.view(torch.int32).expand(-1, -1, repeats).contiguous()  # of a scale and its minimum
    return Quantised(values, pairs.view(torch.float16).view(*values.shape[:2], 2), values.shape[1] * GROUP)
