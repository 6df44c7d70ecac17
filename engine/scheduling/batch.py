"""Arranges the rows of a step in flat arrays."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from engine.interface.constraints import Constraint, Weighing, allow, fill_masks
from engine.interface.sampling_table import EDIT, NO_EDITS, TABLE, EditList, Kind, Masks, mask_words, new_version
from engine.interface.token_sides import SIDES, Sides
from engine.scheduling.encoder_input import EncoderInput
from engine.scheduling.philox import uniforms
from engine.scheduling.plan import (
    CrossRows,
    EncoderBatch,
    Float32,
    Float64,
    ImageRows,
    Int32,
    PoolingRow,
    PromptLogprobRows,
    SamplingBatch,
    Searches,
    StateRows,
    StepPlan,
)
from engine.scheduling.repetition import dry_penalties
from engine.scheduling.row import Row
from engine.scheduling.sequence import IntBuffer, Sequence, SequenceGroup
from engine.scheduling.step import SearchAhead

# Positions of an answer for which random numbers are made at a time: many take hardly longer than one.
_AHEAD = 32
_NO_SEARCHES: Mapping[SequenceGroup, SearchAhead] = {}
_UNKNOWN = np.zeros(1, dtype=np.int32)  # in place of a token
_NO_ROWS = np.zeros(0, dtype=np.int32)
_BIAS, _SOURCE, _HISTORY, _DRY, _BAN, _FORCE = map(int, Kind)  # enumeration members are slow to access


@dataclass(slots=True)
class LastStep:
    """The parts of the last step that the next one shares if the same requests decode in both."""

    # the request of each row; empty if the step did more than decode
    groups: list[SequenceGroup] = field(default_factory=list)
    # sampling, cross, sides: as in its plan; the sides of an answer's tokens do not change from one to the next
    sampling: SamplingBatch | None = None
    cross: CrossRows | None = None
    sides: Sides = field(default_factory=dict)

    def forget(self) -> None:
        """The next step has nothing in common with it."""
        self.groups, self.sampling, self.cross, self.sides = [], None, None, {}


def _int32(values: Seq[int]) -> Int32:
    return np.array(values, dtype=np.int32)


def build_plan(
    rows: Seq[Row],
    copies: Seq[tuple[int, int]],
    block_size: int,
    inputs: Seq[EncoderInput] = (),
    last: LastStep | None = None,
    pending: Mapping[Sequence, int] | None = None,
    searches: Mapping[SequenceGroup, SearchAhead] = _NO_SEARCHES,
) -> StepPlan:
    """The step plan of these rows, in order; the encoder runs over `inputs` first. Either all rows have pages, or none
    has. `last` is read and updated. `pending` has the sequences that the step in flight samples, each with the number
    of its sampled token; `searches` has those groups of them whose beams are not known either."""
    groups = [row.group for row in rows]
    decoding = all(row.sampled and row.count == 1 and row.start >= row.sequence.num_prompt for row in rows)
    known = last if decoding and last is not None and last.groups == groups else None
    unchunked = any(group.unchunked for group in groups)
    # A page on which a search begins is not in any table yet.
    width = max([search.rows[0].start // block_size + 1 for search in searches.values()], default=0)
    tables = _tables([row.sequence.table for row in rows], width)
    if decoding:  # few numbers: lists are faster than array arithmetic
        starts = [row.start for row in rows]
        query_start = np.arange(len(rows) + 1, dtype=np.int32)
        context_lens, positions = _int32([start + 1 for start in starts]), _int32(starts)
        if pending:
            token_ids = _int32([0 if row.sequence in pending else row.sequence.tokens[row.start] for row in rows])
        else:
            token_ids = _int32([row.sequence.tokens[row.start] for row in rows])
        if searches:
            pages = tables[np.arange(len(rows)), positions // block_size].tolist()
        else:
            pages = [row.sequence.table[row.start // block_size] for row in rows]
        slots = _int32([page * block_size + start % block_size for page, start in zip(pages, starts, strict=True)])
    else:
        first, counts = _int32([row.start for row in rows]), _int32([row.count for row in rows])
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        context_lens = _attended(rows, counts) if unchunked else first + counts
        row_of_token = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        positions = np.arange(query_start[-1], dtype=np.int32) + (first - query_start[:-1])[row_of_token]
        token_ids = np.concatenate([part for row in rows for part in _tokens(row)])
        slots = positions[:0]
        if not unchunked:
            slots = tables[row_of_token, positions // block_size] * block_size + positions % block_size
    images, image_slots = ((), None) if decoding else _images(rows, query_start)
    sides = known.sides if known is not None else _sides(rows) if any(group.sides for group in groups) else {}
    sampling = _sampling(rows, query_start) if known is None else _sampling_again(rows, known.sampling)
    plan = StepPlan(
        version=new_version() if sampling is None else sampling.version,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=tables,
        copies=np.array(copies, dtype=np.int32).reshape(-1, 2),
        sampling=sampling,
        prompt_logprobs=None if decoding else _prompt_logprobs(rows, query_start),
        encoder=_encoder(inputs, block_size) if inputs else None,
        cross=_cross(groups) if known is None else known.cross,
        states=_states(rows),
        pooling=() if decoding else _pooling(rows),
        unchunked=unchunked,
        sides=sides if image_slots is None else {**sides, "image_slots": image_slots},
        images=images,
        two_way=None if decoding else _two_way(rows),
        signals=_signals(rows) if unchunked else (),
        sources=_sources(rows, query_start, pending) if pending else None,
        searches=_searches(rows, searches, pending, block_size) if searches and pending else None,
    )
    if last is not None:
        last.groups = groups if decoding else []
        last.sampling, last.cross, last.sides = plan.sampling, plan.cross, plan.sides
    return plan


def _tokens(row: Row) -> tuple[Int32, ...]:
    """A row's known tokens, and its drafted ones. A pending token is the only one of its row."""
    known = row.sequence.tokens.view(row.start, min(row.start + row.count, row.sequence.num_tokens))
    if row.drafts:
        return known, _int32(row.drafts)
    return (known if len(known) else _UNKNOWN,)


