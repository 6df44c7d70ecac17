"""Biases that attention adds to its scores, as the tables that backends are handed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.base import DistanceBias, PositionBias
from engine.model.positions import RoundedSlopes, Slopes


class BiasTable(nn.Module):
    """The bias of a fixed slope per head, for sequences of up to `length` tokens; float32."""

    table: Tensor

    def __init__(self, part: Slopes | RoundedSlopes, length: int, device: torch.device):
        super().__init__()
        slopes = torch.tensor(part.values, dtype=torch.float32, device="cpu")[:, None]
        places = torch.arange(length, device="cpu")
        if isinstance(part, Slopes):
            table = slopes * (places - (length - 1))
        else:
            table = (slopes.bfloat16() * places).float() * part.scale
        self.by_distance = isinstance(part, Slopes)
        self.register_buffer("table", table.to(device), persistent=False)

    def forward(self) -> DistanceBias | PositionBias:
        """What `AttentionBackend.attend` takes."""
        if self.by_distance:
            return DistanceBias(self.table, zero=self.table.shape[1] - 1)
        return PositionBias(self.table)
