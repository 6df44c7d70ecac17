"""How many connections there may be: which are closed for others, what is answered all the same, what files allow."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from support.service import PATIENCE, Service, wait_for
from test_connection import certificate  # noqa: F401

from server.config.settings import ServerSettings
from server.door.accepting import Acceptor
from server.door.protocol import http_protocol
from server.door.slots import Slot, Slots, SlotSizes, count_slots

HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
ORDINARY = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"

# ---------------------------------------------------------------- which ones are closed for others


class Crowd:
    """Slots whose connections tell that they were closed."""

    def __init__(self, ordinary: int = 2, reserve: int = 2):
        self.closed: list[str] = []
        self.counts: Counter[str] = Counter()
        count = self.counts.update
        self.slots = Slots("/llm", lambda reason: count([reason]), lambda kind: count([kind]))
        self.slots.sizes = SlotSizes(ordinary, reserve, ordinary)

    def come(self, name: str) -> Slot:
        slot = self.slots.open()
        slot.drop = lambda: self.closed.append(name)
        return slot


def test_slots_are_ordinary_until_they_are_taken() -> None:
    crowd = Crowd()
    first, _ = crowd.come("a"), crowd.come("b")
    assert not first.is_reserve
    late = crowd.come("c")
    assert late.is_reserve
    assert crowd.slots.num_open == 3
    for path in (b"/health", b"/health/live", b"/health/ready", b"/metrics", b"/llm/health"):
        assert late.ask(path) is None
    refusal = late.ask(b"/v1/completions")
    assert refusal is not None
    assert (refusal.status_code, refusal.code) == (503, "overloaded")
    assert refusal.headers == {"Retry-After": "1", "Connection": "close"}
    assert "2 connections" in refusal.message
    assert "--max-connections" in refusal.message
    assert crowd.counts == {"connections": 1}
    # A slot that is free by now serves the connection that came before.
    first.close()
    first.close()
    assert late.ask(b"/v1/completions") is None
    assert not late.is_reserve
    assert crowd.come("d").is_reserve
    assert crowd.closed == []


def test_the_connection_that_rests_for_longest_is_closed_first() -> None:
    crowd = Crowd(ordinary=3)
    slots = {name: crowd.come(name) for name in "abc"}
    for name in "bac":
        slots[name].ask(b"/")
        slots[name].rest()
    slots["b"].stir()  # its next request begins
    assert not crowd.come("d").is_reserve
    assert crowd.closed == ["a"]
    slots["a"].rest()  # what its protocol still has to say changes nothing
    late = crowd.come("e")
    assert crowd.closed == ["a", "c"]
    assert not late.is_reserve
    assert crowd.come("f").is_reserve
    assert crowd.counts == {"idle": 2}


def test_of_the_reserve_the_oldest_that_is_not_answered_is_closed() -> None:
    crowd = Crowd(ordinary=1, reserve=3)
    crowd.come("ordinary")
    probe = crowd.come("probe")
    assert probe.ask(b"/health") is None
    for name in "abcd":
        crowd.come(name)
    assert crowd.closed == ["a", "b"]
    for slot in list(crowd.slots._reserve):
        slot.ask(b"/metrics")
    crowd.come("e")  # where all are being answered, a client that takes its answer slowly must not keep others out
    assert crowd.closed == ["a", "b", "probe"]
    assert crowd.slots.num_open == 4


def test_missing_files_cost_connections_that_can_be_spared() -> None:
    crowd = Crowd(ordinary=2, reserve=2)
    busy, resting = crowd.come("busy"), crowd.come("resting")
    resting.rest()
    assert crowd.slots.make_room()
    assert crowd.closed == ["resting"]
    crowd.come("c"), crowd.come("d")
    assert crowd.slots.make_room()
    assert crowd.closed == ["resting", "d"]
    assert not crowd.slots.make_room()
    busy.rest()
    assert crowd.slots.make_room()


def test_as_many_as_files_allow() -> None:
    assert count_slots(None, limit=65536, used=30) == SlotSizes(65474, 16, 65474)
    assert count_slots(100, limit=65536, used=30) == SlotSizes(100, 16, 65474)
    assert count_slots(None, limit=64, used=24) == SlotSizes(18, 6, 18)
    assert count_slots(100, limit=64, used=24) == SlotSizes(18, 6, 18)
    assert count_slots(None, limit=64, used=64) == SlotSizes(1, 2, 1)
    sizes = count_slots(None)
    assert sizes.ordinary > 0


# ---------------------------------------------------------------- on sockets


LONG = b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """200, and the path, or far more than a connection holds."""
    body = scope["path"].encode() * (1 if scope["path"] != "/long" else 4_000_000)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Door:
    """An acceptor with the service's protocol before a small app."""

    def __init__(self, slots: Slots, port: int, tls: ssl.SSLContext | None):
        self.slots = slots
        self.port = port
        self._tls = tls
        self.streams: list[asyncio.StreamWriter] = []
        self.accepted = 0
        self._open = slots.open
        slots.open = self._count  # type: ignore[method-assign]

    def _count(self) -> Slot:
        self.accepted += 1
        return self._open()

    async def connect(self, *, handshake: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that has its slot."""
        before = self.accepted
        tls = self._tls if handshake else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        self.streams.append(writer)
        while self.accepted == before:
            await asyncio.sleep(0.01)
        return reader, writer

    async def ask(self, request: bytes) -> tuple[int, str]:
        """Status and header of the answer on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self._tls)
        self.streams.append(writer)
        return await status(reader, writer, request)


