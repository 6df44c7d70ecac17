"""The operations of a layer program on rows of features; those of attention are in `attention_operations`.

Rows are in buffers, one row per token. An operation may overwrite its input only if its docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, dataclass_transform

import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.native.program import Rows
from engine.model import spec
from engine.model.embedding import Embedding, PatchEmbedding, TokenEmbedding, with_images
from engine.model.experts import ExpertsFeedForward
from engine.model.inputs import Inputs
from engine.model.layers import Linear, SpanConvolution, XieluFeedForward

T = TypeVar("T", bound="HasRows")


class HasRows:
    """The buffers that an operation reads and writes."""

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
class Embed(HasRows):
    """out = the vectors of token ids, with their positions and sides, or of images in their positions; or those of
    signals."""

    module: Embedding
    out: Rows

    def vectors(self, inputs: Inputs) -> Tensor:
        """The vectors [Tp, features] of a pass's inputs."""
        if isinstance(self.module, TokenEmbedding):
            x: Tensor = self.module(inputs.token_ids, inputs.positions, inputs.metadata, inputs.tokens, inputs.sides)
            if self.module.joining is not None:
                return self.module.joining(x, inputs.given)  # type: ignore[no-any-return]
            return with_images(x, inputs.images, inputs.sides)
        if isinstance(self.module, PatchEmbedding):
            x = self.module(inputs.signals, inputs.min_rows, inputs.blend)
        else:
            x = self.module(inputs.signals, inputs.min_rows)
        return F.pad(x, (0, 0, 0, len(inputs.token_ids) - len(x)))


@operation(writes="out")
class EmbedAhead(HasRows):
    """out = the vectors of the next tokens, made from their positions and the last of these vectors."""

    module: TokenEmbedding
    vectors: nn.Parameter
    out: Rows


@operation(writes="out")
class Take(HasRows):
    """out = the rows that the pass receives."""

    out: Rows


@operation(reads="x residual", writes="x out")
class Normalize(HasRows):
    """out = norm of x, or of x + residual, which then becomes x; out may be x."""

    module: nn.Module
    x: Rows
    out: Rows
    residual: Rows | None = None


@operation(reads="x", writes="out")
class Multiply(HasRows):
    """out = x @ weight.T + bias."""

    linear: Linear
    x: Rows
    out: Rows


@operation(reads="x out", writes="out")
class AddAdapters(HasRows):
    """out += the additions of a product's adapters for its x; nothing if no row has an adapter."""

    linear: Linear
    x: Rows
    out: Rows


@operation(reads="x", writes="x")
class AllReduce(HasRows):
    """x = the sum of all devices' x, each of which has a part of the layer; unchanged on one device."""

    x: Rows


@operation(reads="x", writes="out")
class Activate(HasRows):
    """out = function(x), or function(a) * b of x = [a | b]."""

    function: spec.Activation
    x: Rows
    out: Rows
    gated: bool


@operation(reads="x", writes="out")
class ActivateXielu(HasRows):
    """out = xielu(x), with the layer's learned slopes."""

    module: XieluFeedForward
    x: Rows
    out: Rows


@operation(reads="x opening", writes="x")
class Open(HasRows):
    """x = sigmoid(opening) * x; an opening is one number per row."""

    opening: Rows
    x: Rows


@operation(reads="x opening", writes="x")
class OpenHeads(HasRows):
    """x = function(opening) * x, where an opening has one number per feature, or per head."""

    function: Literal["sigmoid", "softplus"]
    opening: Rows
    x: Rows


@operation(reads="x judged", writes="out")
class MixExperts(HasRows):
    """out = the results of each token's experts for x; they are chosen by `judged`, or by x as well."""

    module: ExpertsFeedForward
    x: Rows
    out: Rows
    judged: Rows | None = None


@operation(reads="x", writes="out")
class GatherNeighbours(HasRows):
    """out = the `taps` tokens of x around each token, side by side; zeros beyond the ends of its input."""

    x: Rows
    out: Rows
    taps: int


@operation(reads="x", writes="out")
class WeighTaps(HasRows):
    """out = the sum of the windows x (`GatherNeighbours`) over their taps. Each feature has its own weights."""

    module: SpanConvolution
    x: Rows
    out: Rows


@operation(reads="scores x", writes="out")
class MixTaps(HasRows):
    """out = the sum of the windows x over their taps, each head's weighted by the softmax of its scores."""

    module: SpanConvolution
    scores: Rows
    x: Rows
    out: Rows


@operation(reads="x", writes="out")
class TransformFourier(HasRows):
    """out = the real part of the Fourier transform of each input's rows x, over tokens and features."""

    x: Rows
    out: Rows


@operation(reads="x y", writes="out")
class Concatenate(HasRows):
    """out = [x | y]."""

    x: Rows
    y: Rows
    out: Rows


@operation(reads="x y", writes="out")
class Scale(HasRows):
    """out = x * y, element by element; out may be x."""

    x: Rows
    y: Rows
    out: Rows


@operation(reads="x y", writes="out")
class Add(HasRows):
    """out = x + y; out may be either."""

    x: Rows
    y: Rows
    out: Rows
