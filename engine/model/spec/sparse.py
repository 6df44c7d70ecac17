"""Sparse attention of encoders: global tokens, sums of blocks, and vectors and blocks that a token sees."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.normalisation import Norm


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of an input."""


@dataclass(frozen=True, slots=True)
class BeforeToken:
    """The tokens of an input before the first one with an id, such as a question; none without that id."""

    id: int


@dataclass(frozen=True, slots=True)
class GlobalTokens:
    """Tokens see a window. Some tokens see all others and are seen by all. They use separate projections of queries,
    keys and values (Longformer, arXiv:2004.05150, 3.1)."""

    which: FirstToken | BeforeToken
    reach: int  # tokens of the window on either side


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Tokens see a window, and further keys and values. Each of these is made from the normalised sum of a block of
    tokens (transient global attention, arXiv:2112.07916, 3.1.2). The remaining tokens at the end of an input belong to
    its last whole block. An input without a whole block has no sums."""

    size: int  # tokens per block
    norm: Norm
    reach: int  # tokens of the window on either side


@dataclass(frozen=True, slots=True)
class SparseBlocks:
    """Tokens see some blocks of tokens, counted from an input's beginning: their own block, adjacent ones, the first
    and the last one. Tokens of the first and the last block see all (BigBird, arXiv:2007.14062, 2).

    In training, tokens also see some random blocks. At inference, transformers uses the first block in place of each,
    so its keys count several times; Octavo does the same.
    """

    size: int  # tokens per block
    drawn: int  # random blocks per token in training

    @property
    def whole(self) -> int:
        """Inputs of up to this many tokens are not divided: all their tokens see all."""
        return (5 + 2 * self.drawn) * self.size


@dataclass(frozen=True, slots=True)
class GlobalStream:
    """Tokens see those of their own block, and the stack's `global_vectors`. These pass through the layers beside the
    tokens of each input: they see all tokens and each other, with the tokens' projections but a norm of their own, and
    pass through the feed-forward network as tokens do (PEGASUS-X, arXiv:2208.04347, 3)."""

    size: int  # tokens per block
    # the number of tokens missing from an input's first block; with a shift in every other layer, blocks overlap those
    # of adjacent layers
    shift: int
    norm: Norm  # a norm of the vectors before attention


Sparse = GlobalTokens | BlockSums | SparseBlocks | GlobalStream