async def status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, str]:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    found = re.search(r"content-length: (\d+)", head)
    assert found
    await reader.readexactly(int(found[1]))
    return int(head.split()[1]), head


@asynccontextmanager
async def door(sizes: SlotSizes, pem: Path | None, **options: Any) -> AsyncIterator[Door]:
    tls = client = None
    if pem is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(pem)
        client = ssl.create_default_context()
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    slots = Slots()
    slots.sizes = sizes
    config = uvicorn.Config(answer, log_config=None, access_log=False)
    config.load()
    state = uvicorn.server.ServerState()
    make = partial(cast(Callable[..., asyncio.Protocol], http_protocol(ServerSettings())), config, state, {})
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    acceptor = Acceptor(listener, slots, lambda slot: make(slot=slot), tls, options.get("handshake_timeout", PATIENCE))
    opened = Door(slots, listener.getsockname()[1], client)
    acceptor.start(backlog=64)
    try:
        yield opened
    finally:
        acceptor.close()
        acceptor.close()
        for writer in opened.streams:
            writer.transport.abort()
        for connection in list(state.connections):
            connection.transport.abort()


LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.fixture(params=["plain", "tls"])
def pem(request: pytest.FixtureRequest) -> Path | None:
    return request.getfixturevalue("certificate") if request.param == "tls" else None


@pytest.mark.parametrize("loop", LOOPS)
def test_health_is_answered_while_all_slots_are_taken(loop: Any, pem: Path | None) -> None:
    """By silent connections, and, where there is TLS, by those that do not even begin the handshake."""

    async def scenario() -> None:
        async with door(SlotSizes(3, 3, 3), pem) as opened:
            for _ in range(30):
                await opened.connect(handshake=False)
            assert opened.slots.num_open <= 6
            found, head = await opened.ask(HEALTH)
            assert found == 200
            assert "connection: close" in head
            found, head = await opened.ask(ORDINARY)
            assert found == 503
            assert "retry-after: 1" in head
            for writer in opened.streams:
                writer.transport.abort()
            await gone(opened)
            found, head = await opened.ask(ORDINARY)
            assert found == 200
            assert "connection: close" not in head

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario(), PATIENCE))


async def gone(opened: Door) -> None:
    while opened.slots.num_open:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("loop", LOOPS)
