"""Rotary position embedding: frequencies, tables, and the rotation itself (arXiv:2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.positions import (
    BandScaling,
    DynamicScaling,
    LinearScaling,
    LongScaling,
    Rotary,
    ShareScaling,
    YarnScaling,
)


def rotary_frequencies(part: Rotary, length: int) -> Tensor:
    """[dim / 2] float32 radians per position, scaling applied.

    The operations are those of transformers, in the same order: at position 100,000, a frequency that differs in its
    last bit gives an angle that differs by 0.01. `length`: maximum length of a sequence, by which scalings that depend
    on length are chosen.
    """
    theta, dim = part.theta, part.dim
    if isinstance(part.scaling, DynamicScaling):
        factor, original = part.scaling.factor, part.scaling.original_length
        stretch = factor * max(length, original) / original - (factor - 1.0)
        theta *= stretch ** (dim / (dim - 2))
    waves = theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    frequencies = 1.0 / waves
    match part.scaling:
        case None | DynamicScaling():
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case ShareScaling(turning, factor):
            turned = frequencies / factor
            turned[turning:] = 0.0
            return turned
        case BandScaling(factor, low, high, original):
            wavelengths = 2 * math.pi / frequencies
            # 0 for a wave so long that it is stretched, 1 if it is kept, blended between.
            kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
            return (1 - kept) * frequencies / factor + kept * frequencies
        case YarnScaling(factor):
            kept = _yarn_kept(part.scaling, theta, dim)
            return 1.0 / (factor * waves) * (1 - kept) + frequencies * kept
        case LongScaling(short, long, original):
            divisors = torch.tensor(long if length > original else short, dtype=torch.float32, device="cpu")
            return 1.0 / (divisors * waves)


def _yarn_kept(scaling: YarnScaling, theta: float, dim: int) -> Tensor:
    """[dim / 2] how much of each frequency is kept: 1 for fast ones, 0 for slow ones (arXiv:2309.00071, 3.2)."""

    def feature(turns: float) -> float:
        """The (fractional) feature that rotates this many times over the original length."""
        return dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = feature(scaling.fast), feature(scaling.slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    return 1.0 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / width).clamp(0.0, 1.0)


def attention_factor(part: Rotary) -> float:
    """The factor of the rotated features in some scalings."""
    return part.scaling.attention_factor if isinstance(part.scaling, YarnScaling | LongScaling) else 1.0


_FILLED = 4096
"""Rows computed at a time: float32 for all of them would take twice their final memory."""


class RotaryTable(nn.Module):
    """Cosines and sines of positions, one row each.

    `cos` [rows, head_dim] is 1 for features that do not rotate; `sin` is [rows, dim / 2].

    Attributes:
        placed: the first row whose position changes from step to step (`place`).

    Args:
        length: the first rows are for all positions in [0, length), in sequences up to that length.
        limits: then, for each limit, rows for [0, limit) follow, in sequences that do not exceed it.
        dtype: the format of rows, unless the rotation is in float32.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        part: Rotary,
        head_dim: int,
        length: int,
        device: torch.device,
        limits: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.part, self.in_float32 = part, part.in_float32
        kept = torch.float32 if part.in_float32 else dtype
        rows = length + sum(limits)
        self.register_buffer("cos", torch.empty(rows, head_dim, dtype=kept, device=device), persistent=False)
        self.register_buffer("sin", torch.empty(rows, part.dim // 2, dtype=kept, device=device), persistent=False)
        start = 0
        for reach in (length, *limits):
            self._fill(start, reach, torch.arange(reach, device="cpu"))
            start += reach
        self.placed = rows

    def make_room(self, count: int) -> None:
        """Append `count` rows for `place`."""
        self.placed = len(self.cos)
        self.cos, self.sin = (
            torch.cat((table, table.new_zeros(count, table.shape[1]))) for table in (self.cos, self.sin)
        )

    def place(self, positions: Tensor) -> None:
        """Overwrite the first rows of that room, from the row `placed` on, with those of positions [n, axes]."""
        self._fill(self.placed, self.placed, positions)

    def extend(self, length: int, positions: Tensor) -> None:
        """Append rows for these positions [n], in sequences up to a length."""
        rows = len(self.cos)
        self.cos, self.sin = (
            torch.cat((table, table.new_empty(len(positions), table.shape[1]))) for table in (self.cos, self.sin)
        )
        self._fill(rows, length, positions)

    def _fill(self, start: int, length: int, positions: Tensor) -> None:
        if self.cos.is_meta:
            return
        part, factor = self.part, attention_factor(self.part)
        frequencies, axes = rotary_frequencies(part, length), [axis for axis, _ in part.pairs]
        if part.pairs:
            frequencies = frequencies[[number for _, number in part.pairs]]
        self.cos[start : start + len(positions), part.dim :] = 1.0
        for block in torch.split(positions, _FILLED):
            rows = slice(start, start + len(block))
            angles = (block[:, None] if block.dim() == 1 else block[:, axes]).float() * frequencies
            cos = angles.cos() * factor
            turned = cos.repeat_interleave(2, dim=1) if part.interleaved else torch.cat((cos, cos), dim=1)
            self.cos[rows, : part.dim] = turned.to(self.cos.device)
            self.sin[rows] = (angles.sin() * factor).to(self.sin.device)
            start += len(block)

    def whole(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos [rows, head_dim], sin [rows, dim / 2]), in the format of the rotation for heads of `dtype`."""
        dtype = torch.float32 if self.in_float32 else dtype
        return self.cos.to(dtype), self.sin.to(dtype)

    def forward(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos [T, 1, head_dim], sin [T, 1, dim / 2]) in these rows [T], in the format of the rotation."""
        cos, sin = F.embedding(rows, self.cos), F.embedding(rows, self.sin)
        dtype = torch.float32 if self.in_float32 else dtype
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(x: Tensor, part: Rotary, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, heads, head_dim] by the angles of their positions."""
    half = part.dim // 2
    if part.interleaved:
        first, second = slice(0, part.dim, 2), slice(1, part.dim, 2)
    else:
        first, second = slice(0, half), slice(half, part.dim)
    dtype, x = x.dtype, x.to(cos.dtype)
    out = x * cos
    out[..., first].addcmul_(x[..., second], sin, value=-1)
    out[..., second].addcmul_(x[..., first], sin)
    return out.to(dtype)
