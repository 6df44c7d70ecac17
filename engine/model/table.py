"""Weight tables: which tensors of a checkpoint fill which parameter, and how.

A transformation gives, for a parameter, one view per source tensor in the source's own layout: copying
each source into its view fills the parameter. So nothing is assembled in memory first, and shapes are
checked before any data is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.model.spec import ModelSpec


class Transform(Protocol):
    """How source tensors lie in a parameter."""

    def views(self, target: Tensor) -> list[Tensor]:
        """One view of `target` per source, in the source's layout."""


@dataclass(frozen=True, slots=True)
class Same:
    """The tensor as stored."""

    def views(self, target: Tensor) -> list[Tensor]:
        return [target]


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix stored [in, out]."""

    def views(self, target: Tensor) -> list[Tensor]:
        return [target.t()]


@dataclass(frozen=True, slots=True)
class Joined:
    """Several tensors, one after the other along the first axis, of these lengths."""

    lengths: tuple[int, ...]

    def views(self, target: Tensor) -> list[Tensor]:
        return list(torch.split(target, list(self.lengths), dim=0))


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter.

    Attributes:
        target: its name in the Transformer.
        sources: names in the checkpoint, in the order of the transformation's views.
        transform: how they lie in the parameter.
        shard_axis: axis of the parameter (of each part, if joined) that tensor parallelism would divide;
            None to repeat it everywhere.
    """

    target: str
    sources: tuple[str, ...]
    transform: Transform = Same()
    shard_axis: int | None = None


@dataclass(frozen=True, slots=True)
class WeightTable:
    """All parameters of a model.

    Attributes:
        entries: one per parameter.
        prefix: of the sources that a checkpoint of the headless model stores without it.
        ignored: patterns of whole names that a checkpoint may hold and that are not needed.
        head: name under which an output matrix may be stored although it is tied to the embedding.
    """

    entries: tuple[Entry, ...]
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    head: str | None = None

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor of this name may be left unused."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True, slots=True)
class Family:
    """What Octavo knows about one family of checkpoints.

    Attributes:
        name: for messages.
        spec: a transformers config to the parts; raises UnsupportedModelError for what has no part.
        weights: the parts to the table of weight names; None for a family whose parts are described but
            not implemented yet (`engine.model.transformer.unsupported` names them).
    """

    name: str
    spec: Callable[[Any], ModelSpec]
    weights: Callable[[ModelSpec], WeightTable] | None = None
