"""Kernels for single operations on rows, as modules use them. Executors choose them (`engine.model.executors.choice`);
without a choice, torch computes everything."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from engine.backends.attention.base import Paged
from engine.model import spec
from engine.model.positions import Rotary


class NewHeads(NamedTuple):
    """Queries, keys and values of new tokens."""

    turning: Tensor  # [T, heads + kv_heads, head_dim], queries first; it is overwritten
    values: Tensor  # [T, kv_heads, head_dim]
    part: Rotary | None = None  # how the heads are rotated, if at all
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines of the tokens
    cache: Paged | None = None  # None for keys without pages, which are rotated in place too
    slots: Tensor | None = None  # the slots of the first tokens


class RowKernels(Protocol):
    """The kernels of a device. The code for a row depends only on its format, never on the number of rows, because a
    row's bits would otherwise depend on the batch."""

    def activate(self, name: spec.Activation, x: Tensor) -> Tensor | None:
        """name(x) of rows x [T, width]; None if torch should compute it."""
        ...

    def gate(self, name: spec.Activation, x: Tensor) -> Tensor | None:
        """name(a) * b of rows [a | b] of x [T, 2 * width]; None if torch should compute it."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, *, unit_offset: bool, in_float32: bool
    ) -> Tensor | None:
        """RMSNorm of the last dimension; None if torch should compute it."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rows: int) -> Tensor | None:
        """LayerNorm of the last dimension, with separate weights for `rows` rows; None if torch should compute it."""
        ...

    def rotate_and_store(self, heads: NewHeads) -> bool:
        """Rotate heads in place, and store keys and values in pages; returns False, without any change, if torch should
        do it."""
        ...


class RowModule(nn.Module):
    """A module with operations on rows. `kernels`: the kernels that an executor chose for them."""

    kernels: RowKernels | None = None
