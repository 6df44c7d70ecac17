"""Attention that reads the keys and values of an earlier layer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from engine.backends.attention.base import AttentionBackend
from engine.model import spec
from engine.model.layers import Linear, QkNorm
from engine.model.place import Place


class ReadingAttention(nn.Module):
    """The weights of attention whose keys and values another layer has stored in pages. `own`: the part without heads
    of keys and values, which is prepared."""

    def __init__(self, part: spec.Attention, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__()
        self.part, self.own, self.backend = part, replace(part, kv_heads=0, value_norm=None), backend
        features = part.heads * part.head_dim
        self.queries = Linear(hidden_size, features, part.qkv_bias, place)
        self.qk_norm = None if part.qk_norm is None else QkNorm(self.own, part.qk_norm, place)
        self.out = Linear(features, hidden_size, part.out_bias, place)
