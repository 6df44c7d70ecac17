"""The parts that a transformer is made of, as frozen values.

A family is a composition of these parts and nothing else; `engine.model.transformer` builds modules
from them. A choice between alternatives is a sum type (`Placement`, `FeedForward` …), so a novelty is a
new member and not another boolean. Sizes are counted in features or tokens as their names say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.attention.base import Window

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh"]


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the features of one token.

    Attributes:
        kind: "rms" (arXiv:1910.07467) or "layer" (arXiv:1607.06450).
        eps: added to the mean square or variance.
        bias: has a learned bias (layer norm only).
        unit_offset: the stored weight is the deviation from 1, and is applied in float32.
    """

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = False
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class Learned:
    """A learned vector per position, read at row position + offset of a table of `size` rows."""

    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Sinusoidal:
    """Fixed sine and cosine vectors (arXiv:1706.03762, 3.5) of `size` positions."""

    size: int
    offset: int = 0


Positions = Learned | Sinusoidal


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary frequencies divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class BandScaling:
    """Rotary frequencies divided by `factor` below a band, kept above it, blended inside it (Llama 3.1).

    Attributes:
        factor: divisor of the low frequencies.
        low, high: the band lies between wavelengths original_length / low and original_length / high.
        original_length: tokens of context in pretraining.
    """

    factor: float
    low: float
    high: float
    original_length: int


Scaling = LinearScaling | BandScaling


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (arXiv:2104.09864) of the first `dim` features of each head.

    Attributes:
        dim: rotated features, even.
        theta: base of the geometric row of frequencies.
        interleaved: pairs are neighbouring features; otherwise feature i pairs with i + dim / 2.
        scaling: how the frequencies are stretched for long contexts.
    """

    dim: int
    theta: float
    interleaved: bool = False
    scaling: Scaling | None = None


@dataclass(frozen=True, slots=True)
class RelativeBuckets:
    """Learned bias per head by bucketed distance (T5, arXiv:1910.10683, 2.1)."""

    buckets: int
    max_distance: int
    bidirectional: bool


@dataclass(frozen=True, slots=True)
class Slopes:
    """Fixed bias per head, linear in the distance (ALiBi, arXiv:2108.12409)."""

    values: tuple[float, ...]


# A bias per head that depends only on the distance of two positions; its table is what a backend is
# handed as `engine.attention.base.DistanceBias`.
DistanceBias = RelativeBuckets | Slopes


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Separate content and position terms in the scores (DeBERTa, arXiv:2006.03654)."""

    buckets: int
    max_distance: int
    content_to_position: bool = True
    position_to_content: bool = True


AttentionPosition = Rotary | RelativeBuckets | Slopes | Disentangled


@dataclass(frozen=True, slots=True)
class PerHead:
    """Queries and keys are normalised per head, over head_dim features."""

    norm: Norm


@dataclass(frozen=True, slots=True)
class WholeProjection:
    """Queries and keys are normalised over all heads at once."""

    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head attention; kv_heads below heads is grouped-query, 1 is multi-query.

    Attributes:
        heads, kv_heads, head_dim: heads is a multiple of kv_heads.
        scale: multiplies the scores of queries and keys.
        position: how positions enter the scores, beyond what the embedding adds.
        causal: a query sees no later key.
        window: sliding window, None for all keys.
        qk_norm: normalisation of queries and keys after their projection.
        qkv_bias, out_bias: the projections have biases.
        clip: projected queries, keys and values are limited to [-clip, clip].
        softcap: scores s become softcap * tanh(s / softcap).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    position: AttentionPosition | None = None
    causal: bool = True
    window: Window | None = None
    qk_norm: PerHead | WholeProjection | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Dense:
    """down(activation(up(x))) with `width` hidden features."""

    width: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Gated:
    """down(activation(gate(x)) * up(x)) with `width` hidden features (arXiv:2002.05202)."""

    width: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A router sends each token to `active` of `count` feed-forward experts (arXiv:1701.06538)."""

    expert: Dense | Gated
    count: int
    active: int
    normalize: bool = True


FeedForward = Dense | Gated | Experts


@dataclass(frozen=True, slots=True)
class Pre:
    """x + f(norm(x)) for each sublayer; a norm of None is the identity."""

    attention: Norm | None
    ffn: Norm | None
    cross: Norm | None = None


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


@dataclass(frozen=True, slots=True)
class Parallel:
    """x + attention(norm(x)) + ffn(norm(x)); one norm for both sublayers, or one for each."""

    norms: tuple[Norm] | tuple[Norm, Norm]


Placement = Pre | Post | AfterSublayer | Sandwich | Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer. `cross` attends to the encoder's output."""

    placement: Placement
    attention: Attention
    ffn: FeedForward
    cross: Attention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token ids to vectors of `width` features.

    Attributes:
        vocab_size, width: shape of the table.
        scale: multiplies the vectors.
        positions: added after scaling.
        token_types: number of segment embeddings added, 0 for none.
        norm: applied to the sum.
        projection: the stack's hidden size, where it differs from width.
    """

    vocab_size: int
    width: int
    scale: float = 1.0
    positions: Positions | None = None
    token_types: int = 0
    norm: Norm | None = None
    projection: int | None = None


@dataclass(frozen=True, slots=True)
class Patches:
    """Square image patches to vectors, by one matrix over the patch's pixels (arXiv:2010.11929)."""

    size: int
    channels: int
    width: int
    positions: Positions | None = None


Embedding = Tokens | Patches


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """An encoder or a decoder.

    Attributes:
        hidden_size: features of the residual stream.
        blocks: one per layer; they may differ.
        shared_bias: a distance bias that the self-attentions of all blocks share.
    """

    hidden_size: int
    embedding: Embedding
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    shared_bias: DistanceBias | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lm:
    """Hidden state to logits over the vocabulary.

    Attributes:
        tied: the matrix is the embedding's table.
        input_scale: multiplies the hidden state first.
        bias: has a learned bias.
        logit_scale: multiplies the logits.
        softcap: logits l become softcap * tanh(l / softcap).
    """

    tied: bool
    input_scale: float = 1.0
    bias: bool = False
    logit_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLm:
    """norm(activation(dense(x))), then logits over the vocabulary (BERT, arXiv:1810.04805)."""

    tied: bool
    activation: Activation
    norm: Norm
    dense_bias: bool = True
    bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """One vector per sequence, then scores of `labels` classes.

    Attributes:
        labels: number of classes.
        pooling: which hidden state, or their mean.
        activation: of a dense layer before the scores; None for no such layer.
        norm: after that layer.
        dense_bias, bias: biases of the two layers.
    """

    labels: int
    pooling: Literal["cls", "mean", "last"]
    activation: Activation | None = None
    norm: Norm | None = None
    dense_bias: bool = True
    bias: bool = True


@dataclass(frozen=True, slots=True)
class Pool:
    """No head: the hidden states themselves are the answer."""


Head = Lm | MaskedLm | Classifier | Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model: decoder-only, encoder-only or both."""

    encoder: Stack | None
    decoder: Stack | None
    head: Head

    @property
    def vocab_size(self) -> int:
        """Rows of the token table, 0 where there is none."""
        stack = self.decoder or self.encoder
        return stack.embedding.vocab_size if stack and isinstance(stack.embedding, Tokens) else 0

    @property
    def max_positions(self) -> int | None:
        """Most tokens a sequence can have because a position table ends there; None without a table."""
        sizes = [
            stack.embedding.positions.size - stack.embedding.positions.offset
            for stack in (self.encoder, self.decoder)
            if stack is not None and stack.embedding.positions is not None
        ]
        return min(sizes, default=None)
