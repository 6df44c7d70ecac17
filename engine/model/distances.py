"""The vectors of distances in disentangled attention (DeBERTa, arXiv:2006.03654, 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.positions import DistanceVectors


class DistanceTable(nn.Module):
    """The vectors of distances that the layers of a stack share, and the vector of each distance. `length`: distances
    between tokens are below this."""

    columns: Tensor

    def __init__(self, part: DistanceVectors, hidden_size: int, length: int, place: Place):
        super().__init__()
        self.weight = place.parameter(2 * part.span, hidden_size)
        self.norm = build_norm(part.norm, hidden_size, place)
        self.zero = length - 1
        distances = torch.arange(1 - length, length, device="cpu")
        self.register_buffer("columns", column_of(part, distances).to(place.device), persistent=False)

    def forward(self) -> Tensor:
        """[2 * span, hidden]."""
        vectors: Tensor = self.weight if self.norm is None else self.norm(self.weight)
        return vectors


def column_of(part: DistanceVectors, distances: Tensor) -> Tensor:
    """The index of the vector of each distance (key position - query position), int64.

    The operations on buckets are those of transformers, in the same order, because the end of a bucket depends on the
    last bit.
    """
    back = -distances  # earlier keys have the later vectors
    if part.buckets is not None:
        half, far = part.buckets // 2, back.abs()
        base = torch.log(torch.tensor((part.max_distance - 1) / half, device="cpu"))
        wide = torch.ceil(torch.log(far.clamp(min=half) / half) / base * (half - 1)) + half
        back = torch.where(far <= half, back.to(wide.dtype), wide * torch.sign(back)).long()
    return (back + part.span).clamp(0, 2 * part.span - 1)
