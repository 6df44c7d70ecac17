"""The operations of attention in a layer program."""

from __future__ import annotations

from torch import Tensor

from engine.backends.attention.base import AttentionBackend, Sight
from engine.backends.rows import Rows
from engine.model import spec
from engine.model.attention_modules import AttentionModule
from engine.model.latent import LatentAttention
from engine.model.layers import CrossAttention, QkNorm, SelfAttention
from engine.model.operations import Operation, operation


@operation(reads="heads", writes="heads")
class PrepareHeads(Operation):
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


@operation(reads="queries latent", writes="out")
class PrepareLatent(Operation):
    """out = queries in the form for keys in pages: rotated, and multiplied with the matrix that would expand latents to
    keys. The normalised latents and the rotated shared keys are written to a layer's pages. `queries`: for each head
    its content, then the part that is rotated."""

    module: LatentAttention
    queries: Rows
    latent: Rows
    out: Rows
    layer: int


@operation(reads="kv")
class StoreEncoded(Operation):
    """Write keys and values of an encoder's hidden states to a decoder layer's pages."""

    part: spec.Attention
    kv: Rows
    layer: int


@operation(reads="queries kv", writes="out")
class Attend(Operation):
    """out = attention of the queries to the keys and values of their own rows: those in pages, those beside them (in an
    encoder), or those in the encoder's pages."""

    module: AttentionModule
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
