"""Layers: where norms stand in one, and what runs within it or beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.normalisation import Norm
from engine.model.spec.attention import Attention, Fourier
from engine.model.spec.networks import Activation, FeedForward
from engine.model.spec.states import StateLayer


@dataclass(frozen=True, slots=True)
class Pre:
    """x + f(norm(x)) for each sublayer; a norm of None is the identity."""

    attention: Norm | None
    ffn: Norm | None
    cross: Norm | None = None


@dataclass(frozen=True, slots=True)
class NormedResidual:
    """norm(x) + f(norm(x)) for each sublayer: the residual connection starts after the norm."""

    attention: Norm
    ffn: Norm


@dataclass(frozen=True, slots=True)
class Post:
    """norm(x + f(x)) for each sublayer: the original Transformer."""

    attention: Norm
    ffn: Norm
    cross: Norm | None = None


@dataclass(frozen=True, slots=True)
class AfterSublayer:
    """x + norm(f(x)) for each sublayer."""

    attention: Norm
    ffn: Norm


@dataclass(frozen=True, slots=True)
class Sandwich:
    """x + after(f(before(x))) for each sublayer."""

    before_attention: Norm
    after_attention: Norm
    before_ffn: Norm
    after_ffn: Norm
    before_cross: Norm | None = None
    after_cross: Norm | None = None


@dataclass(frozen=True, slots=True)
class Parallel:
    """x + attention(norm(x)) + ffn(norm(x)); one norm for both sublayers, or one for each."""

    norms: tuple[Norm] | tuple[Norm, Norm]


Placement = Pre | NormedResidual | Post | AfterSublayer | Sandwich | Parallel


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution over the tokens of an input beside a layer f: norm(f(x) + activation(convolution(x))).

    Attributes:
        kernel: tokens that it sees at a time, odd; there are zeros before the first and after the last.
        activation, norm: as above.
        groups: features see those of their own group only.
    """

    kernel: int
    activation: Activation
    norm: Norm
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """A layer on fewer features than the residual stream has: norm(x + exit(f(entrance(x)))), where f is attention and
    feed-forward networks with norms after their residuals (arXiv:2004.02984).

    Attributes:
        width: features within it, attention's included.
        norm: of what enters, of what leaves, and of each sublayer.
        networks: feed-forward networks that follow each other.
        values: what attention's values are made of: "entered", as queries and keys are, or "whole" vectors of the
            stream; queries and keys have an entrance of their own then.
    """

    width: int
    norm: Norm
    networks: int = 1
    values: Literal["entered", "whole"] = "entered"


@dataclass(frozen=True, slots=True)
class LayerInput:
    """x + norm(projection(activation(gate(x)) * own)) after the sublayers, own being the layer's vector of the token
    (`LayerVectors`). Of a stream of several versions, gate reads the active one and the sum goes to the others.

    Attributes:
        width: features of the vector.
        norm: of what is added.
    """

    width: int
    activation: Activation
    norm: Norm


@dataclass(frozen=True, slots=True)
class LowRank:
    """y + norm(right(left(y))), y being what attention reads, beside attention; the sum of both and of the stream is
    divided by the root of 2 (LAuReL, arXiv:2411.07501).

    Attributes:
        rank: features between the two matrices.
    """

    rank: int
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer. `cross` attends to the encoder's output; `beside` runs beside the whole layer.

    Attributes:
        mixing: what mixes tokens instead, where attention has no heads (`NO_ATTENTION`).
        bottleneck: the features that the layer works on, where these are not the stream's; its norms stand for those of
            the placement.
        input: what the layer reads of each token beside the stream.
        low_rank: what runs beside attention.
        factor: the stream is multiplied by a learned number at last.
        residual_scale: multiplies what attention and feed-forward network add; their last matrices are loaded times it.
    """

    placement: Placement
    attention: Attention
    ffn: FeedForward
    mixing: Fourier | StateLayer | None = None
    bottleneck: Bottleneck | None = None
    cross: Attention | None = None
    beside: Convolution | None = None
    input: LayerInput | None = None
    low_rank: LowRank | None = None
    factor: bool = False
    residual_scale: float = 1.0
