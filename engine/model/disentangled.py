"""Disentangled attention: scores of contents with distances (DeBERTa, arXiv:2006.03654, 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.attention.base import AttentionBackend, ContentBias
from engine.model import spec
from engine.model.layers import Linear, Place, SelfAttention, Step, build_norm
from engine.model.positions import Disentangled, DistanceVectors


class DistanceTable(nn.Module):
    """The vectors of distances that the layers of a stack share, and which of them each distance has.

    Args:
        length: distances between tokens are below this.
    """

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
    """Which vector belongs to each distance (key position - query position), int64.

    The operations on buckets are those of transformers, in its order: where a bucket ends depends on the last bit.
    """
    back = -distances  # earlier keys have the later vectors
    if part.buckets is not None:
        half, far = part.buckets // 2, back.abs()
        base = torch.log(torch.tensor((part.max_distance - 1) / half, device="cpu"))
        wide = torch.ceil(torch.log(far.clamp(min=half) / half) / base * (half - 1)) + half
        back = torch.where(far <= half, back.to(wide.dtype), wide * torch.sign(back)).long()
    return (back + part.span).clamp(0, 2 * part.span - 1)


class DisentangledAttention(SelfAttention):
    """Self-attention that also multiplies queries with keys made of distances, and keys with queries of distances.

    Both are made at the first step and kept: weights do not change once they are filled, and a short input would
    otherwise wait for the projection of hundreds of distances in every layer.
    """

    def __init__(self, part: spec.Attention, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__(part, hidden_size, backend, place)
        assert isinstance(part.position, Disentangled)
        self.position = part.position
        width = part.heads * part.head_dim
        own = not self.position.shared
        self.distance_keys = self.distance_queries = None
        if own and self.position.content_to_position:
            self.distance_keys = Linear(hidden_size, width, part.qkv_bias, place)
        if own and self.position.position_to_content:
            self.distance_queries = Linear(hidden_size, width, part.qkv_bias, place)
        self._bias: ContentBias | None = None

    def bias(self, step: Step) -> ContentBias:
        """What is added to the scores."""
        if self._bias is None:
            assert step.distances is not None
            keys, queries = self._project(step.distances())
            self._bias = ContentBias(keys, queries, step.distances.columns, step.distances.zero)
        return self._bias

    def _project(self, vectors: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Keys and queries [heads, N, head_dim] of distances' vectors [N, hidden]; None for those of no term."""
        heads, head_dim = self.part.heads, self.part.head_dim

        def split(x: Tensor) -> Tensor:
            return x.view(-1, heads, head_dim).transpose(0, 1).contiguous()

        if self.position.shared:
            queries, keys, _ = self.qkv(vectors).view(-1, 3, heads * head_dim).unbind(1)
            return (
                split(keys) if self.position.content_to_position else None,
                split(queries) if self.position.position_to_content else None,
            )
        return (
            None if self.distance_keys is None else split(self.distance_keys(vectors)),
            None if self.distance_queries is None else split(self.distance_queries(vectors)),
        )
