"""The inputs of one pass through a stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, DistanceBias, Paged
from engine.backends.states import States
from engine.model.layers import CrossPages, SelfAttention
from engine.model.row_form import LIBRARY, RowForm


class QueryKeeper(Protocol):
    """Receives the queries that attend to an encoder's keys in a pass."""

    def __call__(self, layer: int, queries: Tensor) -> None:
        """Take the queries of a layer, [Tp, heads, head_dim], which are overwritten later."""
        ...


class RunningPass(Protocol):
    """The data of a pass, besides its rows, that the computation of a single part (`Apply`) may read."""

    inputs: Inputs
    beside: Tensor | None
    """Vectors that pass through the layers beside the tokens, [inputs * count, features], if any."""

    def pages(self, layer: int | None) -> Paged:
        """The pages of a decoder's layer."""
        ...

    def block_biases(self, module: SelfAttention) -> tuple[DistanceBias, DistanceBias]:
        """The biases for the scores of tokens and of sums of blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of one pass through a stack: T = `tokens` tokens end to end, then padding up to Tp."""

    # token_ids, positions: [Tp]
    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    tokens: int
    # minimum rows of a matrix product whose rows do not depend on each other (`engine.execution.invariance`)
    min_rows: int = 1
    caches: Sequence[Paged] | None = None  # the pages of each decoder layer; None for an encoder alone
    # [T] int64 slots of the new tokens' K and V in the flattened pages; None: executors compute them
    slots: Tensor | None = None
    # states of layers that carry one from token to token; None: rows begin with zeros, and store nothing
    states: States | None = None
    # the location of the encoder's K and V for each row, for decoders that attend to an encoder
    cross: CrossPages | None = None
    # [Tp] or [Tp, width] data of tokens besides their ids (`engine.interface.token_sides`), by name; a missing side has
    # its default for all
    sides: Mapping[str, Tensor] = field(default_factory=dict)
    form: RowForm = LIBRARY  # how a GPU computes a single token
    # [Tp, features] rows that a program uses instead of embedding tokens (`Take`), or beside them (`Joining`)
    given: Tensor | None = None
    # float32 values from which rows are made instead of tokens. `token_ids` are then zeros.
    signals: Sequence[Tensor] = ()
    # [N, features] vectors of images; the side `image_slots` says which tokens have one, and which
    images: Tensor | None = None
    # the parts of an encoder's inputs whose tokens see each other where attention is `in_parts`
    parts: AttentionMetadata | None = None
    # [patches, taps] rows of a table of positions, and the share of each in a patch's position
    blend: tuple[Tensor, Tensor] | None = None
    # receives the hidden states [Tp, features] of the layers that are `kept`, in their order
    kept: list[Tensor] = field(default_factory=list)
    # None if nothing else needs the queries; torch runs a pass with a keeper, operation by operation
    keeper: QueryKeeper | None = None
    rotary_rows: Tensor = field(init=False)  # [Tp] rows of rotary tables: positions plus the side `rotary_offsets`

    def __post_init__(self) -> None:
        offsets = self.sides.get("rotary_offsets")
        object.__setattr__(self, "rotary_rows", self.positions if offsets is None else self.positions + offsets)

    @property
    def needs_torch(self) -> bool:
        """Whether the pass needs something for which only torch's executor has code."""
        return self.keeper is not None

    @property
    def adapters(self) -> Tensor | None:
        """[Tp] the slot of each token's adapter, 0 for none; None if no token has one."""
        return self.sides.get("adapter_slots")

    @staticmethod
    def of_rows(x: Tensor) -> Inputs:
        """The inputs of a program for independent rows x [N, features]."""
        places = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        # No operation on rows reads it on the device, and nothing may be copied there while a step is recorded.
        metadata = AttentionMetadata.build([len(x)], [len(x)], torch.device("cpu"))
        return Inputs(token_ids=places, positions=places, metadata=metadata, tokens=len(x), given=x)
