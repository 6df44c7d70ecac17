"""Attention in which values add to the scores of their keys (dynamic mask attention, arXiv:2508.02124)."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend
from engine.model import spec
from engine.model.activations import activate
from engine.model.layers import Linear, QkNorm, split_heads
from engine.model.place import Place


class ValueScoringAttention(nn.Module):
    """The weights of attention in which values add to the scores of their keys.

    What a key adds does not depend on the query. So it is a part of the key: further features, which queries meet with
    1. Values and results have these features, too, and they are zeros there.

    Attributes:
        part: heads with these features, as in pages; bare: they are rotated and normed by then.
        own: heads without them.
    """

    def __init__(
        self, part: spec.Attention, scores: spec.ValueScores, hidden_size: int, backend: AttentionBackend, place: Place
    ):
        super().__init__()
        self.own, self.backend = replace(part, head_dim=scores.features, value_scores=None), backend
        self.part = replace(part, position=None, qk_norm=None)
        width, values = part.heads * scores.features, part.kv_heads * scores.features
        self.qkv = Linear(hidden_size, width + 2 * values, part.qkv_bias, place)
        self.qk_norm = None if part.qk_norm is None else QkNorm(self.own, part.qk_norm, place)
        self.steps = Linear(values, part.kv_heads, part.qkv_bias, place)
        self.decay = place.parameter(part.kv_heads)
        self.out = Linear(width, hidden_size, part.out_bias, place)

    def widen(self, queries: Tensor, keys: Tensor, values: Tensor, steps: Tensor) -> Tensor:
        """[Tp, (heads + 2 * kv_heads) * head_dim] of prepared heads without the further features and of what `steps`
        made of the values [Tp, kv_heads]."""
        further = self.part.head_dim - self.own.head_dim
        queries, keys, values = (split_heads(x, self.own.head_dim) for x in (queries, keys, values))
        added = activate(torch.exp, activate(F.softplus, steps.float()) * self.decay.float())
        shares = (added / (self.part.scale * further)).to(keys.dtype)
        keys = torch.cat((keys, shares.unsqueeze(2).expand(-1, -1, further)), dim=2)
        return torch.cat((F.pad(queries, (0, further), value=1.0), keys, F.pad(values, (0, further))), dim=1).flatten(1)

    def narrow(self, attended: Tensor) -> Tensor:
        """[Tp, heads * features] of results [Tp, heads * head_dim]."""
        return split_heads(attended, self.part.head_dim)[..., : self.own.head_dim].flatten(1)
