"""Fixed sine and cosine vectors of positions (arXiv:1706.03762, 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_sinusoids(table: Tensor) -> None:
    """Give a table [positions, features] the vectors that a checkpoint without one means: sines in the first half of
    the features, cosines in the second."""
    length, width = table.shape
    # In float64, as the tables were made that models were trained with.
    waves = 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] / waves
    table.copy_(torch.cat((angles.sin(), angles.cos()[:, : width // 2]), dim=1))
