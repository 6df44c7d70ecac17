"""Disentangled attention: scores between content and distances (DeBERTa, arXiv:2006.03654, 3.1)."""

from __future__ import annotations

from torch import Tensor

from engine.backends.attention.base import AttentionBackend, ContentBias
from engine.model import spec
from engine.model.distances import DistanceTable
from engine.model.layers import Linear, SelfAttention
from engine.model.place import Place
from engine.model.positions import Disentangled


class DisentangledAttention(SelfAttention):
    """Self-attention that also multiplies queries with keys made from distances, and keys with queries made from
    distances.

    Both are computed at the first step and kept, because loaded weights do not change and a short input would otherwise
    wait in every layer for the projection of hundreds of distances.
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

    def bias(self, distances: DistanceTable) -> ContentBias:
        if self._bias is None:
            keys, queries = self._project(distances())
            self._bias = ContentBias(keys, queries, distances.columns, distances.zero)
        return self._bias

    def _project(self, vectors: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Keys and queries [heads, N, head_dim] from the distances' vectors [N, hidden]; None if a term is absent."""
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
