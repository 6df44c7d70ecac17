"""The position tables that the layers of a stack share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.attention.base import Bias
from engine.model.attention_modules import AttentionModule
from engine.model.bias import BiasTable, BucketTable
from engine.model.disentangled import DisentangledAttention
from engine.model.distances import DistanceTable
from engine.model.layers import CrossAttention, SelfAttention
from engine.model.positions import AttentionPosition, Rotary
from engine.model.rotary import RotaryTable


@dataclass(frozen=True, slots=True)
class Tables:
    """Layers with the same position part share one table."""

    rotary: Mapping[Rotary, RotaryTable]  # cosines and sines, by rotary part
    slopes: Mapping[AttentionPosition, BiasTable]  # biases, by the part with a slope for each head
    shared_bias: BucketTable | None = None  # the bias of all self-attentions without their own part
    block_bias: BucketTable | None = None  # the bias of the scores of sums of blocks
    distances: DistanceTable | None = None  # the vectors of disentangled attentions

    def rotation(self, part: Rotary, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos [T, 1, head_dim], sin [T, 1, dim / 2]) in these rows [T], for heads of a format."""
        return self.rotary[part](rows, dtype)  # type: ignore[no-any-return]

    def bias(self, module: AttentionModule) -> Bias | None:
        """The bias of an attention's scores."""
        if isinstance(module, CrossAttention):
            return None
        if isinstance(module, DisentangledAttention):
            assert self.distances is not None
            return module.bias(self.distances)
        if isinstance(module, SelfAttention) and module.distance_bias is not None:
            return module.distance_bias()  # type: ignore[no-any-return]
        position = module.part.position
        if position is None:
            return None if self.shared_bias is None else self.shared_bias()
        return self.slopes[position]() if position in self.slopes else None
