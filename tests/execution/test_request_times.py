"""When the engine says that a request began, and when it knew its first token."""

from __future__ import annotations

import time
from collections.abc import Callable

from support.driving import preempt_all

from engine import Engine, RequestDelta, SamplingParams

SIX = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)


def deltas(engine: Engine, between: Callable[[int], None] | None = None) -> dict[str, list[RequestDelta]]:
    """Steps until nothing is left; what each request was told. `between(i)` runs after step i."""
    found: dict[str, list[RequestDelta]] = {}
    for number in range(1000):
        if not engine.has_unfinished_requests():
            return found
        for delta in engine.step_deltas():
            found.setdefault(delta.request_id, []).append(delta)
        if between is not None:
            between(number)
    raise AssertionError("the engine does not come to an end")


def test_the_first_delta_has_the_times_and_no_other(engines: Callable[..., Engine]) -> None:
    engine = engines(max_num_batched_tokens=64)
    began = time.monotonic()
    engine.add_request("chunked", list(range(20, 170)), SIX)  # three steps
    engine.add_request("beams", [1, 2, 3], SamplingParams(max_tokens=6, num_beams=3))
    found = deltas(engine)
    for name in ("chunked", "beams"):
        first, *others = found[name]
        assert first.scheduled_time is not None
        assert first.first_token_time is not None
        assert began <= first.scheduled_time < first.first_token_time <= time.monotonic()
        assert all(delta.scheduled_time is None and delta.first_token_time is None for delta in others)
        assert others


def test_a_request_that_is_preempted_was_scheduled_once(engines: Callable[..., Engine]) -> None:
    """Before its first token, and after it."""
    engine = engines(max_num_batched_tokens=64)
    engine.add_request("a", list(range(20, 170)), SIX)
    preempted: list[float] = []

    def between(number: int) -> None:
        if number in (0, 4):
            assert preempt_all(engine) == 1
            preempted.append(time.monotonic())

    first, *others = deltas(engine, between)["a"]
    assert engine.stats().num_preemptions == 2
    assert first.scheduled_time is not None
    assert first.first_token_time is not None
    assert first.scheduled_time < preempted[0] < first.first_token_time < preempted[1]
    assert all(delta.scheduled_time is None for delta in others)


def test_what_waits_has_no_times(engines: Callable[..., Engine]) -> None:
    engine = engines(max_num_seqs=1)
    engine.add_request("first", [1, 2, 3], SIX)
    engine.add_request("late", [1, 2, 3], SIX, deadline=time.monotonic() - 1)
    engine.add_request("second", [4, 5, 6], SIX)
    found = deltas(engine)
    (late,) = found["late"]
    assert (late.finished, late.scheduled_time, late.first_token_time) == (True, None, None)
    second = found["second"][0].scheduled_time
    first = found["first"][0].first_token_time
    assert first is not None
    assert second is not None
    assert second > first


def test_cached_prompt_tokens_count_once(engines: Callable[..., Engine]) -> None:
    engine = engines()
    prompt = list(range(20, 60))
    for name in ("a", "b"):
        engine.add_request(name, prompt, SIX)
        deltas(engine)
    engine.add_request("c", prompt, SIX)

    def between(number: int) -> None:
        if number == 2:
            preempt_all(engine)

    deltas(engine, between)
    stats = engine.stats()
    assert stats.num_preemptions == 1
    assert stats.prompt_tokens == 120
    assert stats.prompt_tokens_cached == 64
    assert stats.prefix_hits > 64  # the request that resumed found its pages again
