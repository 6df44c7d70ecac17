"""Attention of a decoder's tokens to each other and to an encoder's tokens, with one softmax over both
(arXiv:2512.14856)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionBackend, AttentionMetadata, Paged, Sight
from engine.backends.torch.attention import TorchReference
from engine.model import spec
from engine.model.activations import activate
from engine.model.inputs import RunningPass
from engine.model.layers import EncodedKeys, SelfAttention, split_heads
from engine.model.place import Place


class MergedAttention(SelfAttention):
    """The weights of self-attention, and those that make keys and values of an encoder's tokens. torch always computes
    this attention, also beside other attention backends."""

    def __init__(
        self,
        part: spec.Attention,
        cross: spec.Attention,
        hidden_size: int,
        memory_size: int,
        backend: AttentionBackend,
        place: Place,
    ):
        super().__init__(part, hidden_size, backend, place)
        assert isinstance(part.qk_norm, spec.PerHead)
        self.reference = TorchReference()
        self.encoded = EncodedKeys(cross, memory_size, place, part.qk_norm.norm)

    def attend(self, layer: int, state: RunningPass, queries: Tensor) -> Tensor:
        """The result of attention to the decoder's and the encoder's keys and values in a layer's pages."""
        part, inputs, pages = self.part, state.inputs, state.pages(layer)
        assert inputs.cross is not None
        heads = split_heads(queries, part.head_dim)
        encoded = replace(pages, block_tables=inputs.cross.block_tables, key_centre=None)
        own, sums = self._part(heads, pages, inputs.metadata, part.window)
        others, other_sums = self._part(heads, encoded, inputs.cross.metadata, None, causal=False)
        share = activate(torch.sigmoid, sums - other_sums).unsqueeze(-1)
        return (own * share + others * (1 - share)).to(queries.dtype).flatten(1)

    def _part(
        self, queries: Tensor, kv: Paged, rows: AttentionMetadata, window: Sight | None, *, causal: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The result of attention to the keys of one stack, and the logarithms of the sums of exp(score)."""
        sums = queries.new_zeros(queries.shape[:2], dtype=torch.float32)
        found = self.reference.attend(queries, kv, rows, scale=self.part.scale, causal=causal, window=window, sums=sums)
        return found.float(), sums
