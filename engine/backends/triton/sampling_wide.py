"""Samples from rows of which filters keep more than a few tokens: passes over a row narrow the threshold.

A pass counts the logits that reach each of three numbers, or sums their weights, and reduces the interval to at most a
quarter. The three numbers divide the interval's values evenly, which is fast for usual distributions of logits; every
fourth time they divide its keys, so that 16 such passes end for any distribution. Once the interval contains no more
logits than can be collected, the rest is done among those.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.triton.sampling_draw import MIN_P, TOP_K, TOP_P, _in_splits, _number, _weights
from engine.backends.triton.sampling_walk import (
    FARTHEST,
    NUM_DRAWS,
    TEMPERATURE,
    WORDS,
    divided,
    key_of,
    kth_largest,
    least_with,
    number_of,
    value_of,
)


@triton.jit
def _pass(
    row_logits,
    vocabulary: tl.constexpr,
    heat,
    reference,
    first,
    second,
    third,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The number of a row's logits that reach each of three numbers, and their weights."""
    column = tl.arange(0, SPLIT)
    n1, n2, n3 = tl.zeros((SPLIT,), tl.int32), tl.zeros((SPLIT,), tl.int32), tl.zeros((SPLIT,), tl.int32)
    w1, w2, w3 = tl.zeros((SPLIT,), tl.float64), tl.zeros((SPLIT,), tl.float64), tl.zeros((SPLIT,), tl.float64)
    for start in tl.range(0, vocabulary, DEPTH * SPLIT, num_stages=3):
        token = start + tl.arange(0, DEPTH)[:, None] * SPLIT + column[None, :]
        value = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        scaled = divided(value, heat)
        weight = tl.exp(scaled - reference).to(tl.float64)
        n1 += tl.sum((scaled >= first).to(tl.int32), axis=0)
        n2 += tl.sum((scaled >= second).to(tl.int32), axis=0)
        n3 += tl.sum((scaled >= third).to(tl.int32), axis=0)
        w1 += tl.sum(tl.where(scaled >= first, weight, 0.0), axis=0)
        w2 += tl.sum(tl.where(scaled >= second, weight, 0.0), axis=0)
        w3 += tl.sum(tl.where(scaled >= third, weight, 0.0), axis=0)
    return (
        tl.sum(n1, axis=0), tl.sum(n2, axis=0), tl.sum(n3, axis=0),
        tl.sum(w1, axis=0), tl.sum(w2, axis=0), tl.sum(w3, axis=0),
    )  # fmt: skip


