"""Finds the best tokens of rows, best first, and the reported values of chosen tokens: log-probabilities and ranks."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.triton.sampling_draw import POSITION
from engine.backends.triton.sampling_walk import NUM_DRAWS, WORDS, collect, key_of, kth_largest


@triton.jit
def _ordered(value, token):
    """An int64 that orders by value, and equal values from the last token to the first."""
    number = tl.where(value == 0.0, 0.0, value)  # -0.0 equals 0.0
    return key_of(number) * 4294967296 + (2147483647 - token)


@triton.jit(do_not_specialize=["columns"])
def best(
    logits, stride, vocabulary: tl.constexpr, rows, counts, before, after,
    tops, num_tops, chunks, values, candidates,
    tokens, scores, place, columns, chosen,
    TOPS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (m) writes the `counts[m]` largest logits of row `rows[m]`; equal ones in ascending order of tokens.

    Args:
        counts: [M]; more than the number of tokens means all.
        before, after: [S] float32: subtracted from a logit, one after the other, to give its score.
        tokens, scores: [.., columns], of which rows `place[m]` are written: 0 and -inf beyond the count. A row with NaN
            or inf gets arbitrary tokens; their scores follow from `before` and `after`.
        chosen: [.., columns] float32, written with the logits themselves.

    Each next token is the largest of those below the last one: among the collected logits, or among all if the
    collection has no room for all that tie or are in the same chunks.
    """
    item = tl.program_id(0)
    row = tl.load(rows + item).to(tl.int64)
    out = tl.load(place + item).to(tl.int64) * columns
    count = tl.minimum(tl.load(counts + item), vocabulary)
    first, second = tl.load(before + row), tl.load(after + row)
    column = tl.arange(0, COLUMNS)
    tl.store(tokens + out + column, 0, mask=column < columns)
    tl.store(scores + out + column, float("-inf"), mask=column < columns)
    tl.store(chosen + out + column, float("-inf"), mask=column < columns)
    tl.debug_barrier()
    row_logits, row_tops = logits + row * stride, tops + row * num_tops
    bound = count.to(tl.float32) * 0.0 + float("-inf")
    if num_tops > count:
        top = tl.arange(0, TOPS)
        maxima = tl.load(row_tops + top, mask=top < num_tops, other=float("-inf"))
        bound = kth_largest(maxima, tl.maximum(count, 1))
    found = collect(
        row_logits, vocabulary, row_tops, num_tops, 1.0, bound,
        chunks + row * num_tops, values + row * ROOM, candidates + row * ROOM, TOPS, ROOM,
    )  # fmt: skip
    # Impossible tokens and NaN are not among them: -inf comes last, in ascending order of tokens.
    fits = (found >= count) & (found <= ROOM)
    index = tl.arange(0, ROOM)
    held = index < tl.where(fits, found, 0)
    value = tl.load(values + row * ROOM + index, mask=held, other=float("-inf"))
    token = tl.load(candidates + row * ROOM + index, mask=held, other=2147483647)
    keys = tl.where(held, _ordered(value, token), -9223372036854775807)
    last = count.to(tl.int64) * 0 + 9223372036854775807
    at = count * 0
    while at < count:
        if fits:
            last = tl.max(tl.where(keys < last, keys, -9223372036854775807), axis=0)
        else:
            highest = last * 0 - 9223372036854775807
            for start in range(0, vocabulary, BLOCK):
                every = start + tl.arange(0, BLOCK)
                logit = tl.load(row_logits + every, mask=every < vocabulary, other=float("-inf")).to(tl.float32)
                logit = tl.where(logit == logit, logit, float("-inf"))
                key = tl.where(every < vocabulary, _ordered(logit, every), -9223372036854775807)
                highest = tl.maximum(highest, tl.max(tl.where(key < last, key, -9223372036854775807), axis=0))
            last = highest
        drawn = 2147483647 - (last & 4294967295)
        logit = tl.load(row_logits + drawn).to(tl.float32)
        tl.store(tokens + out + at, drawn.to(tl.int32))
        tl.store(scores + out + at, (logit - first) - second)
        tl.store(chosen + out + at, logit)
        at += 1


@triton.jit(do_not_specialize=["columns"])
def report(
    logits, stride, row_peak, row_log_sum, tokens, chosen, columns, logprobs, first, table,
    COLUMNS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Program (row) computes log-probabilities [S, columns] of tokens under the model's own distribution.

    Args:
        chosen: [S, columns] the logits of the chosen tokens: NaN replaces impossible ones.
        first: [S] int32, output: the tokens of the first column.
        table: [S, WORDS] int32; positions of rows that draw advance if COUNTED.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    known = column < columns
    token = tl.load(tokens + row * columns + column, mask=known, other=0)
    value = tl.load(logits + row * stride + token, mask=known, other=0.0).to(tl.float32)
    logprob = (value - tl.load(row_peak + row)) - tl.load(row_log_sum + row)
    possible = tl.load(chosen + row * columns + column, mask=known, other=0.0) > float("-inf")
    tl.store(logprobs + row * columns + column, tl.where(possible, logprob, float("nan")), mask=known)
    tl.store(first + row + column, token, mask=column == 0)
    if COUNTED:
        own = table + row * WORDS
        draws = tl.load(own + NUM_DRAWS)
        tl.store(own + POSITION, tl.load(own + POSITION) + (draws > 0).to(tl.int32))


@triton.jit(do_not_specialize=["columns"])
def count_larger(
    logits, stride, vocabulary: tl.constexpr, rows, tokens, place, columns, partial, num_splits, BLOCK: tl.constexpr
):
    """Program (m, split) counts the logits of row `rows[m]` that are larger than those of its tokens.

    Args:
        tokens: [.., columns], rows `place[m]`.
        partial: [M, num_splits, columns] int32, output.
    """
    item, split = tl.program_id(0), tl.program_id(1)
    row_logits = logits + tl.load(rows + item).to(tl.int64) * stride
    mine = tokens + tl.load(place + item).to(tl.int64) * columns
    token = split * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(row_logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    column = split * 0
    while column < columns:
        logit = tl.load(row_logits + tl.load(mine + column)).to(tl.float32)
        larger = tl.sum((value > logit).to(tl.int32), axis=0)
        tl.store(partial + (item.to(tl.int64) * num_splits + split) * columns + column, larger)
        column += 1
