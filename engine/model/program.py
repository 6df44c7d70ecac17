"""What a stack computes, as a flat list of operations on rows of features.

The modules of a stack hold its weights; `compile_stack` walks them once and writes down what is computed with them. The
list is run by an executor: torch (`engine.backends.torch.executor`, the oracle, for all devices and formats), the CPU's
library (`engine.backends.native.executor`) or kernels for GPUs (`engine.backends.triton.executor`). What an executor
has no kernel for it leaves to torch, operation by operation.

Rows lie in buffers, one row for each token. An operation may overwrite what it reads only where its docstring says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend, AttentionMetadata, Paged, Sight
from engine.backends.native.program import Rows
from engine.model import spec
from engine.model.block_sums import BlockSumAttention
from engine.model.blocks import BottleneckBlock, ConvolvedBlock, ParallelBlock, SequentialBlock, Sublayer
from engine.model.embedding import Embedding, TokenEmbedding
from engine.model.experts import ExpertsFeedForward, SharedExperts
from engine.model.global_stream import StreamAttention
from engine.model.global_tokens import GlobalAttention
from engine.model.kernels import LIBRARY, RowForm
from engine.model.latent import LatentAttention
from engine.model.layers import (
    CrossAttention,
    CrossPages,
    DenseFeedForward,
    FourierMixing,
    GatedFeedForward,
    Linear,
    OpenedFeedForward,
    QkNorm,
    SelfAttention,
    SpanConvolution,
    XieluFeedForward,
)
from engine.model.positions import Temperature
from engine.model.query_buckets import BucketedAttention


class Adapters(Protocol):
    """What low-rank adapters add to products (arXiv:2106.09685); each row of a pass has one or none."""

    def __call__(self, linear: Linear, x: Tensor) -> Tensor | None:
        """[Tp, out] for the rows x [Tp, in] of this product; None where no row has an adapter for it."""
        ...


class QueryKeeper(Protocol):
    """Is shown the queries of a pass to an encoder's keys."""

    def __call__(self, layer: int, queries: Tensor) -> None:
        """Those of a layer, [Tp, heads, head_dim], which are overwritten later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What one pass through a stack is given: T = `tokens` tokens laid end to end, then padding up to Tp.

    Attributes:
        token_ids, positions: [Tp].
        metadata: the rows that the T tokens form.
        min_rows: fewest rows of a matrix product whose rows do not depend on each other
            (`engine.execution.invariance`).
        caches: the pages of each decoder layer; None for an encoder alone.
        slots: [T] int64, where the new tokens' K and V go in the flattened pages; None: executors work them out.
        cross: where each row finds the encoder's K and V, for decoders that attend to one.
        types: [Tp] the segment of each token; None: all are of the first.
        boxes: [Tp, 4] where each token stands on its page; None: all are zeros.
        rotary_positions: [Tp] the rows of rotary tables; None: positions are.
        adapters: None where no row has one.
        form: how a token alone is computed on a GPU.
        given: [Tp, features] rows that a program takes instead of embedding tokens (`Take`).
        signals: float32, what each row is made of where that is no tokens; `token_ids` are zeros then.
        keeper: None where nothing else reads queries; a pass that has one is run by torch, operation by operation.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    tokens: int
    min_rows: int = 1
    caches: Sequence[Paged] | None = None
    slots: Tensor | None = None
    cross: CrossPages | None = None
    types: Tensor | None = None
    boxes: Tensor | None = None
    rotary_positions: Tensor | None = None
    adapters: Adapters | None = None
    form: RowForm = LIBRARY
    given: Tensor | None = None
    signals: Sequence[Tensor] = ()
    keeper: QueryKeeper | None = None

    @property
    def needs_torch(self) -> bool:
        """Something takes part for which no executor but torch's has kernels."""
        return self.adapters is not None or self.keeper is not None

    @staticmethod
    def of_rows(x: Tensor) -> Inputs:
        """For a program that takes rows x [N, features] which are independent of each other."""
        places = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        # No operation on rows reads it on the device, and nothing may be copied there while a step is recorded.
        metadata = AttentionMetadata.build([len(x)], [len(x)], torch.device("cpu"))
        return Inputs(token_ids=places, positions=places, metadata=metadata, tokens=len(x), given=x)

    @property
    def rotary_rows(self) -> Tensor:
        """[Tp] the rows of rotary tables."""
        return self.positions if self.rotary_positions is None else self.rotary_positions


