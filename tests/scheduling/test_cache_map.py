"""The map of the cache against plain loops, on whatever the scheduler may come to; and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant
from paged_simulator import Simulator, is_published, make_request
from support.checkpoints import Checkpoint
from support.driving import make_engine
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.service import stopped
from test_client import ask, client, load  # noqa: F401
from test_messages import Channel, FaultyEngine
from test_scheduler_properties import SchedulerMachine

from engine import EngineDeadError, RequestFailedError, SamplingParams
from engine.interface.cache_map import CacheMap
from engine.process.client import EngineClient
from engine.process.main import Loop
from engine.process.messages import Look, decode_command, encode, encode_add
from engine.scheduling import mapping
from engine.scheduling.block_pool import CACHED, FREE, HELD, BlockPool
from engine.scheduling.mapping import MAX_NAMED, draw_map
from engine.scheduling.sequence import SequenceGroup, Status

pytestmark = pytest.mark.slow

Cell = tuple[int, int, int, int, frozenset[str], int]


def cells_of(drawn: CacheMap) -> list[Cell]:
    """Each cell's kind in words, without the runs."""
    kinds = drawn.kinds
    cells: list[Cell] = []
    for length, kind in zip(drawn.runs[::2], drawn.runs[1::2], strict=True):
        assert length > 0
        names = frozenset(drawn.running[place].request_id for place in kinds.holders[kind])
        assert len(names) == len(kinds.holders[kind])
        found = kinds.found[kind]
        cells += [(kinds.held[kind], kinds.cached[kind], kinds.tables[kind], found, names, kinds.others[kind])] * length
    return cells


def tables_of(group: SequenceGroup) -> list[list[int]]:
    memory = [] if group.encoder_input is None else [group.encoder_input.pages]
    return [*(list(sequence.table) for sequence in group.sequences), *memory]


def naive_cells(pool: BlockPool, groups: Iterable[SequenceGroup], size: int) -> list[Cell]:
    """The same, page by page."""
    running = sorted((group for group in groups if group.status is Status.RUNNING), key=lambda group: group.key)
    cells: list[Cell] = []
    for first in range(1, pool.total + 1, size):
        pages = range(first, min(first + size, pool.total + 1))
        counts = {page: sum(table.count(page) for g in running for table in tables_of(g)) for page in pages}
        holders = [g.request.request_id for g in running if any(set(pages) & set(t) for t in tables_of(g))]
        found = set()
        for group in running:
            found |= {*list(group.sequences[0].table)[: group.num_found]}
            if group.encoder_input is not None and group.encoder_input.num_cached:
                found |= {*group.encoder_input.pages}
        cells.append(
            (
                sum(count > 0 for count in counts.values()),
                sum(not counts[page] and is_published(pool, page) for page in pages),
                max(counts.values()),
                len(found & {*pages}),
                frozenset(holders[:MAX_NAMED]),
                len(holders[MAX_NAMED:]),
            )
        )
    return cells


