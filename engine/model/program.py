"""The computation of a stack, as a flat list of operations on rows of features.

The modules of a stack hold its weights; `compile_stack` walks them once and writes the list of operations. An executor
runs the list: torch (`engine.model.executors.reference`, the oracle, for all devices and formats), the CPU's library
(`engine.model.executors.native`) or kernels for GPUs (`engine.model.executors.triton`). An executor leaves
operations without a kernel to torch, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from engine.backends.native.ranks import Ranks
from engine.backends.rows import Rows
from engine.model import sparse_blocks, spec
from engine.model.attention_operations import Attend, PrepareHeads, PrepareLatent, StoreEncoded
from engine.model.block_sums import BlockSumAttention
from engine.model.blocks import BottleneckBlock, ConvolvedBlock, ParallelBlock, SequentialBlock, Sublayer
from engine.model.embedding import Embedding, TokenEmbedding, add_images
from engine.model.experts import ExpertsFeedForward, NormedExperts, SharedExperts
from engine.model.fourier import FourierMixing
from engine.model.global_stream import StreamAttention, begin, feed
from engine.model.global_tokens import GlobalAttention
from engine.model.latent import LatentAttention
from engine.model.layer_vectors import LayerEmbedding, LayerInputs, LowRankPath
from engine.model.layers import (
    CrossAttention,
    DenseFeedForward,
    EncodedKeys,
    GatedFeedForward,
    Linear,
    OpenedFeedForward,
    SelfAttention,
    SpanConvolution,
    SparseFeedForward,
    XieluFeedForward,
)
from engine.model.merged import MergedAttention
from engine.model.operations import (
    Activate,
    Add,
    AddAdapters,
    AllReduce,
    Apply,
    Embed,
    GatherNeighbours,
    MixExperts,
    Multiply,
    MultiplyPieces,
    Normalize,
    Open,
    Operation,
    Take,
)
from engine.model.positions import Temperature
from engine.model.query_buckets import BucketedAttention
from engine.model.reading import ReadingAttention
from engine.model.recurrences import ChannelScanLayer, FadingAttentionLayer, FeatureDeltaLayer, GatedRecurrenceLayer
from engine.model.routed_attention import RoutedAttention
from engine.model.row_functions import add_vector, concatenate, keep, multiply_all, scale, temper
from engine.model.state_layers import (
    AttentionBesideState,
    DeltaRuleAttention,
    GatedConvolution,
    SelectiveStateSpace,
    StateModule,
)
from engine.model.state_operations import Advance, ApplyDelta, ApplyScan, Convolve
from engine.model.value_scores import ValueScoringAttention
from engine.model.versions import LayerVersions, VersionEnds

RowFunction = Callable[..., Tensor | Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of a stack."""

    operations: tuple[Operation, ...]  # the operations in order; the first one embeds tokens, or takes given rows
    widths: tuple[int, ...]  # features of each buffer's rows
    stream: Rows
    result: Rows


def last_uses(operations: Sequence[Operation], result: Rows) -> list[tuple[int, ...]]:
    """For each operation, the buffers that nothing reads after it before they are written again."""
    found: list[tuple[int, ...]] = []
    needed = {result.buffer}
    for operation in reversed(operations):
        reads, writes = ({rows.buffer for rows in which} for which in (operation.reads, operation.writes))
        found.append(tuple((reads | writes) - needed))
        needed = needed - writes | reads
    return found[::-1]