# ---------------------------------------------------------------- operations


class HasRows:
    """What an operation reads and writes."""

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
    """out = the vectors of token ids, with positions and segments, or those of signals."""

    WRITES = ("out",)
    module: Embedding
    out: Rows

    def vectors(self, inputs: Inputs) -> Tensor:
        """[Tp, features] of what a pass is given."""
        if isinstance(self.module, TokenEmbedding):
            x: Tensor = self.module(
                inputs.token_ids, inputs.positions, inputs.types, inputs.boxes, inputs.metadata, inputs.tokens
            )
            return x
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
    """out += what the adapters of a product make of its x; nothing where no row has an adapter."""

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
class PrepareHeads(HasRows):
    """Queries, keys and values as attention reads them: limited, normed, rotated (or rotated first, then normed);
    written to a layer's pages where the stack has pages. The heads are overwritten.

    Attributes:
        layer: whose pages; None for an encoder.
        queries, keys, values: the parts of `heads`.
    """

    READS = ("heads",)
    WRITES = ("heads",)
    part: spec.Attention
    qk_norm: QkNorm | None
    heads: Rows
    layer: int | None

    @property
    def queries(self) -> Rows:
        return self.heads.part(0, self.part.heads * self.part.head_dim)

    @property
    def keys(self) -> Rows:
        return self.heads.part(self.queries.width, self.part.kv_heads * self.part.head_dim)

    @property
    def values(self) -> Rows:
        width = self.part.kv_heads * self.part.head_dim
        return self.heads.part(self.queries.width + width, width)


@dataclass(frozen=True, slots=True, eq=False)
class Temper(HasRows):
    """queries = queries times a number of their position."""

    READS = ("queries",)
    WRITES = ("queries",)
    temperature: Temperature
    queries: Rows


@dataclass(frozen=True, slots=True, eq=False)
class PrepareLatent(HasRows):
    """out = queries as they meet what pages hold: rotated, and multiplied with what would make keys of latents. The
    latents, normed, and the shared keys, rotated, are written to a layer's pages.

    Attributes:
        queries: of each head its content, then what is rotated.
        latent: the latent, then the shared key.
        layer: whose pages.
    """

    READS = ("queries", "latent")
    WRITES = ("out",)
    module: LatentAttention
    queries: Rows
    latent: Rows
    out: Rows
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpandLatent(HasRows):
    """out = what each head's matrix makes of the latents that it attended to, which begin each head of x."""

    READS = ("x",)
    WRITES = ("out",)
    module: LatentAttention
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class StoreEncoded(HasRows):
    """Write keys and values of an encoder's hidden states to a decoder layer's pages."""

    READS = ("kv",)
    part: spec.Attention
    kv: Rows
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class Attend(HasRows):
    """out = attention of the queries to the keys and values of their own rows: those in pages, those that lie beside
    them (an encoder's), or the encoder's pages.

    Attributes:
        module: what it belongs to.
        kv: keys and values that lie beside the queries; None where they are in pages.
        layer: whose pages; None for an encoder.
    """

    READS = ("queries", "kv")
    WRITES = ("out",)
    module: SelfAttention | CrossAttention | LatentAttention
    queries: Rows
    kv: tuple[Rows, Rows] | None
    out: Rows
    layer: int | None

    @property
    def part(self) -> spec.Attention:
        return self.module.part

    @property
    def sinks(self) -> Tensor | None:
        """Scores beside those of the keys, [heads] float32."""
        return self.module.sinks if isinstance(self.module, SelfAttention) else None

    @property
    def backend(self) -> AttentionBackend:
        return self.module.backend

    @property
    def is_cross(self) -> bool:
        """The keys are an encoder's."""
        return isinstance(self.module, CrossAttention)

    @property
    def causal(self) -> bool:
        """A query sees no later key."""
        return self.part.causal and not self.is_cross

    @property
    def window(self) -> Sight | None:
        """What a query sees at most."""
        return None if self.is_cross else self.part.window


