"""Layers: the positions of norms in a layer, and the parts within it or beside it."""

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
        kernel: tokens in a window, odd; zeros precede the first token and follow the last.
        activation, norm: as above.
        groups: features only see those of their own group.
    """

    kernel: int
    activation: Activation
    norm: Norm
    groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """A layer with fewer features than the residual stream: norm(x + exit(f(entrance(x)))), where f is attention and
    feed-forward networks with norms after their residuals (arXiv:2004.02984).

    Attributes:
        width: features within it, including attention's.
        norm: the norm of the input, of the output, and of each sublayer.
        networks: feed-forward networks that follow each other.
        values: the source of attention's values: "entered", like queries and keys, or "whole" vectors of the stream;
            queries and keys then have a separate entrance.
    """

    width: int
    norm: Norm
    networks: int = 1
    values: Literal["entered", "whole"] = "entered"


@dataclass(frozen=True, slots=True)
class LayerInput:
    """x + norm(projection(activation(gate(x)) * own)) after the sublayers, where own is the layer's vector for the
    token (`LayerVectors`). In a stream of several versions, gate reads the active one and the sum goes to the others.

    Attributes:
        width: features of the vector.
        norm: the norm of what is added.
    """

    width: int
    activation: Activation
    norm: Norm


@dataclass(frozen=True, slots=True)
class LowRank:
    """y + norm(right(left(y))) beside attention, where y is attention's input; the sum of both and of the stream is
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
        merged: whether one softmax covers the tokens of both attentions, which have the same matrices.
        attention, ffn: `NO_ATTENTION` and `NO_NETWORK` for none. A layer of a decoder with norms before its sublayers
            may lack either.
        mixing: an alternative way to mix tokens, if there is no attention; a state beside attention adds its result to
            attention's.
        factors: by the end of a parameter's name, the factors that multiply it at load time: one number, one for each
            part that is joined in it, or one for each of these counts of rows.
        bottleneck: the features of the layer, if they are not the stream's; its norms replace those of the placement.
        input: what the layer reads for each token beside the stream.
        low_rank: what runs beside attention.
        factor: whether the stream is multiplied by a learned number at the end.
        carried: whether the stream is multiplied by a learned vector before a sublayer's result is added; the sublayer
            reads the stream before that.
        reads_tokens: whether attention reads [norm(the token's vector), norm(x)] (EAGLE-3, arXiv:2503.01840).
        residual_scale: factor of the additions by attention and feed-forward network; their last matrices are
            multiplied by it at load time.
    """

    placement: Placement
    attention: Attention
    ffn: FeedForward
    mixing: Fourier | StateLayer | None = None
    bottleneck: Bottleneck | None = None
    cross: Attention | None = None
    merged: bool = False
    beside: Convolution | None = None
    input: LayerInput | None = None
    low_rank: LowRank | None = None
    factor: bool = False
    carried: bool = False
    reads_tokens: bool = False
    residual_scale: float = 1.0
    factors: tuple[tuple[str, tuple[float, ...], tuple[int, ...]], ...] = ()
