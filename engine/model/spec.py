"""The parts that a transformer is made of, as frozen values.

A family is a composition of these parts and nothing else; `engine.model.transformer` builds modules
from them. A choice between alternatives is a sum type (`Placement`, `FeedForward` …), so a novelty is a
new member and not another boolean. Sizes are counted in features or tokens as their names say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.backends.attention.base import Chunks, Sight
from engine.interface.outputs import EntitiesInfo, RepeatedInput, SignalInfo
from engine.model.normalisation import Norm
from engine.model.positions import (
    AttentionPosition,
    Disentangled,
    DistanceVectors,
    Positions,
    QueryBuckets,
    RelativeBuckets,
    Rotary,
    Temperature,
)

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh"]


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


QkNorm = PerHead | WholeProjection | AfterRotation


@dataclass(frozen=True, slots=True)
class Sinks:
    """A learned score for each head, which softmax counts and which belongs to no value: what a query need not look at
    may go there (arXiv:2508.10925)."""


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

    Pages hold the latent and the shared key, as the one key of a single KV head; its value is the latent in it. What
    makes a head's keys and values of latents is multiplied with queries and with results instead.

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


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an input."""


@dataclass(frozen=True, slots=True)
class BeforeToken:
    """The tokens of an input before the first one of an id: a question, say; none where that is not there."""

    id: int


