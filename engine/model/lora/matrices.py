"""The contents of an adapter's files, before they are matched with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Matrices:
    """The two matrices by which an adapter changes one matrix of a checkpoint."""

    module: str  # the matrix's module in transformers
    scale: float  # the factor of their product
    sizes: tuple[tuple[int, ...], tuple[int, ...]]  # shapes [rank, in] and [out, rank]
    read: Callable[[], tuple[Tensor, Tensor]]
    alternate: bool = False  # the order of a delta rule's value heads, see `DeltaRule`


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of an adapter that replaces the model's."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
