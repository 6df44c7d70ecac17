"""Biases of attention scores, as tables for the backends."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from engine.backends.attention.base import DistanceBias, PositionBias
from engine.model.place import Place
from engine.model.positions import RelativeBuckets, RoundedSlopes, Slopes, TwoSidedSlopes


class BiasTable(nn.Module):
    """The bias of a fixed slope per head, for sequences of up to `length` tokens; float32."""

    table: Tensor

    def __init__(self, part: Slopes | TwoSidedSlopes | RoundedSlopes, length: int, device: torch.device):
        super().__init__()
        slopes = torch.tensor(part.values, dtype=torch.float32, device="cpu")[:, None]
        places = torch.arange(length, device="cpu")
        self.zero: int | None = length - 1  # the column of distance 0
        match part:
            case Slopes():
                table = slopes * (places - (length - 1))
            case TwoSidedSlopes():
                table = -slopes * torch.cat((places.flip(0), places[1:]))
            case RoundedSlopes():
                table = (slopes.bfloat16() * places).float() * part.scale
                self.zero = None
        self.register_buffer("table", table.to(device), persistent=False)

    def forward(self) -> DistanceBias | PositionBias:
        """The bias in the form of `AttentionBackend.attend`."""
        return PositionBias(self.table) if self.zero is None else DistanceBias(self.table, zero=self.zero)


class BucketTable(nn.Module):
    """A learned bias per head and bucket of distances (arXiv:1910.10683, 2.1)."""

    buckets: Tensor

    def __init__(self, part: RelativeBuckets, heads: int, place: Place):
        super().__init__()
        self.weight = place.parameter(part.buckets, heads)
        reach = part.max_distance
        distances = torch.arange(-reach, reach + 1 if part.bidirectional else 1, device="cpu")
        self.zero = reach
        self.register_buffer("buckets", bucket_of(part, distances).to(place.device), persistent=False)

    def forward(self) -> DistanceBias:
        """The bias in the form of `AttentionBackend.attend`; distances beyond the last use its bucket."""
        return DistanceBias(self.weight.index_select(0, self.buckets).t().float().contiguous(), zero=self.zero)


def bucket_of(part: RelativeBuckets, distances: Tensor) -> Tensor:
    """The bucket of each distance (key position - query position), int64."""
    buckets, first = part.buckets, torch.zeros_like(distances)
    if part.bidirectional:  # the upper half is for keys that come later
        buckets //= 2
        first = (distances > 0) * buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = buckets // 2
    # Distances below `exact` have a bucket each; larger ones share buckets that widen geometrically.
    steps = torch.log(distances.clamp(min=1).float() / exact) / math.log(part.max_distance / exact) * (buckets - exact)
    wide = (exact + steps.long()).clamp(max=buckets - 1)
    return first + torch.where(distances < exact, distances, wide)
