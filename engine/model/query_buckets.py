"""Attention with a bias by distance that each query computes (ProphetNet, arXiv:2001.04063)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionBackend
from engine.backends.torch.attention import OwnKey, QueryBias, TorchReference
from engine.model import spec
from engine.model.inputs import RunningPass
from engine.model.layers import Linear, SelfAttention, split_heads
from engine.model.place import Place
from engine.model.positions import QueryBuckets


class BucketedAttention(SelfAttention):
    """The weights of self-attention, and those that make a number for each bucket and head from a hidden state. torch
    always computes this attention, also beside other attention backends. `columns`: [max_distance + 1] int64 bucket of
    each distance, the farthest first; `zero`: the entry for a token's distance to itself."""

    columns: Tensor

    def __init__(self, part: spec.Attention, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__(part, hidden_size, backend, place)
        assert isinstance(part.position, QueryBuckets)
        self.reference = TorchReference()
        self.distance_scores = Linear(hidden_size, part.position.buckets * part.heads, True, place)
        self.zero = part.position.max_distance
        self.register_buffer("columns", buckets_of(part.position).flip(0).to(place.device), persistent=False)

    def attend(self, layer: int, state: RunningPass, queries: Tensor, scores: Tensor, *own: Tensor) -> Tensor:
        """Attention of the queries to keys and values in a layer's pages.

        Args:
            scores: a number per bucket and head, for each query.
            own: keys and values of next tokens, each visible only to its own query. The queries then belong to these
                tokens. Without them, queries belong to tokens whose keys are in the pages.
        """
        part, zero, beside = self.part, self.zero, None
        scores = scores.view(len(scores), -1, part.heads)
        if own:
            keys, values = (split_heads(one, part.head_dim) for one in own)
            # A next token is one position further from all keys except its own, which has the first bucket.
            beside, zero = OwnKey(keys, values, scores[:, 0]), zero - 1
        return self.reference.attend(
            split_heads(queries, part.head_dim),
            state.pages(layer),
            state.inputs.metadata,
            scale=part.scale,
            bias=QueryBias(scores, self.columns, zero),
            own=beside,
        ).flatten(1)


def buckets_of(part: QueryBuckets) -> Tensor:
    """The bucket of each distance between a query and an earlier key, up to the largest distance, int64.

    Rounding follows the reference, which adds the first wide bucket before it drops the fraction;
    `engine.model.bias.bucket_of` drops it first.
    """
    distances, exact = torch.arange(part.max_distance + 1, device="cpu"), part.buckets // 2
    steps = torch.log(distances.clamp(min=1).float() / exact) / math.log(part.max_distance / exact)
    wide = (exact + steps * (part.buckets - exact)).clamp(max=part.buckets - 1).long()
    return torch.where(distances < exact, distances, wide)
