"""Sampling by ranks that have parts of the vocabulary (`engine.model.sharding`).

A rank sends what its part adds to a row's sum of exponentials, and candidates: its tokens that the row could choose or
report. Rank 0 samples from the candidates of all ranks as if there were no other tokens. Where every token may be
drawn, the ranks compare their sums of weights, and the rank in whose part a draw falls draws the token.

`needs_whole` names rows that need all logits. A row whose candidates turn out to be too few needs them, too: if logits
at the limit of top-k are equal, or if top-p keeps more tokens than ranks send. Which way a row takes depends on that
row alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.native.ranks import Ranks
from engine.backends.native.sampling import LogitRows
from engine.execution.sampler import sample, sample_rows
from engine.execution.weighing import weighed
from engine.interface.sampling_table import (
    GREEDY_TEMPERATURE,
    Kind,
    Masks,
    Table,
    by_torch,
    mask_words,
    new_version,
)
from engine.model.sharding import Share
from engine.scheduling.plan import Bool, Float32, Float64, Int32, SamplingBatch, StepResult

Number = TypeVar("Number", np.int32, np.float32)
MOST = 256
"""The largest number of a rank's candidates for one purpose of a row."""
_NONE = np.iinfo(np.int32).max  # in place of a candidate
_CHUNK = 64  # tokens whose weights are added first
_ROWS = 16  # whose weights are computed at once


def needs_whole(batch: SamplingBatch) -> Bool:
    """[S] rows for which candidates do not suffice: filters that torch computes, min-p alone, more than `MOST` tokens,
    forced tokens, beams with masks or with scores that become log-probabilities again, and masks that compare
    sums."""
    table = batch.table
    searching = table["beam_width"] > 0
    sampling = ~searching & (table["temperature"] >= GREEDY_TEMPERATURE)
    whole: Bool = by_torch(table) | (searching & (table["renormalize"] > 0))
    whole |= sampling & (table["top_k"] <= 0) & (table["top_p"] >= 1) & (table["min_p"] > 0)
    whole |= (sampling & (table["top_k"] > MOST)) | (table["beam_width"] > MOST) | (table["num_logprobs"] > MOST)
    whole[batch.edits["row"][batch.edits["kind"] == Kind.FORCE]] = True
    whole[batch.masked] |= searching[batch.masked]
    if len(batch.outweighed):
        whole[batch.masked[batch.outweighed >= 0]] = True
    return whole