def compile_stack(
    embedding: Embedding,
    blocks: Iterable[nn.Module],
    final_norm: nn.Module | None,
    projection: Linear | None,
    *,
    hidden_size: int,
    paged: bool,
    readers: Sequence[EncodedKeys | None] = (),
    beside: nn.Parameter | None = None,
    predicting: nn.Parameter | None = None,
    layer_vectors: LayerEmbedding | None = None,
    versions: VersionEnds | None = None,
    kept: Sequence[int] = (),
    image_layers: int = 0,
    ranks: Ranks | None = None,
) -> Program:
    """The program of a stack.

    Args:
        hidden_size: features of the residual stream.
        paged: whether keys and values are in pages.
        readers: the attentions of a decoder's layers that attend to the result of this stack, an encoder.
        beside: vectors that pass through the layers beside the tokens.
        predicting: the initial vectors of next tokens, which also pass through the layers, and are the result.
        layer_vectors: computes the vectors that layers read beside the stream.
        versions: computes the versions of the stream.
        kept: numbers of the layers whose hidden states are a result, too.
        image_layers: so many of the first layers add vectors of images to the stream.
        ranks: those that divide the layers; None for none.
    """
    builder = Builder(hidden_size, paged, ranks)
    builder.begin(embedding)
    if beside is not None:
        builder.add(Apply("vectors beside tokens", partial(begin, beside)))
    if predicting is not None:
        assert isinstance(embedding, TokenEmbedding)
        builder.ahead = builder.rows("stream ahead", hidden_size)
        builder.add(Apply("vectors of next tokens", partial(embedding.ahead, predicting), made=(builder.ahead,)))
    if layer_vectors is not None:
        builder.embed_layers(layer_vectors)
    if versions is not None:
        builder.versions = builder.rows("versions", versions.part.count * hidden_size)
        builder.apply("versions of the stream", versions.expand, (builder.stream,), builder.versions)
    pages = 0
    for number, block in enumerate(blocks):
        inner = block.attention.inner if isinstance(block, SequentialBlock) and block.attention is not None else None
        builder.block(block, pages)
        builder.states += isinstance(inner, StateModule | AttentionBesideState)
        pages += not isinstance(inner, StateModule) and (inner is not None or not isinstance(block, SequentialBlock))
        builder.keeps = number in kept
        if number < image_layers:
            stream = builder.normed(None)
            builder.add(Apply("vectors of images", partial(add_images, number + 1), (stream,), (stream,)))
    if versions is not None and builder.versions is not None:
        builder.apply("the end of versions", versions.merge, (builder.versions,), builder.stream)
    result = builder.ahead or builder.normed(final_norm)
    if projection is not None:
        result = builder.product(projection, result, "projected")
    for layer, reader in enumerate(readers):
        if reader is not None:
            made = builder.product(reader.kv, result, "encoded")
            if reader.norm is not None:
                builder.apply("norms of an encoder's keys", reader.normalise, (made,), made)
            builder.add(StoreEncoded(reader.part, made, layer))
    return builder.program(result)


def compile_head(
    hidden_size: int,
    network: Sublayer | None,
    dense: Linear | None,
    activation: spec.Activation | None,
    norm: nn.Module | None,
) -> Program:
    """The program of norm(activation(dense(network(x)))) of rows, where each part may be absent."""
    builder = Builder(hidden_size, False)
    builder.add(Take(builder.stream))
    x = builder.stream if network is None else builder.residual(network, builder.stream)
    if dense is not None:
        x = builder.product(dense, x, "dense")
    if activation is not None:
        hidden = builder.rows("hidden", x.width)
        builder.add(Activate(activation, x, hidden, False))
        x = hidden
    if norm is not None:
        normed = builder.rows("normed", x.width)
        builder.add(Normalize(norm, x, normed))
        x = normed
    return builder.program(x)