@dataclass(frozen=True, slots=True)
class GlobalTokens:
    """Some tokens see all others and are seen by all, whatever the window. They see through queries, keys and values
    that are projected for that alone (Longformer, arXiv:2004.05150, 3.1).

    Attributes:
        which: the tokens.
    """

    which: FirstToken | BeforeToken


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Keys and values beside those of tokens, which every token of an input sees, whatever the window: each is made of
    the sum of a block of tokens, normed (transient global attention, arXiv:2112.07916, 3.1.2). What is left at the end
    of an input is of its last whole block; an input without one has no sums.

    Attributes:
        size: tokens of a block.
        norm: of the sums.
    """

    size: int
    norm: Norm


@dataclass(frozen=True, slots=True)
class SparseBlocks:
    """Tokens see blocks of others, which are cut from an input's beginning on: their own block, those beside it, the
    first and the last one. Tokens of the first and of the last block see all (BigBird, arXiv:2007.14062, 2).

    In training tokens see some blocks drawn at random, too. transformers puts the first block in the place of each of
    these when it serves a model, so that its keys count several times; here they do so, too.

    Attributes:
        size: tokens of a block.
        drawn: blocks that training drew for a token.
    """

    size: int
    drawn: int

    @property
    def whole(self) -> int:
        """Inputs of up to so many tokens are not cut: all their tokens see all."""
        return (5 + 2 * self.drawn) * self.size


@dataclass(frozen=True, slots=True)
class GlobalStream:
    """Tokens see those of their own block, and the stack's `global_vectors`. These go through the layers beside the
    tokens of each input: they see all of them and each other, by the projections of tokens but after a norm of their
    own, and go through the feed-forward network as tokens do (PEGASUS-X, arXiv:2208.04347, 3).

    Attributes:
        size: tokens of a block.
        shift: so many tokens are missing from an input's first block; where they are in every other layer, blocks
            overlap those before and after.
        norm: of the vectors, before attention.
    """

    size: int
    shift: int
    norm: Norm


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
        qkv_bias, out_bias: the projections have biases; where there are latents, those that make them.
        clip: projected queries, keys and values are limited to [-clip, clip].
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: scores beside those of the keys.
        spans: heads beside these.
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
    qkv_bias: bool = False
    out_bias: bool = False
    clip: float | None = None
    softcap: float | None = None
    sinks: Sinks | None = None
    spans: Spans | None = None
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
        """Whether the scores have terms of what stands at a distance."""
        return isinstance(self.position, Disentangled)

    @property
    def query_bias(self) -> bool:
        """Whether each query brings what is added to its scores."""
        return isinstance(self.position, QueryBuckets)


NO_ATTENTION = Attention(heads=0, kv_heads=0, head_dim=0, scale=1.0, causal=False)


@dataclass(frozen=True, slots=True)
class Fourier:
    """In the place of attention the real part of a discrete Fourier transform over the tokens of an input and over
    their features; it has no weights (arXiv:2105.03824)."""


@dataclass(frozen=True, slots=True)
class Dense:
    """down(activation(up(x))) with `width` hidden features.

    Attributes:
        groups: outputs of both matrices see the inputs of their own group only; zeros are loaded for the others.
    """

    width: int
    activation: Activation
    bias: bool = False
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Gated:
    """down(activation(gate(x)) * up(x)) with `width` hidden features (arXiv:2002.05202)."""

    width: int
    activation: Activation
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Xielu:
    """down(xielu(up(x))) with `width` hidden features; each layer learns how steep the function is on either side of 0
    (arXiv:2411.13010): p * x^2 + x / 2 above, n * (expm1(x) - x) + x / 2 below."""

    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Clamped:
    """down((u + 1) * g * sigmoid(slope * g)), g being gate(x) and u up(x): u within [-limit, limit], g not above limit
    (arXiv:2508.10925)."""

    width: int
    limit: float
    slope: float
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The experts of the largest probabilities (softmax), which are their weights."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """The experts of the largest sums of score and a learned correction, weighted by the scores alone: load is balanced
    without a loss for it (arXiv:2408.15664). All is computed in float32.

    Attributes:
        score: what becomes of the router's numbers.
        groups, open_groups: experts lie in so many groups, of which a token sees those with the best pairs.
        least: the sum that weights are divided by is no smaller than this.
        scale: multiplies the weights.
    """

    score: Literal["sigmoid", "softmax"] = "sigmoid"
    groups: int = 1
    open_groups: int = 1
    least: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class GroupLimited:
    """The experts of the largest probabilities (softmax) in those groups that hold the largest ones; a probability
    times a constant is the weight (arXiv:2405.04434, 2.1.2). All is computed in float32.

    Attributes:
        groups, open_groups: experts lie in so many groups, of which a token sees those with the best experts.
        scale: multiplies the weights.
    """

    groups: int = 1
    open_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """One expert after the other: the best of those left, weighted by its probability among those near it
    (arXiv:2409.12136).

    Attributes:
        tolerance: those are near whose number falls short of the best one by so much of its size at most.
    """

    tolerance: float


@dataclass(frozen=True, slots=True)
class ScaledInput:
    """The experts of the largest numbers. What an expert reads is multiplied by the sigmoid of its number; what it
    answers counts as it is (Llama 4)."""


Routing = Likeliest | Corrected | GroupLimited | SparseMixer | ScaledInput


@dataclass(frozen=True, slots=True)
class Experts:
    """A router sends each token to `active` of `count` feed-forward experts (arXiv:1701.06538).

    Attributes:
        expert: what each of them is.
        count, active: how many there are, and how many a token goes to.
        normalize: the weights of a token's experts are made to sum to 1.
        routing: which experts a token goes to, and with what weights.
        router_bias: the router has a bias.
        capacity: an expert works on so many tokens of an input, the first that come to it; what comes later gets
            nothing from it (arXiv:2101.03961, 2.2). None: on all.
    """

    expert: Dense | Gated | Clamped
    count: int
    active: int
    normalize: bool = True
    routing: Routing = Likeliest()
    router_bias: bool = False
    capacity: int | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """sigmoid(opening(x)) * inner(x), the opening being one number for each token, made by one row of weights."""

    inner: Gated


@dataclass(frozen=True, slots=True)
class Shared:
    """routed(x) + always(x): beside the experts a network that every token goes to (arXiv:2401.06066)."""

    routed: Experts
    always: Gated | Opened


FeedForward = Dense | Gated | Xielu | Experts | Shared


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer. `cross` attends to the encoder's output; `beside` runs beside the whole layer.

    Attributes:
        mixing: what mixes tokens instead, where attention has no heads (`NO_ATTENTION`).
        bottleneck: the features that the layer works on, where these are not the stream's; its norms stand for those of
            the placement.
        residual_scale: multiplies what attention and feed-forward network add; their last matrices are loaded times it.
    """

    placement: Placement
    attention: Attention
    ffn: FeedForward
    mixing: Fourier | None = None
    bottleneck: Bottleneck | None = None
    cross: Attention | None = None
    beside: Convolution | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class MaskedOut:
    """Tokens of one id have vectors of zeros, and those of an input are scaled by how many it has of these: they are
    multiplied by (1 - usual) / (1 - share), the share of such tokens in training and in the input
    (bioRxiv:2022.07.20.500902)."""

    id: int
    usual: float


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The vectors of the `taps` tokens around each, one after the other, which a matrix with a bias maps to `width`
    features (arXiv:2004.02984); zeros beyond an input's ends."""

    taps: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token ids to vectors of `width` features.

    Attributes:
        vocab_size, width: shape of the table.
        scale: multiplies the vectors.
        masked_out: what becomes of masks before anything is added.
        neighbours: what vectors are made of before anything is added.
        positions: added after scaling.
        token_types: number of segment embeddings added, 0 for none.
        second_after: where nothing is said of an input's segments, its tokens after the first one of this id are of the
            second; without one, those after its first token. None: all are of the first.
        tasks: rows of a table of which the first is added, the task that a checkpoint is for by default
            (arXiv:2107.02137); 0 for none.
        boxes: rows of the tables of where on its page a token stands, one for horizontal and one for vertical places
            of its box, and one each for the box's height and width (arXiv:1912.13318); 0 for none.
        token_norm: applied to the vectors before positions and segments are added.
        norm: applied to the sum.
        projection: features that the vectors are mapped to by a matrix without bias, before positions are added.
        expansion: features that the normed sum is mapped to at last, by a matrix with a bias (arXiv:2003.10555).
        projects_sum: the matrix comes after positions and segments, which have `width` features then.
    """

    vocab_size: int
    width: int
    scale: float = 1.0
    masked_out: MaskedOut | None = None
    neighbours: Neighbours | None = None
    positions: Positions | None = None
    token_types: int = 0
    second_after: int | None = None
    tasks: int = 0
    boxes: int = 0
    token_norm: Norm | None = None
    norm: Norm | None = None
    projection: int | None = None
    expansion: int | None = None
    projects_sum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """An image's patches to vectors of `width` features, row by row, by one matrix over a patch's pixels
    (arXiv:2010.11929). What no whole patch covers at the right and at the bottom is left out.

    Attributes:
        image, patch: height and width, in pixels.
        channels: of the image.
        bias: the matrix has one.
        first: learned vectors that come before those of the patches: of a class, for example.
        positions: added to all of them.
        norm: applied to the sum.
    """

    image: tuple[int, int]
    patch: tuple[int, int]
    channels: int
    width: int
    bias: bool = True
    first: int = 0
    positions: Positions | None = None
    norm: Norm | None = None

    @property
    def signal(self) -> SignalInfo:
        """What it reads, and how many vectors that becomes."""
        rows, columns = (pixels // size for pixels, size in zip(self.image, self.patch, strict=True))
        return SignalInfo("image", (self.channels, *self.image), self.first + rows * columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Frames of sound to vectors of `width` features: two convolutions over time with GELU after each, the second of
    which is taken at every `stride`th place (arXiv:2212.04356).

    Attributes:
        bins, frames: of the spectrum.
        kernel: frames that a convolution sees at a time, odd; there are zeros before the first and after the last.
        positions: added to the vectors.
    """

    bins: int
    frames: int
    width: int
    kernel: int = 3
    stride: int = 2
    positions: Positions | None = None

    @property
    def signal(self) -> SignalInfo:
        """What it reads, and how many vectors that becomes."""
        return SignalInfo("audio", (self.bins, self.frames), -(-self.frames // self.stride))


Embedding = Tokens | Patches | Spectrum


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Layers that are the same weights (arXiv:1909.11942): blocks form groups of `length`, each of which runs `times`
    times before the next one."""

    length: int
    times: int


@dataclass(frozen=True, slots=True)
class PredictingStream:
    """Beside each token of a decoder goes a vector that stands for the next one: it begins as that one's position and a
    learned vector, and passes through the same layers. In self-attention it sees what its token sees, and itself; no
    other sees it, so that pages hold nothing of it. The head reads it (ProphetNet, arXiv:2001.04063, 3.2).

    Attributes:
        vectors: learned ones, one for each stream of the training. Those after the first predict later tokens, and
            nothing of them reaches the first, which is the only one here; its vector is the last.
    """

    vectors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """An encoder or a decoder.

    Attributes:
        hidden_size: features of the residual stream.
        blocks: one per layer; they may differ.
        shared_bias: a bias by distance that the self-attentions of all blocks add; theirs to position is None.
        block_bias: what they add to the scores of sums of blocks, by the distance from a token's own block.
        global_vectors: learned vectors that go through the layers beside the tokens of each input.
        predicting: what the head reads instead of the tokens' hidden states.
        projection: features that the hidden states are mapped to at last, by a matrix without bias.
        distances: what blocks with disentangled attention share.
        repeated: how often blocks run; None: each is one layer.
    """

    hidden_size: int
    embedding: Embedding
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    shared_bias: RelativeBuckets | None = None
    block_bias: RelativeBuckets | None = None
    global_vectors: int = 0
    predicting: PredictingStream | None = None
    projection: int | None = None
    distances: DistanceVectors | None = None
    repeated: Repeated | None = None

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Those of the blocks, as far as they have one."""
        return tuple(block.attention for block in self.blocks if block.attention.heads)

    @property
    def order(self) -> tuple[int, ...]:
        """The number of each layer's block."""
        part = self.repeated or Repeated(length=1, times=1)
        starts = range(0, len(self.blocks), part.length)
        return tuple(start + i for start in starts for _ in range(part.times) for i in range(part.length))

    @property
    def output_size(self) -> int:
        """Features of the hidden states that the stack gives."""
        return self.projection or self.hidden_size


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """norm(activation(dense(x))) where there is a dense layer, then scores of `labels` classes.

    Attributes:
        labels: number of classes.
        pooling: which hidden state x is of a sequence, or their mean; None: each token is classified.
        activation: of the dense layer; None for no such layer.
        norm: after that layer.
        dense_bias, bias: biases of the two layers.
        width: features of the dense layer, None for as many as the hidden states have.
        padding_id: the last hidden state is that of the last token with another id than this.
    """

    labels: int
    pooling: Literal["cls", "mean", "last"] | None
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
    """a + ffn(norm(a)), where a is what a learned query finds by attention to all hidden states (arXiv:1810.00825).

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
        pooling: which hidden state it is, or what is made of all.
        features: what a matrix maps it to; None for no matrix.
        bias: of that matrix.
    """

    pooling: Literal["cls", "last"] | AtToken | Probe
    features: int | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSpans:
    """How well each span of an input's words goes with each label that the input names: the product of what networks
    make of the span's two ends and of the label (GLiNER, arXiv:2311.08526).

    Attributes:
        features: of words, labels and spans; hidden states of another size go through a matrix first.
        recurrent: layers of an LSTM in both directions, which the words go through; 0 for none.
        reading: how an input names labels, and how many words texts and spans have.
    """

    features: int
    recurrent: int
    reading: EntitiesInfo


Head = Lm | MaskedLm | Classifier | AnswerSpan | Pool | Embedder | LabelledSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A whole model: decoder-only, encoder-only or both.

    Attributes:
        encoder, decoder, head: its parts.
        context_length: tokens of context that the model was made for; None if its config does not say.
        shared_tokens: encoder and decoder have one token table.
        repeats: what the decoder reads of the encoder's input, where both read it to classify it.
        twin: an encoder of signals whose vectors lie in the same space as those of this one, which reads token ids
            (arXiv:2103.00020).
        filler: the token that fills texts up to the longest length: the model was trained on texts of that length
            alone, and reads these tokens like others. None: texts are as long as they are.
    """

    encoder: Stack | None
    decoder: Stack | None
    head: Head
    context_length: int | None = None
    shared_tokens: bool = True
    repeats: RepeatedInput | None = None
    twin: ModelSpec | None = None
    filler: int | None = None

    @property
    def trunk(self) -> Stack:
        """The stack whose hidden states the head reads."""
        stack = self.decoder or self.encoder
        assert stack is not None
        return stack

    @property
    def vocab_size(self) -> int:
        """Rows of the token table, 0 where there is none."""
        stack = self.decoder or self.encoder
        return stack.embedding.vocab_size if stack and isinstance(stack.embedding, Tokens) else 0

    @property
    def attention_span(self) -> int | None:
        """Most keys that a query sees in any of the decoder's layers, its own included; None if one sees all."""
        parts = self.decoder.attentions if self.decoder else ()
        windows = [part.window for part in parts if part.causal and part.window is not None]
        reaches = [window.size if isinstance(window, Chunks) else window.left + 1 for window in windows]
        return max(reaches, default=None) if len(windows) == len(parts) else None

    @property
    def signal(self) -> SignalInfo | None:
        """What its encoder, or its twin's, reads instead of token ids; None: it reads those alone."""
        encoder = self.encoder if self.twin is None else self.twin.encoder
        return None if encoder is None or isinstance(encoder.embedding, Tokens) else encoder.embedding.signal

    @property
    def encoder_vocab_size(self) -> int:
        """Rows of the encoder's token table, 0 where there is none."""
        return self.encoder.embedding.vocab_size if self.encoder and isinstance(self.encoder.embedding, Tokens) else 0

    @property
    def rotary_limits(self) -> tuple[int, ...]:
        """Lengths, ascending, up to which sequences are turned otherwise than beyond (`Rotary.limit`)."""
        stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
        parts = [attention.position for stack in stacks for attention in stack.attentions]
        return tuple(sorted({part.limit for part in parts if isinstance(part, Rotary) and part.limit is not None}))

    @property
    def max_positions(self) -> int | None:
        """Most tokens a sequence can have because a position table ends there; None without a table."""
        sizes = [
            _positions(stack)
            for stack in (self.encoder, self.decoder)
            # How long a signal is does not depend on a decoder's tokens.
            if stack is not None and (isinstance(stack.embedding, Tokens) or stack is self.trunk)
        ]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def max_encoder_positions(self) -> int | None:
        """Most tokens of an encoder's input beside a decoder, where its table of positions is longer than the
        decoder's; None for other models."""
        if self.encoder is None or self.decoder is None or self.signal is not None:
            return None
        own, other = _positions(self.encoder), _positions(self.decoder)
        return own if own is not None and other is not None and own > other else None


def _positions(stack: Stack | None) -> int | None:
    """Tokens that a stack has positions for; None without a table."""
    table = None if stack is None else stack.embedding.positions
    if stack is None or table is None:
        return None
    return table.size - table.offset - (stack.predicting is not None)  # the last token's next one has a position, too
