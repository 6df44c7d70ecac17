"""Samples from rows that `summarize` has walked over: temperature, top-k, top-p, min-p, inverse CDF in vocabulary
order.

There are three ways; each row uses the shortest exact one (see docs/kernels.md). In the last one (`wide`), a program
processes a whole row: 256 rows of 128k, which are 134 MB, keep all of a large GPU busy (estimated 31 us a pass by its
bandwidth, some 40 us by the instructions), but a single row only one multiprocessor. Programs of rows without work end
at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.triton.philox import uniform
from engine.backends.triton.sampling_walk import (
    GREEDY_TEMPERATURE,
    NUM_DRAWS,
    TEMPERATURE,
    WORDS,
    collect,
    divided,
    key_of,
    kth_largest,
    least_with,
    number_of,
)
from engine.interface.sampling_table import word

SEED, CHOICE, POSITION = tl.constexpr(word("seed")), tl.constexpr(word("choice")), tl.constexpr(word("position"))
TOP_K, TOP_P, MIN_P = tl.constexpr(word("top_k")), tl.constexpr(word("top_p")), tl.constexpr(word("min_p"))


@triton.jit
def _number(uniforms, table, row, column, width, COUNTED: tl.constexpr):
    """The random number of a row's draw: given, or computed from the table."""
    if COUNTED:
        own = table + row * WORDS
        low, high = tl.load(own + SEED).to(tl.int64), tl.load(own + SEED + 1).to(tl.int64)
        made = uniform((high << 32) | (low & 0xFFFFFFFF), tl.load(own + CHOICE) + column, tl.load(own + POSITION))
    else:
        made = tl.load(uniforms + row * width + column)
    return made


@triton.jit
def _weights(value, heat, reference, smallest, min_p):
    """Weights of logits under filters, as float64; 0 for removed tokens.

    Args:
        reference: the logit (divided by the temperature) whose weight is 1.
        smallest: the smallest kept logit (divided by the temperature).
    """
    scaled = divided(value, heat)
    weight = tl.exp(scaled - reference)
    return tl.where((scaled >= smallest) & (weight >= min_p), weight, 0.0).to(tl.float64)


@triton.jit
def _among(weight, token, value, target, nothing):
    """Token and logit at which the running sum of weights passes the target, or the last token with weight."""
    running = tl.cumsum(weight, axis=0)
    possible = weight > 0.0
    at = tl.min(tl.where(possible & (running > target), token, 2147483647), axis=0)
    last = tl.max(tl.where(possible, token, -1), axis=0)
    at = tl.where(at == 2147483647, last, at)
    at = tl.where(at < 0, nothing, at)
    return at, tl.max(tl.where(token == at, value, float("-inf")), axis=0)