def test_kept_alive_connections_are_closed_and_others_are_not(loop: Any, pem: Path | None) -> None:
    async def scenario() -> None:
        async with door(SlotSizes(2, 2, 2), pem) as opened:
            first, second = await opened.connect(), await opened.connect()
            for stream in (second, first, second):
                assert (await status(*stream, ORDINARY))[0] == 200
            assert (await opened.ask(ORDINARY))[0] == 200
            assert await first[0].read() == b"", "the one that rested for longest was not closed"
            assert (await status(*second, ORDINARY))[0] == 200
            # The connections do not rest while heads are on their way.
            for stream in (second, await opened.connect()):
                stream[1].write(b"GET / HTTP/1.1\r\n")
            while opened.slots.idle:
                await asyncio.sleep(0.01)
            assert (await opened.ask(ORDINARY))[0] == 503
            assert (await opened.ask(HEALTH))[0] == 200
            assert (await status(*second, b"Host: a\r\n\r\n"))[0] == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario(), PATIENCE))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_is_not_closed_while_bytes_of_its_answer_wait(loop: Any, pem: Path | None) -> None:
    """It would be closed in the middle of it."""

    async def scenario() -> None:
        async with door(SlotSizes(1, 2, 1), pem) as opened:
            reader, writer = await opened.connect()
            # What the client's system takes ahead of it must not be all that the server's system has.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            writer.write(LONG)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 20000000" in head
            assert (await opened.ask(ORDINARY))[0] == 503
            assert (await opened.ask(HEALTH))[0] == 200
            await reader.readexactly(20_000_000)
            (slot,) = opened.slots.idle
            while slot.unsent():
                await asyncio.sleep(0.01)
            assert (await opened.ask(ORDINARY))[0] == 200
            assert await reader.read() == b""

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario(), PATIENCE))


@pytest.mark.parametrize("loop", LOOPS)
def test_handshakes_that_fail_free_their_slots(loop: Any, certificate: Path) -> None:  # noqa: F811
    async def scenario() -> None:
        async with door(SlotSizes(2, 2, 2), certificate, handshake_timeout=0.5) as opened:
            _, writer = await opened.connect(handshake=False)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await gone(opened)
            await opened.connect(handshake=False)
            await gone(opened)
            assert (await opened.ask(ORDINARY))[0] == 200

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(scenario(), PATIENCE))


def test_an_acceptor_without_files_goes_on_when_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """It spares a connection if it can, or waits for a moment."""
    accept, missing = socket.socket.accept, [True] * 3

    def failing(self: socket.socket) -> Any:
        if missing:
            missing.pop()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    async def scenario() -> None:
        async with door(SlotSizes(2, 2, 2), None) as opened:
            stream = await opened.connect()
            assert (await status(*stream, ORDINARY))[0] == 200
            monkeypatch.setattr(socket.socket, "accept", failing)
            assert (await opened.ask(ORDINARY))[0] == 200
            assert not missing
            assert await stream[0].read() == b""

    with asyncio.Runner() as runner:
        runner.run(asyncio.wait_for(scenario(), PATIENCE))


# ---------------------------------------------------------------- the service


@pytest.fixture
def few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """The service under `ulimit -n 64`."""
    begin = subprocess.Popen

    def limited(command: list[str], **options: Any) -> Any:
        return begin(["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *command], **options)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", limited)
        service = Service("--kv-cache-memory", "64MiB", log=tmp_path / "log")
    yield service
    service.process.kill()
    service.process.wait()


@pytest.mark.slow
def test_a_hundred_silent_connections_where_there_are_64_files(few_files: Service) -> None:
    service = few_files
    url = httpx.URL(service.wait_ready())
    assert re.search(r"ulimit -n\) allows \d+ connections", service.log.read_text())
    engine = service.engine()
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((url.host, url.port or 80), timeout=PATIENCE))
        for _ in range(5):
            for path in ("/health", "/health/live", "/metrics"):
                assert service.get(path).status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "Hello"}, timeout=PATIENCE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert service.metric('octavo_requests_rejected_total{reason="connections"}') == 1
        assert service.metric('octavo_connections_dropped_total{kind="reserve"}') > 0
        assert service.metric("octavo_connections") < 64
    wait_for(lambda: service.metric("octavo_connections") == 1, "connections are left")
    answered = httpx.post(f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 3}, timeout=PATIENCE)
    assert answered.status_code == 200, answered.text
    assert service.engine() == engine
    log = service.log.read_text()
    assert "Too many open files" not in log
    assert "Traceback" not in log
    assert service.stop() == 0
