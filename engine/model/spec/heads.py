"""Heads: the parts that read the last hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.interface.outputs import EntitiesInfo
from engine.model.normalisation import Norm
from engine.model.spec.networks import Activation, Dense


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """norm(activation(dense(x))), with as many features as x, between the hidden states and a head's matrix."""

    activation: Activation
    norm: Norm
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lm:
    """Hidden state to logits over the vocabulary.

    Attributes:
        tied: whether the matrix is the embedding's table.
        layer: a layer before the matrix.
        input_scale: factor of the hidden state.
        bias: whether it has a learned bias.
        logit_scale: factor of the logits.
        softcap: logits l become softcap * tanh(l / softcap).
        norm: a norm before the matrix, in addition to the stack's.
        choices: the number of tokens that it may choose; None: all. It needs a norm.
    """

    tied: bool
    layer: HeadLayer | None = None
    input_scale: float = 1.0
    bias: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None
    norm: Norm | None = None
    choices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLm:
    """norm(activation(dense(x))) if there is a dense layer, then logits over the vocabulary (arXiv:1810.04805).

    Attributes:
        tied: whether the last matrix is the embedding's table.
        activation, norm: applied after the dense layer; an activation of None means no such layer.
        dense_bias, bias: biases of the two layers.
        width: features of the dense layer, None for as many as the table has.
        beyond: this many of these features have a separate matrix, because the table has fewer (arXiv:2004.02984).
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
    """Each of the first `count` hidden states passes through its own layers. The scores are the mean of the results
    (arXiv:2012.12877)."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """norm(activation(dense(x))) if there is a dense layer, then scores of `labels` classes.

    Attributes:
        labels: number of classes.
        pooling: the hidden state x of a sequence, or their mean, or several; None: each token is classified.
        activation: activation of the dense layer; None for no such layer.
        norm: norm after that layer.
        dense_bias, bias: biases of the two layers.
        width: features of the dense layer, None for as many as the hidden states have.
        padding_id: the last hidden state is that of the last token with another id.
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
    """norm(activation(dense(x))) if there is a dense layer, then two numbers per token, for the beginning and the end
    of an answer (BERT, arXiv:1810.04805, 4.2).

    Attributes:
        network: a network before these, if any.
        activation: activation of the dense layer; None for no such layer.
        norm: norm after that layer.
        dense_bias: whether that layer has a bias.
    """

    network: ResidualNetwork | None = None
    activation: Activation | None = None
    norm: Norm | None = None
    dense_bias: bool = True


@dataclass(frozen=True, slots=True)
class Pool:
    """No head: the hidden states themselves are the result."""


@dataclass(frozen=True, slots=True)
class AtToken:
    """The hidden state of an input's first token with an id; without such a token, that of its first token.

    Attributes:
        id: None for the largest id in the input (arXiv:2103.00020).
    """

    id: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """a + ffn(norm(a)), where a is the attention of a learned query to all hidden states (arXiv:1810.00825).

    Attributes:
        heads: heads of the attention, whose matrices have biases.
        norm, ffn: as above.
    """

    heads: int
    norm: Norm
    ffn: Dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedder:
    """One vector of an input.

    Attributes:
        pooling: the hidden state to use, or a function of all of them.
        features: features of the result of a matrix; None for no matrix.
        bias: whether that matrix has a bias.
    """

    pooling: Literal["cls", "last"] | AtToken | Probe
    features: int | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSpans:
    """Scores of how well each span of an input's words matches each label in the input: the product of two networks'
    results, one for the span's two ends and one for the label (GLiNER, arXiv:2311.08526).

    Attributes:
        features: features of words, labels and spans; hidden states of another size pass through a matrix first.
        recurrent: layers of a bidirectional LSTM over the words; 0 for none.
        reading: the form of labels in an input, and the maximum words of texts and spans.
    """

    features: int
    recurrent: int
    reading: EntitiesInfo


Head = Lm | MaskedLm | Classifier | AnswerSpan | Pool | Embedder | LabelledSpans
