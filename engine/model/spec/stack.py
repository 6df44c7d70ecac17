"""Encoders and decoders: consecutive layers, and their shared parts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface.token_sides import SIDES
from engine.model.normalisation import Norm
from engine.model.positions import DistanceVectors, RelativeBuckets
from engine.model.spec.attention import Attention
from engine.model.spec.blocks import Block
from engine.model.spec.embedding import Embedding
from engine.model.spec.states import StateLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Layers with the same weights (arXiv:1909.11942): blocks form groups of `length`, each of which runs `times` times
    before the next one."""

    length: int
    times: int


@dataclass(frozen=True, slots=True)
class PredictingStream:
    """Each token of a decoder has a second vector, which represents the next token. It begins as that token's position
    plus a learned vector, and passes through the same layers. In self-attention it sees the same tokens as its token,
    and itself. No other token sees it, so pages do not contain it. The head reads it (ProphetNet, arXiv:2001.04063,
    3.2).

    Attributes:
        vectors: the number of learned vectors, one per stream in training. Octavo computes only the first stream, whose
            vector is the last. The other streams predict later tokens and do not influence the first.
    """

    vectors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVectors:
    """Each token has a vector for each layer (`LayerInput`): (norm(projection(x)) + scale * table[id]) / root of 2, x
    being the token's embedding (Gemma 3n).

    Attributes:
        vocab_size: rows of the table. Ids beyond it read row 0.
        width: features of one layer's vector.
        norm: the norm over these.
    """

    vocab_size: int
    width: int
    norm: Norm

    @property
    def scale(self) -> float:
        """The factor of the table."""
        return float(self.width**0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The residual stream has several versions. Each layer predicts all of them, computes the active one, and corrects
    all by its result (AltUp, arXiv:2301.13310).

    Attributes:
        count, active: how many there are, and the number of the one that layers work on.
        norm: the norm of the input of the coefficients of predictions and corrections.
        scaled: whether the input of a layer's `LayerInput` is multiplied by a learned vector.
    """

    count: int
    active: int
    norm: Norm
    scaled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """An encoder or a decoder.

    Attributes:
        hidden_size: features of the residual stream.
        blocks: one per layer; they may differ.
        shared_bias: a bias by distance that the self-attentions of all blocks add; their own position part is None.
        block_bias: a bias that they add to the scores of sums of blocks, by the distance from a token's own block.
        global_vectors: learned vectors that pass through the layers beside the tokens of each input.
        predicting: the stream that the head reads instead of the tokens' hidden states.
        layer_vectors: what layers read for each token beside the stream.
        versions: the stream's versions; None: there is only one.
        projection: features to which a matrix without bias maps the hidden states at the end.
        distances: the vectors that blocks with disentangled attention share.
        repeated: how often blocks run; None: each is one layer.
        kept: numbers of the layers whose hidden states are a result, too (`Inputs.kept`).
    """

    hidden_size: int
    embedding: Embedding
    blocks: tuple[Block, ...]
    final_norm: Norm | None
    shared_bias: RelativeBuckets | None = None
    block_bias: RelativeBuckets | None = None
    global_vectors: int = 0
    predicting: PredictingStream | None = None
    layer_vectors: LayerVectors | None = None
    versions: Versions | None = None
    projection: int | None = None
    distances: DistanceVectors | None = None
    repeated: Repeated | None = None
    kept: tuple[int, ...] = ()

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attentions of the blocks that have one."""
        return tuple(block.attention for block in self.blocks if block.attention.heads)

    @property
    def states(self) -> tuple[StateLayer, ...]:
        """The parts that carry a state, of the blocks that have one."""
        return tuple(block.mixing for block in self.blocks if isinstance(block.mixing, StateLayer))

    @property
    def sides(self) -> dict[str, int]:
        """The number of values of each side of its tokens that its embedding reads (`engine.interface.token_sides`)."""
        found = {name: getattr(self.embedding, name, 0) for name, side in SIDES.items() if side.reads == "Embed"}
        return {name: count for name, count in found.items() if count}

    @property
    def order(self) -> tuple[int, ...]:
        """The index of each layer's block."""
        part = self.repeated or Repeated(length=1, times=1)
        starts = range(0, len(self.blocks), part.length)
        return tuple(start + i for start in starts for _ in range(part.times) for i in range(part.length))

    @property
    def output_size(self) -> int:
        """Features of the stack's resulting hidden states."""
        return self.projection or self.hidden_size
