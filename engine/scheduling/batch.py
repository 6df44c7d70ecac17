"""Lays the rows of a step out in flat arrays."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.pooling import Pooling
from engine.scheduling.encoding import Memory
from engine.scheduling.philox import uniforms
from engine.scheduling.plan import (
    CrossRows,
    EncoderBatch,
    Int32,
    PoolingRow,
    PromptLogprobRows,
    SamplingBatch,
    StepPlan,
)
from engine.scheduling.sequence import Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's part in a step: `count` tokens from `start` on; sampled if that is all it has."""

    group: SequenceGroup
    sequence: Sequence
    start: int
    count: int
    sampled: bool


def _int32(values: Seq[int]) -> Int32:
    return np.array(values, dtype=np.int32)


def build_plan(rows: Seq[Row], copies: Seq[tuple[int, int]], block_size: int, memories: Seq[Memory] = ()) -> StepPlan:
    """The step plan of these rows, in their order; the encoder runs over `memories` first. All rows have pages, or
    none has."""
    whole = any(row.group.whole for row in rows)
    counts = _int32([row.count for row in rows])
    starts = _int32([row.start for row in rows])
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    row_of_token = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    positions = np.arange(query_start[-1], dtype=np.int32) + (starts - query_start[:-1])[row_of_token]
    token_ids = np.concatenate([row.sequence.tokens.view(row.start, row.start + row.count) for row in rows])
    tables = np.zeros((len(rows), max(len(row.sequence.table) for row in rows)), dtype=np.int32)
    for i, row in enumerate(rows):
        tables[i, : len(row.sequence.table)] = row.sequence.table.view()
    slots = positions[:0]
    if not whole:
        slots = tables[row_of_token, positions // block_size] * block_size + positions % block_size
    sampled = [i for i, row in enumerate(rows) if row.sampled]
    return StepPlan(
        token_ids=token_ids.astype(np.int32, copy=False),
        positions=positions,
        slots=slots.astype(np.int32, copy=False),
        query_start=query_start,
        context_lens=starts + counts,
        block_tables=tables,
        copies=_int32([page for pair in copies for page in pair]).reshape(-1, 2),
        sampling=_sampling([rows[i] for i in sampled], query_start[1:][sampled] - 1) if sampled else None,
        prompt_logprobs=_prompt_logprobs(rows, query_start),
        encoder=_encoder(memories, block_size) if memories else None,
        cross=_cross(rows),
        pooling=tuple(
            _pooling(i, row.group.request.pooling, row)
            for i, row in enumerate(rows)
            if row.group.request.pooling is not None
        ),
        whole=whole,
        token_types=_token_types(rows),
    )


def _pooling(number: int, pooling: Pooling, row: Row) -> PoolingRow:
    return PoolingRow(
        row=number,
        pooling=pooling,
        start=row.start,
        complete=row.start + row.count == row.sequence.num_tokens,
        before=row.group.pooled,
    )


def _token_types(rows: Seq[Row]) -> Int32 | None:
    if not any(len(row.group.token_types) for row in rows):
        return None
    parts = [row.group.token_types[row.start : row.start + row.count] for row in rows]
    return np.concatenate(
        [p if len(p) else np.zeros(row.count, dtype=np.int32) for p, row in zip(parts, rows, strict=True)]
    )


def _encoder(memories: Seq[Memory], block_size: int) -> EncoderBatch:
    slots = []
    for memory in memories:
        places = np.arange(len(memory.tokens), dtype=np.int32)
        slots.append(_int32(memory.pages)[places // block_size] * block_size + places % block_size)
    starts = np.zeros(len(memories) + 1, dtype=np.int32)
    np.cumsum([len(memory.tokens) for memory in memories], out=starts[1:])
    return EncoderBatch(
        token_ids=np.concatenate([memory.tokens for memory in memories]), starts=starts, slots=np.concatenate(slots)
    )


def _cross(rows: Seq[Row]) -> CrossRows | None:
    memories = [row.group.memory for row in rows]
    if not any(memories):
        return None
    tables = np.zeros((len(rows), max(len(memory.pages) for memory in memories if memory)), dtype=np.int32)
    for i, memory in enumerate(memories):
        if memory is not None:
            tables[i, : len(memory.pages)] = memory.pages
    owners = np.cumsum([0, *(a.group is not b.group for a, b in pairwise(rows))], dtype=np.int32)
    lengths = _int32([len(memory.tokens) if memory else 0 for memory in memories])
    return CrossRows(tables=tables, lens=lengths, owners=owners)


def _sampling(rows: Seq[Row], token_rows: Int32) -> SamplingBatch:
    parameters = np.stack([row.group.parameters for row in rows])
    draws = [_num_draws(row.group) for row in rows]
    bans: list[tuple[int, int]] = []
    forced: list[tuple[int, int]] = []
    biases: list[tuple[int, int, float]] = []
    history: list[int] = []
    sources: list[int] = []
    for i, row in enumerate(rows):
        bans.extend((i, token) for token in banned_tokens(row))
        forced.extend((i, token) for token in forced_tokens(row))
        biases.extend((i, token, value) for token, value in row.group.request.decoding.logit_bias)
        if row.group.has_penalties:
            history.append(i)
        if len(row.group.favoured):
            sources.append(i)
    lengths = [rows[i].sequence.num_tokens for i in history]
    return SamplingBatch(
        rows=token_rows.astype(np.int32, copy=False),
        temperature=parameters[:, 0].astype(np.float32),
        top_k=parameters[:, 1].astype(np.int32),
        top_p=parameters[:, 2].astype(np.float32),
        min_p=parameters[:, 3].astype(np.float32),
        repetition_penalty=parameters[:, 4].astype(np.float32),
        presence_penalty=parameters[:, 5].astype(np.float32),
        frequency_penalty=parameters[:, 6].astype(np.float32),
        beam_width=parameters[:, 7].astype(np.int32),
        num_logprobs=parameters[:, 8].astype(np.int32),
        num_draws=_int32(draws),
        uniforms=_uniforms(rows, draws),
        bias_row=_int32([b[0] for b in biases]),
        bias_token=_int32([b[1] for b in biases]),
        bias_value=np.array([b[2] for b in biases], dtype=np.float32),
        history_row=np.repeat(_int32(history), lengths),
        history_token=np.concatenate([rows[i].sequence.tokens.view() for i in history]) if history else _int32([]),
        history_is_output=np.concatenate(
            [np.arange(rows[i].sequence.num_tokens) >= rows[i].sequence.num_prompt for i in history]
        )
        if history
        else np.zeros(0, dtype=np.bool_),
        renormalize=parameters[:, 9] > 0,
        source_reward=parameters[:, 10].astype(np.float32),
        source_row=np.repeat(_int32(sources), [len(rows[i].group.favoured) for i in sources]),
        source_token=np.concatenate([rows[i].group.favoured for i in sources]) if sources else _int32([]),
        ban_row=_int32([b[0] for b in bans]),
        ban_token=_int32([b[1] for b in bans]),
        force_row=_int32([f[0] for f in forced]),
        force_token=_int32([f[1] for f in forced]),
    )


def _num_draws(group: SequenceGroup) -> int:
    if group.beam is not None:
        return 0
    return 1 if group.started else group.request.decoding.n


def _uniforms(rows: Seq[Row], draws: Seq[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    width = max(1, *draws)
    numbers = np.zeros((len(rows), width), dtype=np.float64)
    wanted = [
        (i, draw)
        for i, row in enumerate(rows)
        if row.group.request.decoding.temperature > 0.0
        for draw in range(draws[i])
    ]
    if wanted:
        numbers[[i for i, _ in wanted], [draw for _, draw in wanted]] = uniforms(
            [rows[i].group.request.decoding.seed for i, _ in wanted],
            [rows[i].sequence.index + draw for i, draw in wanted],
            [rows[i].sequence.num_output for i, _ in wanted],
        )
    return numbers


def banned_tokens(row: Row) -> set[int]:
    """Tokens that must not come next, as the logits processors of `transformers` have it."""
    decoding, sequence = row.group.request.decoding, row.sequence
    banned = set(decoding.suppress_tokens)
    if sequence.num_output < decoding.min_tokens:
        banned |= decoding.stop_ids
    if sequence.num_tokens < decoding.min_length:
        banned |= decoding.eos_ids
    # With a forced BOS after a single prompt token, the first free choice is the second one.
    begin = 1 if sequence.num_prompt == 1 and decoding.forced_bos_token_id is not None else 0
    if decoding.begin_suppress_tokens and sequence.num_output == begin:
        banned.update(decoding.begin_suppress_tokens)
    tokens = sequence.tokens.view()
    if decoding.no_repeat_ngram_size:
        banned.update(_ngram_ends(tokens, tokens, decoding.no_repeat_ngram_size))
    if decoding.encoder_no_repeat_ngram_size:
        banned.update(_ngram_ends(row.group.source, tokens, decoding.encoder_no_repeat_ngram_size))
    if decoding.bad_words:
        banned.update(_word_ends(decoding.bad_words, tokens))
    return banned


def forced_tokens(row: Row) -> tuple[int, ...]:
    """The only tokens that may come next; empty where there is a free choice."""
    decoding, sequence = row.group.request.decoding, row.sequence
    if decoding.forced_eos_token_ids and sequence.num_output == decoding.max_tokens - 1:
        return decoding.forced_eos_token_ids
    if decoding.forced_bos_token_id is not None and sequence.num_tokens == 1:
        return (decoding.forced_bos_token_id,)
    return ()


def _word_ends(words: Seq[tuple[int, ...]], tokens: Int32) -> list[int]:
    """Last tokens of those words whose others the tokens end with."""
    longest = max(map(len, words)) - 1
    tail = tuple(tokens[-longest:].tolist()) if longest else ()
    return [word[-1] for word in words if len(word) <= len(tail) + 1 and tail[len(tail) + 1 - len(word) :] == word[:-1]]


def _ngram_ends(source: Int32, tokens: Int32, size: int) -> list[int]:
    """Tokens that would complete an n-gram of `source` after `tokens`."""
    if len(source) < size or len(tokens) < size - 1:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(source, size)
    same = (windows[:, :-1] == tokens[len(tokens) - size + 1 :]).all(axis=1)
    return windows[same, -1].tolist()  # type: ignore[no-any-return]


def _prompt_logprobs(rows: Seq[Row], query_start: Int32) -> PromptLogprobRows | None:
    flat: list[int] = []
    targets: list[int] = []
    wanted: list[int] = []
    for i, row in enumerate(rows):
        number = row.group.request.decoding.prompt_logprobs
        if number is None:
            continue
        # Entry p + 1 is scored by position p; entries known before a preemption are not scored again.
        first = max(row.start, len(row.group.prompt_logprobs) - 1)
        last = min(row.start + row.count, row.sequence.num_prompt - 1)
        for position in range(first, last):
            flat.append(int(query_start[i]) + position - row.start)
            targets.append(row.sequence.tokens[position + 1])
            wanted.append(number)
    if not flat:
        return None
    return PromptLogprobRows(rows=_int32(flat), targets=_int32(targets), num_logprobs=_int32(wanted))
