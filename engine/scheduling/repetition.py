"""DRY's penalties for tokens that would continue a repetition (`engine.interface.dry`).

For each position of a sequence, this keeps how many tokens up to it equal those at the sequence's end. Each further
token updates these lengths in one pass of numpy; only if many tokens arrive at once, as in a prompt, are they computed
anew.
"""

from __future__ import annotations

import math

import numpy as np

from engine.interface.dry import Breakers, Dry
from engine.scheduling.plan import Float32, Int32
from engine.scheduling.sequence import Sequence

_FEW = 32  # tokens that are added one by one
_LARGEST = float(np.finfo(np.float32).max)
_NOTHING = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)


def dry_penalties(dry: Dry, sequence: Sequence) -> tuple[Int32, Float32]:
    """Distinct tokens [N], and the penalties that are subtracted from their logits."""
    tokens = sequence.tokens.view()
    first = 0 if dry.last_n < 0 else max(0, len(tokens) - dry.last_n)
    window = tokens[first:]
    if len(window) <= dry.allowed_length:
        return _NOTHING
    # A repetition that begins before the window is as long as its part within.
    lengths = np.minimum(_lengths(sequence)[first:-1], np.arange(1, len(window), dtype=np.int32))
    places = np.flatnonzero(lengths >= dry.allowed_length)
    if not len(places):
        return _NOTHING
    limit = _since_breaker(dry.breakers, window, int(lengths[places].max()))
    if limit < dry.allowed_length:
        return _NOTHING
    following, which = np.unique(window[places + 1], return_inverse=True)
    longest = np.zeros(len(following), dtype=np.int32)
    np.maximum.at(longest, which, np.minimum(lengths[places], limit))
    exponents = (longest - dry.allowed_length).astype(np.float64)
    if dry.base > 1.0:  # as far as float32 can represent powers
        exponents = np.minimum(exponents, math.log(_LARGEST) / math.log(dry.base))
    taken = np.minimum(dry.multiplier * dry.base**exponents, _LARGEST)
    return following.astype(np.int32), taken.astype(np.float32)


def _lengths(sequence: Sequence) -> Int32:
    """[n] for each position, how many tokens up to and including it equal those at the sequence's end."""
    tokens, known = sequence.tokens.view(), sequence.repeats
    if len(tokens) - len(known) > _FEW:
        known = _from_nothing(tokens)
    for count in range(len(known), len(tokens)):
        # One more if the token is the last one and those before it matched, too.
        longer = np.ones(count + 1, dtype=np.int32)
        longer[1:] += known
        longer[tokens[: count + 1] != tokens[count]] = 0
        known = longer
    sequence.repeats = known
    return known


def _from_nothing(tokens: Int32) -> Int32:
    """`_lengths` of all tokens by the Z algorithm (Gusfield 1997), over the reversed tokens."""
    text = tokens[::-1].tolist()
    count = len(text)
    found = [count] * count
    begin = end = 0  # of the match found so far that extends furthest, which equals the text's beginning
    for place in range(1, count):
        length = min(found[place - begin], end - place) if place < end else 0
        while place + length < count and text[length] == text[place + length]:
            length += 1
        found[place] = length
        if place + length > end:
            begin, end = place, place + length
    return np.array(found[::-1], dtype=np.int32)


def _since_breaker(breakers: Breakers, window: Int32, most: int) -> int:
    """Number of tokens after the last breaker; at least `most` if none is close enough to matter."""
    tail = window[-(most + breakers.longest + 1) :].tolist()
    for back in range(len(tail)):
        place = len(tail) - 1 - back
        followed = [
            len(rest)
            for rest in breakers.tails.get(tail[place], ())
            if tuple(tail[place + 1 : place + 1 + len(rest)]) == rest
        ]
        if followed:
            return back - max(followed)
    return max(most, len(tail))
