"""The common part of sampling kernels: one walk over rows of logits that keeps few statistics, and reads of the rest
guided by them.

The walk (`summarize`) reads each row once, in splits of 2048 tokens whatever the batch, so that a row's sums have one
order and a single row uses as much of a GPU as possible. For each split it keeps the peak, its position, the smallest
finite logit and the sums of exponentials; and for each chunk of 64 tokens the largest logit. The k-th largest of these
maxima is a bound that the k largest logits reach and few others do: candidates (`collect`) are found in few chunks, and
nothing is sorted. Searches for thresholds bisect the bits of floats, ordered as integers (`key_of`): each step is a
count or a float64 sum over data in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.interface import sampling_table
from engine.interface.sampling_table import word

CHUNK = tl.constexpr(64)
# Below this temperature, a softmax in float32 is one-hot for any two different logits.
GREEDY_TEMPERATURE = tl.constexpr(1e-5)
# Positions of the columns in a row of the sampling table.
WORDS = tl.constexpr(sampling_table.WORDS)
NUM_DRAWS = tl.constexpr(word("num_draws"))
TEMPERATURE = tl.constexpr(word("temperature"))
# The key of -inf.
LOWEST = tl.constexpr(-2139095041)
# exp() of a logit farther below the peak is 0 in float32, even as a denormal.
FARTHEST = tl.constexpr(104.0)


@triton.jit
def number_of(table, row, column: tl.constexpr):
    return tl.load(table + row * WORDS + column).to(tl.float32, bitcast=True)


@triton.jit
def key_of(value):
    """An int64 with the same order as the float32; NaN is not allowed."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def value_of(key):
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def divided(value, divisor):
    """value / divisor, rounded as on a CPU, so that order and ties equal torch's."""
    return tl.math.div_rn(value, divisor)


@triton.jit
def summarize(
    logits,
    stride,
    vocabulary: tl.constexpr,
    table,
    split_peak,
    split_floor,
    split_place,
    split_sum,
    split_weight,
    tops,
    num_splits,
    num_tops,
    CHUNKS: tl.constexpr,
):
    """Program (row, split) walks over one split.

    Args:
        logits: [S, vocabulary], rows `stride` apart.
        table: [S, WORDS]; weights are computed for rows that draw with a temperature. A row with less than 0 draws is
            unused.
        split_peak, split_floor: [S, num_splits] float32, the largest logit and the smallest one that is not -inf.
        split_place: [S, num_splits] int32, the first token with the peak.
        split_sum: [S, num_splits] float32, sum of exp(logit - peak); NaN if a logit is NaN or inf.
        split_weight: [S, num_splits] float64, sum of exp(logit / temperature - peak / temperature).
        tops: [S, num_tops] float32, the largest logit of each chunk.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    draws = tl.load(table + row * WORDS + NUM_DRAWS)
    if draws < 0:
        return
    chunk = split * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    value = tl.load(logits + row * stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    number = tl.where(value == value, value, float("-inf"))
    top = tl.max(number, axis=1)
    tl.store(tops + row * num_tops + chunk, top, mask=chunk < num_tops)
    peak = tl.max(top, axis=0)
    least = tl.min(tl.min(tl.where(number > float("-inf"), number, float("inf")), axis=1), axis=0)
    place = tl.min(tl.min(tl.where(number == peak, token, 2147483647), axis=1), axis=0)
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    at = row * num_splits + split
    tl.store(split_peak + at, peak)
    tl.store(split_floor + at, least)
    tl.store(split_place + at, place)
    tl.store(split_sum + at, tl.sum(tl.sum(tl.exp(value - reference), axis=1), axis=0))
    heat = number_of(table, row, TEMPERATURE)
    if (draws > 0) & (heat >= GREEDY_TEMPERATURE):
        weight = tl.exp(divided(value, heat) - divided(reference, heat))
        tl.store(split_weight + at, tl.sum(tl.sum(weight.to(tl.float64), axis=1), axis=0))


@triton.jit
def kth_largest(values, k):
    """The k-th largest of at least k float32 values without NaN; -inf counts."""
    high = key_of(tl.max(values, axis=0)) + 1
    low = high * 0 + LOWEST
    while high - low > 1:
        middle = (low + high) // 2
        enough = tl.sum((values >= value_of(middle)).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return value_of(low)


@triton.jit
def least_with(values, weights, goal, low, high):
    """The largest number such that the weights (float64) of the values that reach it sum to at least `goal`. `low`,
    `high`: keys; `low` must reach the goal, `high` must not."""
    while high - low > 1:
        middle = (low + high) // 2
        reached = tl.sum(tl.where(values >= value_of(middle), weights, 0.0), axis=0) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return value_of(low)


@triton.jit
def collect(
    row_logits,
    vocabulary: tl.constexpr,
    row_tops,
    num_tops,
    heat,
    bound,
    chunks,
    values,
    tokens,
    TOPS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Write the tokens whose logits, divided by `heat`, reach `bound` and are not -inf, in order.

    Args:
        row_logits, row_tops: one row, and the largest logits of its chunks, `num_tops` <= TOPS.
        chunks: [num_tops] int32 scratch.
        values, tokens: [ROOM] outputs: logits and tokens, as many as fit.

    Returns: Their number; more than ROOM if not all fitted (then not all are counted).
    """
    LOOK: tl.constexpr = 32  # chunks that are examined at a time
    at = tl.arange(0, TOPS)
    top = tl.load(row_tops + at, mask=at < num_tops, other=float("-inf"))
    inside = (divided(top, heat) >= bound) & (top > float("-inf"))
    place = tl.cumsum(inside.to(tl.int32), axis=0) - 1
    tl.store(chunks + place, at, mask=inside)
    number = tl.sum(inside.to(tl.int32), axis=0)
    tl.debug_barrier()  # all threads see what was written
    element = tl.arange(0, LOOK * CHUNK)
    found = number * 0
    first = number * 0
    while (first < number) & (found <= ROOM):
        which = first + element // CHUNK
        chunk = tl.load(chunks + which, mask=which < number, other=0)
        token = chunk * CHUNK + element % CHUNK
        known = (which < number) & (token < vocabulary)
        value = tl.load(row_logits + token, mask=known, other=float("-inf")).to(tl.float32)
        wanted = (divided(value, heat) >= bound) & (value > float("-inf"))
        slot = found + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(values + slot, value, mask=wanted & (slot < ROOM))
        tl.store(tokens + slot, token, mask=wanted & (slot < ROOM))
        found += tl.sum(wanted.to(tl.int32), axis=0)
        first += LOOK
    tl.debug_barrier()
    return found
