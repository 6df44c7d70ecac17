"""The live feed: which keys may watch, what is told, and that the engine is not asked while no client looks."""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

import pytest
from fake_client import FakeClient, byte_tokenizer, say
from support.asgi import Call, until
from support.service import PATIENCE

from engine import CacheMap, EngineStats, LiveRequest
from engine.interface.cache_map import CellKinds
from server.app import create_app
from server.config.settings import ServerSettings
from server.door.drain import Drain
from server.live import MAX_WATCHERS, LiveFeed, label, make_frame

PATH = "/playground/live"


class Watched(FakeClient):
    """Counts how often it is looked at."""

    looks = 0

    async def cache_map(self) -> CacheMap:
        self.looks += 1
        return await super().cache_map()


class Site:
    def __init__(self, **chosen: Any):
        self.go_on = asyncio.Event()
        self.client = Watched(lambda name, source, params: [self.go_on, *say(name, ["hi"], params)])
        self.drain = Drain()
        self.app = create_app(
            self.client, byte_tokenizer(), "m", settings=ServerSettings(**chosen), drain=self.drain
        )  # fmt: skip
        self.live: LiveFeed = self.app.state.service.live

    def watch(self) -> Call:
        return Call(self.app, PATH, method="GET")


def frames(call: Call) -> list[dict[str, Any]]:
    blocks = call.text.split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: ")]


async def test_frames_come_when_something_changes_and_only_then() -> None:
    site = Site(stream_keepalive=0)
    call = site.watch()
    await until(lambda: len(frames(call)) == 1)
    assert call.headers["content-type"].startswith("text/event-stream")
    assert call.headers["cache-control"] == "no-cache"
    looks = site.client.looks
    await until(lambda: site.client.looks >= looks + 2)
    assert len(frames(call)) == 1, "nothing has changed"
    asked = Call(site.app, "/v1/completions", {"prompt": "secret words", "max_tokens": 2})
    await until(lambda: len(frames(call)) == 2)
    site.go_on.set()
    await asked.wait_end()
    await until(lambda: len(frames(call)) == 3)
    before, during, after = frames(call)
    assert (before["num_running"], during["num_running"], after["num_running"]) == (0, 1, 0)
    (name,) = site.client.asked
    assert [item["request"] for item in during["running"]] == [label(name)]
    assert during["kinds"]["requests"][1] == [label(name)]
    pages = {"total": 10, "tokens": 0, "per_cell": 1}
    assert before["pages"] == after["pages"] == pages | {"free": 10, "held": 0, "cached": 0}
    assert during["pages"] == pages | {"free": 8, "held": 2, "cached": 0}
    assert "secret" not in call.text
    assert name not in call.text
    call.leave()
    await call.wait_end()


async def test_the_engine_is_asked_once_for_all_watchers_and_not_at_all_without_one() -> None:
    site = Site()
    calls = [site.watch() for _ in range(5)]
    await until(lambda: all(frames(call) for call in calls))
    looks = site.client.looks
    assert looks < len(calls)
    assert site.live.num_watchers == 5
    for call in calls:
        call.leave()
        await call.wait_end()
    assert site.live.num_watchers == 0
    looks = site.client.looks
    await asyncio.sleep(0.6)
    assert site.client.looks == looks
    again = site.watch()
    await until(lambda: frames(again))
    assert site.client.looks > looks
    again.leave()
    await again.wait_end()


async def test_an_engine_that_is_down_is_told_and_comes_back() -> None:
    site = Site()
    call = site.watch()
    await until(lambda: len(frames(call)) == 1)
    site.client.dead = True
    await until(lambda: len(frames(call)) == 2)
    site.client.dead = False
    await until(lambda: len(frames(call)) == 3)
    assert [frame["engine"] for frame in frames(call)] == ["up", "down", "up"]
    call.leave()
    await call.wait_end()


async def test_the_feed_does_not_hold_up_a_service_that_stops() -> None:
    site = Site()
    call = site.watch()
    await until(lambda: frames(call))
    site.drain.begin()
    assert await site.drain.wait_idle(PATIENCE)
    await call.wait_end()
    assert call.complete
    late = site.watch()
    await late.wait_end()
    assert late.status == 503


async def test_a_client_that_takes_nothing_misses_frames_and_delays_no_other() -> None:
    site = Site(stream_keepalive=0)
    slow, quick = site.watch(), site.watch()
    await until(lambda: frames(slow) and frames(quick))
    slow.reading.clear()
    for number in range(3):
        site.client.dead = number % 2 == 0
        await until(lambda: len(frames(quick)) == number + 2)  # noqa: B023
    slow.reading.set()
    await until(lambda: len(frames(slow)) >= 2)
    await until(lambda: frames(slow)[-1] == frames(quick)[-1])
    assert len(frames(slow)) < len(frames(quick))
    for call in (slow, quick):
        call.leave()
        await call.wait_end()


