"""The inputs of one pass through a stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, Paged
from engine.backends.states import States
from engine.model.kernels import LIBRARY, RowForm
from engine.model.layers import CrossPages


class QueryKeeper(Protocol):
    """A function that sees the queries of a pass to an encoder's keys."""

    def __call__(self, layer: int, queries: Tensor) -> None:
        """Take the queries of a layer, [Tp, heads, head_dim], which are overwritten later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of one pass through a stack: T = `tokens` tokens laid end to end, then padding up to Tp.

    Attributes:
        token_ids, positions: [Tp].
        metadata: the rows that the T tokens form.
        min_rows: fewest rows of a matrix product whose rows do not depend on each other
            (`engine.execution.invariance`).
        caches: the pages of each decoder layer; None for an encoder alone.
        slots: [T] int64, where the new tokens' K and V go in the flattened pages; None: executors work them out.
        states: of layers that carry one from token to token; None: rows begin with zeros, and leave nothing.
        cross: where each row finds the encoder's K and V, for decoders that attend to one.
        sides: [Tp] or [Tp, width] what is known of tokens beside their ids (`engine.interface.token_sides`), by name; a
            side that is not there has its default for all.
        form: how a token alone is computed on a GPU.
        given: [Tp, features] rows that a program takes instead of embedding tokens (`Take`).
        signals: float32 values that rows are made of instead of tokens. `token_ids` are zeros then.
        images: [N, features] vectors of images; the side `image_slots` says which tokens have one, and which.
        keeper: None if nothing else reads queries; a pass that has one is run by torch, operation by operation.
        rotary_rows: [Tp] the rows of rotary tables: positions, moved by the side `rotary_offsets`.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    tokens: int
    min_rows: int = 1
    caches: Sequence[Paged] | None = None
    slots: Tensor | None = None
    states: States | None = None
    cross: CrossPages | None = None
    sides: Mapping[str, Tensor] = field(default_factory=dict)
    form: RowForm = LIBRARY
    given: Tensor | None = None
    signals: Sequence[Tensor] = ()
    images: Tensor | None = None
    keeper: QueryKeeper | None = None
    rotary_rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        offsets = self.sides.get("rotary_offsets")
        object.__setattr__(self, "rotary_rows", self.positions if offsets is None else self.positions + offsets)

    @property
    def needs_torch(self) -> bool:
        """Something takes part for which no executor but torch's has kernels."""
        return self.keeper is not None

    @property
    def adapters(self) -> Tensor | None:
        """[Tp] the slot of each token's adapter, 0 for none; None where no token has one."""
        return self.sides.get("adapter_slots")

    @staticmethod
    def of_rows(x: Tensor) -> Inputs:
        """The inputs of a program that takes rows x [N, features] which are independent of each other."""
        places = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        # No operation on rows reads it on the device, and nothing may be copied there while a step is recorded.
        metadata = AttentionMetadata.build([len(x)], [len(x)], torch.device("cpu"))
        return Inputs(token_ids=places, positions=places, metadata=metadata, tokens=len(x), given=x)
