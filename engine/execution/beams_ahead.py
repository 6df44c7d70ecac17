"""Beams that continue before the host has applied the answer that selects them (`engine.scheduling.plan.Searches`).

If the candidates of the previous step are known here, as on a CPU, the plan is completed with them. On a GPU, kernels
choose, copy pages and exchange rows of the block tables, and nothing waits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.execution.buffers import Buffer
from engine.execution.kv_cache import KVCache
from engine.scheduling.plan import Float32, Int32, Searches, StepPlan, StepResult
from engine.scheduling.search import rank

if TYPE_CHECKING:
    from engine.execution.sampler_device import DeviceSamples


def resolved(plan: StepPlan, before: StepResult, block_size: int) -> StepPlan:
    """A plan with searches, turned into one without: the result of the previous step selects the beams."""
    searches, sources = plan.searches, plan.sources
    assert searches is not None
    assert sources is not None
    token_ids, sources, slots = plan.token_ids.copy(), sources.copy(), plan.slots.copy()
    tables, copies = plan.block_tables.copy(), plan.copies.tolist()
    bounds = list(accumulate(searches.widths.tolist(), initial=0))
    for number, (begin, end) in enumerate(pairwise(bounds)):
        row, place = int(searches.rows[number]), int(searches.places[number])
        width, column = end - begin, int(searches.columns[number])
        beams = slice(place, place + width)
        stops = searches.stop_ids[slice(*searches.stops[number : number + 2])]
        chosen = _chosen(
            searches.scores[begin:end],
            before.tokens[beams],
            before.scores[beams],
            int(searches.candidates[number]),
            frozenset(stops.tolist()),
        )
        continued: set[int] = set()
        for beam, (parent, token) in enumerate(chosen):
            page, own = int(plan.block_tables[row + parent, column]), int(searches.pages[begin + beam])
            if searches.fresh[number]:
                page = own
            elif parent in continued:
                copies.append([page, own])
                page = own
            continued.add(parent)
            tables[row + beam] = plan.block_tables[row + parent]
            tables[row + beam, column] = page
            at = int(plan.query_start[row + beam])
            token_ids[at], sources[at] = token, -1
            slots[at] = page * block_size + plan.positions[at] % block_size
    return replace(
        plan,
        token_ids=token_ids,
        sources=sources,
        slots=slots,
        block_tables=tables,
        copies=np.array(copies, dtype=np.int32).reshape(-1, 2),
        searches=None,
    )


def _chosen(
    scores: Float32, tokens: Int32, candidate_scores: Float32, candidates: int, stop_ids: frozenset[int]
) -> list[tuple[int, int]]:
    """The beam that each row continues, and its token; any beam if too few are left."""
    (ranking,) = rank([scores.tolist()], tokens[None], candidate_scores[None], candidates)
    live = [
        (place // ranking.width, token)
        for place, token, score in zip(ranking.places, ranking.tokens, ranking.scores, strict=True)
        if token not in stop_ids and score > -np.inf
    ][: len(scores)]
    return live + [(0, 0)] * (len(scores) - len(live))


class BeamsOnDevice:
    """Chooses the continuing beams with kernels of `engine.backends.triton`. `sampled`: int32 memory that has the
    previous step's tokens and receives the chosen ones."""

    def __init__(self, sampled: Tensor):
        self._sampled = sampled
        self._numbers = Buffer(1024, torch.int32, sampled.device)
        rows, device = len(sampled), sampled.device
        self._places = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._pairs = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self._pages = torch.zeros(rows, dtype=torch.int32, device=device)

    def go_on(self, searches: Searches, before: DeviceSamples, cache: KVCache, width: int, tables: Tensor) -> None:
        """Update tokens, pages and tables to what the plan's step expects.

        Args:
            before: the samples of the previous step; the sampler was not used since.
            width: number of columns of the plan's tables.
            tables: [rows, blocks] int32, contiguous, the plan's tables.
        """
        from engine.backends.triton import beams

        assert before.scores is not None
        columns = before.tokens.shape[1]
        numbers, most, total = _numbers(searches, columns)
        beams.go_on(
            before.tokens,
            before.scores,
            self._numbers.fill(numbers),
            tables,
            self._sampled,
            (self._places, self._pairs, self._pages),
            len(searches.rows),
            beams.width_for(int(searches.widths.max()), most),
        )
        continued, own, last = self._places[:, :total].unbind()
        rows = tables[:, :width]
        rows.index_copy_(0, own, rows.index_select(0, continued))
        tables.view(-1).index_copy_(0, last, self._pages[:total])
        cache.copy_found_pages(self._pairs[:total])

    def warm(self) -> None:
        """Compile the kernels, so that no request waits for that."""
        from engine.backends.triton import beams

        device = self._sampled.device
        numbers = np.zeros(beams.FIELDS + 2, dtype=np.int32)
        numbers[[2, 3, 7, 8, 9, 10]] = 1, 1, beams.FIELDS, beams.FIELDS + 1, 0, 0
        # Triton compiles again for addresses that are not multiples of 16, so each array has separate memory, as it
        # will have later.
        tokens, tables = (torch.zeros(1, 1, dtype=torch.int32, device=device) for _ in range(2))
        scores = torch.zeros(1, 1, dtype=torch.float32, device=device)
        found = self._places, self._pairs, self._pages
        for width in beams.WIDTHS:
            beams.go_on(tokens, scores, self._numbers.fill(numbers), tables, self._sampled, found, 1, width)


def _numbers(searches: Searches, columns: int) -> tuple[Int32, int, int]:
    """The numbers for the kernel, the maximum number of candidates of a search, and the number of rows of all
    searches."""
    from engine.backends.triton import beams

    count, total = len(searches.rows), len(searches.pages)
    candidates = np.minimum(searches.candidates, columns)
    first = np.cumsum(searches.widths) - searches.widths
    scores = count * beams.FIELDS
    pages, stops = scores + total, scores + 2 * total
    fields = np.stack(
        (
            searches.rows,
            searches.places,
            searches.widths,
            candidates,
            searches.columns,
            searches.fresh.astype(np.int32),
            first,
            scores + first,
            pages + first,
            stops + searches.stops[:-1],
            stops + searches.stops[1:],
        ),
        axis=1,
    ).astype(np.int32)
    bits = searches.scores.view(np.int32)
    numbers = np.concatenate((fields.ravel(), bits, searches.pages, searches.stop_ids))
    return numbers, int((searches.widths * candidates).max()), total
