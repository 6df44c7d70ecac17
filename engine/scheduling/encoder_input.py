"""The scheduler's facts about an encoder input: its length, its content, and the pages of its K and V.

An input is encoded once, as a whole, by the step that first runs its request, and its K and V for all layers of the
decoder are stored in pages of the same pool. They are never written again: all beams and answers read them, and
requests with an equal input share them. Their hashes cover the whole input, so either all of them are found or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.interface.token_sides import Sides
from engine.scheduling.block_pool import PageHash, PageHasher
from engine.scheduling.plan import Float32, Int32


class EncoderInput:
    """A request's encoder input. `key`: hash of the whole input and of the values in its root."""

    __slots__ = ("hashes", "key", "num_cached", "pages", "sides", "signal", "tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        root: PageHash,
        hasher: PageHasher,
        block_size: int,
        signal: Float32 | None = None,
        sides: Sides | None = None,
    ):
        self.tokens: Int32 = np.array(tokens, dtype=np.int32)  # the input's tokens; for a signal, one zero per position
        self.signal = signal  # the signal that is read instead of tokens, if any
        self.sides: Sides = sides or {}  # further values of the tokens, beside their ids
        # No token is -1, so neither hash is that of a decoder's page.
        self.key = hasher.extend(root, np.array([-1, *tokens], dtype=np.int32))
        if signal is not None:
            self.key = hasher.of_signal(self.key, signal)
        count = -(-len(tokens) // block_size)
        # one per page
        self.hashes = [hasher.extend(self.key, np.array([-1, page], dtype=np.int32)) for page in range(count)]
        self.pages: list[int] = []  # where K and V are, or will be after this step; empty while the request waits
        # number of tokens that were encoded already when the request was first admitted; None before
        self.num_cached: int | None = None
