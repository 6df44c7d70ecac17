"""Fixed sine and cosine vectors of positions (arXiv:1706.03762, 3.5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.model.positions import Positions, Sinusoidal, SpannedSinusoidal


def fixed_vectors(part: Positions) -> Callable[[Tensor], None] | None:
    """The table of fixed positions; None for learned ones."""
    match part:
        case Sinusoidal():
            return fill_sinusoids
        case SpannedSinusoidal():
            return partial(fill_spanned_sinusoids, part)
        case _:
            return None


def fill_sinusoids(table: Tensor) -> None:
    """Fill a table [positions, features] that the checkpoint does not store: sines in the first half of the features,
    cosines in the second."""
    length, width = table.shape
    # In float64, like the tables used in training.
    waves = 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] / waves
    table.copy_(torch.cat((angles.sin(), angles.cos()[:, : width // 2]), dim=1))


def fill_spanned_sinusoids(part: SpannedSinusoidal, table: Tensor) -> None:
    """Fill a table [positions, features] with the vectors of the part; with an odd number of features, the last is
    0."""
    length, width = table.shape
    half = width // 2
    # In float32, like the tables used in training.
    waves = torch.exp(torch.arange(half, dtype=torch.float32, device="cpu") * -(math.log(10_000) / (half - 1)))
    angles = torch.arange(length, dtype=torch.float32, device="cpu")[:, None] * waves
    table.zero_()
    table[:, : 2 * half].copy_(torch.cat((angles.sin(), angles.cos()), dim=1))
    if part.unplaced is not None:
        table[part.offset - 1].zero_()
