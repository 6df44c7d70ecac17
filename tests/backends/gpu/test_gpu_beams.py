"""Beams that go on ahead of the host: by the host's search, by `resolved`, and by a GPU's kernel (or Triton's
interpreter), to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from support.gpu import kernels

from engine.backends.attention.formats import PageShape
from engine.backends.triton import beams
from engine.backends.triton.beams import WIDTHS
from engine.execution.beams_ahead import BeamsOnDevice, resolved
from engine.execution.kv_cache import KVCache
from engine.scheduling.plan import Searches, StepPlan, StepResult
from engine.scheduling.search import MOST_AHEAD, BeamSearch, rank

SIZE = 4


@dataclass(frozen=True)
class Case:
    """Some searches, their candidates, and the plan that goes on with them."""

    searches: list[BeamSearch]
    scores: list[list[float]]
    result: StepResult
    plan: StepPlan


def search(beams: int, stop_ids: Sequence[int]) -> BeamSearch:
    return BeamSearch(beams, 1.0, False, frozenset(stop_ids), max_tokens=2**30)


def made(rng: np.random.Generator, searches: list[BeamSearch], *, vocabulary: int, lost: float = 0.0) -> Case:
    """Candidates with many equal scores. Other rows stand before, between and behind the searches'.

    Args:
        lost: how likely a candidate is impossible, or no number.
    """
    columns = min(max(one.num_candidates for one in searches), vocabulary)
    gaps = rng.integers(0, 3, len(searches) + 1)
    widths = np.array([one.num_beams for one in searches], dtype=np.int32)
    starts = np.cumsum([gaps[0], *(widths[:-1] + gaps[1:-1])])
    count = int(starts[-1] + widths[-1] + gaps[-1])
    places = np.cumsum([1, *widths[:-1]])  # the step before had other rows
    sampled = int(places[-1] + widths[-1]) + 2
    tokens = np.stack([rng.permutation(vocabulary)[:columns] for _ in range(sampled)]).astype(np.int32)
    found = -np.sort(rng.integers(0, 12, (sampled, columns)) / np.float32(7.0), axis=1).astype(np.float32)
    hurt = rng.random(found.shape) < lost
    found[hurt] = np.where(rng.random(found.shape) < 0.5, -np.inf, np.nan).astype(np.float32)[hurt]
    scores = [(-np.sort(rng.integers(0, 9, width) / np.float32(3.0))).tolist() for width in widths.tolist()]
    positions = rng.integers(1, 6 * SIZE, count).astype(np.int32)
    for start, width in zip(starts, widths, strict=True):
        positions[start : start + width] = positions[start]
    fresh = positions[starts] % SIZE == 0
    tables = np.zeros((count, 7), dtype=np.int32)
    pages = iter(rng.permutation(np.arange(1, 2000)).tolist())
    for row, position in enumerate(positions.tolist()):
        held = position // SIZE + (position % SIZE > 0)
        tables[row, :held] = [next(pages) for _ in range(held)]
    aside = [
        next(pages) if (beam or new) else 0 for width, new in zip(widths, fresh, strict=True) for beam in range(width)
    ]
    sources = np.full(count, -1, dtype=np.int32)
    for start, place, width in zip(starts, places, widths, strict=True):
        sources[start : start + width] = place + np.arange(width)
    stop_ids = [sorted(one.stop_ids) for one in searches]
    plan = StepPlan(
        token_ids=np.where(sources < 0, 5, 0).astype(np.int32),
        positions=positions,
        slots=np.zeros(count, dtype=np.int32),
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=positions + 1,
        block_tables=tables,
        copies=np.zeros((0, 2), dtype=np.int32),
        sampling=None,
        prompt_logprobs=None,
        sources=sources,
        searches=Searches(
            rows=starts.astype(np.int32),
            places=places.astype(np.int32),
            widths=widths,
            candidates=np.array([one.num_candidates for one in searches], dtype=np.int32),
            columns=(positions[starts] // SIZE).astype(np.int32),
            fresh=fresh,
            scores=np.array([score for own in scores for score in own], dtype=np.float32),
            pages=np.array(aside, dtype=np.int32),
            stop_ids=np.array([token for own in stop_ids for token in own], dtype=np.int32),
            stops=np.cumsum([0, *map(len, stop_ids)], dtype=np.int32),
        ),
    )
    empty = np.zeros((sampled, 0), dtype=np.int32)
    result = StepResult(
        tokens=tokens, scores=found, logprobs=found, ranks=tokens, top_ids=empty, top_logprobs=empty.view(np.float32)
    )
    return Case(searches, scores, result, plan)


def on_device(case: Case) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """Tokens and tables of all rows, and the copies, by the kernel."""
    copied: list[Any] = []
    with kernels() as device, pytest.MonkeyPatch.context() as patch:
        cache = KVCache([PageShape(1, 2)], 1, SIZE, torch.float32, device)
        patch.setattr(cache, "copy_found_pages", lambda pairs: copied.append(pairs.clone()))
        sampled = torch.full((len(case.result.tokens) + 8,), -7, dtype=torch.int32, device=device)
        tables = torch.from_numpy(np.pad(case.plan.block_tables, ((0, 2), (0, 3)))).to(device)
        before: Any = SimpleNamespace(
            tokens=torch.from_numpy(case.result.tokens).to(device),
            scores=torch.from_numpy(case.result.scores).to(device),
        )
        assert case.plan.searches is not None
        BeamsOnDevice(sampled).go_on(case.plan.searches, before, cache, case.plan.block_tables.shape[1], tables)
        (pairs,) = copied
        chosen, found = sampled.cpu().numpy(), tables.cpu().numpy()
    assert case.plan.sources is not None
    known = case.plan.sources >= 0
    assert (np.delete(chosen, case.plan.sources[known]) == -7).all(), "tokens of other rows"
    assert not found[case.plan.num_rows :].any()
    assert not found[:, case.plan.block_tables.shape[1] :].any()
    tokens = np.where(known, chosen[case.plan.sources], case.plan.token_ids)
    width = case.plan.block_tables.shape[1]
    pairs = [(source, target) for source, target in pairs.tolist() if source != target]
    return tokens, found[: case.plan.num_rows, :width], pairs


def check(case: Case) -> None:
    plan, searches = resolved(case.plan, case.result, SIZE), case.plan.searches
    assert searches is not None
    assert plan.searches is None
    tokens, tables, pairs = on_device(case)
    copies = [tuple(pair) for pair in plan.copies.tolist()]
    others = np.ones(plan.num_rows, dtype=bool)
    whole = np.ones(plan.num_rows, dtype=bool)
    for number, one in enumerate(case.searches):
        row, place = int(searches.rows[number]), int(searches.places[number])
        beams, rows = slice(place, place + one.num_beams), slice(row, row + one.num_beams)
        others[rows] = False
        (ranking,) = rank(
            [case.scores[number]], case.result.tokens[beams][None], case.result.scores[beams][None], one.num_candidates
        )
        live = one.choose(ranking, 0, []).live
        whole[rows] = np.arange(one.num_beams) < len(live)
        assert plan.token_ids[rows].tolist()[: len(live)] == [continuation.token for continuation in live]
        column = int(searches.columns[number])
        for beam, continuation in enumerate(live):
            before, now = case.plan.block_tables[row + continuation.parent], plan.block_tables[row + beam]
            assert np.delete(before, column).tolist() == np.delete(now, column).tolist()
            first = continuation.parent not in [other.parent for other in live[:beam]]
            own = int(searches.pages[searches.widths[:number].sum() + beam])
            if searches.fresh[number]:
                assert now[column] == own > 0
            elif first:
                assert now[column] == before[column] > 0
            else:
                assert now[column] == own > 0
                assert (before[column], own) in copies
    assert plan.block_tables[others].tolist() == case.plan.block_tables[others].tolist()
    assert (plan.sources[~others] == -1).all()
    assert plan.slots[whole & ~others].tolist() == [
        int(table[position // SIZE]) * SIZE + position % SIZE
        for table, position in zip(plan.block_tables[whole & ~others], plan.positions[whole & ~others], strict=True)
    ]
    assert len({target for _, target in pairs}) == len(pairs)
    assert not {source for source, _ in pairs} & {target for _, target in pairs}
    # Rows that are for nothing may be anything that is theirs.
    assert tokens[whole].tolist() == plan.token_ids[whole].tolist()
    assert tables[whole].tolist() == plan.block_tables[whole].tolist()
    assert set(tables[~whole].ravel().tolist()) <= {*case.plan.block_tables.ravel().tolist(), *searches.pages.tolist()}
    if whole.all():
        assert pairs == copies


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(st.tuples(st.integers(2, 5), st.lists(st.integers(0, 30), max_size=3)), min_size=1, max_size=3),
    vocabulary=st.sampled_from([31, 9, 200]),
    lost=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_beams_go_on_as_the_host_says(
    seed: int, kinds: list[tuple[int, list[int]]], vocabulary: int, lost: float
) -> None:
    searches = [search(beams, stops) for beams, stops in kinds]
    check(made(np.random.default_rng(seed), searches, vocabulary=vocabulary, lost=lost))


@pytest.mark.parametrize(("beams", "stops"), [(12, 1), (30, 3), (45, 1)], ids=WIDTHS[1:])
def test_many_beams(beams: int, stops: int) -> None:
    one = search(beams, range(stops))
    assert one.may_run_ahead
    check(made(np.random.default_rng(beams), [one, search(2, [])], vocabulary=300))


def test_more_candidates_than_a_program_looks_at_wait() -> None:
    assert WIDTHS[-1] ** 2 == MOST_AHEAD
    assert search(45, []).may_run_ahead
    assert not search(46, []).may_run_ahead
    assert not search(30, range(5)).may_run_ahead


def test_candidates_of_all_sizes_are_compiled_before_they_are_needed() -> None:
    with kernels() as device:
        sampled = torch.zeros(8, dtype=torch.int32, device=device)
        with mock.patch.object(beams.go_on_kernel, "run", wraps=beams.go_on_kernel.run) as launches:
            BeamsOnDevice(sampled).warm()
        assert [call.kwargs["BEAMS"] for call in launches.call_args_list] == list(WIDTHS)
        tensors = [value for call in launches.call_args_list for value in call.args if isinstance(value, torch.Tensor)]
        assert len(tensors) == 8 * len(WIDTHS)
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors), "as they are later, for what is compiled"
