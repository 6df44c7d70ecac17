"""Attention: its heads, the inputs of its queries, keys and values, and its alternatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.backends.attention.base import Sight, Window
from engine.model.normalisation import Norm
from engine.model.positions import AttentionPosition, Disentangled, QueryBuckets, Temperature
from engine.model.spec.sparse import BlockSums, GlobalTokens, Sparse


@dataclass(frozen=True, slots=True)
class PerHead:
    """Queries and keys are normalised per head, over head_dim features."""

    norm: Norm


@dataclass(frozen=True, slots=True)
class WholeProjection:
    """Queries and keys are normalised over all heads at once."""

    norm: Norm


@dataclass(frozen=True, slots=True)
class AfterRotation:
    """Queries and keys are normalised per head after they are rotated, over head_dim features."""

    norm: Norm


@dataclass(frozen=True, slots=True)
class EachHead:
    """Queries and keys are normalised per head, and each head has its own weights (of a layer norm)."""

    norm: Norm


QkNorm = PerHead | WholeProjection | AfterRotation | EachHead


@dataclass(frozen=True, slots=True)
class Sinks:
    """A learned score for each head that is part of the softmax and has no value: a query may attend to it instead of
    tokens (arXiv:2508.10925)."""


@dataclass(frozen=True, slots=True)
class OutputGate:
    """The heads' result is multiplied by function(gate(x)) before the output matrix, where x is the input of the
    queries (arXiv:2505.06708).

    Attributes:
        per_head: whether a gate has one number per head, not per feature.
    """

    function: Literal["sigmoid", "softplus"] = "sigmoid"
    per_head: bool = False


@dataclass(frozen=True, slots=True)
class Spans:
    """Convolution heads beside the attention heads, of equal number and width: each token has its own kernels, made
    from its query and its neighbours (arXiv:2008.02496).

    Attributes:
        kernel: tokens in a window, odd.
    """

    kernel: int


@dataclass(frozen=True, slots=True)
class RoutedHeads:
    """A router sends each token to `active` of `count` experts (arXiv:2306.04640). An expert makes a query for each KV
    head, and maps the results of these. Its result is weighted by the softmax of the chosen experts' logits. A bias is
    added to the sum."""

    count: int
    active: int


@dataclass(frozen=True, slots=True)
class ValueScores:
    """Each key adds exp(decay * softplus(step)) to its scores. The values of all KV heads make the step; each KV head
    has a decay (dynamic mask attention, arXiv:2508.02124).

    Attributes:
        features: of a head. head_dim counts further ones, in which pages contain what keys add.
        longest: maximum tokens of a sequence. In longer ones, queries would see only the keys that add the most.
    """

    features: int
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Keys and values of all heads are made from one short vector per token, its latent; the heads also share one
    rotated key beside it (multi-head latent attention, arXiv:2405.04434, 2.1).

    Pages contain the latent and the shared key, as the only key of a single KV head; its value is the latent in it. The
    matrices that would expand latents to a head's keys and values are multiplied with queries and results instead.

    Attributes:
        width: features of the latent.
        rotary: features of the shared key, and of the matching part of a query; all of them are rotated.
        content: features of the rest of a query, which is matched with keys made from latents.
        values: features of a head's result.
        norm: the norm of the latent, and of the latent of queries.
        query_width: features of the latent from which queries are made; None: from the hidden state.
    """

    width: int
    rotary: int
    content: int
    values: int
    norm: Norm
    query_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head attention; fewer kv_heads than heads is grouped-query attention, 1 is multi-query attention.

    Attributes:
        heads, kv_heads, head_dim: heads is a multiple of kv_heads.
        scale: factor of the scores of queries and keys.
        position: how positions enter the scores, in addition to the embedding.
        temperature: a factor of queries that grows with their position.
        causal: whether a query sees no later key.
        sees: the keys that a query sees: a sliding window, a chunk, or those of sparse attention in an encoder; None
            for all.
        qk_norm: normalisation of queries and keys after their projection.
        value_norm: normalisation of values per head, without weights.
        one_for_both: whether one matrix makes keys and values; values are its result before norm and rotation.
        reads: the number of an earlier layer whose keys and values this one reads; it then has only queries.
        qkv_bias, out_bias: whether the projections have biases; with latents, the projections that make them.
        clip: limits projected queries, keys and values to [-clip, clip].
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: scores beside those of the keys.
        spans: convolution heads beside the attention heads.
        gate: the gate by which their results are multiplied.
        latent: the source of queries, keys and values; None: each has a separate projection of the hidden state. With
            latents there is one KV head, and head_dim is the width of a token's vector in pages.
        routed: the experts that make queries and map results, `active` heads for each KV head; None: all tokens have
            the same matrices.
        value_scores: what keys add to their scores; head_dim is then the width of a key in pages.
        in_parts: whether tokens of an encoder see only those of their own part of the input (`Inputs.parts`).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    position: AttentionPosition | None = None
    temperature: Temperature | None = None
    causal: bool = True
    sees: Sight | Sparse | None = None
    qk_norm: QkNorm | None = None
    value_norm: Norm | None = None
    one_for_both: bool = False
    reads: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float | None = None
    softcap: float | None = None
    sinks: Sinks | None = None
    spans: Spans | None = None
    gate: OutputGate | None = None
    latent: Latent | None = None
    routed: RoutedHeads | None = None
    value_scores: ValueScores | None = None
    in_parts: bool = False

    @property
    def window(self) -> Sight | None:
        """The window or chunk of keys that a query sees; None for none."""
        if isinstance(self.sees, GlobalTokens | BlockSums):
            return Window(self.sees.reach, self.sees.reach)
        return self.sees if isinstance(self.sees, Sight) else None

    @property
    def turned(self) -> int:
        """Features of a head that take part in the rotation."""
        if self.value_scores is not None:
            return self.value_scores.features
        return self.head_dim if self.latent is None else self.latent.rotary

    @property
    def content_bias(self) -> bool:
        """Whether the scores have terms that depend on the distance."""
        return isinstance(self.position, Disentangled)

    @property
    def query_bias(self) -> bool:
        """Whether each query adds its own terms to its scores."""
        return isinstance(self.position, QueryBuckets)


NO_ATTENTION = Attention(heads=0, kv_heads=0, head_dim=0, scale=1.0, causal=False)


@dataclass(frozen=True, slots=True)
class Fourier:
    """The real part of a discrete Fourier transform over the tokens of an input and over their features, instead of
    attention; it has no weights (arXiv:2105.03824)."""
