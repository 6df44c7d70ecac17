"""Vectors that pass through the layers beside the tokens (PEGASUS-X, arXiv:2208.04347, 3)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend
from engine.model import spec
from engine.model.activations import activate_by_name
from engine.model.layers import DenseFeedForward, SelfAttention
from engine.model.norms import build_norm
from engine.model.place import Place


class StreamAttention(SelfAttention):
    """The weights of self-attention, which the vectors share, and a norm of the vectors."""

    def __init__(self, part: spec.Attention, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__(part, hidden_size, backend, place)
        assert part.stream is not None
        self.size, self.shift = part.stream.size, part.stream.shift
        self.global_norm = build_norm(part.stream.norm, hidden_size, place)

    def heads_of(self, vectors: Tensor, min_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [N, heads, head_dim] of vectors [N, features]. `min_rows`: minimum rows of a matrix
        product."""
        assert self.global_norm is not None
        heads = self.qkv(self.global_norm(_filled(vectors, min_rows)))[: len(vectors)]
        queries, keys, values = heads.view(len(vectors), 3, self.part.heads, self.part.head_dim).unbind(1)
        return queries, keys, values

    def joined(self, vectors: Tensor, attended: Tensor, min_rows: int) -> Tensor:
        """The vectors [N, features] plus their attention results, [N, heads, head_dim]."""
        seen: Tensor = self.out(_filled(attended.flatten(1), min_rows))[: len(vectors)]
        return vectors + seen


def feed(vectors: Tensor, before: nn.Module | None, network: DenseFeedForward, min_rows: int) -> Tensor:
    """vectors + network(before(vectors)), [N, features]."""
    x = _filled(vectors, min_rows)
    up = network.up(x if before is None else before(x))
    fed: Tensor = network.down(activate_by_name(network.activation, up))[: len(vectors)]
    return vectors + fed


def _filled(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, max(rows - len(x), 0)))
