"""Heads: what reads the hidden states at last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.interface.outputs import EntitiesInfo
from engine.model.normalisation import Norm
from engine.model.spec.networks import Activation, Dense


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """norm(activation(dense(x))), with as many features as x has, between the hidden states and a head's matrix."""

    activation: Activation
    norm: Norm
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lm:
    """Hidden state to logits over the vocabulary.

    Attributes:
        tied: the matrix is the embedding's table.
        layer: stands before the matrix.
        input_scale: multiplies the hidden state first.
        bias: has a learned bias.
        logit_scale: multiplies the logits.
        softcap: logits l become softcap * tanh(l / softcap).
    """

    tied: bool
    layer: HeadLayer | None = None
    input_scale: float = 1.0
    bias: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLm:
    """norm(activation(dense(x))) where there is a dense layer, then logits over the vocabulary (arXiv:1810.04805).

    Attributes:
        tied: the last matrix is the embedding's table.
        activation, norm: after the dense layer; an activation of None for no such layer.
        dense_bias, bias: biases of the two layers.
        width: features of the dense layer, None for as many as the table has.
        beyond: so many of these have a matrix of their own, since the table ends before them (arXiv:2004.02984).
    """

    tied: bool
    activation: Activation | None = None
    norm: Norm | None = None
    dense_bias: bool = True
    bias: bool = True
    width: int | None = None
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class FirstStates:
    """Each of the first `count` hidden states goes through layers of its own. The scores are the mean of their results
    (arXiv:2012.12877)."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """norm(activation(dense(x))) where there is a dense layer, then scores of `labels` classes.

    Attributes:
        labels: number of classes.
        pooling: which hidden state x is of a sequence, or their mean, or several; None: each token is classified.
        activation: of the dense layer; None for no such layer.
        norm: after that layer.
        dense_bias, bias: biases of the two layers.
        width: features of the dense layer, None for as many as the hidden states have.
        padding_id: the last hidden state is that of the last token with another id than this.
    """

    labels: int
    pooling: Literal["cls", "mean", "last"] | FirstStates | None
    activation: Activation | None = None
    norm: Norm | None = None
    dense_bias: bool = True
    bias: bool = True
    width: int | None = None
    padding_id: int | None = None


@dataclass(frozen=True, slots=True)
class ResidualNetwork:
    """norm(x + ffn(x))."""

    ffn: Dense
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpan:
    """norm(activation(dense(x))) where there is a dense layer, then two numbers of each token: that an answer begins
    with it, and that one ends with it (BERT, arXiv:1810.04805, 4.2).

    Attributes:
        network: stands before all that, where there is one.
        activation: of the dense layer; None for no such layer.
        norm: after that layer.
        dense_bias: that layer has a bias.
    """

    network: ResidualNetwork | None = None
    activation: Activation | None = None
    norm: Norm | None = None
    dense_bias: bool = True


@dataclass(frozen=True, slots=True)
class Pool:
    """No head: the hidden states themselves are the answer."""


@dataclass(frozen=True, slots=True)
class AtToken:
    """The hidden state of an input's first token of an id; where it has none, that of its first token.

    Attributes:
        id: None for the largest id that the input has (arXiv:2103.00020).
    """

    id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """a + ffn(norm(a)), where a is the attention of a learned query to all hidden states (arXiv:1810.00825).

    Attributes:
        heads: of the attention, whose matrices have biases.
        norm, ffn: as above.
    """

    heads: int
    norm: Norm
    ffn: Dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """One vector of an input.

    Attributes:
        pooling: the hidden state that is taken, or the function of all of them.
        features: the width of the result of a matrix; None for no matrix.
        bias: of that matrix.
    """

    pooling: Literal["cls", "last"] | AtToken | Probe
    features: int | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSpans:
    """Scores of how well each span of an input's words goes with each label that the input names: the product of two
    networks' results, one for the span's two ends and one for the label (GLiNER, arXiv:2311.08526).

    Attributes:
        features: of words, labels and spans; hidden states of another size go through a matrix first.
        recurrent: layers of an LSTM in both directions, which the words go through; 0 for none.
        reading: how an input names labels, and how many words texts and spans have.
    """

    features: int
    recurrent: int
    reading: EntitiesInfo


Head = Lm | MaskedLm | Classifier | AnswerSpan | Pool | Embedder | LabelledSpans