async def test_silence_is_broken_by_comments() -> None:
    site = Site(stream_keepalive=0.1)
    call = site.watch()
    await until(lambda: call.text.count(": keep-alive\n\n") >= 2)
    assert len(frames(call)) == 1
    call.leave()
    await call.wait_end()


async def test_a_fault_ends_the_feed_and_the_next_one_begins_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Site()
    look = site.client.cache_map

    async def fail() -> CacheMap:
        raise ValueError("a fault")

    site.client.cache_map = fail  # type: ignore[method-assign]
    call = site.watch()
    await call.wait_end()
    assert call.status == 500
    site.client.cache_map = look  # type: ignore[method-assign]
    again = site.watch()
    await until(lambda: frames(again))
    again.leave()
    await again.wait_end()


async def test_there_are_only_so_many_watchers() -> None:
    site = Site()
    calls = [site.watch() for _ in range(MAX_WATCHERS)]
    await until(lambda: site.live.num_watchers == MAX_WATCHERS)
    more = site.watch()
    await more.wait_end()
    assert more.status == 503
    assert json.loads(more.text)["error"]["code"] == "overloaded"
    for call in calls:
        call.leave()
        await call.wait_end()


@pytest.mark.parametrize(
    ("chosen", "headers", "status"),
    [
        ({"api_key": ("k",)}, [], 401),
        ({"api_key": ("k",)}, [(b"authorization", b"Bearer k")], 200),
        ({"api_key": ("k",), "public_metrics": True}, [], 200),
        ({"enable_cache_map": False}, [], 404),
        ({"enable_cache_map": False, "api_key": ("k",)}, [], 401),
        ({"enable_playground": False}, [], 200),
    ],
)
async def test_the_key_is_that_of_the_metrics(chosen: dict[str, Any], headers: Any, status: int) -> None:
    site = Site(**chosen)
    call = Call(site.app, PATH, method="GET", headers=headers)
    await call.wait_sent(2)
    assert call.status == status
    if status == 404:
        assert "--no-enable-cache-map" in json.loads(call.text)["error"]["message"]
    metrics = Call(site.app, "/metrics", method="GET", headers=headers)
    await metrics.wait_end()
    assert (metrics.status == 401) == (status == 401)
    call.leave()
    await call.wait_end()


async def test_head_is_answered_at_once() -> None:
    site = Site()
    call = Call(site.app, PATH, method="HEAD")
    await call.wait_end()
    assert (call.status, call.text) == (200, "")
    assert call.headers["content-type"].startswith("text/event-stream")
    assert site.client.looks == 0


def test_a_label_is_what_the_page_computes() -> None:
    """CRC-32 of the id, bit by bit, as labels.js has it."""

    def by_bits(name: str) -> int:
        crc = 0xFFFFFFFF
        for byte in name.encode():
            crc ^= byte
            for _ in range(8):
                crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
        return crc ^ 0xFFFFFFFF

    for name in ("", "cmpl-13b8-0", "ä"):
        assert by_bits(name) == zlib.crc32(name.encode())
        assert label(name) == f"{by_bits(name):08x}"[-5:]


def test_a_frame_says_nothing_but_what_the_documentation_lists() -> None:
    kinds = CellKinds(held=[1], cached=[3], tables=[2], found=[1], holders=[[0]], others=[3])
    request = LiveRequest(request_id="cmpl-1-0", num_prompt=5, num_output=2, num_computed=6, num_pages=1, num_found=1)
    cache_map = CacheMap(pages_per_cell=1, runs=[2, 0], kinds=kinds, running=[request], waiting=[request])
    frame = make_frame(cache_map, EngineStats(pages_total=10))
    assert [frame["pages"][name] for name in ("total", "free", "held", "cached")] == [10, 2, 2, 6]
    assert set(frame) == {
        "engine", "steps", "pages", "cells", "kinds", "num_running", "num_waiting", "running", "waiting",
    }  # fmt: skip
    assert frame["running"] == frame["waiting"] == [
        {
            "request": label("cmpl-1-0"), "prompt": 5, "answer": 2, "computed": 6, "sequences": 1, "beams": False,
            "pages": 1, "found": 1,
        }
    ]  # fmt: skip
    assert frame["kinds"]["requests"] == [[label("cmpl-1-0")]]