def _sources(rows: Seq[Row], query_start: Int32, pending: Mapping[Sequence, int]) -> Int32 | None:
    sources = np.full(query_start[-1], -1, dtype=np.int32)
    sources[query_start[1:] - 1] = [pending.get(row.sequence, -1) for row in rows]
    return sources if (sources >= 0).any() else None


def _searches(
    rows: Seq[Row], searches: Mapping[SequenceGroup, SearchAhead], pending: Mapping[Sequence, int], block_size: int
) -> Searches:
    first: dict[SequenceGroup, int] = {}
    for number, row in enumerate(rows):
        first.setdefault(row.group, number)
    starts = [search.rows[0].start for search in searches.values()]
    beams = [group.beam for group in searches if group.beam is not None]
    stop_ids = [sorted(beam.stop_ids) for beam in beams]
    return Searches(
        rows=_int32([first[group] for group in searches]),
        places=_int32([pending[group.sequences[0]] for group in searches]),
        widths=_int32([beam.num_beams for beam in beams]),
        candidates=_int32([beam.num_candidates for beam in beams]),
        columns=_int32([start // block_size for start in starts]),
        fresh=np.array([start % block_size == 0 for start in starts]),
        scores=np.array([sequence.score for group in searches for sequence in group.sequences], dtype=np.float32),
        pages=_int32([page for search in searches.values() for page in search.pages]),
        stop_ids=_int32([token for tokens in stop_ids for token in tokens]),
        stops=np.cumsum([0, *map(len, stop_ids)], dtype=np.int32),
    )


def _states(rows: Seq[Row]) -> StateRows | None:
    states = [row.state for row in rows if row.state is not None]
    if not states:
        return None
    return StateRows(
        sources=_int32([state.source for state in states]),
        targets=_int32([state.target for state in states]),
        snapshots=_int32([state.snapshot for state in states]),
        afters=_int32([state.after for state in states]),
    )


def _tables(tables: Seq[IntBuffer], least: int) -> Int32:
    laid = np.zeros((len(tables), max([least, *[table.size for table in tables]])), dtype=np.int32)
    for i, table in enumerate(tables):
        laid[i, : table.size] = table.view()
    return laid


def _pooling(rows: Seq[Row]) -> tuple[PoolingRow, ...]:
    return tuple(
        PoolingRow(
            row=number,
            pooling=row.group.request.pooling,
            start=row.start,
            complete=row.start + row.count == row.sequence.num_tokens,
            before=row.group.pooled,
        )
        for number, row in enumerate(rows)
        if row.group.request.pooling is not None
    )


def _sides(rows: Seq[Row]) -> Sides:
    """The sides of the rows' tokens; sides with only default values are left out."""
    return _sides_of([(row.group.sides, row.start, row.count) for row in rows])


def _sides_of(parts: Seq[tuple[Sides, int, int]]) -> Sides:
    """The sides of this many tokens from a position on, for each of some sequences."""
    names = {
        name
        for sides, start, _ in parts
        for name, known in sides.items()
        if SIDES[name].reads is not None and SIDES[name].is_known(known, start)
    }
    found = {}
    for side in (SIDES[name] for name in sorted(names)):
        nothing = side.array(())
        values = [side.part(sides.get(side.name, nothing), start, count) for sides, start, count in parts]
        found[side.name] = np.concatenate(values)
    return found


def _images(rows: Seq[Row], query_start: Int32) -> tuple[tuple[ImageRows, ...], Int32 | None]:
    """The images whose vectors tokens of the rows have, and of each token the number of its vector among all of these,
    from 1 on; None where there are none."""
    if not any(row.group.request.images for row in rows):
        return (), None
    found: list[ImageRows] = []
    slots, count = np.zeros(query_start[-1], dtype=np.int32), 0
    for row, begin in zip(rows, query_start.tolist(), strict=False):
        for image in row.group.request.images:
            first, end = image.part(row.start, row.count)
            if first == end:
                continue
            places = image.places[first:end] - row.start + begin
            slots[places] = np.arange(count + 1, count + 1 + end - first, dtype=np.int32)
            count += end - first
            found.append(ImageRows(key=image.key, pixels=image.pixels, size=image.size, first=first, count=end - first))
    return (tuple(found), slots) if found else ((), None)


def _two_way(rows: Seq[Row]) -> tuple[int, ...] | None:
    """The value of `AttentionMetadata.two_way` for each row; None if it is 0 for all."""

    def sees(row: Row) -> int:
        for image in row.group.request.images:
            first, end = image.two_way or (0, 0)
            if row.start < end and row.start + row.count > first:
                return 2 if image.of_prompt else 1
        return 0

    found = tuple(map(sees, rows))
    return found if any(found) else None


def _attended(rows: Seq[Row], counts: Int32) -> Int32:
    """The number of attended tokens in each whole input: the first ones, usually all."""
    poolings = [row.group.request.pooling for row in rows]
    asked = [None if pooling is None else pooling.attended for pooling in poolings]
    if not any(asked):
        return counts
    return _int32([count if most is None else min(most, count) for most, count in zip(asked, counts, strict=True)])


def _signals(rows: Seq[Row]) -> tuple[Float32 | None, ...]:
    found = tuple(row.group.request.signal for row in rows)
    return found if any(signal is not None for signal in found) else ()


def _encoder(inputs: Seq[EncoderInput], block_size: int) -> EncoderBatch:
    slots = []
    for encoder_input in inputs:
        places = np.arange(len(encoder_input.tokens), dtype=np.int32)
        slots.append(_int32(encoder_input.pages)[places // block_size] * block_size + places % block_size)
    starts = np.zeros(len(inputs) + 1, dtype=np.int32)
    np.cumsum([len(encoder_input.tokens) for encoder_input in inputs], out=starts[1:])
    return EncoderBatch(
        token_ids=np.concatenate([encoder_input.tokens for encoder_input in inputs]),
        starts=starts,
        slots=np.concatenate(slots),
        signals=tuple(encoder_input.signal for encoder_input in inputs if encoder_input.signal is not None),
        sides=_sides_of([(one.sides, 0, len(one.tokens)) for one in inputs]),
    )


def _cross(groups: Seq[SequenceGroup]) -> CrossRows | None:
    if not any(group.encoder_input for group in groups):
        return None
    owners = np.cumsum([0, *(a is not b for a, b in pairwise(groups))], dtype=np.int32)
    inputs = [group.encoder_input for group in dict.fromkeys(groups)]
    tables = np.zeros(
        (len(inputs), max(len(encoder_input.pages) for encoder_input in inputs if encoder_input)), dtype=np.int32
    )
    for i, encoder_input in enumerate(inputs):
        if encoder_input is not None:
            tables[i, : len(encoder_input.pages)] = encoder_input.pages
    lengths = _int32([len(encoder_input.tokens) if encoder_input else 0 for encoder_input in inputs])
    return CrossRows(tables=tables[owners], lens=lengths[owners], owners=owners)


def _sampling(rows: Seq[Row], query_start: Int32) -> SamplingBatch | None:
    is_sampled = [row.sampled > 0 for row in rows]
    if not any(is_sampled):
        return None
    token_rows = query_start[1:][is_sampled] - 1
    rows = [row for row in rows if row.sampled]
    spans = drafts = None
    if any(row.drafts for row in rows):
        spans = np.cumsum([0, *(row.sampled for row in rows)], dtype=np.int32)
        drafts = _int32([token for row in rows for token in (*row.drafts, -1)])
        token_rows = np.arange(spans[-1], dtype=np.int32) + np.repeat(token_rows + 1 - spans[1:], np.diff(spans))
        rows = [position for row in rows for position in row.positions()]
    draws, places = [_num_draws(row.group) for row in rows], [row.num_output for row in rows]
    table = np.frombuffer(bytearray().join([row.group.parameters for row in rows]), dtype=TABLE)
    table["num_draws"], table["position"] = draws, places
    table["choice"] = [row.sequence.index for row in rows]
    return SamplingBatch(
        rows=token_rows,
        table=table,
        uniforms=_uniforms(rows, draws, places),
        edits=_edits(rows),
        watched=_watched(rows),
        spans=spans,
        drafts=drafts,
        **_masks(rows),
    )


def _watched(rows: Seq[Row]) -> Int32 | None:
    listed = [row.group.request.decoding.logprob_token_ids for row in rows]
    if not any(listed):
        return None
    watched = np.zeros((len(rows), max(map(len, listed))), dtype=np.int32)
    for i, tokens in enumerate(listed):
        watched[i, : len(tokens)] = tokens
    return watched


def _sampling_again(rows: Seq[Row], before: SamplingBatch | None) -> SamplingBatch | None:
    """The sampling of rows one token later: only what depends on their tokens is computed again."""
    assert before is not None
    groups = {row.group for row in rows}
    changes: dict[str, Any] = {}
    if any(group.draws for group in groups):
        places = [row.num_output for row in rows]
        changes["uniforms"] = _uniforms(rows, before.table["num_draws"].tolist(), places)
        table = changes["table"] = before.table.copy()
        table["position"] = places
    if any(group.has_changing_edits for group in groups):
        changes |= {"edits": _edits(rows), "edits_version": new_version()}
    if any(row.sequence.constraint is not None for row in rows):
        masks = _masks(rows)
        if not np.array_equal(masks.get("masked", _NO_ROWS), before.masked):  # used rows changed
            changes |= {"version": new_version(), "masked": _NO_ROWS, "outweighed": _NO_ROWS, "fill": None}
        changes |= masks
    return replace(before, **changes) if changes else before


def _edits(rows: Seq[Row]) -> EditList:
    parts: list[tuple[int, int, Int32 | list[int], float]] = []  # row, kind, tokens, value
    values_of: dict[int, Float32] = {}  # values of kinds that have one for each token
    for i, row in enumerate(rows):
        group = row.group
        if not group.has_edits:
            continue
        if group.biased is not None:
            tokens, values_of[len(parts)] = group.biased
            parts.append((i, _BIAS, tokens, 0.0))
        if len(group.favoured):
            parts.append((i, _SOURCE, group.favoured, 1.0 / group.request.decoding.encoder_repetition_penalty))
        if group.has_penalties:
            known, prompt = row.sequence.tokens, row.sequence.num_prompt
            parts.append((i, _HISTORY, known.view(0, prompt), 0.0))
            parts.append((i, _HISTORY, known.view(prompt), 1.0))
        if (dry := group.request.decoding.dry) is not None:
            tokens, values_of[len(parts)] = dry_penalties(dry, row.sequence)
            parts.append((i, _DRY, tokens, 0.0))
        if group.has_bans:
            parts.append((i, _BAN, banned_tokens(row), 0.0))
        if group.has_forced_tokens:
            parts.append((i, _FORCE, list(forced_tokens(row)), 0.0))
    if not parts:
        return NO_EDITS
    numbers, kinds, tokens_of, values = zip(*parts, strict=True)
    lengths = [len(tokens) for tokens in tokens_of]
    first = np.empty(len(parts), dtype=EDIT)
    first["row"], first["kind"], first["value"] = numbers, kinds, values
    edits: EditList = np.repeat(first, lengths)
    np.concatenate(tokens_of, out=edits["token"], casting="unsafe")  # numpy makes floats of nothing
    for part, own in values_of.items():
        start = sum(lengths[:part])
        edits["value"][start : start + len(own)] = own
    return edits


def _masks(rows: Seq[Row]) -> dict[str, Any]:
    """The rows that have constraints, and the function that fills their masks when needed."""
    masked = [i for i, row in enumerate(rows) if row.sequence.mask is not None]
    if not masked:
        return {}
    made: dict[str, Any] = {"masked": _int32(masked), "fill": partial(_fill, [rows[i] for i in masked])}
    constraints = [rows[i].sequence.mask for i in masked]
    if any(isinstance(constraint, Weighing) for constraint in constraints):
        weighed = [one.outweighed_from if isinstance(one, Weighing) else -1 for one in constraints]
        made["outweighed"] = _int32(weighed)
    return made


def _fill(rows: Seq[Row]) -> Masks:
    """The masks of what constraints leave of the vocabulary; for a complete constraint, the end of the answer.

    An end that is too early for `min_tokens` or `min_length` is left out, unless nothing else may follow.
    """
    constraints: list[Constraint] = [row.sequence.mask for row in rows if row.sequence.mask is not None]
    masks = np.zeros((len(rows), mask_words(constraints[0].vocab_size)), dtype=np.uint32)
    open_places = [place for place, constraint in enumerate(constraints) if not constraint.is_complete]
    fill_masks([constraints[place] for place in open_places], open_places, masks)
    for place, (row, constraint) in enumerate(zip(rows, constraints, strict=True)):
        if constraint.is_complete:
            allow(masks[place], row.group.request.decoding.eos_ids | row.group.request.decoding.stop_ids)
        elif row.group.has_bans and (early := _early_ends(row)):
            ends = np.zeros_like(masks[place])
            allow(ends, early)
            if (rest := masks[place] & ~ends).any():
                masks[place] = rest
    return masks


def _num_draws(group: SequenceGroup) -> int:
    if group.beam is not None:
        return 0
    return 1 if group.started else group.request.decoding.n


def _uniforms(rows: Seq[Row], draws: Seq[int], places: Seq[int]) -> Float64:
    """[S, max draws] numbers for rows that sample the tokens at `places` of their answers."""
    numbers = np.zeros((len(rows), max(1, *draws)), dtype=np.float64)
    _look_ahead([(rows[i], places[i]) for i, count in enumerate(draws) if count == 1])
    for i, count in enumerate(draws):
        group, sequence, place = rows[i].group, rows[i].sequence, places[i]
        if not group.draws:
            continue
        if count == 1:
            numbers[i, 0] = sequence.uniforms[place]
        else:
            choices = range(sequence.index, sequence.index + count)
            numbers[i, :count] = uniforms([group.seed] * count, choices, [place] * count)
    return numbers


def _look_ahead(rows: Seq[tuple[Row, int]]) -> None:
    """Give each drawing row's sequence its number for the next token, and those for the tokens after it."""
    rows = [(row, place) for row, place in rows if row.group.draws and place not in row.sequence.uniforms]
    if not rows:
        return
    made = uniforms(
        [row.group.seed for row, _ in rows for _ in range(_AHEAD)],
        [row.sequence.index for row, _ in rows for _ in range(_AHEAD)],
        [place + more for _, place in rows for more in range(_AHEAD)],
    )
    for (row, place), numbers in zip(rows, made.reshape(len(rows), _AHEAD).tolist(), strict=True):
        row.sequence.uniforms = dict(enumerate(numbers, start=place))


def banned_tokens(row: Row) -> Int32:
    """Tokens that must not come next, in rising order, according to the logits processors of `transformers`."""
    decoding, tokens = row.group.request.decoding, row.sequence.tokens.view()
    lasting = _lasting_bans(row)
    banned: list[int] = []
    if decoding.no_repeat_ngram_size:
        banned += _ngram_ends(tokens, tokens, decoding.no_repeat_ngram_size)
    if decoding.encoder_no_repeat_ngram_size:
        banned += _ngram_ends(row.group.source, tokens, decoding.encoder_no_repeat_ngram_size)
    if decoding.bad_words:
        banned += _word_ends(decoding.bad_words, tokens)
    return np.union1d(lasting, _int32(banned)) if banned else lasting


def _lasting_bans(row: Row) -> Int32:
    """Banned tokens that depend only on the place in the answer. The group keeps them: a thousand ends of each of many
    rows take milliseconds to list, and are the same in the next step."""
    decoding, sequence, kept = row.group.request.decoding, row.sequence, row.group.lasting_bans
    # With a forced BOS after a single prompt token, the first free choice is the second one.
    begin = 1 if sequence.num_prompt == 1 and decoding.forced_bos_token_id is not None else 0
    begins = row.num_output == begin
    early = frozenset[int]() if sequence.mask is not None else _early_ends(row)  # a mask respects them
    if (begins, early) not in kept:
        banned = early.union(decoding.suppress_tokens, decoding.begin_suppress_tokens if begins else ())
        kept[begins, early] = _int32(sorted(banned))
    return kept[begins, early]


def _early_ends(row: Row) -> frozenset[int]:
    """Tokens that end an answer, but are not allowed yet."""
    decoding = row.group.request.decoding
    stops, ends = row.num_output < decoding.min_tokens, row.sequence.num_prompt + row.num_output < decoding.min_length
    if stops and ends:
        return decoding.stop_ids | decoding.eos_ids
    return decoding.stop_ids if stops else decoding.eos_ids if ends else frozenset()


def forced_tokens(row: Row) -> tuple[int, ...]:
    """The only tokens that may come next; empty if there is a free choice."""
    return row.group.request.decoding.forced_after(row.start + row.count, row.num_output)


def _word_ends(words: Seq[tuple[int, ...]], tokens: Int32) -> list[int]:
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
        for position in row.scored:
            flat.append(int(query_start[i]) + position - row.start)
            targets.append(row.sequence.tokens[position + 1])
            wanted.append(row.group.request.decoding.prompt_logprobs or 0)
    if not flat:
        return None
    return PromptLogprobRows(rows=_int32(flat), targets=_int32(targets), num_logprobs=_int32(wanted))
