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
    YarnScaling,
)


def rotary_frequencies(part: Rotary, length: int) -> Tensor:
    """[dim / 2] float32 radians per position, scaling applied.

    The operations are those of transformers, in its order: at position 100,000, a frequency that differs in its last
    bit gives an angle that differs by 0.01.

    Args:
        length: what a sequence can reach, in tokens: scalings that depend on length are fixed for it.
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
        case BandScaling(factor, low, high, original):
            wavelengths = 2 * math.pi / frequencies
            # 0 where the wave is so long that it is stretched, 1 where it is kept, blended between.
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
        """The (fractional) feature that turns so often over the original length."""
        return dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = feature(scaling.fast), feature(scaling.slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    return 1.0 - ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / width).clamp(0.0, 1.0)


def attention_factor(part: Rotary) -> float:
    """What the rotated features are multiplied by, which some scalings ask for."""
    return part.scaling.attention_factor if isinstance(part.scaling, YarnScaling | LongScaling) else 1.0


class RotaryTable(nn.Module):
    """Cosines and sines of positions, float32 until they are narrowed, a row each.

    `cos` [rows, head_dim] is 1 for features that do not rotate; `sin` is [rows, dim / 2].

    Args:
        length: the first rows are of all positions in [0, length), in sequences that can reach that length.
        limits: after them, for each of these, come those of [0, limit), in sequences that do not exceed it.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, part: Rotary, head_dim: int, length: int, device: torch.device, limits: Sequence[int] = ()):
        super().__init__()
        self.part, self.in_float32 = part, part.in_float32
        self.register_buffer("cos", torch.empty(0, head_dim, device=device), persistent=False)
        self.register_buffer("sin", torch.empty(0, part.dim // 2, device=device), persistent=False)
        for reach in (length, *limits):
            self.extend(reach, torch.arange(reach, device="cpu"))

    def extend(self, length: int, positions: Tensor) -> None:
        """Append rows of these positions [n], in sequences that can reach a length."""
        part, factor = self.part, attention_factor(self.part)
        angles = positions.float()[:, None] * rotary_frequencies(part, length)
        cos = angles.cos() * factor
        turned = cos.repeat_interleave(2, dim=1) if part.interleaved else torch.cat((cos, cos), dim=1)
        still = torch.ones(len(angles), self.cos.shape[1] - part.dim, device="cpu")
        self.cos = torch.cat((self.cos, torch.cat((turned, still), dim=1).to(self.cos.device)))
        self.sin = torch.cat((self.sin, (angles.sin() * factor).to(self.sin.device)))

    def narrow(self, dtype: torch.dtype) -> None:
        """Keep the rows in the format that heads of `dtype` are rotated in, and in no other."""
        self.cos, self.sin = self.whole(dtype)

    def bytes_for(self, dtype: torch.dtype) -> int:
        """Bytes of the rows then."""
        return (self.cos.numel() + self.sin.numel()) * (torch.float32 if self.in_float32 else dtype).itemsize

    def whole(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos [rows, head_dim], sin [rows, dim / 2]), in the format that heads of `dtype` are rotated in."""
        dtype = torch.float32 if self.in_float32 else dtype
        return self.cos.to(dtype), self.sin.to(dtype)

    def forward(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos [T, 1, head_dim], sin [T, 1, dim / 2]) in these rows [T], in the format that rotation happens in."""
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
