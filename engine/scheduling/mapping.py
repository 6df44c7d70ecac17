"""The map of the pages (`engine.interface.cache_map`), drawn from the scheduler's data. It changes nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from engine.interface.cache_map import CacheMap, CellKinds, LiveRequest
from engine.scheduling.block_pool import CACHED, HELD, BlockPool
from engine.scheduling.sequence import SequenceGroup, Status

MAX_CELLS = 4096  # cells of a map; a larger pool's cells stand for several pages each
MAX_LISTED = 64  # running requests, and waiting ones
MAX_NAMED = 4  # holders of a cell

Ints = NDArray[np.int64]
Tables = list[NDArray[np.int32]]


def draw_map(pool: BlockPool, groups: Iterable[SequenceGroup]) -> CacheMap:
    """The current map, taken between steps, of all pages and all unfinished requests."""
    unfinished = list(groups)
    running = sorted((group for group in unfinished if group.status is Status.RUNNING), key=_order)
    queue = (group for group in unfinished if group.status in (Status.RESTORING, Status.WAITING))
    waiting = heapq.nsmallest(MAX_LISTED, queue, key=_order)
    tables, found = [_tables(group) for group in running], [_found(group) for group in running]
    pages, owners = _entries(tables)
    size = max(1, -(-pool.total // MAX_CELLS))
    states = pool.snapshot()
    facts = (
        _per_cell(states == HELD, size),
        _per_cell(states == CACHED, size),
        _per_cell(np.bincount(pages, minlength=pool.total + 1)[1:], size, most=True),
        _per_cell(_marked(found, pool.total), size),
    )
    holders = np.zeros((len(facts[0]), len(running)), dtype=bool)
    holders[(pages - 1) // size, owners] = True
    runs, kinds = _group(holders, facts)
    counts = np.bincount(owners, minlength=len(running)).tolist()
    return CacheMap(
        pages_per_cell=size,
        runs=runs,
        kinds=kinds,
        running=[
            # Tables of several sequences have pages in common.
            _describe(group, len(np.setdiff1d(np.concatenate(own), [0])) if len(own) > 1 else count, marks)
            for group, own, count, marks in zip(running[:MAX_LISTED], tables, counts, found, strict=False)
        ],
        waiting=[_describe(group) for group in waiting],
    )


def _order(group: SequenceGroup) -> tuple[int, int]:
    return group.key


def _tables(group: SequenceGroup) -> Tables:
    tables = [sequence.table.view() for sequence in group.sequences]
    return tables if group.encoder_input is None else [*tables, np.array(group.encoder_input.pages, dtype=np.int32)]


def _found(group: SequenceGroup) -> Tables:
    """The part of it that was found in the cache."""
    found = [group.sequences[0].table.view(0, group.num_found)] if group.num_found else []
    if group.encoder_input is not None and group.encoder_input.num_cached:
        found.append(np.array(group.encoder_input.pages, dtype=np.int32))
    return found


def _entries(tables: Seq[Tables]) -> tuple[Ints, Ints]:
    """Every entry of every table: the page, and the request's number."""
    flat = [table for own in tables for table in own]
    pages = np.concatenate(flat).astype(np.int64) if flat else np.zeros(0, dtype=np.int64)
    owners = np.repeat(np.arange(len(tables)), [sum(map(len, own)) for own in tables])
    there = pages > 0  # 0 replaces pages outside the window
    return (pages, owners) if there.all() else (pages[there], owners[there])


def _marked(found: Seq[Tables], total: int) -> NDArray[np.bool_]:
    """[total] whether a page is among them."""
    marks = np.zeros(total + 1, dtype=bool)
    flat = [table for own in found for table in own]
    if flat:
        marks[np.concatenate(flat)] = True
    return marks[1:]


def _per_cell(values: NDArray[np.generic], size: int, *, most: bool = False) -> Ints:
    """[P] a number for each page -> [ceil(P / size)] the sum, or the maximum, for each cell."""
    numbers = values.astype(np.int64)
    if size == 1:
        return numbers
    starts = np.arange(0, len(values), size)
    return np.maximum.reduceat(numbers, starts) if most else np.add.reduceat(numbers, starts)


def _group(holders: NDArray[np.bool_], facts: Seq[Ints]) -> tuple[list[int], CellKinds]:
    """Runs of equal cells, and their kinds.

    Args:
        holders: [cells, running requests] whether the request holds a page of the cell.
        facts: the facts of `CellKinds`, in order, for each cell.
    """
    num_cells, width = holders.shape[0], max(holders.shape[1], 1)
    cells, rows = np.divmod(np.flatnonzero(holders), width)
    # Cells are alike if these sums are equal; their terms are random numbers that are always the same.
    weights = np.random.default_rng(0).random(width + len(facts))
    keys = np.bincount(cells, weights=weights[rows], minlength=num_cells).astype(np.float64)  # integers where empty
    for fact, weight in zip(facts, weights[width:], strict=True):
        keys += fact * weight
    _, first, kind = np.unique(keys, return_index=True, return_inverse=True)
    starts = np.flatnonzero(np.diff(kind, prepend=-1))
    lengths = np.diff(starts, append=len(kind))
    runs = np.stack([lengths, kind[starts]], axis=1).ravel().tolist()
    cells, rows = np.divmod(np.flatnonzero(holders[first]), width)
    counts = np.bincount(cells, minlength=len(first))
    ends = np.cumsum(counts)
    named = (np.arange(len(cells)) - (ends - counts)[cells] < MAX_NAMED) & (rows < MAX_LISTED)
    kept = np.bincount(cells[named], minlength=len(first))
    stops = np.cumsum(kept).tolist()
    names = rows[named].tolist()
    held, cached, tables, found = (fact[first].tolist() for fact in facts)
    return runs, CellKinds(
        held=held,
        cached=cached,
        tables=tables,
        found=found,
        holders=[names[start:stop] for start, stop in zip([0, *stops], stops, strict=False)],
        others=(counts - kept).tolist(),
    )


def _describe(group: SequenceGroup, num_pages: int = 0, found: Tables | None = None) -> LiveRequest:
    encoded = 0 if group.encoder_input is None else len(group.encoder_input.tokens)
    is_encoded = group.encoder_input is not None and bool(group.encoder_input.pages)
    sequences = group.sequences
    return LiveRequest(
        request_id=group.request.request_id,
        num_prompt=sequences[0].num_prompt + encoded,
        num_output=max([sequence.num_output for sequence in sequences]),
        num_computed=max([sequence.num_computed for sequence in sequences]) + (encoded if is_encoded else 0),
        num_sequences=len(sequences),
        beams=group.beam is not None,
        num_pages=num_pages,
        num_found=sum([int(np.count_nonzero(table)) for table in found or ()]),
    )