@triton.jit
def _threshold(
    row_logits, vocabulary: tl.constexpr, heat, reference, low, high, goal, room,
    COUNTED: tl.constexpr, DEPTH: tl.constexpr, SPLIT: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The largest number that at least `goal` logits reach (COUNTED), or that logits with that total weight reach.

    Args:
        low, high: keys; `low` must reach the goal, and nothing reaches `high`.
        room: [ROOM] float32 scratch.

    Returns: That number, the number of logits above it, and their weight.
    """
    # Until a pass has counted the logits that reach `low`, all logits may reach it. At least one pass runs: if Triton
    # 3.6 sees that none is needed, it fails to compile the rest.
    turn = low.to(tl.int32) * 0
    count_low = turn + (vocabulary if vocabulary > ROOM else ROOM + 1)
    count_high, weight_high = turn, reference.to(tl.float64) * 0.0
    while (high - low > 1) & (count_low - count_high > ROOM):
        floor, ceiling = value_of(low), value_of(high)
        step = (ceiling - floor) * 0.25
        quarter = (high - low + 3) // 4
        by_keys = turn % 4 == 3
        key1 = tl.where(by_keys, low + quarter, key_of(floor + step))
        key2 = tl.where(by_keys, low + 2 * quarter, key_of(floor + 2 * step))
        key3 = tl.where(by_keys, low + 3 * quarter, key_of(floor + 3 * step))
        key1 = tl.minimum(tl.maximum(key1, low + 1), high - 1)
        key2 = tl.minimum(tl.maximum(key2, key1), high - 1)
        key3 = tl.minimum(tl.maximum(key3, key2), high - 1)
        n1, n2, n3, w1, w2, w3 = _pass(
            row_logits, vocabulary, heat, reference, value_of(key1), value_of(key2), value_of(key3), DEPTH, SPLIT
        )
        if COUNTED:
            enough1, enough2, enough3 = n1 >= goal, n2 >= goal, n3 >= goal
        else:
            enough1, enough2, enough3 = w1 >= goal, w2 >= goal, w3 >= goal
        high = tl.where(enough3, high, tl.where(enough2, key3, tl.where(enough1, key2, key1)))
        count_high = tl.where(enough3, count_high, tl.where(enough2, n3, tl.where(enough1, n2, n1)))
        weight_high = tl.where(enough3, weight_high, tl.where(enough2, w3, tl.where(enough1, w2, w1)))
        low = tl.where(enough3, key3, tl.where(enough2, key2, tl.where(enough1, key1, low)))
        count_low = tl.where(enough3, n3, tl.where(enough2, n2, tl.where(enough1, n1, count_low)))
        turn += 1
    threshold = value_of(low)
    if high - low > 1:
        floor, ceiling = threshold, value_of(high)
        found = turn * 0
        element = tl.arange(0, DEPTH * SPLIT)
        for start in tl.range(0, vocabulary, DEPTH * SPLIT, num_stages=3):
            token = start + element
            value = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
            scaled = divided(value, heat)
            inside = (scaled >= floor) & (scaled < ceiling)
            place = found + tl.cumsum(inside.to(tl.int32), axis=0) - 1
            tl.store(room + place, scaled, mask=inside & (place < ROOM))
            found += tl.sum(inside.to(tl.int32), axis=0)
        tl.debug_barrier()
        index = tl.arange(0, ROOM)
        scaled = tl.load(room + index, mask=index < found, other=float("-inf"))
        weight = tl.where(index < found, tl.exp(scaled - reference), 0.0).to(tl.float64)
        if COUNTED:
            # If there are fewer than requested, all of them are kept.
            more = goal - count_high
            if found >= more:
                threshold = kth_largest(scaled, more)
        else:
            threshold = least_with(scaled, weight, goal - weight_high, low, high)
        count_high += tl.sum((scaled > threshold).to(tl.int32), axis=0)
        weight_high += tl.sum(tl.where(scaled > threshold, weight, 0.0), axis=0)
        tl.debug_barrier()  # all threads have read the memory before it is reused
    return threshold, count_high, weight_high


@triton.jit(do_not_specialize=["width", "columns"])
def wide(
    logits, stride, vocabulary: tl.constexpr, place,
    table, uniforms, width,
    split_floor, split_weight, num_splits, split_peak,
    row_peak, room, is_wide,
    tokens, chosen, columns,
    COUNTED: tl.constexpr, SPLITS: tl.constexpr, ROOM: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (row) samples from a row that `choose` has left to it. The arguments are those of `choose`;
    `split_weight` is written."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_wide + row) == 0:
        return
    row_logits, row_room = logits + row * stride, room + row * ROOM
    heat, peak = number_of(table, row, TEMPERATURE), tl.load(row_peak + row)
    k, draws = tl.load(table + row * WORDS + TOP_K), tl.load(table + row * WORDS + NUM_DRAWS)
    p, least = number_of(table, row, TOP_P), number_of(table, row, MIN_P)
    reference = divided(peak, heat)
    at = tl.arange(0, SPLITS)
    known = at < num_splits
    floor = tl.min(tl.load(split_floor + row * num_splits + at, mask=known, other=float("inf")), axis=0)
    # Logits farther below have no weight.
    smallest = tl.maximum(divided(floor, heat), reference - FARTHEST)
    high = key_of(reference) + 1
    own = tl.load(split_weight + row * num_splits + at, mask=known, other=0.0)
    peaks = tl.load(split_peak + row * num_splits + at, mask=known, other=float("-inf"))
    relative = tl.exp(divided(peaks, heat) - reference).to(tl.float64)
    whole = tl.sum(tl.where(peaks == float("-inf"), 0.0, own * relative), axis=0)
    if (k > 0) & (k < vocabulary):
        smallest, above, weight = _threshold(
            row_logits, vocabulary, heat, reference, key_of(smallest), high, k, row_room, True, DEPTH, SPLIT, ROOM
        )
        # Of logits equal to the last kept one, only as many count as requested.
        whole = tl.minimum(whole, weight + tl.exp(smallest - reference).to(tl.float64) * (k - above))
    if p < 1.0:
        # Everything below this weighs less than the part that top-p removes, even if it were all tokens.
        left = tl.log((1.0 - p.to(tl.float64)) * whole / vocabulary).to(tl.float32)
        low = key_of(tl.maximum(smallest, reference + left - 0.01))
        goal = whole * p.to(tl.float64)
        nucleus, _above, _weight = _threshold(
            row_logits, vocabulary, heat, reference, low, high, goal, row_room, False, DEPTH, SPLIT, ROOM
        )
        smallest = tl.maximum(smallest, nucleus)
    for start in tl.range(0, vocabulary, DEPTH * SPLIT, num_stages=3):
        token = start + tl.arange(0, DEPTH)[:, None] * SPLIT + tl.arange(0, SPLIT)[None, :]
        value = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
        weight = tl.sum(_weights(value, heat, reference, smallest, least), axis=1)
        split = start // SPLIT + tl.arange(0, DEPTH)
        tl.store(split_weight + row * num_splits + split, weight, mask=split < num_splits)
    tl.debug_barrier()
    best = tl.load(tokens + tl.load(place + row).to(tl.int64) * columns)
    out = tl.load(place + row).to(tl.int64) * columns
    draw = draws * 0
    while draw < draws:
        number = _number(uniforms, table, row, draw, width, COUNTED)
        token, value = _in_splits(
            row_logits, vocabulary, split_weight + row * num_splits, split_weight, num_splits,
            peak, heat, smallest, least, number, best, False, SPLITS, SPLIT,
        )  # fmt: skip
        tl.store(tokens + out + draw, token)
        tl.store(chosen + out + draw, value)
        draw += 1