@dataclass(frozen=True, slots=True, eq=False)
class AttendByBuckets(HasRows):
    """out = attention of the queries to keys and values in pages, with the scores that they bring for distances.

    Attributes:
        scores: for each bucket a number of each head.
        own: the keys and values of tokens that come next, of which each is seen by its own query alone; queries are of
            these, then. None: queries are of tokens whose keys are in the pages.
    """

    READS = ("queries", "scores", "own")
    WRITES = ("out",)
    module: BucketedAttention
    queries: Rows
    scores: Rows
    own: tuple[Rows, Rows] | None
    out: Rows
    layer: int


@dataclass(frozen=True, slots=True, eq=False)
class AttendGlobally(HasRows):
    """out = attention of the queries to the keys and values beside them that are near, and to those of global tokens;
    for global tokens, attention of their own queries to all of their rows' own keys and values.

    Attributes:
        heads, of_global: queries, keys and values side by side; the second ones are those of global tokens.
    """

    READS = ("heads", "of_global")
    WRITES = ("out",)
    module: GlobalAttention
    heads: Rows
    of_global: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class AttendToBlocks(HasRows):
    """out = attention of the queries to the keys and values beside them that are near, and to those that are made of
    sums of blocks of their rows' x.

    Attributes:
        heads: queries, keys and values side by side.
    """

    READS = ("x", "heads")
    WRITES = ("out",)
    module: BlockSumAttention
    x: Rows
    heads: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class AttendInBlocks(HasRows):
    """out = attention of the queries to those of the keys and values beside them that lie in blocks they see.

    Attributes:
        heads: queries, keys and values side by side.
    """

    READS = ("heads",)
    WRITES = ("out",)
    part: spec.Attention
    heads: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class BeginBeside(HasRows):
    """Each input of the pass gets these vectors, [count, features], which go through the layers beside its tokens."""

    vectors: nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class AttendBeside(HasRows):
    """out = attention of the queries to the keys and values beside them that lie in their block, and to those of the
    vectors beside the tokens; these gain what they see of all tokens and of each other.

    Attributes:
        heads: queries, keys and values side by side.
    """

    READS = ("heads",)
    WRITES = ("out",)
    module: StreamAttention
    heads: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class FeedBeside(HasRows):
    """The vectors beside the tokens gain what a feed-forward network makes of their norms."""

    before: nn.Module | None
    network: DenseFeedForward


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
class MixExperts(HasRows):
    """out = what each token's experts make of x."""

    READS = ("x",)
    WRITES = ("out",)
    module: ExpertsFeedForward
    x: Rows
    out: Rows


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
    """out = the sum of the windows x (`GatherNeighbours`) over their taps, each feature's times its own weights."""

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


