"""The operations of a layer program on rows of features; those of attention are in `attention_operations`.

Rows are in buffers, one row per token. An operation may overwrite its input only if its docstring says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.native.program import Rows
from engine.model import spec
from engine.model.embedding import Embedding, TokenEmbedding, with_images
from engine.model.experts import ExpertsFeedForward
from engine.model.inputs import Inputs
from engine.model.layers import Linear, SpanConvolution, XieluFeedForward


class HasRows:
    """The buffers that an operation reads and writes."""

    __slots__ = ()
    READS: ClassVar[tuple[str, ...]] = ()
    WRITES: ClassVar[tuple[str, ...]] = ()
    """Names of its fields."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Embed(HasRows):
    """out = the vectors of token ids, with their positions and sides, or of images in their positions; or those of
    signals."""

    WRITES = ("out",)
    module: Embedding
    out: Rows

    def vectors(self, inputs: Inputs) -> Tensor:
        """The vectors [Tp, features] of a pass's inputs."""
        if isinstance(self.module, TokenEmbedding):
            x: Tensor = self.module(inputs.token_ids, inputs.positions, inputs.metadata, inputs.tokens, inputs.sides)
            if self.module.joining is not None:
                return self.module.joining(x, inputs.given)  # type: ignore[no-any-return]
            return with_images(x, inputs.images, inputs.sides)
        x = self.module(inputs.signals, inputs.min_rows)
        return F.pad(x, (0, 0, 0, len(inputs.token_ids) - len(x)))


@dataclass(frozen=True, slots=True, eq=False)
class EmbedAhead(HasRows):
    """out = the vectors of the next tokens, made from their positions and the last of these vectors."""

    WRITES = ("out",)
    module: TokenEmbedding
    vectors: nn.Parameter
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Take(HasRows):
    """out = the rows that the pass receives."""

    WRITES = ("out",)
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Normalize(HasRows):
    """out = norm of x, or of x + residual, which then becomes x; out may be x."""

    READS = ("x", "residual")
    WRITES = ("x", "out")
    module: nn.Module
    x: Rows
    out: Rows
    residual: Rows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Multiply(HasRows):
    """out = x @ weight.T + bias."""

    READS = ("x",)
    WRITES = ("out",)
    linear: Linear
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class AddAdapters(HasRows):
    """out += the additions of a product's adapters for its x; nothing if no row has an adapter."""

    READS = ("x", "out")
    WRITES = ("out",)
    linear: Linear
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce(HasRows):
    """x = the sum of all devices' x, each of which has a part of the layer; unchanged on one device."""

    READS = ("x",)
    WRITES = ("x",)
    x: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Activate(HasRows):
    """out = function(x), or function(a) * b of x = [a | b]."""

    READS = ("x",)
    WRITES = ("out",)
    function: spec.Activation
    x: Rows
    out: Rows
    gated: bool


@dataclass(frozen=True, slots=True, eq=False)
class ActivateXielu(HasRows):
    """out = xielu(x), with the layer's learned slopes."""

    READS = ("x",)
    WRITES = ("out",)
    module: XieluFeedForward
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Open(HasRows):
    """x = sigmoid(opening) * x; an opening is one number per row."""

    READS = ("x", "opening")
    WRITES = ("x",)
    opening: Rows
    x: Rows


@dataclass(frozen=True, slots=True, eq=False)
class OpenHeads(HasRows):
    """x = function(opening) * x, where an opening has one number per feature, or per head."""

    READS = ("x", "opening")
    WRITES = ("x",)
    function: Literal["sigmoid", "softplus"]
    opening: Rows
    x: Rows


@dataclass(frozen=True, slots=True, eq=False)
class MixExperts(HasRows):
    """out = the results of each token's experts for x; they are chosen by `judged`, or by x as well."""

    READS = ("x", "judged")
    WRITES = ("out",)
    module: ExpertsFeedForward
    x: Rows
    out: Rows
    judged: Rows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GatherNeighbours(HasRows):
    """out = the `taps` tokens of x around each token, side by side; zeros beyond the ends of its input."""

    READS = ("x",)
    WRITES = ("out",)
    x: Rows
    out: Rows
    taps: int


@dataclass(frozen=True, slots=True, eq=False)
class WeighTaps(HasRows):
    """out = the sum of the windows x (`GatherNeighbours`) over their taps. Each feature has its own weights."""

    READS = ("x",)
    WRITES = ("out",)
    module: SpanConvolution
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class MixTaps(HasRows):
    """out = the sum of the windows x over their taps, each head's weighted by the softmax of its scores."""

    READS = ("scores", "x")
    WRITES = ("out",)
    module: SpanConvolution
    scores: Rows
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class TransformFourier(HasRows):
    """out = the real part of the Fourier transform of each input's rows x, over tokens and features."""

    READS = ("x",)
    WRITES = ("out",)
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Concatenate(HasRows):
    """out = [x | y]."""

    READS = ("x", "y")
    WRITES = ("out",)
    x: Rows
    y: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Scale(HasRows):
    """out = x * y, element by element; out may be x."""

    READS = ("x", "y")
    WRITES = ("out",)
    x: Rows
    y: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Add(HasRows):
    """out = x + y; out may be either."""

    READS = ("x", "y")
    WRITES = ("out",)
    x: Rows
    y: Rows
    out: Rows
