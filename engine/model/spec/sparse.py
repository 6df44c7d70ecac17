"""Sparse attention of encoders: tokens outside the window, sums of blocks, vectors and blocks that a token sees."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.normalisation import Norm


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
    the sum of a block of tokens, normed (transient global attention, arXiv:2112.07916, 3.1.2). The remaining tokens at
    the end of an input belong to its last whole block. An input without a whole block has no sums.

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