Operation = (
    Embed
    | EmbedAhead
    | Take
    | Normalize
    | Multiply
    | AddAdapters
    | AllReduce
    | PrepareHeads
    | Temper
    | PrepareLatent
    | ExpandLatent
    | StoreEncoded
    | Attend
    | AttendByBuckets
    | AttendGlobally
    | AttendToBlocks
    | AttendInBlocks
    | BeginBeside
    | AttendBeside
    | FeedBeside
    | Activate
    | ActivateXielu
    | Open
    | MixExperts
    | GatherNeighbours
    | WeighTaps
    | MixTaps
    | TransformFourier
    | Concatenate
    | Scale
    | Add
)


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of a stack.

    Attributes:
        operations: in their order; the first one embeds, or takes what is given.
        widths: features of each buffer's rows.
        stream: the residual stream.
        result: what the stack gives.
    """

    operations: tuple[Operation, ...]
    widths: tuple[int, ...]
    stream: Rows
    result: Rows


def last_uses(operations: Sequence[HasRows], result: Rows) -> list[tuple[int, ...]]:
    """For each operation the buffers that nothing reads after it before they are written again."""
    found: list[tuple[int, ...]] = []
    needed = {result.buffer}
    for operation in reversed(operations):
        reads, writes = ({rows.buffer for rows in which} for which in (operation.reads, operation.writes))
        found.append(tuple((reads | writes) - needed))
        needed = needed - writes | reads
    return found[::-1]


# ---------------------------------------------------------------- from modules to operations


def compile_stack(
    embedding: Embedding,
    blocks: Iterable[nn.Module],
    final_norm: nn.Module | None,
    projection: Linear | None,
    *,
    hidden_size: int,
    paged: bool,
    readers: Sequence[CrossAttention | None] = (),
    beside: nn.Parameter | None = None,
    predicting: nn.Parameter | None = None,
) -> Program:
    """The program of a stack.

    Args:
        hidden_size: features of the residual stream.
        paged: keys and values are kept in pages.
        readers: the attentions of a decoder's layers that read what this stack, an encoder, gives.
        beside: vectors that go through the layers beside the tokens.
        predicting: what the vectors of next tokens begin as, which pass through the layers, too, and are the result.
    """
    builder = Builder(hidden_size, paged)
    builder.add(Embed(embedding, builder.stream))
    if beside is not None:
        builder.add(BeginBeside(beside))
    if predicting is not None:
        assert isinstance(embedding, TokenEmbedding)
        builder.ahead = builder.rows("stream ahead", hidden_size)
        builder.add(EmbedAhead(embedding, predicting, builder.ahead))
    for layer, block in enumerate(blocks):
        builder.block(block, layer)
    result = builder.ahead or builder.normed(final_norm)
    if projection is not None:
        result = builder.product(projection, result, "projected")
    for layer, reader in enumerate(readers):
        if reader is not None:
            builder.add(StoreEncoded(reader.part, builder.product(reader.kv, result, "encoded"), layer))
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
    """Operations as they are added. What a sublayer gives joins the stream together with the next norm of it."""

    def __init__(self, hidden_size: int, paged: bool):
        self.operations: list[Operation] = []
        self.widths: list[int] = []
        self._buffers: dict[tuple[str, int], Rows] = {}
        self._paged = paged
        self._pending: Rows | None = None  # what the stream still lacks
        self.stream = self.rows("stream", hidden_size)
        self.ahead: Rows | None = None  # the stream of next tokens

    def add(self, operation: Operation) -> None:
        """Add an operation."""
        self.operations.append(operation)

    def program(self, result: Rows) -> Program:
        """What was added."""
        return Program(tuple(self.operations), tuple(self.widths), self.stream, result)

    def rows(self, name: str, width: int) -> Rows:
        """A buffer that all layers use."""
        key = (name, width)
        if key not in self._buffers:
            self._buffers[key] = Rows(len(self.widths), 0, width, width)
            self.widths.append(width)
        return self._buffers[key]

    # ---- layers

    def block(self, block: nn.Module, layer: int) -> None:
        """Add a layer."""
        match block:
            case ConvolvedBlock():
                self._convolved(block, layer)
            case BottleneckBlock():
                self._bottleneck(block, layer)
            case ParallelBlock():
                self._parallel(block, layer)
            case SequentialBlock():
                for sublayer in (block.attention, block.cross, block.ffn):
                    if sublayer is not None:
                        self.sublayer(sublayer, layer)
                        self._sublayer_ahead(sublayer, layer)
                if isinstance(block.attention.inner, StreamAttention):
                    assert isinstance(block.ffn.inner, DenseFeedForward)
                    self.add(FeedBeside(block.ffn.before, block.ffn.inner))
            case _:
                raise TypeError(f"{type(block).__name__} is no block")

    def sublayer(self, part: Sublayer, layer: int) -> None:
        """Add outer(y + after(f(before(y)))) of y = first(x), where each norm may be absent."""
        if part.first is not None:
            self.add(Normalize(part.first, self.stream, self.stream, self._take_pending()))
        y = self._inner(part.inner, self.normed(part.before), "sublayer", layer)
        if part.after is not None:
            self.add(Normalize(part.after, y, y))
        self._pending = y
        if part.outer is not None:
            self.add(Normalize(part.outer, self.stream, self.stream, self._take_pending()))

    def _sublayer_ahead(self, part: Sublayer, layer: int) -> None:
        """The same for next tokens, where there is a stream of these; the keys that they see are in the pages now."""
        if self.ahead is not None:
            own, self.stream = self.stream, self.ahead
            self.sublayer(part, layer)
            self.stream = own

    def residual(self, part: Sublayer, x: Rows) -> Rows:
        """outer(x + f(x)) of rows that stay as they are."""
        assert part.outer is not None
        total, out = self.rows("total", x.width), self.rows("normed total", x.width)
        self.add(Add(x, self._inner(part.inner, x, "network", 0), total))
        self.add(Normalize(part.outer, total, out))
        return out

    def _parallel(self, block: ParallelBlock, layer: int) -> None:
        """x + attention(norm(x)) + ffn(norm(x)), where both may read the same norm."""
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
        assert block.norm is not None
        self.add(Normalize(block.norm, self.normed(None), self.stream, convolved))

    def _bottleneck(self, block: BottleneckBlock, layer: int) -> None:
        """norm(x + exit(f(entrance(x)))): f's sublayers have a stream of their own."""
        whole, x = self.stream, self.normed(None)
        entered = queries = self._entered(block.entrance, block.entrance_norm, x, "entered")
        if block.second_entrance is not None:
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
        assert block.exit_norm is not None
        self.add(Normalize(block.exit_norm, whole, whole, self.product(block.exit, entered, "left")))

    def _entered(self, linear: Linear, norm: nn.Module | None, x: Rows, name: str) -> Rows:
        out = self.product(linear, x, name)
        assert norm is not None
        self.add(Normalize(norm, out, out))
        return out

    def _take_pending(self) -> Rows | None:
        pending, self._pending = self._pending, None
        return pending

    def normed(self, norm: nn.Module | None) -> Rows:
        """The norm of the stream, which is complete afterwards; the stream itself without one."""
        pending = self._take_pending()
        if norm is None:
            if pending is not None:
                self.add(Add(self.stream, pending, self.stream))
            return self.stream
        out = self.rows("normed", self.stream.width)
        self.add(Normalize(norm, self.stream, out, pending))
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
                self.add(TransformFourier(x, out))
                return out
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
                self.add(ActivateXielu(module, wide, hidden))
                return self._reduced(module.down, hidden, name)
            case ExpertsFeedForward():
                out = self.rows(name, self.stream.width)
                self.add(MixExperts(module, x, out))
                self.add(AllReduce(out))
                return out
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
                raise TypeError(f"{type(module).__name__} is no sublayer")

    def _self_attention(
        self, module: SelfAttention, x: Rows, name: str, layer: int, values: Rows | None = None
    ) -> Rows:
        """Attention of rows x, or of x and other rows that its values are made of."""
        heads = self.product(module.qkv, x, "heads")
        if module.values is not None:
            assert values is not None
            made = self.product(module.values, values, "values")
            both = self.rows("all heads", heads.width + made.width)
            self.add(Concatenate(heads, made, both))
            heads = both
        own = layer if self._paged else None
        prepared = PrepareHeads(module.part, module.qk_norm, heads, own)
        self.add(prepared)
        if module.part.temperature is not None:
            self.add(Temper(module.part.temperature, prepared.queries))
        kv = None if self._paged else (prepared.keys, prepared.values)
        attended = self.rows("attended", prepared.queries.width)
        if isinstance(module, GlobalAttention):
            of_global = self.product(module.global_qkv, x, "heads of global tokens")
            self.add(AttendGlobally(module, heads, of_global, attended))
        elif isinstance(module, BlockSumAttention):
            self.add(AttendToBlocks(module, x, heads, attended))
        elif isinstance(module, StreamAttention):
            self.add(AttendBeside(module, heads, attended))
        elif module.part.blocks is not None:
            self.add(AttendInBlocks(module.part, heads, attended))
        else:
            self.add(Attend(module, prepared.queries, kv, attended, own))
        if module.spans is not None:
            convolved = self._spans(module.spans, x, prepared.queries)
            both = self.rows("attended and convolved", attended.width + convolved.width)
            self.add(Concatenate(attended, convolved, both))
            attended = both
        return self._reduced(module.out, attended, name)

    def _bucketed_attention(self, module: BucketedAttention, x: Rows, name: str, layer: int) -> Rows:
        heads = self.product(module.qkv, x, "heads")
        scores = self.product(module.distance_scores, x, "scores of distances")
        ahead = self.stream == self.ahead
        prepared = PrepareHeads(module.part, None, heads, None if ahead else layer)
        self.add(prepared)
        own = (prepared.keys, prepared.values) if ahead else None
        attended = self.rows("attended", prepared.queries.width)
        self.add(AttendByBuckets(module, prepared.queries, scores, own, attended, layer))
        return self._reduced(module.out, attended, name)

    def _spans(self, module: SpanConvolution, x: Rows, queries: Rows) -> Rows:
        """What heads with kernels of each token's own make of rows x."""
        windows = self.rows("windows", module.taps * x.width)
        self.add(GatherNeighbours(x, windows, module.taps))
        weighed = self.rows("weighed", x.width)
        self.add(WeighTaps(module, windows, weighed))
        mixed = self.product(module.mix, weighed, "mixed")
        self.add(Scale(mixed, queries, mixed))
        scores = self.product(module.scores, mixed, "scores of taps")
        values = self.product(module.values, x, "values of taps")
        windows = self.rows("windows", module.taps * values.width)
        self.add(GatherNeighbours(values, windows, module.taps))
        out = self.rows("convolved", values.width)
        self.add(MixTaps(module, scores, windows, out))
        return out

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
        attended = self.rows("attended", prepared.width)
        self.add(Attend(module, prepared, None, attended, layer))
        expanded = self.rows("expanded", module.out.inputs)
        self.add(ExpandLatent(module, attended, expanded))
        return self._reduced(module.out, expanded, name)

    def _feed_forward(self, module: DenseFeedForward | GatedFeedForward, x: Rows, name: str) -> Rows:
        gated = isinstance(module, GatedFeedForward)
        wide = self.product(module.gate_up if isinstance(module, GatedFeedForward) else module.up, x, "wide")
        hidden = self.rows("hidden", module.down.inputs)
        self.add(Activate(module.activation, wide, hidden, gated))
        return self._reduced(module.down, hidden, name)

    def product(self, linear: Linear, x: Rows, name: str) -> Rows:
        """The product, with what adapters add."""
        out = self.rows(name, linear.outputs)
        self.add(Multiply(linear, x, out))
        self.add(AddAdapters(linear, x, out))
        return out

    def _reduced(self, linear: Linear, x: Rows, name: str) -> Rows:
        """The product, summed over devices."""
        out = self.product(linear, x, name)
        self.add(AllReduce(out))
        return out
