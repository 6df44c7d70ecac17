"""Pages that are out of every layer's window: when they are freed, what a request then needs, what it still hits."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
from paged_simulator import VOCAB, Simulator, make_request, small

from engine.errors import InvalidRequestError
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.sequence import SequenceGroup, worst_case_pages
from engine.scheduling.step import NextStep

simulator = partial(small, window=8, budget=16)


def limits(window: int | None = 8, block_size: int = 4, budget: int = 16, max_num_seqs: int = 8) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=block_size,
        needs=SequenceNeeds(window=window),
    )


def prompt(length: int, start: int = 2) -> list[int]:
    return [2 + (start + 5 * i + i // 7) % (VOCAB - 2) for i in range(length)]


def group_of(sim: Simulator, request_id: str) -> SequenceGroup:
    return next(group for group in sim.scheduler.groups() if group.request.request_id == request_id)


def step_of(sim: Simulator) -> NextStep:
    """A step in which nothing is planned yet."""
    return NextStep(sim.config.max_num_batched_tokens)


def evict_all(sim: Simulator) -> None:
    """Leave no page in the cache."""
    pages = sim.pool.reserve(sim.pool.num_available)
    assert pages is not None
    sim.pool.free(pages)
    assert sim.pool.num_cached == 0


# ------------------------------------------------------------------ the arithmetic, by counting


class TestArithmetic:
    @pytest.mark.parametrize(("window", "size"), list(itertools.product([1, 2, 3, 7, 8, 9], [1, 2, 4, 5])))
    def test_the_first_page(self, window: int, size: int) -> None:
        config = limits(window, size)
        for position in range(40):
            seen = range(max(0, position - window + 1), position + 1)
            assert config.first_page(position) == seen[0] // size
        assert limits(None).first_page(10**6) == 0

    @pytest.mark.parametrize(("window", "size"), list(itertools.product([1, 2, 3, 7, 8, 9], [1, 2, 4, 5])))
    def test_the_pages_that_a_hit_needs(self, window: int, size: int) -> None:
        needed = limits(window, size).seen_pages
        for pages in range(12):
            seen = {place // size for place in range(max(0, pages * size - window + 1), pages * size)}
            assert len(seen) == min(pages, needed)
        assert limits(None).seen_pages is None

    @pytest.mark.parametrize("width", [1, 2, 3])
    @pytest.mark.parametrize(("window", "size"), list(itertools.product([1, 2, 4, 7], [1, 3, 4])))
    def test_the_most_pages(self, width: int, window: int, size: int) -> None:
        """As many as the worst places and the worst division of a step's tokens can take."""
        for budget in range(width, 14):
            most = [
                max(
                    len({place // size for place in range(start, start + window - 1 + tokens)}) for start in range(size)
                )
                for tokens in range(budget + 1)
            ]
            divisions = itertools.product(range(budget + 1), repeat=width)
            worst = max(
                sum(most[tokens] for tokens in tokens_of) for tokens_of in divisions if sum(tokens_of) <= budget
            )
            counted = limits(window, size, budget).most_pages(width)
            assert worst <= counted < worst + width + (window == 1)
            if width == 1:
                assert counted == worst

    def test_how_many_requests_fit(self) -> None:
        """Those that fit by this figure are let in; without a window it is the whole length that counts."""
        for window, length, pages in itertools.product([1, 5, 64], [3, 40, 1000], [4, 30, 200]):
            config = limits(window, 4, 16)
            fitting = int(config.fitting(length, pages))
            most = config.most_pages(fitting)
            assert min(most, worst_case_pages(length, 1, 1, 4) * fitting) <= pages
        assert limits(None, 4).fitting(10, 7) == 7 / 3
        assert limits(1, 1, 4).fitting(1000, 7) == 3.0


# ------------------------------------------------------------------ pages are given back


class TestFreed:
    @pytest.mark.parametrize("caching", [False, True])
    def test_a_long_answer_holds_no_more_than_its_window(self, caching: bool) -> None:
        with simulator(window=9, num_pages=10, caching=caching) as sim:
            sim.add(make_request("r", prompt(3), max_tokens=200))
            held = []
            while sim.scheduler.has_unfinished():
                sim.step()  # checks that exactly the pages are held that are seen
                held.append(sim.pool.num_held)
            assert len(held) == 200
            assert max(held) == sim.scheduler.snapshot().peak_pages_held == 3
            sim.compare()
            assert (sim.pool.num_cached > 0) == caching

    def test_a_chunk_longer_than_the_window(self) -> None:
        """Pages that it filled and that no query sees any more are published, and freed in the same step."""
        with simulator(window=6, budget=40) as sim:
            sim.add(make_request("r", prompt(70), max_tokens=3))
            sim.step()
            table = list(group_of(sim, "r").sequences[0].table)
            assert [bool(page) for page in table] == [False] * 8 + [True] * 2
            assert sim.pool.num_cached == 8
            sim.drain()
            sim.compare()

    def test_nothing_happens_within_the_window(self) -> None:
        """The same steps as without one, page for page."""
        plans = []
        for window in (None, 40, 39):
            with simulator(window=window, num_pages=20) as sim:
                for name in ("a", "b"):
                    sim.add(make_request(name, prompt(20), max_tokens=20, n=2, temperature=1.0, seed=3))
                tables = []
                while sim.scheduler.has_unfinished():
                    plan = sim.scheduler.schedule()
                    assert plan is not None
                    tables.append(plan.block_tables.tolist())
                    sim._deliver(sim.scheduler.update(sim.execute(plan)))
                plans.append(tables)
        assert plans[0] == plans[1] == plans[2]

    def test_a_page_is_freed_when_its_last_holder_has_left_it(self) -> None:
        with simulator(window=7, num_pages=60) as sim:
            sim.add(make_request("r", prompt(10), max_tokens=30, n=4, temperature=1.0, seed=1, min_tokens=30))
            sim.step()
            sequences = group_of(sim, "r").sequences
            shared = list(sequences[0].table)[1]
            assert sim.pool.references(shared) == 4
            assert sim.abort("r", 2)
            assert sim.pool.references(shared) == 3
            while sim.pool.references(shared):
                sim.step()
            assert [sequence.num_computed for sequence in sequences if sequence.index != 2] == [14] * 3
            sim.drain()
            sim.compare()

    def test_the_integrity_check_sees_what_is_wrong(self) -> None:
        with simulator(window=5) as sim:
            sim.add(make_request("r", prompt(14), max_tokens=9))
            sim.step()
            table = group_of(sim, "r").sequences[0].table
            page = table[2]
            assert (table[1], page > 0) == (0, True)
            for place, wrong in ((1, page), (2, 0)):
                right, table[place] = table[place], wrong
                with pytest.raises(AssertionError, match="pages from 2 on are needed"):
                    sim.scheduler.check_integrity()
                table[place] = right
            sim.drain()


# ------------------------------------------------------------------ what a request needs


class TestRoom:
    def test_a_request_longer_than_the_pool(self) -> None:
        with simulator(window=9, num_pages=7) as sim:
            sim.add(make_request("r", prompt(100), max_tokens=50))
            assert worst_case_pages(100, 50, 1, 4) == 38
            sim.drain()
            sim.compare()

    def test_what_cannot_fit_is_refused_with_the_figures(self) -> None:
        """A window of 9, a step of 16 tokens, pages of 4: two sequences may touch 11 pages."""
        with simulator(window=9, num_pages=10) as sim:
            sim.add(make_request("fits", prompt(100), max_tokens=50))
            with pytest.raises(InvalidRequestError) as caught:
                sim.add(make_request("r", prompt(100), max_tokens=50, num_beams=2))
            assert caught.value.param == "max_tokens"
            parts = ("11 pages", "4 tokens", "100 prompt", "max_tokens 50", "2 sequences", "has 10", "windows of 9")
            parts += ("steps of up to 16", "--kv-cache-memory", "--max-num-batched-tokens")
            assert all(part in str(caught.value) for part in parts), str(caught.value)
            sim.add(make_request("short", prompt(12), max_tokens=13, num_beams=2))
            with pytest.raises(InvalidRequestError, match=r"need 11 pages .*2 sequences\), but"):
                sim.add(make_request("r", prompt(4), max_tokens=21, num_beams=2))
            sim.drain()
            sim.compare()

    @pytest.mark.parametrize("kind", ["n", "num_beams"])
    @pytest.mark.parametrize(("width", "window", "size"), [(1, 5, 2), (2, 4, 2), (2, 9, 4), (3, 6, 3), (3, 2, 1)])
    @pytest.mark.slow
    def test_a_pool_of_exactly_that_is_enough(self, kind: str, width: int, window: int, size: int) -> None:
        """At every length, and to come back after a preemption at any moment."""
        came_back = 0
        for length, caching in ((40, False), (37, True)):
            pages = limits(window, size, budget=6).most_pages(width)
            assert pages < worst_case_pages(length, 12, width, size)
            for interruption in range(1, 24, 2):
                room = {"num_pages": pages, "block_size": size, "budget": 6, "max_num_seqs": 6}
                with simulator(window=window, caching=caching, **room) as sim:
                    how: dict[str, Any] = {kind: width} if width > 1 else {}
                    sim.add(make_request("r", prompt(length), max_tokens=12, temperature=1.5, seed=3, **how))
                    for _ in range(interruption):
                        sim.step()
                    if sim.scheduler.has_unfinished():
                        sim.scheduler._preempt(step_of(sim), group_of(sim, "r"))
                        sim.add(make_request("urgent", prompt(60, 5), max_tokens=4, priority=-1))
                    sim.drain()
                    sim.compare()
                    came_back += sim.scheduler.stats.num_preemptions
        assert came_back > 5

    def test_more_requests_run_at_a_time(self) -> None:
        """Long prompts are let in for what they hold, not for what they are long."""
        most = {}
        for window in (None, 6):
            with simulator(window=window, num_pages=24, caching=False) as sim:
                for name in "abcde":
                    sim.add(make_request(name, prompt(60), max_tokens=20))
                most[window] = 0
                while sim.scheduler.has_unfinished():
                    sim.step()
                    most[window] = max(most[window], sim.scheduler.snapshot().num_running)
                sim.compare()
                assert sim.scheduler.stats.num_preemptions == 0
        assert most == {None: 1, 6: 5}


# ------------------------------------------------------------------ what is found again


class TestHits:
    def test_a_repeated_prompt_is_found_although_its_beginning_is_gone(self) -> None:
        with simulator(window=9, num_pages=10) as sim:
            sim.add(make_request("a", prompt(81), max_tokens=1))
            sim.drain()
            assert sim.pool.num_cached == 9
            sim.add(make_request("b", prompt(81), max_tokens=1))
            sim.drain()
            sim.compare()
            assert sim.cached_tokens == {"b": 80}
            assert sim.scheduler.stats.computed_tokens == 82

    def test_the_longest_beginning_whose_window_is_known(self) -> None:
        """b shares 41 tokens with a: what it needs are the pages of tokens 32 to 39."""
        with simulator(window=9) as sim:
            sim.add(make_request("a", prompt(81), max_tokens=1))
            sim.drain()
            sim.add(make_request("b", [*prompt(41), *prompt(20, 9)], max_tokens=1))
            sim.drain()
            sim.compare()
            assert sim.cached_tokens == {"b": 40}

    def test_a_gap_in_the_window_is_no_hit(self) -> None:
        with simulator(window=9) as sim:
            sim.add(make_request("a", prompt(81), max_tokens=1))
            sim.drain()
            hashes = sim.scheduler._hasher
            sequence = SequenceGroup(make_request("x", prompt(81)), 0, hashes.root(None)).sequences[0]
            chain = sequence.extend_hashes(hashes, hashes.root(None), 4, 20)
            for page in (18, 12):
                del sim.pool._page_of[chain[page]]  # pages 18 and 19 are in the window of a hit of 80 tokens
            sim.add(make_request("b", prompt(81), max_tokens=1))
            sim.step()
            assert sim.cached_tokens == {"b": 72}

    @pytest.mark.parametrize("how", [{}, {"n": 3, "temperature": 1.0, "seed": 4}, {"num_beams": 3, "n": 2}])
    def test_a_preempted_request_goes_on_from_its_window(self, how: dict[str, Any]) -> None:
        """Of 80 and more tokens, only those are computed again that its last full common page does not hold."""
        with simulator(window=9, num_pages=22) as sim:
            sim.add(make_request("r", prompt(83), max_tokens=30, min_tokens=30, **how))
            while group_of(sim, "r").sequences[0].num_output < 2:
                sim.step()
            sim.add(make_request("urgent", prompt(3), max_tokens=1, priority=-1))
            sim.scheduler._preempt(step_of(sim), group_of(sim, "r"))
            assert sim.pool.num_held == 0
            computed = sim.scheduler.stats.computed_tokens
            sim.step()
            sim.step()
            assert sim.scheduler.stats.computed_tokens - computed < 30
            assert not any(list(group_of(sim, "r").sequences[0].table)[:18])
            sim.drain()
            sim.compare()

    def test_without_its_pages_it_starts_over(self) -> None:
        with simulator(window=9, num_pages=22) as sim:
            sim.add(make_request("r", prompt(50), max_tokens=30, num_beams=3))
            while group_of(sim, "r").sequences[0].num_output < 7:
                sim.step()
            sim.scheduler._preempt(step_of(sim), group_of(sim, "r"))
            evict_all(sim)
            computed = sim.scheduler.stats.computed_tokens
            sim.drain()
            sim.compare()
            assert sim.scheduler.stats.computed_tokens > computed + 50

    def test_prompt_logprobs_take_no_hits_and_give_some(self) -> None:
        with simulator(window=6, num_pages=20) as sim:
            for name in ("a", "b"):
                sim.add(make_request(name, prompt(50), max_tokens=2, prompt_logprobs=2))
                sim.drain()
            sim.add(make_request("c", prompt(50), max_tokens=1))
            sim.drain()
            sim.compare()
            assert sim.cached_tokens == {"c": 48}

    def test_salts_do_not_meet(self) -> None:
        with simulator(window=6) as sim:
            for name, salt in (("a", None), ("b", "x"), ("c", "x")):
                sim.add(make_request(name, prompt(33), max_tokens=1, cache_salt=salt))
                sim.drain()
            assert sim.cached_tokens == {"c": 32}
