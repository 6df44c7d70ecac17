"""The operations of attention in a layer program, and of the vectors that go through layers beside the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend, Sight
from engine.backends.native.program import Rows
from engine.model import spec
from engine.model.block_sums import BlockSumAttention
from engine.model.global_stream import StreamAttention
from engine.model.global_tokens import GlobalAttention
from engine.model.latent import LatentAttention
from engine.model.layers import CrossAttention, DenseFeedForward, QkNorm, SelfAttention
from engine.model.operations import HasRows
from engine.model.positions import Temperature
from engine.model.query_buckets import BucketedAttention
from engine.model.reading import ReadingAttention


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
    """out = queries in the form in which they meet the keys of pages: rotated, and multiplied with what would make keys
    of latents. The latents, normed, and the shared keys, rotated, are written to a layer's pages.

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
    """out = the product of each head's matrix and the latents that the head attended to, which begin each head of x."""

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
        kv: keys and values that lie beside the queries; None if they are in pages.
        layer: whose pages; None for an encoder.
    """

    READS = ("queries", "kv")
    WRITES = ("out",)
    module: SelfAttention | CrossAttention | LatentAttention | ReadingAttention
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
        """The tokens that a query sees at most."""
        return None if self.is_cross else self.part.window


@dataclass(frozen=True, slots=True, eq=False)
class AttendByBuckets(HasRows):
    """out = attention of the queries to keys and values in pages, with the scores that they bring for distances.

    Attributes:
        scores: for each bucket a number of each head.
        own: the keys and values of next tokens, each seen only by its own query. Then the queries are those of these
            tokens. None: queries are of tokens whose keys are in the pages.
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
    """A feed-forward network of their norms is added to the vectors beside the tokens."""

    before: nn.Module | None
    network: DenseFeedForward
