"""Attention in a window, and to and from an input's global tokens (Longformer, arXiv:2004.05150, 3.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionBackend, AttentionMetadata, Window
from engine.backends.torch import attention_global
from engine.model import spec
from engine.model.inputs import RunningPass
from engine.model.layers import Linear, SelfAttention, heads_of
from engine.model.place import Place


class GlobalAttention(SelfAttention):
    """The weights of self-attention, with separate queries, keys and values (one more matrix) for global tokens."""

    def __init__(self, part: spec.Attention, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__(part, hidden_size, backend, place)
        self.global_qkv = Linear(hidden_size, 3 * part.heads * part.head_dim, part.qkv_bias, place)

    def attend(self, state: RunningPass, queries: Tensor, keys: Tensor, values: Tensor, of_global: Tensor) -> Tensor:
        """Attention of the queries to nearby keys and values beside them and to those of global tokens; for global
        tokens, attention of their own queries to the global keys and values of their whole rows. `of_global`: queries,
        keys and values side by side, for global tokens."""
        part, inputs = self.part, state.inputs
        assert isinstance(part.sees, spec.GlobalTokens)
        assert isinstance(part.window, Window)
        own = heads_of((queries, keys, values), part.head_dim)
        others = heads_of(of_global.chunk(3, dim=1), part.head_dim)
        found = find_global(part.sees, inputs.token_ids, inputs.metadata)
        return attention_global.attend(own, others, inputs.metadata, found, part.window, part.scale).flatten(1)


def find_global(part: spec.GlobalTokens, token_ids: Tensor, metadata: AttentionMetadata) -> list[range]:
    """The global tokens of each row, as positions in it; the first layer of a step finds them for all layers.
    `token_ids`: [Tp]."""
    key = ("global tokens", part)
    found = metadata.cache.get(key)
    if found is None:
        lengths = metadata.query_lens
        match part.which:
            case spec.FirstToken():
                found = [range(min(1, length)) for length in lengths]
            case spec.BeforeToken(id=token):
                rows = torch.split(token_ids[: sum(lengths)], lengths)
                ends = [(row == token).nonzero().flatten().tolist() for row in rows]
                found = [range(places[0] if places else 0) for places in ends]
        metadata.cache[key] = found
    return found  # type: ignore[return-value]
