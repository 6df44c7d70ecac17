"""The operations of a layer program on rows of features; those of attention are in `attention_operations`.

Rows lie in buffers, one row for each token. An operation may overwrite what it reads only where its docstring says so.
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
        """The rows that it reads."""
        return self._rows(self.READS)

    @property
    def writes(self) -> tuple[Rows, ...]:
        """The rows that it writes."""
        return self._rows(self.WRITES)

    def _rows(self, names: tuple[str, ...]) -> tuple[Rows, ...]:
        found: list[Rows] = []
        for value in (getattr(self, name) for name in names):
            found += [value] if isinstance(value, Rows) else value or ()
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Embed(HasRows):
    """out = the vectors of token ids, with their positions and sides, or of images in their places; or those of
    signals."""

    WRITES = ("out",)
    module: Embedding
    out: Rows

    def vectors(self, inputs: Inputs) -> Tensor:
        """[Tp, features] of what a pass is given."""
        if isinstance(self.module, TokenEmbedding):
            x: Tensor = self.module(inputs.token_ids, inputs.positions, inputs.metadata, inputs.tokens, inputs.sides)
            return with_images(x, inputs.images, inputs.sides)
        x = self.module(inputs.signals, inputs.min_rows)
        return F.pad(x, (0, 0, 0, len(inputs.token_ids) - len(x)))


@dataclass(frozen=True, slots=True, eq=False)
class EmbedAhead(HasRows):
    """out = the vectors of the tokens that come next, made of their positions and the last of these vectors."""

    WRITES = ("out",)
    module: TokenEmbedding
    vectors: nn.Parameter
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Take(HasRows):
    """out = the rows that the pass is given."""

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
    """out += the additions of the adapters of a product for its x; nothing where no row has an adapter."""

    READS = ("x", "out")
    WRITES = ("out",)
    linear: Linear
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce(HasRows):
    """x = the sum of all devices' x, each of which has a part of the layer; x itself on one device."""

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
    """out = xielu(x), with the slopes that a layer has learned."""

    READS = ("x",)
    WRITES = ("out",)
    module: XieluFeedForward
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Open(HasRows):
    """x = sigmoid(opening) * x, where an opening is one number of each row."""

    READS = ("x", "opening")
    WRITES = ("x",)
    opening: Rows
    x: Rows


@dataclass(frozen=True, slots=True, eq=False)
class OpenHeads(HasRows):
    """x = function(opening) * x, where an opening has a number of each feature, or of each head."""

    READS = ("x", "opening")
    WRITES = ("x",)
    function: Literal["sigmoid", "softplus"]
    opening: Rows
    x: Rows


@dataclass(frozen=True, slots=True, eq=False)
class MixExperts(HasRows):
    """out = what each token's experts make of x; they are chosen by `judged`, or by x as well."""

    READS = ("x", "judged")
    WRITES = ("out",)
    module: ExpertsFeedForward
    x: Rows
    out: Rows
    judged: Rows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GatherNeighbours(HasRows):
    """out = the `taps` tokens of x around each, side by side; zeros where a token's own input has none."""

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
    """out = the sum of the windows x over their taps, each head's times the softmax of its scores."""

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
