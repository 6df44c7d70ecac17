"""The memory of the process that answers HTTP: what is refused while there is too little, and that it comes back."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from fake_client import FakeClient, byte_tokenizer, say
from support.service import PATIENCE, Service, wait_for
from test_process import sockets, start, status  # noqa: F401

from engine import ConfigError
from engine.host.resident import clean_code, give_back, give_back_code
from server import memory
from server.app import create_app
from server.config.settings import ServerSettings
from server.memory import MemoryGuard, find_limit, resident_memory

MIB = 2**20


class Process:
    """Has as much memory, and is as old, as a test says."""

    def __init__(self) -> None:
        self.size = 100 * MIB
        self.now = 0.0
        self.looks = 0
        self.given_back = 0
        self.guard = MemoryGuard(200 * MIB, self.look, lambda: self.now, self.give)

    def look(self) -> int:
        self.looks += 1
        return self.size

    def give(self) -> None:
        self.given_back += 1


def ask(process: Process, *requests: tuple[str, str]) -> list[httpx.Response]:
    """The answers of a small app to (method, path)s."""
    client = FakeClient(lambda name, source, params: say(name, ["hello"], params))
    app = create_app(client, byte_tokenizer(), "m", memory=process.guard)

    async def call() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            body = {"prompt": "ab", "max_tokens": 1}
            return [await http.request(*one, json=body if one[0] == "POST" else None) for one in requests]

    return asyncio.run(asyncio.wait_for(call(), PATIENCE))


def test_new_requests_are_refused_and_the_service_lives() -> None:
    process = Process()
    (served,) = ask(process, ("POST", "/v1/completions"))
    assert served.status_code == 200
    process.size, process.now = 201 * MIB, 1.0
    refused, pooled, live, ready, models, metrics = ask(
        process, ("POST", "/v1/completions"), ("POST", "/v1/embeddings"), ("GET", "/health/live"), ("GET", "/health"),
        ("GET", "/v1/models"), ("GET", "/metrics"),
    )  # fmt: skip
    for answer in (refused, pooled, ready):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.headers["retry-after"] == "5"
        assert "200 MiB" in answer.json()["error"]["message"]
        assert "--max-api-memory" in answer.json()["error"]["message"]
    assert refused.headers["connection"] == "close"
    assert live.status_code == models.status_code == 200
    assert 'octavo_requests_rejected_total{reason="memory"} 2.0' in metrics.text
    process.size, process.now = 199 * MIB, 2.0
    assert [answer.status_code for answer in ask(process, ("POST", "/v1/completions"), ("GET", "/health"))] == [200] * 2


def test_requests_that_come_fast_share_a_look(caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    with caplog.at_level(logging.INFO, logger="octavo.server"):
        for step in range(100):
            process.now = step / 1000  # a hundred requests in a tenth of a second
            process.size = 300 * MIB
            process.guard.exceeded()
        assert process.looks == 2
        process.size, process.now = 150 * MIB, 1.5
        assert not process.guard.exceeded()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "The HTTP process uses 300 MiB of memory, more than 200 MiB (max_api_memory): new requests are refused until "
        "it "
        "uses less.",
        "The HTTP process uses 150 MiB of memory and accepts requests again after 1.5 s.",
    ]


def test_what_is_not_in_use_is_given_back_and_what_is_is_said(caplog: pytest.LogCaptureFixture) -> None:
    process, running = Process(), 1

    def complaints() -> int:
        return sum("it is idle" in record.getMessage() for record in caplog.records)

    async def looks(count: int) -> None:
        wanted = process.looks + count
        while process.looks < wanted:
            await asyncio.sleep(0)

    async def scenario() -> None:
        nonlocal running
        async with process.guard.watched(lambda: running, period=0):
            process.now = 1.0
            await looks(1)
            assert process.given_back == 0
            process.size, process.now = 300 * MIB, 2.0
            await looks(4)
            assert process.given_back >= 1
            process.now = 100.0
            await looks(4)
            assert complaints() == 0, "what runs may need it"
            running = 0
            await looks(6)
            assert complaints() == 1
            process.now = 170.0
            await looks(6)
            assert complaints() == 2
            process.size, process.now = 100 * MIB, 200.0
            await looks(1)
        assert not process.guard.exceeded()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


async def test_memory_is_given_back_after_growth() -> None:
    """Also far below the limit; not again before it has grown again, and a while has passed."""
    process = Process()

    async def looks(count: int) -> None:
        wanted = process.looks + count
        while process.looks < wanted:
            await asyncio.sleep(0.001)

    process.size = 100 * MIB
    async with process.guard.watched(lambda: 1, period=0):
        await looks(4)
        process.size, process.now = 110 * MIB, 100.0
        await looks(4)
        assert process.given_back == 0
        process.size = 120 * MIB
        await looks(8)
        assert process.given_back == 1
        process.size, process.now = 140 * MIB, 101.0
        await looks(4)
        assert process.given_back == 1, "it has only just been given back"
        process.now = 200.0
        await looks(8)
        assert process.given_back == 2


def test_without_a_limit_memory_is_not_read() -> None:
    process = Process()
    guard = MemoryGuard(None, process.look)

    async def scenario() -> None:
        async with guard.watched(lambda: 0, period=0):
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert not guard.exceeded()
    assert process.looks == 0


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "resident_memory", lambda: 400 * MIB)
    monkeypatch.setattr(memory, "available_memory", lambda: 8192 * MIB)
    assert find_limit(None) == (400 + 2048) * MIB
    monkeypatch.setattr(memory, "available_memory", lambda: 100 * MIB)
    assert find_limit(None) == (400 + 256) * MIB
    assert find_limit("2GiB") == 2048 * MIB
    for text in (0, "0", " 0 "):
        assert find_limit(ServerSettings(max_api_memory=text).max_api_memory) is None
    with pytest.raises(ConfigError, match=r"max_api_memory is 300 MiB, but .* already uses 400 MiB.*--max-api-memory"):
        find_limit("300MiB")
    with pytest.raises(ConfigError, match="max_api_memory must be a size"):
        ServerSettings(max_api_memory="much")


def test_this_process_has_memory_and_can_give_some_back() -> None:
    assert 10 * MIB < resident_memory() < 2**40
    give_back()
    before = resident_memory()
    assert give_back_code() > 5
    assert resident_memory() < before
    assert torch.ones(3, 3).matmul(torch.ones(3, 3)).sum() == 27  # it comes back


def test_code_that_was_changed_is_kept() -> None:
    """In memory, or swapped out; and so is all that is no code of a library."""
    described = "".join(
        f"{place}000-{place}800 {rights} 00000000 08:01 7 {file}\nRss: 8 kB\nAnonymous: {own} kB\nSwap: {swapped} kB\n"
        for place, rights, file, own, swapped in (
            ("a", "r-xp", "/lib/c.so.6", 0, 0), ("b", "r-xp", "/lib/d.so", 4, 0), ("c", "r-xp", "/lib/e.so", 0, 4),
            ("d", "r--p", "/lib/c.so.6", 0, 0), ("e", "r-xp", "/bin/python", 0, 0), ("f", "r-xp", "/l/t.so.2.1", 0, 0),
        )
    )  # fmt: skip
    assert clean_code(described) == [(0xA000, 0xA800), (0xF000, 0xF800)]


# SIGUSR1: 400 MB of texts; SIGUSR2: all but the last one are freed, so that the C library keeps what they took.
HOARDS = """
import signal, sys
if "serve" in sys.orig_argv:
    hoard = []
    signal.signal(signal.SIGUSR1, lambda *_: hoard.extend(("x%d" % i) * 100 for i in range(600_000)))
    signal.signal(signal.SIGUSR2, lambda *_: hoard.__delitem__(slice(-1)))
"""


@pytest.mark.slow
def test_a_service_with_too_much_memory_serves_again_once_it_is_freed(
    start: Callable[..., Service],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    small = start("--max-api-memory", "20MiB")
    assert small.process.wait(PATIENCE) == 1
    assert "octavo: cannot start: max_api_memory is 20 MiB" in small.log.read_text()

    service = start()
    service.wait_ready()
    resident = service.metric("process_resident_memory_bytes")
    assert service.stop() == 0
    service = start("--max-api-memory", f"{int(resident) // MIB + 250}MiB")
    url = f"{service.wait_ready()}/v1/completions"
    service.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: status(service) == 503, "it does not see its memory")
    refused = httpx.post(url, json={"prompt": [97]}, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert status(service, "/health/live") == 200
    service.process.send_signal(signal.SIGUSR2)
    wait_for(lambda: status(service) == 200, "it does not serve again")
    assert httpx.post(url, json={"prompt": [97]}, timeout=PATIENCE).status_code == 200
    assert service.stop() == 0
    log = service.log.read_text()
    assert "new requests are refused" in log
    assert "accepts requests again" in log