def check_map(simulator: Simulator) -> CacheMap:
    """The map as it is drawn now, compared."""
    pool, groups = simulator.scheduler.pool, list(simulator.scheduler.groups())
    for most in (3, mapping.MAX_CELLS):
        with mock.patch.object(mapping, "MAX_CELLS", most):
            drawn = draw_map(pool, iter(groups))
        size = drawn.pages_per_cell
        assert size == max(1, -(-pool.total // most))
        assert cells_of(drawn) == naive_cells(pool, groups, size)
    by_name = {group.request.request_id: group for group in groups}
    ordered = sorted(groups, key=lambda group: group.key)
    for listed, status in ((drawn.running, Status.RUNNING), (drawn.waiting, Status.WAITING)):
        expected = [group.request.request_id for group in ordered if group.status is status]
        assert [item.request_id for item in listed] == expected
    for item in [*drawn.running, *drawn.waiting]:
        group = by_name[item.request_id]
        pages = {page for table in tables_of(group) for page in table if page}
        assert item.num_pages == len(pages)
        assert item.num_found <= item.num_pages
        assert item.num_sequences == len(group.sequences)
        assert item.beams == (group.request.decoding.num_beams > 1)
        assert item.num_prompt == len(group.request.prompt_token_ids) + len(group.request.encoder_token_ids)
        assert item.num_output == max(sequence.num_output for sequence in group.sequences)
        assert 0 <= item.num_computed <= item.num_prompt + item.num_output
    return drawn


class MapMachine(SchedulerMachine):
    """Everything that may happen to a scheduler, and a look at it each time."""

    @invariant()
    def the_map_is_true(self) -> None:
        if self.simulator is not None:
            check_map(self.simulator)


TestMapMachine = MapMachine.TestCase
TestMapMachine.settings = settings(
    max_examples=30, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def test_a_snapshot_is_a_copy() -> None:
    pool = BlockPool(3)
    pages = pool.reserve(2)
    assert pages is not None
    before = pool.snapshot()
    pool.publish(pages[0], b"hash")
    pool.free(pages)
    assert sorted(before.tolist()) == [FREE, HELD, HELD]
    assert sorted(pool.snapshot().tolist()) == [FREE, FREE, CACHED]
    before[:] = 7
    pool.check_integrity([])


def test_what_a_request_finds_is_marked_and_what_requests_share() -> None:
    text = list(range(2, 14))
    with Simulator(num_pages=20, block_size=2, max_num_seqs=8, max_num_batched_tokens=32) as sim:
        assert cells_of(check_map(sim)) == [(0, 0, 0, 0, frozenset(), 0)] * 20
        sim.add(make_request("first", text, max_tokens=9))
        sim.step()
        sim.add(make_request("second", [*text[:9], 3], max_tokens=9))
        sim.step()
        first, second = check_map(sim).running
        assert (first.num_found, second.num_found) == (0, 4)
        shared = [cell for cell in cells_of(check_map(sim)) if len(cell[4]) == 2]
        assert shared == [(1, 0, 2, 1, frozenset({"first", "second"}), 0)] * 4
        sim.drain()
        cells = cells_of(check_map(sim))
        assert {cell[0] for cell in cells} == {0}
        assert sum(cell[1] for cell in cells) == sim.pool.num_cached > 0


def test_many_holders_are_counted_and_not_all_named() -> None:
    with Simulator(num_pages=60, block_size=2, max_num_seqs=16, max_num_batched_tokens=64) as sim:
        for number in range(7):
            sim.add(make_request(f"r{number}", [5, 6, 7, 8, 9], max_tokens=12))
            sim.step()
        kinds = check_map(sim).kinds
        assert max(kinds.others) == 7 - MAX_NAMED
        assert max(kinds.tables) == 7
        sim.drain()


def test_a_map_of_no_pages() -> None:
    drawn = draw_map(BlockPool(0), [])
    assert (drawn.runs, drawn.kinds.held, drawn.running) == ([], [], [])


@pytest.mark.parametrize("total", [100_000, 100_001])
def test_the_map_of_a_large_pool_stays_small(total: int) -> None:
    pool = BlockPool(total)
    order = np.random.default_rng(0).permutation(total) + 1
    pool._free[:] = order.tolist()  # as scattered as pages can be
    groups = []
    for number in range(64):
        group = SequenceGroup(make_request(f"r{number}", [1, 2], max_tokens=3), number, b"")
        group.status = Status.RUNNING
        group.sequences[0].table.extend(pool.reserve(700) or [])
        groups.append(group)
    drawn = draw_map(pool, groups)
    assert len(drawn.runs) <= 2 * mapping.MAX_CELLS
    assert sum(drawn.runs[::2]) == -(-total // drawn.pages_per_cell) <= mapping.MAX_CELLS
    held = sum(length * drawn.kinds.held[kind] for length, kind in zip(drawn.runs[::2], drawn.runs[1::2], strict=True))
    assert held == 64 * 700 == pool.num_held


# ---------------------------------------------------------------- the way to the client


async def test_the_client_sees_the_map_while_requests_run(client: EngineClient) -> None:  # noqa: F811
    idle = await client.cache_map()
    assert (idle.running, idle.waiting) == ([], [])
    assert sum(idle.runs[::2]) == -(-client.stats().pages_total // idle.pages_per_cell)
    with stopped(client._process.pid):  # type: ignore[attr-defined]
        asked = asyncio.create_task(ask(client, "mine"))
        looking = [asyncio.create_task(client.cache_map()) for _ in range(2)]
        await asyncio.sleep(0.01)
    seen = await asyncio.gather(*looking)
    await asked
    assert any(item.request_id == "mine" for drawn in seen for item in [*drawn.running, *drawn.waiting])
    assert (await client.cache_map()).running == []
    assert client.progress.idle


async def test_a_dead_engine_shows_no_map(checkpoint: Callable[[str], Checkpoint]) -> None:
    mine = load(checkpoint)
    looking = asyncio.create_task(mine.cache_map())
    await asyncio.sleep(0)
    mine.give_up("made by the test")
    with pytest.raises(EngineDeadError, match="made by the test"):
        await looking
    with pytest.raises(EngineDeadError):
        await mine.cache_map()
    await mine.close()


def test_a_fault_while_drawing_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """The engine's side sends no map; the client's says so, see below."""
    assert isinstance(decode_command(encode(Look())), Look)
    channel = Channel(encode(Look()), encode_add("good", [1], SamplingParams()))
    Loop(FaultyEngine(), channel).turn()  # type: ignore[arg-type]
    commands, step = channel.sent
    assert commands.cache_map is None
    assert commands.num_commands == 2
    assert [delta.request_id for delta in step.deltas] == ["good"]
    assert "could not be made" in caplog.text


async def test_a_map_that_could_not_be_drawn_is_an_error(client: EngineClient) -> None:  # noqa: F811
    looking = asyncio.create_task(client.cache_map())
    await asyncio.sleep(0)
    client._num_obeyed = client._num_sent  # type: ignore[attr-defined]
    client._show(None)  # type: ignore[attr-defined]
    with pytest.raises(RequestFailedError, match="log"):
        await looking
    assert (await client.cache_map()).running == []


def test_an_encoder_without_pages_has_an_empty_map(tmp_path: Path) -> None:
    engine = make_engine(make_encoder_checkpoint(ENCODER_SHAPES["bert"], tmp_path / "bert").path)
    drawn = engine.cache_map()
    assert (drawn.runs, drawn.running, drawn.waiting) == ([], [], [])
    engine.close()