@triton.jit
def _in_splits(
    row_logits, vocabulary: tl.constexpr, row_weights, row_peaks, num_splits, peak, heat, smallest, min_p,
    number, nothing,
    OWN: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Token and logit of one draw, found through the weights of splits.

    Args:
        row_weights: [num_splits] float64, relative to each split's own peak if OWN, else to the row's.
        row_peaks: [num_splits]; read if OWN.
    """
    at = tl.arange(0, SPLITS)
    weight = tl.load(row_weights + at, mask=at < num_splits, other=0.0)
    top = divided(peak, heat)
    if OWN:
        own = divided(tl.load(row_peaks + at, mask=at < num_splits, other=float("-inf")), heat)
        # A split with only -inf has weights relative to 0, all of them 0.
        factor = tl.exp(own - top).to(tl.float64)
        weight = tl.where(own == float("-inf"), 0.0, weight * factor)
    running = tl.cumsum(weight, axis=0)
    target = number * tl.max(running, axis=0)
    possible = weight > 0.0
    split = tl.min(tl.where(possible & (running > target), at, SPLITS), axis=0)
    last = tl.maximum(tl.max(tl.where(possible, at, -1), axis=0), 0)
    split = tl.where(split == SPLITS, last, split)
    rest = target - tl.max(tl.where(at < split, running, 0.0), axis=0)
    reference = top
    if OWN:
        reference = tl.max(tl.where(at == split, own, float("-inf")), axis=0)
        rest = rest / tl.max(tl.where(at == split, factor, 0.0), axis=0)
    token = split * SPLIT + tl.arange(0, SPLIT)
    value = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return _among(_weights(value, heat, reference, smallest, min_p), token, value, rest, nothing)


@triton.jit(do_not_specialize=["width", "columns"])
def choose(
    logits, stride, vocabulary: tl.constexpr, place,
    table, uniforms, width,
    split_peak, split_place, split_sum, split_weight, tops, num_splits, num_tops,
    row_peak, row_log_sum, chunks, values, candidates, is_wide,
    tokens, chosen, columns,
    COUNTED: tl.constexpr, SPLITS: tl.constexpr, TOPS: tl.constexpr, ROOM: tl.constexpr, SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Program (row) sums up the walk's results and samples, unless it leaves the row to `wide`.

    Args:
        place: [S] rows of `tokens` and `chosen` to write.
        table: [S, WORDS] (`engine.interface.sampling_table`); a row with less than 0 draws is unused.
        uniforms: [S, width] float64; if COUNTED they are computed from the table.
        row_peak, row_log_sum: [S] float32, outputs: the largest logit, and the log of the sum of exp(logit - peak), NaN
            for a row with NaN or inf, or with nothing but -inf.
        chunks, values, candidates: scratch, [S, num_tops], [S, ROOM], [S, ROOM].
        is_wide: [S] int32, output: 1 if `wide` must sample.
        tokens, chosen: [.., columns] outputs: the draws, or the likeliest token in all columns; and their logits.
        FEW: the number of largest logits among which a threshold is searched first; ROOM is at least twice that.
    """
    row = tl.program_id(0).to(tl.int64)
    draws = tl.load(table + row * WORDS + NUM_DRAWS)
    out = tl.load(place + row).to(tl.int64) * columns
    column = tl.arange(0, COLUMNS)
    tl.store(is_wide + row, 0)
    if draws < 0:
        tl.store(tokens + out + column, 0, mask=column < columns)
        return
    at = tl.arange(0, SPLITS)
    known = at < num_splits
    peaks = tl.load(split_peak + row * num_splits + at, mask=known, other=float("-inf"))
    peak = tl.max(peaks, axis=0)
    where = tl.load(split_place + row * num_splits + at, mask=known, other=2147483647)
    best = tl.min(tl.where(peaks == peak, where, 2147483647), axis=0)
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    sums = tl.load(split_sum + row * num_splits + at, mask=known, other=0.0).to(tl.float64)
    factor = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - reference))
    # A split with NaN or inf has a NaN sum, and inf - inf is NaN too.
    total = tl.sum(tl.where(sums == sums, sums * factor.to(tl.float64), sums), axis=0)
    log_sum = tl.log(total).to(tl.float32)
    log_sum = tl.where(total > 0.0, log_sum, float("nan"))
    tl.store(row_peak + row, peak)
    tl.store(row_log_sum + row, log_sum)
    tl.store(tokens + out + column, best, mask=column < columns)
    tl.store(chosen + out + column, peak, mask=column < columns)
    heat = number_of(table, row, TEMPERATURE)
    if (draws == 0) | (heat < GREEDY_TEMPERATURE) | (log_sum != log_sum):
        return
    tl.debug_barrier()  # the likeliest token is written before the draws are
    k = tl.load(table + row * WORDS + TOP_K)
    p, least = number_of(table, row, TOP_P), number_of(table, row, MIN_P)
    limited = (k > 0) & (k < vocabulary)
    row_logits = logits + row * stride
    if (limited == 0) & (p >= 1.0) & (least <= 0.0):
        draw = draws * 0
        while draw < draws:
            number = _number(uniforms, table, row, draw, width, COUNTED)
            token, value = _in_splits(
                row_logits, vocabulary, split_weight + row * num_splits, split_peak + row * num_splits, num_splits,
                peak, heat, float("-inf"), 0.0, number, best, True, SPLITS, SPLIT,
            )  # fmt: skip
            tl.store(tokens + out + draw, token)
            tl.store(chosen + out + draw, value)
            draw += 1
        return
    if limited & (k > 2 * FEW):
        tl.store(is_wide + row, 1)
        return
    few = tl.where(limited, k, FEW)
    bound = peak * 0 + float("-inf")
    if num_tops > few:
        top = tl.arange(0, TOPS)
        maxima = tl.load(tops + row * num_tops + top, mask=top < num_tops, other=float("-inf"))
        bound = divided(kth_largest(maxima, few), heat)
    found = collect(
        row_logits, vocabulary, tops + row * num_tops, num_tops, heat, bound,
        chunks + row * num_tops, values + row * ROOM, candidates + row * ROOM, TOPS, ROOM,
    )  # fmt: skip
    if found > ROOM:
        tl.store(is_wide + row, 1)
        return
    index = tl.arange(0, ROOM)
    value = tl.load(values + row * ROOM + index, mask=index < found, other=float("-inf"))
    token = tl.load(candidates + row * ROOM + index, mask=index < found, other=2147483647)
    scaled = divided(value, heat)
    top_scaled = divided(peak, heat)
    weight = tl.exp(scaled - top_scaled).to(tl.float64)
    smallest = bound
    whole = tl.sum(weight, axis=0)
    if limited:
        if found > k:
            smallest = kth_largest(scaled, k)
            above = scaled > smallest
            whole = tl.sum(tl.where(above, weight, 0.0), axis=0)
            more = k - tl.sum(above.to(tl.int32), axis=0)
            whole += tl.exp(smallest - top_scaled).to(tl.float64) * more
    elif bound > float("-inf"):
        own = tl.load(split_weight + row * num_splits + at, mask=known, other=0.0)
        relative = tl.exp(divided(peaks, heat) - top_scaled).to(tl.float64)
        whole = tl.sum(tl.where(peaks == float("-inf"), 0.0, own * relative), axis=0)
    resolved = limited | (bound == float("-inf"))
    if p < 1.0:
        goal = whole * p.to(tl.float64)
        reach = tl.sum(tl.where(scaled >= smallest, weight, 0.0), axis=0)
        if reach >= goal:
            resolved = resolved | True
            nucleus = least_with(scaled, weight, goal, key_of(smallest), key_of(top_scaled) + 1)
            smallest = tl.maximum(smallest, nucleus)
    # Logits that were not collected weigh less than the bound.
    resolved = resolved | (tl.exp(bound - top_scaled) < least)
    if resolved == 0:
        tl.store(is_wide + row, 1)
        return
    weight = _weights(value, heat, top_scaled, smallest, least)
    whole = tl.sum(weight, axis=0)
    draw = draws * 0
    while draw < draws:
        number = _number(uniforms, table, row, draw, width, COUNTED)
        drawn, logit = _among(weight, token, value, number * whole, best)
        tl.store(tokens + out + draw, drawn)
        tl.store(chosen + out + draw, logit)
        draw += 1