class Builder:
    """Collects the operations of a program. A sublayer's result is added to the stream in one operation with the next
    norm."""

    def __init__(self, hidden_size: int, paged: bool, ranks: Ranks | None = None):
        self._ranks = ranks
        self.operations: list[Operation] = []
        self.widths: list[int] = []
        self._buffers: dict[tuple[str, int], Rows] = {}
        self._paged = paged
        self._pending: Rows | None = None  # addends that the stream still lacks
        self.stream = self.rows("stream", hidden_size)
        self.ahead: Rows | None = None  # the stream of next tokens
        self.layer_vectors: Rows | None = None  # all of a token's, side by side
        self.versions: Rows | None = None  # of the stream, side by side
        self.states = 0  # layers with a state so far
        self.keeps = False  # whether the stream is kept as soon as it is complete

    def begin(self, embedding: Embedding) -> None:
        """Begin the stream with an embedding."""
        self._embedding = embedding
        self.add(Embed(embedding, self.stream))

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def apply(self, name: str, function: RowFunction, given: tuple[Rows, ...], *made: Rows) -> None:
        """Add a computation of rows that reads nothing else of the pass."""
        self.add(Apply(name, lambda _, *values: function(*values), given, made))

    def _multiply(self, factor: nn.Parameter | float, x: Rows) -> None:
        self.apply("a factor", partial(multiply_all, factor), (x,), x)

    def _temper(self, part: Temperature, queries: Rows) -> None:
        self.add(Apply("a temperature of queries", partial(temper, part), (queries,), (queries,)))

    def program(self, result: Rows) -> Program:
        """The operations that were added."""
        return Program(tuple(self.operations), tuple(self.widths), self.stream, result)

    def rows(self, name: str, width: int) -> Rows:
        """Rows that all layers share."""
        key = (name, width)
        if key not in self._buffers:
            self._buffers[key] = Rows(len(self.widths), 0, width, width)
            self.widths.append(width)
        return self._buffers[key]

    # ---- layers

    def block(self, block: nn.Module, layer: int) -> None:
        match block:
            case ConvolvedBlock():
                self._convolved(block, layer)
            case BottleneckBlock():
                self._bottleneck(block, layer)
            case ParallelBlock():
                self._parallel(block, layer)
            case SequentialBlock(versions=LayerVersions() as versions):
                self._versions(block, versions, layer)
            case SequentialBlock():
                for sublayer in (block.attention, block.cross, block.ffn):
                    if sublayer is not None:
                        reads = block.reads_tokens and sublayer is block.attention
                        self.sublayer(sublayer, layer, self._embedding if reads else None)
                        self._sublayer_ahead(sublayer, layer)
                if block.input is not None:
                    self._pending = self._layer_input(block.input, self.normed(None), layer)
                if block.factor is not None:
                    self._multiply(block.factor, self.normed(None))
                if block.attention is not None and isinstance(block.attention.inner, StreamAttention):
                    assert block.ffn is not None
                    assert isinstance(block.ffn.inner, DenseFeedForward)
                    network = partial(feed, block.ffn.before, block.ffn.inner)
                    self.add(Apply("the network of vectors beside tokens", network))
            case _:
                raise TypeError(f"{type(block).__name__} is not a block")

    def sublayer(self, part: Sublayer, layer: int, beside: Embedding | None = None) -> None:
        """Add outer(carry * y + after(f(before(y)))) of y = first(x); each norm and carry may be absent. f reads the
        vectors of tokens before its input, if there is an embedding beside it."""
        if part.first is not None:
            self.add(Normalize(part.first, self.stream, self.stream, self._take_pending()))
        x = self.normed(part.before)
        y = self._inner(part.inner, x if beside is None else self._joined(beside, x), "sublayer", layer)
        if part.after is not None:
            self.add(Normalize(part.after, y, y))
        if part.carry is not None:
            self._multiply(part.carry, self.stream)
        self._pending = y
        if part.outer is not None:
            self.add(Normalize(part.outer, self.stream, self.stream, self._take_pending()))

    def _joined(self, embedding: Embedding, x: Rows) -> Rows:
        """[the norms of tokens' vectors, x]."""
        assert isinstance(embedding, TokenEmbedding)
        vectors, both = self.rows("token vectors", x.width), self.rows("joined", 2 * x.width)
        self.add(Apply("vectors of tokens beside the stream", embedding.beside, made=(vectors,)))
        self.apply("a concatenation", concatenate, (vectors, x), both)
        return both

    def embed_layers(self, module: LayerEmbedding) -> None:
        """Add the vectors that layers read beside the stream."""
        self.layer_vectors = self.rows("layer vectors", module.layers * module.width)
        parts = tuple(self.layer_vectors.part(i * module.width, module.width) for i in range(module.layers))
        self.add(Apply("vectors of layers", module.embed, (self.stream,), parts))

    def _layer_input(self, module: LayerInputs, x: Rows, layer: int) -> Rows:
        """norm(projection(activation(gate(x)) * own)), own being the layer's vector."""
        assert self.layer_vectors is not None
        gate = self.product(module.gate, x, "gate of layer vector")
        hidden = self.rows("layer vector", gate.width)
        self.add(Activate(module.activation, gate, hidden, False))
        own = self.layer_vectors.part(layer * gate.width, gate.width)
        self.apply("a product of rows", scale, (hidden, own), hidden)
        out = self.product(module.projection, hidden, "layer input")
        normed = self.rows("normed layer input", out.width)
        self.add(Normalize(module.norm, out, normed))
        return normed

    def _versions(self, block: SequentialBlock, versions: LayerVersions, layer: int) -> None:
        """A layer on the active version of the stream, which predicts all of them before, and corrects them after."""
        assert self.versions is not None
        assert block.attention is not None
        assert block.ffn is not None
        self.apply("predictions of versions", versions.predict, (self.versions,), self.versions, self.stream)
        if block.low_rank is None:
            self.sublayer(block.attention, layer)
        else:
            self._beside_low_rank(block.attention, block.low_rank, layer)
        self.sublayer(block.ffn, layer)
        read = self.rows("read of versions", self.stream.width)
        made = (self.versions, self.normed(None))
        self.apply("corrections of versions", versions.correct, made, self.versions, read)
        if block.input is not None:
            given = self._layer_input(block.input, read, layer)
            self.apply("the sum of versions", versions.add, (self.versions, given), self.versions)

    def _beside_low_rank(self, part: Sublayer, path: LowRankPath, layer: int) -> None:
        """(x + after(attention(y)) + y + norm(right(left(y)))) / root of 2 of y = before(x)."""
        y = self.normed(part.before)
        low = self.product(path.right, self.product(path.left, y, "low rank"), "low-rank path")
        beside = self.rows("beside attention", y.width)
        self.add(Normalize(path.norm, low, beside))
        self.add(Add(y, beside, beside))
        attended = self._inner(part.inner, y, "sublayer", layer)
        if part.after is not None:
            self.add(Normalize(part.after, attended, attended))
        self.add(Add(self.stream, attended, self.stream))
        self.add(Add(self.stream, beside, self.stream))
        self._multiply(2.0**-0.5, self.stream)

    def _sublayer_ahead(self, part: Sublayer, layer: int) -> None:
        """The same for next tokens, if there is a stream of them; the keys that they see are in the pages by now."""
        if self.ahead is not None:
            own, self.stream = self.stream, self.ahead
            self.sublayer(part, layer)
            self.stream = own

    def residual(self, part: Sublayer, x: Rows) -> Rows:
        """outer(x + f(x)) of rows that do not change."""
        assert part.outer is not None
        total, out = self.rows("total", x.width), self.rows("normed total", x.width)
        self.add(Add(x, self._inner(part.inner, x, "network", 0), total))
        self.add(Normalize(part.outer, total, out))
        return out

    def _parallel(self, block: ParallelBlock, layer: int) -> None:
        """x + attention(norm(x)) + ffn(norm(x)), where both may use the same norm."""
        normed = self.normed(block.attention.before)
        attended = self._inner(block.attention.inner, normed, "sublayer", layer)
        if block.ffn.before is not None:
            normed = self.normed(block.ffn.before)
        fed = self._inner(block.ffn.inner, normed, "second sublayer", layer)
        self.add(Add(self.stream, attended, self.stream))
        self._pending = fed

    def _convolved(self, block: ConvolvedBlock, layer: int) -> None:
        """norm(y + convolution(x)) of y = inner(x), a layer."""
        part, x = block.convolution, self.normed(None)
        windows = self.rows("windows", part.kernel.inputs)
        self.add(GatherNeighbours(x, windows, part.taps))
        convolved = self.rows("convolved", x.width)
        self.add(Activate(part.activation, self.product(part.kernel, windows, "unconvolved"), convolved, False))
        self.block(block.inner, layer)
        self.add(Normalize(block.norm, self.normed(None), self.stream, convolved))

    def _bottleneck(self, block: BottleneckBlock, layer: int) -> None:
        """norm(x + exit(f(entrance(x)))); f's sublayers have their own stream."""
        whole, x = self.stream, self.normed(None)
        entered = queries = self._entered(block.entrance, block.entrance_norm, x, "entered")
        if block.second_entrance is not None and block.second_norm is not None:
            queries = self._entered(block.second_entrance, block.second_norm, x, "queries entered")
        self.stream = entered
        assert isinstance(block.attention.inner, SelfAttention)
        assert block.attention.outer is not None
        attended = self._self_attention(block.attention.inner, queries, "sublayer", layer, values=x)
        self.add(Normalize(block.attention.outer, entered, entered, attended))
        for network in block.networks:
            assert isinstance(network, Sublayer)
            self.sublayer(network, layer)
        self.stream = whole
        self.add(Normalize(block.exit_norm, whole, whole, self.product(block.exit, entered, "left")))

    def _entered(self, linear: Linear, norm: nn.Module, x: Rows, name: str) -> Rows:
        out = self.product(linear, x, name)
        self.add(Normalize(norm, out, out))
        return out

    def _take_pending(self) -> Rows | None:
        pending, self._pending = self._pending, None
        return pending

    def normed(self, norm: nn.Module | None) -> Rows:
        """The norm of the stream, which is complete afterwards; without a norm, the stream itself."""
        pending, out = self._take_pending(), self.stream
        if norm is not None:
            out = self.rows("normed", self.stream.width)
            self.add(Normalize(norm, self.stream, out, pending))
        elif pending is not None:
            self.add(Add(self.stream, pending, self.stream))
        if self.keeps:
            self.add(Apply("hidden states that are kept", keep, (self.stream,)))
            self.keeps = False
        return out

    # ---- sublayers

    def _inner(self, module: nn.Module, x: Rows, name: str, layer: int) -> Rows:
        match module:
            case BucketedAttention():
                return self._bucketed_attention(module, x, name, layer)
            case SelfAttention():
                return self._self_attention(module, x, name, layer)
            case FourierMixing():
                out = self.rows(name, x.width)
                self.add(Apply("the Fourier transform", module.mix, (x,), (out,)))
                return out
            case DeltaRuleAttention():
                return self._delta_rule(module, x, name)
            case GatedConvolution():
                return self._gated_convolution(module, x, name)
            case SelectiveStateSpace():
                return self._state_space(module, x, name)
            case ChannelScanLayer():
                return self._channel_scan(module, x, name)
            case GatedRecurrenceLayer():
                return self._gated_recurrence(module, x, name)
            case FadingAttentionLayer():
                return self._fading_attention(module, x, name)
            case FeatureDeltaLayer():
                return self._feature_delta(module, x, name)
            case AttentionBesideState():
                out = self._inner(module.attention, x, name, layer)
                self.add(Add(out, self._inner(module.state, x, f"{name} beside attention", layer), out))
                return out
            case ReadingAttention():
                return self._reading_attention(module, x, name)
            case RoutedAttention():
                return self._routed_attention(module, x, name, layer)
            case ValueScoringAttention():
                return self._value_scoring_attention(module, x, name, layer)
            case LatentAttention():
                return self._latent_attention(module, x, name, layer)
            case CrossAttention():
                queries = self.product(module.queries, x, "queries")
                attended = self.rows("attended", queries.width)
                self.add(Attend(module, queries, None, attended, layer))
                return self._reduced(module.out, attended, name)
            case DenseFeedForward() | GatedFeedForward():
                return self._feed_forward(module, x, name)
            case XieluFeedForward():
                wide = self.product(module.up, x, "wide")
                hidden = self.rows("hidden", module.down.inputs)
                self.apply("xIELU", module.activate, (wide,), hidden)
                return self._reduced(module.down, hidden, name)
            case ExpertsFeedForward():
                out = self.rows(name, self.stream.width)
                self.add(MixExperts(module, x, out))
                self._summed(out)
                if module.bias is not None:
                    self.apply("a bias of experts", partial(add_vector, module.bias), (out,), out)
                return out
            case SparseFeedForward():
                wide = self.product(module.gate_up, x, "wide")
                hidden = self.rows("hidden", module.down.inputs)
                self.apply("a sparse activation", module.activate, (wide,), hidden)
                return self._reduced(module.down, hidden, name)
            case NormedExperts():
                return self._normed_experts(module, x, name)
            case SharedExperts():
                out = self._inner(module.routed, x, name, layer)
                self.add(Add(out, self._inner(module.always, x, f"{name} of all", layer), out))
                return out
            case OpenedFeedForward():
                opening = self.product(module.opening, x, "opening")
                out = self._inner(module.inner, x, name, layer)
                self.add(Open(opening, out))
                return out
            case _:
                raise TypeError(f"{type(module).__name__} is not a sublayer")

    def _self_attention(
        self, module: SelfAttention, x: Rows, name: str, layer: int, values: Rows | None = None
    ) -> Rows:
        heads = self.product(module.qkv, x, "heads")
        if module.values is not None:
            assert values is not None
            made = self.product(module.values, values, "values")
            both = self.rows("all heads", heads.width + made.width)
            self.apply("a concatenation", concatenate, (heads, made), both)
            heads = both
        own = layer if self._paged else None
        prepared = PrepareHeads(module.part, module.qk_norm, heads, own)
        self.add(prepared)
        if module.part.temperature is not None:
            self._temper(module.part.temperature, prepared.queries)
        kv = None if self._paged else (prepared.keys, prepared.values)
        attended = self.rows("attended", prepared.queries.width)
        parts = (prepared.queries, prepared.keys, prepared.values)
        match module:
            case GlobalAttention():
                of_global = self.product(module.global_qkv, x, "heads of global tokens")
                self.add(Apply("attention to global tokens", module.attend, (*parts, of_global), (attended,)))
            case BlockSumAttention():
                self.add(Apply("attention to sums of blocks", module.attend, (x, *parts), (attended,)))
            case MergedAttention():
                attend = partial(module.attend, layer)
                self.add(Apply("attention with an encoder's tokens", attend, (prepared.queries,), (attended,)))
            case StreamAttention():
                self.add(Apply("attention to vectors beside tokens", module.attend, parts, (attended,)))
            case SelfAttention(part=spec.Attention(sees=spec.SparseBlocks())):
                attend = partial(sparse_blocks.attend, module.part)
                self.add(Apply("attention to some blocks", attend, parts, (attended,)))
            case _:
                self.add(Attend(module, prepared.queries, kv, attended, own))
        if module.spans is not None:
            convolved = self._spans(module.spans, x, prepared.queries)
            both = self.rows("attended and convolved", attended.width + convolved.width)
            self.apply("a concatenation", concatenate, (attended, convolved), both)
            attended = both
        if module.gate is not None and module.part.gate is not None:
            opening = self.product(module.gate, x, "openings of heads")
            self.add(Open(opening, attended, module.part.gate.function))
        return self._reduced(module.out, attended, name)

    def _bucketed_attention(self, module: BucketedAttention, x: Rows, name: str, layer: int) -> Rows:
        heads = self.product(module.qkv, x, "heads")
        scores = self.product(module.distance_scores, x, "scores of distances")
        ahead = self.stream == self.ahead
        prepared = PrepareHeads(module.part, None, heads, None if ahead else layer)
        self.add(prepared)
        own = (prepared.keys, prepared.values) if ahead else ()
        attended = self.rows("attended", prepared.queries.width)
        given = (prepared.queries, scores, *own)
        self.add(Apply("attention by buckets of queries", partial(module.attend, layer), given, (attended,)))
        return self._reduced(module.out, attended, name)

    def _spans(self, module: SpanConvolution, x: Rows, queries: Rows) -> Rows:
        """The result of heads with a separate kernel for each token, for rows x."""
        windows = self.rows("windows", module.taps * x.width)
        self.add(GatherNeighbours(x, windows, module.taps))
        weighed = self.rows("weighed", x.width)
        self.apply("the weighted sum of a window", module.weigh, (windows,), weighed)
        mixed = self.product(module.mix, weighed, "mixed")
        self.apply("a product of rows", scale, (mixed, queries), mixed)
        scores = self.product(module.scores, mixed, "scores of taps")
        values = self.product(module.values, x, "values of taps")
        windows = self.rows("windows", module.taps * values.width)
        self.add(GatherNeighbours(values, windows, module.taps))
        out = self.rows("convolved", values.width)
        self.apply("the mixture of a window", module.mix_windows, (windows, scores), out)
        return out

    def _normed_experts(self, module: NormedExperts, x: Rows, name: str) -> Rows:
        read, judged = (self.rows(f"{kind} of stream", x.width) for kind in ("norm", "judged"))
        first, second = self.rows(name, x.width), self.rows("normed experts", x.width)
        fed = self._feed_forward(module.always, x, "network beside experts")
        self.add(Normalize(module.first, fed, first))
        self.add(Normalize(module.before, self.stream, read))
        self.add(Normalize(module.judged, self.stream, judged))
        mixed = self.rows("experts", x.width)
        self.add(MixExperts(module.routed, read, mixed, judged))
        self.add(Normalize(module.second, self._summed(mixed), second))
        self.add(Add(first, second, first))
        return first

    def _reading_attention(self, module: ReadingAttention, x: Rows, name: str) -> Rows:
        """Attention of own queries to keys and values in the pages of an earlier layer."""
        queries = self.product(module.queries, x, "queries")
        self.add(PrepareHeads(module.own, module.qk_norm, queries, None))
        attended = self.rows("attended", queries.width)
        self.add(Attend(module, queries, None, attended, module.part.reads))
        return self._reduced(module.out, attended, name)

    def _routed_attention(self, module: RoutedAttention, x: Rows, name: str, layer: int) -> Rows:
        """Attention whose queries, and what becomes of their results, are made by experts that each token chooses."""
        part, kv = module.part, self.product(module.kv, x, "keys and values")
        heads = self.rows("heads", (part.heads + 2 * part.kv_heads) * part.head_dim)
        self.add(Apply("queries of experts", module.make_heads, (x, kv), (heads,)))
        prepared = PrepareHeads(part, None, heads, layer)
        self.add(prepared)
        attended, out = self.rows("attended", prepared.queries.width), self.rows(name, self.stream.width)
        self.add(Attend(module, prepared.queries, None, attended, layer))
        self.add(Apply("results of experts", module.reduce, (x, attended), (out,)))
        return out

    def _value_scoring_attention(self, module: ValueScoringAttention, x: Rows, name: str, layer: int) -> Rows:
        """Attention in which values add to the scores of their keys."""
        heads = self.product(module.qkv, x, "heads")
        prepared, wide = PrepareHeads(module.own, module.qk_norm, heads, None), module.part.head_dim
        steps = self.product(module.steps, prepared.values, "steps of values")
        self.add(prepared)
        given = (prepared.queries, prepared.keys, prepared.values, steps)
        widened = self.rows("wide heads", (module.part.heads + 2 * module.part.kv_heads) * wide)
        self.apply("scores of values", module.widen, given, widened)
        stored = PrepareHeads(module.part, None, widened, layer)
        self.add(stored)
        attended, narrow = self.rows("attended", stored.queries.width), self.rows("narrow heads", module.out.inputs)
        self.add(Attend(module, stored.queries, None, attended, layer))
        self.apply("features of heads", module.narrow, (attended,), narrow)
        return self._reduced(module.out, narrow, name)

    def _latent_attention(self, module: LatentAttention, x: Rows, name: str, layer: int) -> Rows:
        part, source = module.part, x
        if module.query_latent is not None and module.query_norm is not None:
            low = self.product(module.query_latent, x, "latent of queries")
            source = self.rows("normed latent of queries", low.width)
            self.add(Normalize(module.query_norm, low, source))
        queries = self.product(module.queries, source, "queries")
        latent = self.product(module.latent, x, "latent")
        prepared = self.rows("heads", part.heads * part.head_dim)
        self.add(PrepareLatent(module, queries, latent, prepared, layer))
        if part.temperature is not None:
            self._temper(part.temperature, prepared)
        attended = self.rows("attended", prepared.width)
        self.add(Attend(module, prepared, None, attended, layer))
        expanded = self.rows("expanded", module.out.inputs)
        self.apply("the expansion of latents", module.expand, (attended,), expanded)
        return self._reduced(module.out, expanded, name)

    def _delta_rule(self, module: DeltaRuleAttention, x: Rows, name: str) -> Rows:
        entered = self.product(module.enter, x, "entered")
        opening = self.product(module.opening, x, "openings of heads")
        rates = self.product(module.rates, x, "rates")
        convolved = self.rows("convolved", entered.width)
        self.add(Convolve(module.convolution, entered, convolved, "silu", self.states))
        out = self.rows("attended", opening.width)
        self.add(ApplyDelta(module, convolved, rates, opening, out, self.states))
        return self._reduced(module.out, out, name)

    def _state_space(self, module: SelectiveStateSpace, x: Rows, name: str) -> Rows:
        part, entered = module.part, self.product(module.enter, x, "entered")
        opening, rest = entered.part(0, part.width), entered.part(part.width, part.convolved)
        rates = entered.part(part.width + part.convolved, part.heads)
        convolved, out = self.rows("convolved", part.convolved), self.rows("scanned", part.width)
        self.add(Convolve(module.convolution, rest, convolved, "silu", self.states))
        self.add(ApplyScan(module, convolved, rates, opening, out, self.states))
        return self._reduced(module.out, out, name)

    def _gated_recurrence(self, module: GatedRecurrenceLayer, x: Rows, name: str) -> Rows:
        width, entered = module.part.width, self.product(module.enter, x, "entered")
        convolved, out = self.rows("convolved", width), self.rows("attended", width)
        self.add(Convolve(module.convolution, entered.part(width, width), convolved, "plain", self.states))
        gates = self.rows("input gates", width), self.rows("decays of features", width)
        for matrices, made in zip((module.inputs, module.decays), gates, strict=True):
            self.add(MultiplyPieces(matrices, convolved, made))
        self.add(Advance(module, (convolved, *gates), out, self.states))
        self.add(Open(entered.part(0, width), out, module.part.activation))
        return self._reduced(module.out, out, name)

    def _channel_scan(self, module: ChannelScanLayer, x: Rows, name: str) -> Rows:
        part, entered = module.part, self.product(module.enter, x, "entered")
        convolved, out = self.rows("convolved", part.width), self.rows("scanned", part.width)
        self.add(Convolve(module.convolution, entered.part(0, part.width), convolved, "silu", self.states))
        made = self.product(module.made, convolved, "made of features")
        low, before, after = made.part(0, part.rank), *(made.part(part.rank + i * part.size, part.size) for i in (0, 1))
        low = self._normed_copy(module.step_norm, low, "normed vector of steps")
        before = self._normed_copy(module.before_norm, before, "normed B")
        after = self._normed_copy(module.after_norm, after, "normed C")
        steps, opening = self.product(module.steps, low, "steps"), entered.part(part.width, part.width)
        self.add(Advance(module, (convolved, before, after, steps, opening), out, self.states))
        return self._reduced(module.out, out, name)

    def _normed_copy(self, norm: nn.Module | None, x: Rows, name: str) -> Rows:
        """The norm of x in rows of its own; without a norm, x. On a GPU, a norm in place waits for the stream."""
        if norm is None:
            return x
        out = self.rows(name, x.width)
        self.add(Normalize(norm, x, out))
        return out

    def _fading_attention(self, module: FadingAttentionLayer, x: Rows, name: str) -> Rows:
        entered, opening = (
            self.product(module.enter, x, "entered"),
            self.product(module.opening, x, "openings of heads"),
        )
        heads, out = self.rows("activated", entered.width), self.rows("attended", opening.width)
        self.add(Activate(module.part.activation, entered, heads, False))
        self.add(Advance(module, (heads,), out, self.states))
        normed = self._normed_copy(module.norm, out, "normed heads")
        self.add(Open(opening, normed))
        return self._reduced(module.out, normed, name)

    def _feature_delta(self, module: FeatureDeltaLayer, x: Rows, name: str) -> Rows:
        size, entered = module.part.head_dim, self.product(module.enter, x, "entered")
        rates, low = self.product(module.rates, x, "rates"), self.product(module.low, x, "low rank")
        fading = self.product(module.fading, low.part(0, size), "decays of features")
        opening = self.product(module.opening, low.part(size, size), "openings of heads")
        convolved, out = self.rows("convolved", entered.width), self.rows("attended", opening.width)
        self.add(Convolve(module.convolution, entered, convolved, "silu", self.states))
        self.add(Advance(module, (convolved, rates, fading, opening), out, self.states))
        return self._reduced(module.out, out, name)

    def _gated_convolution(self, module: GatedConvolution, x: Rows, name: str) -> Rows:
        width = module.convolution.width
        entered, out = self.product(module.enter, x, "entered"), self.rows("convolved", width)
        self.add(Convolve(module.convolution, entered, out, "gated", self.states))
        return self._reduced(module.out, out, name)

    def _feed_forward(self, module: DenseFeedForward | GatedFeedForward, x: Rows, name: str) -> Rows:
        gated = isinstance(module, GatedFeedForward)
        wide = self.product(module.gate_up if isinstance(module, GatedFeedForward) else module.up, x, "wide")
        hidden = self.rows("hidden", module.down.inputs)
        self.add(Activate(module.activation, wide, hidden, gated))
        return self._reduced(module.down, hidden, name)

    def product(self, linear: Linear, x: Rows, name: str) -> Rows:
        """The product plus the terms of adapters."""
        out = self.rows(name, linear.outputs)
        self.add(Multiply(linear, x, out))
        self.add(AddAdapters(linear, x, out))
        return out

    def _reduced(self, linear: Linear, x: Rows, name: str) -> Rows:
        return self._summed(self.product(linear, x, name))

    def _summed(self, x: Rows) -> Rows:
        """The sum of the ranks' x, if there are several ranks."""
        if self._ranks is not None:
            self.add(AllReduce(self._ranks, x))
        return x
