"""The state of decoding rows on the device: always what the plan asks for, and uploaded only where it changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.decode_state import DecodeState
from engine.interface.request import Decoding, Request
from engine.scheduling.batch import build_plan
from engine.scheduling.plan import CrossRows, Searches, StepPlan
from engine.scheduling.row import Row
from engine.scheduling.sequence import SequenceGroup

ROWS, BLOCKS, MEMORY_BLOCKS, SIZE = 5, 6, 3, 4
CPU = torch.device("cpu")


def plan_of(lengths: list[int], pages: list[list[int]], tokens: list[int], sources: list[int] | None) -> StepPlan:
    """Rows that decode the token after `lengths` others."""
    rows = []
    for number, (length, table) in enumerate(zip(lengths, pages, strict=True)):
        request = Request(request_id=str(number), prompt_token_ids=(7,) * length, decoding=Decoding(max_tokens=9))
        group = SequenceGroup(request, number, b"")
        group.started = True
        group.sequences[0].tokens.append(tokens[number])
        group.sequences[0].table.extend(table)
        rows.append(Row(group, group.sequences[0], length, 1, True))
    plan = build_plan(rows, [], SIZE)
    return plan if sources is None else replace(plan, sources=np.array(sources, dtype=np.int32))


def check(state: DecodeState, plan: StepPlan, padded: int) -> None:
    """What a step of `padded` rows would read is what the plan says, and padding behind it."""
    inputs, count = state.inputs(padded), plan.num_rows
    sources = [-1] * count if plan.sources is None else plan.sources.tolist()
    assert inputs.sources.tolist() == sources + [-1] * (padded - count)
    known = inputs.tokens.tolist()
    assert all(source >= 0 or known[i] == plan.token_ids[i] for i, source in enumerate(sources))
    assert known[count:] == [0] * (padded - count)
    assert inputs.positions.tolist() == plan.positions.tolist() + [0] * (padded - count)
    assert inputs.contexts.tolist() == plan.context_lens.tolist() + [1] * (padded - count)
    assert inputs.moving.tolist() == [1] * count + [0] * (padded - count)
    tables = np.zeros((padded, BLOCKS), dtype=np.int32)
    tables[:count, : plan.block_tables.shape[1]] = plan.block_tables
    assert np.array_equal(inputs.tables.numpy(), tables)
    memories, lens = np.zeros((padded, MEMORY_BLOCKS), dtype=np.int32), np.zeros(padded, dtype=np.int32)
    if plan.cross is not None:
        memories[:count, : plan.cross.tables.shape[1]] = plan.cross.tables
        lens[:count] = plan.cross.lens
    assert np.array_equal(inputs.memories.numpy(), memories)
    assert inputs.memory_lens.tolist() == lens.tolist()


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, bool]:
    """A plan, and whether the step after it is the one that the device expects."""
    count = draw(st.integers(1, ROWS))
    lengths = draw(st.lists(st.integers(1, BLOCKS * SIZE - 4), min_size=count, max_size=count))
    pages = [draw(st.lists(st.integers(1, 99), min_size=n // SIZE + 1, max_size=n // SIZE + 1)) for n in lengths]
    tokens = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    sources = draw(st.none() | st.lists(st.integers(-1, ROWS - 1), min_size=count, max_size=count))
    plan = plan_of(lengths, pages, tokens, sources)
    if draw(st.booleans()):
        width = draw(st.integers(1, MEMORY_BLOCKS))
        tables = np.array([[draw(st.integers(1, 99)) for _ in range(width)] for _ in range(count)], dtype=np.int32)
        lens = np.full(count, width * SIZE, dtype=np.int32)
        plan = replace(plan, cross=CrossRows(tables=tables, lens=lens, owners=np.arange(count, dtype=np.int32)))
    return plan, draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(st.lists(plans(), min_size=1, max_size=6))
def test_the_device_holds_what_any_plan_after_any_other_asks_for(steps: list[tuple[StepPlan, bool]]) -> None:
    state = DecodeState(8, BLOCKS, MEMORY_BLOCKS, CPU)
    for plan, runs in steps:
        state.load(plan)
        check(state, plan, 8)
        if runs:
            state.inputs(8).advance()
            state.advanced()
            moved = replace(plan, positions=plan.positions + 1, context_lens=plan.context_lens + 1)
            check(state, moved, 8)


def test_a_steady_step_uploads_nothing_and_a_new_page_one_number() -> None:
    state = DecodeState(8, BLOCKS, MEMORY_BLOCKS, CPU)
    pages = [[3, 4], [5]]
    state.load(plan_of([6, 1], pages, [11, 12], None))
    for step in range(1, 6):
        state.inputs(2).advance()
        state.advanced()
        before = state.num_uploaded
        for table, length in zip(pages, (6 + step, 1 + step), strict=True):
            if len(table) * SIZE == length:
                table.append(90 + len(table))
        plan = plan_of([6 + step, 1 + step], pages, [0, 0], [0, 1])
        state.load(plan)
        check(state, plan, 4)
        # The first step ahead says where tokens come from; then each row needs a page once.
        assert state.num_uploaded - before == {1: 2, 2: 1, 3: 1}.get(step, 0)


def test_many_differences_go_in_several_uploads() -> None:
    rows, blocks = 60, 100
    state = DecodeState(64, blocks, 0, CPU)
    pages = [[100 * row + page for page in range(blocks)] for row in range(rows)]
    plan = plan_of([blocks * SIZE - 2] * rows, pages, [1] * rows, None)
    state.load(plan)
    assert np.array_equal(state.inputs(rows).tables.numpy(), plan.block_tables)
    assert state.num_uploaded > 4096


def test_tables_that_the_device_has_exchanged_are_sent_where_they_differ() -> None:
    """Beams have their first page in common. What the next plan wants is there, whatever order they were put into."""
    for order in ([0, 1, 2], [1, 1, 0], [2, 0, 0]):
        state = DecodeState(8, BLOCKS, MEMORY_BLOCKS, CPU)
        plan = plan_of([9] * 4, [[50, 51, 52], [3, 10, 11], [3, 12, 13], [3, 10, 14]], [1] * 4, [0, 1, 2, 3])
        state.load(plan)
        numbers = np.array([1], dtype=np.int32)
        empty = np.zeros(0, dtype=np.int32)
        searches = Searches(
            rows=numbers, places=numbers, widths=3 * numbers, candidates=6 * numbers, columns=2 * numbers,
            fresh=numbers > 1, scores=np.zeros(3, np.float32), pages=np.zeros(3, np.int32), stop_ids=empty,
            stops=np.zeros(2, np.int32),
        )  # fmt: skip
        state.tables[1:4] = state.tables[1:4][order]
        state.tables[1:4, 2] = torch.tensor([21, 22, 23])
        state.exchanged(searches)
        before = state.num_uploaded
        tables = plan.block_tables.copy()
        tables[1:4] = tables[1:4][order]
        tables[1:4, 2] = 21, 22, 23
        wanted = replace(plan, block_tables=tables)
        state.load(wanted)
        check(state, wanted, 8)
        assert state.num_uploaded - before == 6, "two columns of three rows"
