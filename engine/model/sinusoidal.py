"""Fixed sine and cosine vectors of positions (arXiv:1706.03762, 3.5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.place import Place
from engine.model.positions import Sinusoidal


class SinusoidalTable(nn.Module):
    """Vectors of all positions in [0, length): sines in the first half of the features, cosines in the second."""

    table: Tensor

    def __init__(self, part: Sinusoidal, width: int, length: int, place: Place):
        super().__init__()
        # In float64, as the tables were made that models were trained with.
        waves = 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
        angles = (torch.arange(length, dtype=torch.float64, device="cpu") + part.offset)[:, None] / waves
        table = torch.cat((angles.sin(), angles.cos()[:, : width // 2]), dim=1)
        self.register_buffer("table", table.to(place.dtype).to(place.device), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """[T, width] of positions [T]."""
        return F.embedding(positions, self.table)
