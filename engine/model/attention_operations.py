"""The operations of attention in a layer program, and those of vectors that pass through layers beside the tokens."""

from __future__ import annotations

from torch import Tensor, nn

from engine.backends.attention.base import AttentionBackend, Sight
from engine.backends.native.program import Rows
from engine.model import spec
from engine.model.block_sums import BlockSumAttention
from engine.model.global_stream import StreamAttention
from engine.model.global_tokens import GlobalAttention
from engine.model.latent import LatentAttention
from engine.model.layers import CrossAttention, DenseFeedForward, QkNorm, SelfAttention
from engine.model.operations import HasRows, operation
from engine.model.positions import Temperature
from engine.model.query_buckets import BucketedAttention
from engine.model.reading import ReadingAttention


@operation(reads="heads", writes="heads")
class PrepareHeads(HasRows):
    """Prepare queries, keys and values for attention: clip, normalise and rotate them (or rotate, then normalise), and
    write them to a layer's pages if the stack has pages. The heads are overwritten.

    Attributes:
        layer: the layer of the pages; None for an encoder.
        queries, keys, values: the parts of `heads`.
    """

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


@operation(reads="queries", writes="queries")
class Temper(HasRows):
    """queries = queries times a number that depends on their position."""

    temperature: Temperature
    queries: Rows


@operation(reads="queries latent", writes="out")
class PrepareLatent(HasRows):
    """out = queries in the form for keys in pages: rotated, and multiplied with the matrix that would expand latents to
    keys. The normalised latents and the rotated shared keys are written to a layer's pages. `queries`: for each head
    its content, then the part that is rotated."""

    module: LatentAttention
    queries: Rows
    latent: Rows
    out: Rows
    layer: int


@operation(reads="x", writes="out")
class ExpandLatent(HasRows):
    """out = the product of each head's matrix and the head's attention result over latents, which begins each head of
    x."""

    module: LatentAttention
    x: Rows
    out: Rows


@operation(reads="kv")
class StoreEncoded(HasRows):
    """Write keys and values of an encoder's hidden states to a decoder layer's pages."""

    part: spec.Attention
    kv: Rows
    layer: int


@operation(reads="queries kv", writes="out")
class Attend(HasRows):
    """out = attention of the queries to the keys and values of their own rows: those in pages, those beside them (in an
    encoder), or those in the encoder's pages."""

    module: SelfAttention | CrossAttention | LatentAttention | ReadingAttention
    queries: Rows
    kv: tuple[Rows, Rows] | None  # keys and values beside the queries; None if they are in pages
    out: Rows
    layer: int | None  # the layer of the pages; None for an encoder

    @property
    def part(self) -> spec.Attention:
        return self.module.part

    @property
    def sinks(self) -> Tensor | None:
        """Scores besides those of the keys, [heads] float32."""
        return self.module.sinks if isinstance(self.module, SelfAttention) else None

    @property
    def backend(self) -> AttentionBackend:
        return self.module.backend

    @property
    def is_cross(self) -> bool:
        """Whether the keys are an encoder's."""
        return isinstance(self.module, CrossAttention)

    @property
    def causal(self) -> bool:
        """Whether a query sees no later key."""
        return self.part.causal and not self.is_cross

    @property
    def window(self) -> Sight | None:
        """The maximum number of tokens that a query sees."""
        return None if self.is_cross else self.part.window


@operation(reads="queries scores own", writes="out")
class AttendByBuckets(HasRows):
    """out = attention of the queries to keys and values in pages, with scores by distance from each query."""

    module: BucketedAttention
    queries: Rows
    scores: Rows  # a number per bucket and head
    # keys and values of next tokens, each visible only to its own query. The queries then belong to these tokens. None:
    # queries belong to tokens whose keys are in the pages.
    own: tuple[Rows, Rows] | None
    out: Rows
    layer: int


@operation(reads="heads of_global", writes="out")
class AttendGlobally(HasRows):
    """out = attention of the queries to nearby keys and values beside them and to those of global tokens; for global
    tokens, attention of their own queries to the global keys and values of their whole rows. `heads`, `of_global`:
    queries, keys and values side by side; the latter are for global tokens."""

    module: GlobalAttention
    heads: Rows
    of_global: Rows
    out: Rows


@operation(reads="x heads", writes="out")
class AttendToBlocks(HasRows):
    """out = attention of the queries to nearby keys and values beside them, and to those made from sums of blocks of
    their rows' x."""

    module: BlockSumAttention
    x: Rows
    heads: Rows
    out: Rows


@operation(reads="heads", writes="out")
class AttendInBlocks(HasRows):
    """out = attention of the queries to the keys and values beside them in the blocks that they see."""

    part: spec.Attention
    heads: Rows
    out: Rows


@operation()
class BeginBeside(HasRows):
    """Each input of the pass gets these vectors, [count, features], which pass through the layers beside its tokens."""

    vectors: nn.Parameter


@operation(reads="heads", writes="out")
class AttendBeside(HasRows):
    """out = attention of the queries to the keys and values beside them in their block, and to those of the vectors
    beside the tokens; these vectors add the results of their own attention to all tokens and to each other."""

    module: StreamAttention
    heads: Rows
    out: Rows


@operation()
class FeedBeside(HasRows):
    """Add a feed-forward network of their norms to the vectors beside the tokens."""

    before: nn.Module | None
    network: DenseFeedForward
