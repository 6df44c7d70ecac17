"""Attention: its heads, the inputs of its queries, keys and values, and the parts that can stand in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.backends.attention.base import Sight
from engine.model.normalisation import Norm
from engine.model.positions import AttentionPosition, Disentangled, QueryBuckets, Temperature
from engine.model.spec.sparse import BlockSums, GlobalStream, GlobalTokens, SparseBlocks


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
    """Queries and keys are normalised per head, and each head has weights of its own (a layer norm's)."""

    norm: Norm


QkNorm = PerHead | WholeProjection | AfterRotation | EachHead


@dataclass(frozen=True, slots=True)
class Sinks:
    """A learned score for each head, which softmax counts and which belongs to no value: what a query need not look at
    may go there (arXiv:2508.10925)."""


@dataclass(frozen=True, slots=True)
class OutputGate:
    """What heads attended to is multiplied by function(gate(x)) before the output matrix, x being what queries are made
    of (arXiv:2505.06708).

    Attributes:
        per_head: a gate has one number for each head, not for each feature.
    """

    function: Literal["sigmoid", "softplus"] = "sigmoid"
    per_head: bool = False


@dataclass(frozen=True, slots=True)
class Spans:
    """Heads of convolutions beside those of attention, as many and as wide: each token has kernels of its own, made of
    its query and of its neighbours (arXiv:2008.02496).

    Attributes:
        kernel: tokens that one sees at a time, odd.
    """

    kernel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Keys and values of all heads are made of one short vector for each token, its latent; one rotated key beside it
    is shared by the heads, too (multi-head latent attention, arXiv:2405.04434, 2.1).

    Pages hold the latent and the shared key, as the one key of a single KV head; its value is the latent in it. The
    matrices that make a head's keys and values of latents are multiplied with queries and with results instead.

    Attributes:
        width: features of the latent.
        rotary: of the shared key, and of the part of a query that meets it; all of them are rotated.
        content: of the rest of a query, which meets keys made of latents.
        values: of a head's result.
        norm: of the latent, and of that which queries are made of.
        query_width: features of the latent that queries are made of; None: of the hidden state.
    """

    width: int
    rotary: int
    content: int
    values: int
    norm: Norm
    query_width: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head attention; kv_heads below heads is grouped-query, 1 is multi-query.

    Attributes:
        heads, kv_heads, head_dim: heads is a multiple of kv_heads.
        scale: multiplies the scores of queries and keys.
        position: how positions enter the scores, beyond what the embedding adds.
        temperature: what queries are multiplied by, where that grows with their position.
        causal: a query sees no later key.
        window: which keys a query sees at most, a sliding window or a chunk; None for all.
        qk_norm: normalisation of queries and keys after their projection.
        value_norm: normalisation of values per head, without weights of its own.
        one_for_both: a matrix makes keys, and values are what it gives before they are normed and rotated.
        reads: the number of an earlier layer whose keys and values this one reads; it makes queries alone then.
        qkv_bias, out_bias: the projections have biases; where there are latents, those that make them.
        clip: projected queries, keys and values are limited to [-clip, clip].
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: scores beside those of the keys.
        spans: heads beside these.
        gate: what their results are multiplied by.
        latent: what queries, keys and values are made of; None: of the hidden state, each by a projection of its own.
            With latents there is one KV head, and head_dim is the width of what pages hold of a token.
        global_tokens: tokens that the window does not bind; it reaches equally far to both sides then.
        block_sums: what tokens see besides those in the window, which reaches equally far to both sides then.
        blocks: the blocks that tokens see, in an encoder; None for all.
        stream: what tokens of an encoder see where vectors go through its layers beside them.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    position: AttentionPosition | None = None
    temperature: Temperature | None = None
    causal: bool = True
    window: Sight | None = None
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
    global_tokens: GlobalTokens | None = None
    block_sums: BlockSums | None = None
    blocks: SparseBlocks | None = None
    stream: GlobalStream | None = None

    @property
    def turned(self) -> int:
        """Features of a head among which rotation happens."""
        return self.head_dim if self.latent is None else self.latent.rotary

    @property
    def content_bias(self) -> bool:
        """Whether the scores have terms that depend on the distance."""
        return isinstance(self.position, Disentangled)

    @property
    def query_bias(self) -> bool:
        """Whether each query brings terms for its scores."""
        return isinstance(self.position, QueryBuckets)


NO_ATTENTION = Attention(heads=0, kv_heads=0, head_dim=0, scale=1.0, causal=False)


@dataclass(frozen=True, slots=True)
class Fourier:
    """The real part of a discrete Fourier transform over the tokens of an input and over their features, in the
    place of attention; it has no weights (arXiv:2105.03824)."""
