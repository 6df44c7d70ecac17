"""The operations of a layer program on rows of features; those of attention are in `attention_operations`.

A computation that only one part needs is no kind of operation: it is a function beside the part's weights, which
`Apply` calls.

Rows are in buffers, one row per token. An operation may overwrite its input only if its docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, dataclass_transform

import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.native.ranks import Ranks
from engine.backends.rows import Rows
from engine.model import spec
from engine.model.embedding import Embedding, PatchEmbedding, TokenEmbedding, with_images
from engine.model.experts import ExpertMatrices, ExpertsFeedForward
from engine.model.inputs import Inputs
from engine.model.layers import Linear

T = TypeVar("T", bound="Operation")


class Operation:
    """An element of a program, with the buffers that it reads and writes."""

    __slots__ = ()
    READS: ClassVar[tuple[str, ...]] = ()  # names of its fields
    WRITES: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> tuple[Rows, ...]:
        return self._rows(self.READS)

    @property
    def writes(self) -> tuple[Rows, ...]:
        return self._rows(self.WRITES)

    def _rows(self, names: tuple[str, ...]) -> tuple[Rows, ...]:
        found: list[Rows] = []
        for value in (getattr(self, name) for name in names):
            found += [value] if isinstance(value, Rows) else value or ()
        return tuple(found)


@dataclass_transform(frozen_default=True, eq_default=False)
def operation(reads: str = "", writes: str = "") -> Callable[[type[T]], type[T]]:
    """A frozen dataclass of an operation. `reads`, `writes`: the fields with the buffers that it reads and writes."""

    def make(cls: type[T]) -> type[T]:
        cls.READS, cls.WRITES = tuple(reads.split()), tuple(writes.split())
        return dataclass(frozen=True, slots=True, eq=False)(cls)

    return make


@operation(writes="out")
class Embed(Operation):
    """out = the vectors of token ids, with their positions and sides, or of images in their positions; or those of
    signals."""

    module: Embedding
    out: Rows

    def vectors(self, inputs: Inputs) -> Tensor:
        """The vectors [Tp, features] of a pass's inputs."""
        if isinstance(self.module, TokenEmbedding):
            x: Tensor = self.module(
                inputs.token_ids, inputs.positions, inputs.metadata, inputs.tokens, inputs.sides, inputs.signals
            )
            if self.module.joining is not None:
                return self.module.joining(x, inputs.given)  # type: ignore[no-any-return]
            return with_images(x, inputs.images, inputs.sides)
        if isinstance(self.module, PatchEmbedding):
            x = self.module(inputs.signals, inputs.min_rows, inputs.blend)
        else:
            x = self.module(inputs.signals, inputs.min_rows)
        return F.pad(x, (0, 0, 0, len(inputs.token_ids) - len(x)))


@operation(reads="given", writes="made")
class Apply(Operation):
    """made = a part's own computation of given; torch runs it on every device.

    Attributes:
        name: the name of the computation, for log lines.
        compute: called with the pass and the given rows; returns a tensor for each of the made rows.
    """

    name: str
    compute: Callable[..., Tensor | Sequence[Tensor] | None]
    given: tuple[Rows, ...] = ()
    made: tuple[Rows, ...] = ()


@operation(writes="out")
class Take(Operation):
    """out = the rows that the pass receives."""

    out: Rows


@operation(reads="x residual", writes="x out")
class Normalize(Operation):
    """out = norm of x, or of x + residual, which then becomes x; out may be x."""

    module: nn.Module
    x: Rows
    out: Rows
    residual: Rows | None = None


@operation(reads="x", writes="out")
class Multiply(Operation):
    """out = x @ weight.T + bias."""

    linear: Linear
    x: Rows
    out: Rows


@operation(reads="x out", writes="out")
class AddAdapters(Operation):
    """out += the additions of a product's adapters for its x; nothing if no row has an adapter."""

    linear: Linear
    x: Rows
    out: Rows


@operation(reads="x", writes="x")
class AllReduce(Operation):
    """x = the sum of all ranks' x, each of which has a part of the layer."""

    ranks: Ranks
    x: Rows


@operation(reads="x", writes="out")
class Activate(Operation):
    """out = function(x), or function(a) * b of x = [a | b]."""

    function: spec.Activation
    x: Rows
    out: Rows
    gated: bool


@operation(reads="x opening", writes="x")
class Open(Operation):
    """x = function(opening) * x. An opening has a number for each of as many pieces of a row, of equal widths."""

    opening: Rows
    x: Rows
    function: spec.Activation | Literal["sigmoid", "softplus"] = "sigmoid"


@operation(reads="x judged", writes="out")
class MixExperts(Operation):
    """out = the results of each token's experts for x; they are chosen by `judged`, or by x as well."""

    module: ExpertsFeedForward
    x: Rows
    out: Rows
    judged: Rows | None = None


@operation(reads="x", writes="out")
class MultiplyPieces(Operation):
    """out = each of the pieces of x times its own matrix, and biases."""

    matrices: ExpertMatrices
    x: Rows
    out: Rows


@operation(reads="x", writes="out")
class GatherNeighbours(Operation):
    """out = the `taps` tokens of x around each token, side by side; zeros beyond the ends of its input."""

    x: Rows
    out: Rows
    taps: int


@operation(reads="x y", writes="out")
class Add(Operation):
    """out = x + y; out may be either."""

    x: Rows
    y: Rows
    out: Rows