def picked(batch: SamplingBatch, rows: NDArray[np.int64]) -> SamplingBatch:
    """The batch of some of the rows, ascending."""
    if len(rows) == len(batch.table):
        return batch
    place = np.full(len(batch.table), -1, dtype=np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    edits = batch.edits[place[batch.edits["row"]] >= 0]
    edits["row"] = place[edits["row"]]
    kept = place[batch.masked] >= 0
    return replace(
        batch,
        rows=batch.rows[rows],
        table=batch.table[rows],
        uniforms=np.ascontiguousarray(batch.uniforms[rows, : max(int(batch.table["num_draws"][rows].max()), 1)]),
        edits=edits,
        masked=place[batch.masked[kept]],
        masks=batch.masks[kept],
        outweighed=batch.outweighed[kept] if len(batch.outweighed) else batch.outweighed,
        watched=None if batch.watched is None else batch.watched[rows],
        spans=None,
        drafts=None,
        version=new_version(),
        edits_version=new_version(),
    )


class DividedSampler:
    """A rank's part in sampling. All ranks call `sample` with the same batch."""

    def __init__(self, ranks: Ranks, vocabulary: int):
        self._ranks = ranks
        self._shares = [Share(rank, ranks.count).of(vocabulary) for rank in range(ranks.count)]

    def sample(self, own: Tensor, batch: SamplingBatch) -> StepResult | None:
        """Candidates for each row, on rank 0. `own`: the rank's columns of the logits [S, vocabulary]."""
        whole = needs_whole(batch)
        some = np.flatnonzero(~whole)
        results: list[tuple[NDArray[np.int64], StepResult]] = []
        if len(some):
            step = _Step(self._ranks, self._shares, _rows(own, some), picked(batch, some))
            found = step.sample()
            whole[some[step.missed]] = True
            if found is not None:
                results.append((some, found))
        rest = np.flatnonzero(whole)
        if len(rest):
            logits = self._ranks.gather(_rows(own, rest), [end - begin for begin, end in self._shares])
            if self._ranks.rank == 0:
                results.append((rest, sample(logits, weighed(logits, picked(batch, rest)))))
        return _merged(results, len(batch.table)) if self._ranks.rank == 0 else None


def _rows(own: Tensor, rows: NDArray[np.int64]) -> Tensor:
    return own if len(rows) == len(own) else own[torch.from_numpy(rows)]


def _merged(results: list[tuple[NDArray[np.int64], StepResult]], count: int) -> StepResult:
    """The result of all rows; where several have a row, the last one counts."""
    if len(results) == 1 and len(results[0][0]) == count:
        return results[0][1]

    def put(arrays: Iterable[NDArray[Number]]) -> NDArray[Number]:
        given = list(arrays)
        made = np.zeros((count, max(values.shape[1] for values in given)), dtype=given[0].dtype)
        for (rows, _), values in zip(results, given, strict=True):
            made[rows, : values.shape[1]] = values
        return made

    watched = [result.watched for _, result in results if result.watched is not None]
    return StepResult(
        tokens=put(result.tokens for _, result in results),
        scores=put(result.scores for _, result in results),
        logprobs=put(result.logprobs for _, result in results),
        ranks=put(result.ranks for _, result in results),
        top_ids=put(result.top_ids for _, result in results),
        top_logprobs=put(result.top_logprobs for _, result in results),
        watched=put(watched) if watched else None,
    )


class _Step:
    """One batch whose rows are sampled from candidates. `missed`: rows whose candidates were too few."""

    def __init__(self, ranks: Ranks, shares: list[tuple[int, int]], own: Tensor, batch: SamplingBatch):
        self._ranks, self._batch, self._own = ranks, batch, own
        self._first, self._end = shares[ranks.rank]
        self._rows = LogitRows(own)
        table = batch.table
        self._searching = table["beam_width"] > 0
        sampling = ~self._searching & (table["temperature"] >= GREEDY_TEMPERATURE)
        self._limited = sampling & (table["top_k"] > 0)
        self._nucleus = sampling & ~self._limited & (table["top_p"] < 1)
        self._anywhere = sampling & ~self._limited & ~self._nucleus
        self._tied: Bool = np.zeros(len(table), dtype=np.bool_)
        self._floor: Float32 = np.full(len(table), -np.inf, dtype=np.float32)
        self.missed: Bool = np.zeros(len(table), dtype=np.bool_)

    def sample(self) -> StepResult | None:
        """The rows' result on rank 0, None on the others."""
        self._share_sums()
        copied = self._nucleus | self._anywhere
        copied[self._batch.masked] = True
        chosen, values = self._chosen(copied)
        parts, weights, draws = [chosen, self._reported()], None, 0
        free = np.flatnonzero(self._nucleus | self._anywhere)
        place = np.cumsum(copied) - 1  # of a row among those that are copied
        if len(free):
            weights = _Weights(values[torch.from_numpy(place[free])], self._batch.table[free], self._ranks)
            draws = self._batch.uniforms.shape[1]
            drawn = np.full((len(self._rows), draws), _NONE, dtype=np.int32)
            drawn[free] = weights.draw(self._batch.uniforms[free])
            drawn[~self._anywhere] = _NONE
            parts.insert(0, drawn)
        if self._batch.watched is not None:
            watched = self._batch.watched
            here = (watched >= self._first) & (watched < self._end)
            parts.append(np.where(here, watched - self._first, _NONE).astype(np.int32))
        ids = np.concatenate(parts, axis=1)
        candidates = self._together(ids, draws)
        table = self._batch.table.copy()
        nucleus = np.flatnonzero(self._nucleus)
        if len(nucleus):
            assert weights is not None
            final = np.take_along_axis(values.numpy()[place[nucleus]], _within(ids[nucleus], values.shape[1]), axis=1)
            final = np.where(ids[nucleus] == _NONE, -np.inf, final).astype(np.float32)
            own = torch.from_numpy(np.concatenate((final, self._floor[nucleus, None]), axis=1))
            each = self._ranks.collect(own).numpy()
            floor = each[:, :, -1].max(axis=0)
            final, rows = candidates.alike(each[:, :, :-1], nucleus), np.searchsorted(free, nucleus)
            missed, table["top_p"][nucleus] = _limits(final, floor, weights, rows, table["top_p"][nucleus])
            self.missed[nucleus] |= missed
        result = candidates.sampled(self._batch, table, self._rows, self._anywhere) if self._ranks.rank == 0 else None
        return self._ranked(result, candidates)

    def _share_sums(self) -> None:
        """Let `peak` and `log_sum` be those of whole rows."""
        rows = self._rows
        nothing: Bool = np.isnan(rows.log_sum)
        nothing[nothing] = (rows.values[nothing] == -np.inf).all(axis=1)
        own = np.where(nothing, np.float32(-np.inf), np.stack((rows.peak, rows.log_sum)))
        peaks, sums = self._ranks.collect(torch.from_numpy(own)).double().numpy().transpose(1, 0, 2)
        peak = peaks.max(axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            log_sum = np.log(np.exp(peaks - peak + sums).sum(axis=0))
        rows.peak[:] = np.where(np.isnan(log_sum), 0.0, peak)
        rows.log_sum[:] = log_sum

    def _chosen(self, copied: Bool) -> tuple[Int32, Tensor]:
        """The rank's tokens that rows could choose [S, C], and the logits of rows that are copied, as edits and masks
        leave them."""
        batch, rows, table = self._batch, self._rows, self._batch.table
        wanted = np.where(self._searching, table["beam_width"], 1)
        wanted = np.where(self._limited, table["top_k"] + 1, np.where(self._nucleus, MOST, wanted))
        wanted = np.where(self._anywhere, 0, wanted).astype(np.int32)
        edits = batch.edits[(batch.edits["token"] >= self._first) & (batch.edits["token"] < self._end)]
        edits["token"] -= self._first
        chosen = np.full((len(rows), int(wanted.max())), _NONE, dtype=np.int32)
        with rows.edited(edits, table, self._searching) if len(edits) else contextlib.nullcontext():
            values = self._own[torch.from_numpy(np.flatnonzero(copied))]
            if len(batch.masked):
                allowed = _bits(batch.masks, self._first, self._end)
                masked = torch.from_numpy(np.searchsorted(np.flatnonzero(copied), batch.masked))
                values[masked] = values[masked].masked_fill(~torch.from_numpy(allowed), -np.inf)
            for source, at in ((rows, ~copied), (LogitRows(values), copied)):
                self._take_best(source, np.flatnonzero(at), wanted, chosen)
        return chosen, values

    def _take_best(self, source: LogitRows, at: NDArray[np.int64], wanted: Int32, chosen: Int32) -> None:
        """Write the best tokens of rows: those of `source`, or all of it, in order."""
        width = min(int(wanted[at].max(initial=0)), source.vocabulary)
        if not width:
            return
        of = at if source is self._rows else np.arange(len(at))
        counts = np.minimum(wanted[at], width).astype(np.int32)
        tokens, scores = source.best(of.astype(np.int32), counts, width)
        chosen[at, :width] = np.where(scores > -np.inf, tokens, _NONE)
        number = np.arange(len(at))
        last, before = scores[number, counts - 1], scores[number, np.maximum(counts - 2, 0)]
        self._tied[at] = self._limited[at] & (counts > 1) & (last == before) & (last > -np.inf)
        nucleus = self._nucleus[at] & (counts < source.vocabulary)
        at, tokens = at[nucleus], tokens[nucleus, counts[nucleus] - 1]
        self._floor[at] = source.values[of[nucleus], tokens]

    def _reported(self) -> Int32:
        """The rank's most probable tokens, for rows that report some."""
        counts = self._batch.table["num_logprobs"]
        asking = np.flatnonzero(counts > 0)
        width = int(counts.max(initial=0))
        found = np.full((len(self._rows), max(width, 0)), _NONE, dtype=np.int32)
        if len(asking):
            width = min(width, self._rows.vocabulary)
            tokens, scores = self._rows.best(asking.astype(np.int32), np.minimum(counts[asking], width), width)
            found[asking, :width] = np.where(scores > -np.inf, tokens, _NONE)
        return found

    def _together(self, ids: Int32, draws: int) -> _Candidates:
        """The candidates of all ranks; the first ones were drawn."""
        values = np.take_along_axis(self._rows.values, _within(ids, self._rows.vocabulary), axis=1)
        known = np.where(ids == _NONE, _NONE, ids + self._first).astype(np.int32)
        own = np.concatenate((known, values.view(np.int32), self._tied[:, None].astype(np.int32)), axis=1)
        each: Int32 = self._ranks.collect(torch.from_numpy(own)).numpy()
        width = ids.shape[1]
        self.missed |= each[:, :, -1].any(axis=0)
        return _Candidates(each[:, :, :width], each[:, :, width:-1].copy().view(np.float32), draws)

    def _ranked(self, result: StepResult | None, candidates: _Candidates) -> StepResult | None:
        """The result with the ranks of tokens, if rows ask for them: every rank counts its larger logits."""
        asking = np.flatnonzero(self._batch.table["num_logprobs"] >= 0)
        if not len(asking):
            return result
        table = self._batch.table
        shape = len(asking), max(int(table["num_draws"].max()), int(table["beam_width"].max()), 1)
        asked = np.zeros(shape, dtype=np.float32)
        if result is not None:
            tokens = result.tokens[asking]
            asked[:, : tokens.shape[1]] = candidates.values_of(asking, tokens)
        asked = self._ranks.collect(torch.from_numpy(asked)).numpy()[0]
        own = self._rows.values[asking]
        counts = np.stack([(own > asked[:, column, None]).sum(axis=1) for column in range(shape[1])], axis=1)
        larger = self._ranks.collect(torch.from_numpy(counts.astype(np.int32))).numpy().sum(axis=0)
        if result is None:
            return None
        ranks = np.zeros_like(result.tokens)
        ranks[asking] = 1 + larger[:, : ranks.shape[1]]
        return replace(result, ranks=ranks)


class _Candidates:
    """Tokens and their logits: [ranks, S, C] of each rank. `draws`: how many of the first columns were drawn; one rank
    has the token of a draw."""

    def __init__(self, tokens: Int32, logits: Float32, draws: int):
        self._drawn: Int32 = tokens[:, :, :draws].min(axis=0)
        tokens = np.concatenate(list(tokens), axis=1)
        self._order = np.argsort(tokens, axis=1, kind="stable")
        self.tokens: Int32 = np.take_along_axis(tokens, self._order, axis=1)  # ascending
        self._void = self.tokens == _NONE
        self._void[:, 1:] |= self.tokens[:, 1:] == self.tokens[:, :-1]  # some are there twice
        self.logits = self.alike(logits, np.arange(len(tokens)))

    def alike(self, values: Float32, rows: NDArray[np.int64]) -> Float32:
        """[N, tokens] the values [ranks, N, C] of some rows in the order of `tokens`; -inf for those that do not
        count."""
        sorted_ = np.take_along_axis(np.concatenate(list(values), axis=1), self._order[rows], axis=1)
        return np.where(self._void[rows], np.float32(-np.inf), sorted_)

    def places(self, rows: NDArray[np.integer], tokens: Int32) -> tuple[NDArray[np.int64], Bool]:
        """The columns of tokens of rows, and which of them are candidates."""
        base = rows.astype(np.int64) << 32
        keys = (np.arange(len(self.tokens), dtype=np.int64)[:, None] << 32 | self.tokens).ravel()
        found = np.searchsorted(keys, base + tokens)
        there = keys[np.minimum(found, len(keys) - 1)] == base + tokens
        return found - rows * self.tokens.shape[1], there

    def values_of(self, rows: NDArray[np.int64], tokens: Int32) -> Float32:
        """The logits of candidates [N, C] of rows; -inf for others."""
        places, there = self.places(np.repeat(rows, tokens.shape[1]), tokens.ravel())
        values = self.logits[np.repeat(rows, tokens.shape[1]), np.where(there, places, 0)]
        return np.where(there, values, np.float32(-np.inf)).reshape(tokens.shape)

    def sampled(self, batch: SamplingBatch, table: Table, whole: LogitRows, drawn: Bool) -> StepResult:
        """The rows' result. `whole` has the sums of whole rows; the tokens of rows that are `drawn` are known."""
        rows = LogitRows(torch.from_numpy(self.logits))
        rows.peak[:], rows.log_sum[:] = whole.peak, whole.log_sum
        table = table.copy()
        table["temperature"][drawn] = 0.0  # nothing is drawn again
        places, there = self.places(batch.edits["row"], batch.edits["token"])
        edits = batch.edits[there]
        edits["token"] = places[there]
        watched = batch.watched
        if watched is not None:
            number = np.repeat(np.arange(len(watched)), watched.shape[1])
            watched = self.places(number, watched.ravel())[0].reshape(watched.shape).astype(np.int32)
        own = replace(batch, table=table, edits=edits, masks=self._masks(batch), watched=watched)
        result = sample_rows(rows, own)
        columns = np.clip(result.tokens, 0, self.tokens.shape[1] - 1)
        tokens, logprobs = np.take_along_axis(self.tokens, columns, axis=1), result.logprobs.copy()
        logprobs[np.take_along_axis(self._void, columns, axis=1)] = np.nan  # every token is banned
        at = np.flatnonzero(drawn)
        if len(at):
            found = self._drawn[at]
            width = found.shape[1]
            tokens[at, :width] = found
            scores = self.values_of(at, found) - rows.peak[at, None] - rows.log_sum[at, None]
            logprobs[at, :width] = np.where(found == _NONE, np.float32(np.nan), scores)
        top = np.take_along_axis(self.tokens, np.clip(result.top_ids, 0, self.tokens.shape[1] - 1), axis=1)
        tokens[tokens == _NONE] = 0
        return replace(result, tokens=tokens, logprobs=logprobs, top_ids=top)

    def _masks(self, batch: SamplingBatch) -> Masks:
        """The masks of the candidates."""
        if not len(batch.masked):
            return batch.masks
        void, tokens = self._void[batch.masked], self.tokens[batch.masked]
        tokens = np.where(void, 0, tokens)
        words = np.take_along_axis(batch.masks, tokens >> 5, axis=1) >> (tokens & 31).astype(np.uint32)
        bits = np.zeros((len(tokens), 32 * mask_words(tokens.shape[1])), dtype=np.uint8)
        bits[:, : tokens.shape[1]] = (words & 1) * ~void
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


class _Weights:
    """The weights of the tokens of rows that sample without top-k: exp((value - most) / temperature).

    Args:
        values: [N, own columns] float32.
        table: [N]
    """

    def __init__(self, values: Tensor, table: Table, ranks: Ranks):
        self._values, self._rank = values, ranks.rank
        self._temperature = torch.from_numpy(np.ascontiguousarray(table["temperature"]))[:, None]
        self._top = values.amax(dim=1, keepdim=True).nan_to_num(nan=torch.nan, neginf=0.0, posinf=torch.nan)
        # [N, chunks] running sums, relative to the rank's largest value
        self._sums = torch.cat([self._added(slice(at, at + _ROWS)) for at in range(0, len(values), _ROWS)]).numpy()
        temperature = table["temperature"].astype(np.float64)
        own = np.stack((self._top[:, 0].double().numpy() / temperature, self._sums[:, -1]))
        tops, sums = ranks.collect(torch.from_numpy(own)).numpy().transpose(1, 0, 2)
        self._most = np.where(sums > 0, tops, -np.inf).max(axis=0)  # largest value of all ranks, over temperature
        self._most[~np.isfinite(self._most)] = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            self._scales = np.where(sums > 0, np.exp(tops - self._most), np.where(sums == 0, 1.0, np.nan))
        self._totals: Float64 = sums * self._scales  # [ranks, N]

    def _weights(self, rows: slice | int) -> Tensor:
        values, temperature, top = self._values[rows], self._temperature[rows], self._top[rows]
        return (values / temperature - top / temperature).exp_()

    def _added(self, rows: slice) -> Tensor:
        weights = self._weights(rows)
        weights = F.pad(weights, (0, -weights.shape[1] % _CHUNK)).view(len(weights), -1, _CHUNK)
        return weights.double().sum(dim=2).cumsum(dim=1)

    def relative(self, rows: NDArray[np.int64], values: Float32) -> Float64:
        """The weights of values [M, C] of some rows."""
        temperature = self._temperature.numpy()[rows].astype(np.float64)
        with np.errstate(over="ignore"):  # a rank with NaN does not count, but what it reports is here
            relative: Float64 = np.exp(values / temperature - self._most[rows, None])
        return relative

    def total(self, rows: NDArray[np.int64]) -> Float64:
        """[M] the weights of whole rows."""
        total: Float64 = self._totals[:, rows].sum(axis=0)
        return total

    def draw(self, uniforms: Float64) -> Int32:
        """The rank's tokens at which running sums of the weights pass uniform numbers [N, C] times the whole."""
        running = np.cumsum(self._totals, axis=0)
        goals = uniforms * running[-1][:, None]
        last = np.argmax(running == running[-1], axis=0)  # where the whole is reached
        owners = np.minimum((running[:, :, None] <= goals).sum(axis=0), last[:, None])
        tokens = np.full(uniforms.shape, _NONE, dtype=np.int32)
        mine = (owners == self._rank) & (running[-1] > 0)[:, None]
        before = running[self._rank] - self._totals[self._rank]
        for row, draw in zip(*(places.tolist() for places in np.nonzero(mine)), strict=True):
            goal = (goals[row, draw] - before[row]) / self._scales[self._rank, row]
            tokens[row, draw] = self._find(row, goal)
        return tokens

    def _find(self, row: int, goal: float) -> int:
        sums: Float64 = self._sums[row]
        chunk = int(np.searchsorted(sums, min(goal, np.nextafter(sums[-1], 0.0)), side="right"))
        chunk = min(chunk, int(np.argmax(sums == sums[-1])))
        part = slice(chunk * _CHUNK, (chunk + 1) * _CHUNK)
        weights = self._weights(row)[part].numpy().astype(np.float64)
        running = np.cumsum(weights) + (sums[chunk - 1] if chunk else 0.0)
        possible = np.flatnonzero(weights)
        passed = possible[running[possible] > goal]
        return part.start + int(passed[0] if len(passed) else possible[-1])


def _limits(
    final: Float32, floor: Float32, weights: _Weights, rows: NDArray[np.int64], top_p: Float32
) -> tuple[Bool, Float32]:
    """Whether top-p keeps tokens [N] that are no candidates, and a top-p that keeps as many of the candidates.

    Args:
        final: [N, C] values of candidates as edits and masks leave them.
        floor: [N] a bound that no other token's value exceeds.
        rows: [N] rows of `weights`.
    """
    own = weights.relative(rows, final)
    goal = top_p.astype(np.float64) * weights.total(rows)
    missed = ~(np.where(final > floor[:, None], own, 0.0).sum(axis=1) >= goal)
    among = own.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        limit = np.where(among > 0, goal / among, top_p)
    below_one = np.nextafter(np.float32(1.0), np.float32(0.0))
    return missed, np.clip(limit, np.finfo(np.float32).tiny, below_one).astype(np.float32)


def _within(ids: Int32, columns: int) -> Int32:
    """The columns of candidates, any where there is none."""
    return np.minimum(ids, columns - 1)


def _bits(masks: Masks, first: int, end: int) -> Bool:
    """[M, end - first] the bits of some tokens."""
    start = first // 32
    words = np.ascontiguousarray(masks[:, start : mask_words(end)])
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return bits[:, first - 32 * start : end - 32 * start].astype(np.bool_)
