"""What several processes that answer HTTP have in common: the line, the desk, and the counts of connections."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_client import FakeClient

from engine import ConfigError
from server.admission import LocalReservation
from server.commons import Admissions
from server.config.settings import ServerSettings
from server.door.accepting import Acceptor
from server.door.key_counts import KeyCounts
from server.door.rates import RateWindow, RequestRates
from server.door.shares import Shares
from server.door.slots import Slot, Slots, SlotSizes
from server.errors import ApiError
from server.processes.desk import Counts, Desk
from server.processes.line import Line
from server.processes.messages import Body, Cancelled, Count, Counted, FrontReady, LookAt
from server.processes.remote import RemoteGate, RemoteKeys

SETTINGS = ServerSettings(max_num_queued_reqs=4, max_num_queued_tokens=100, max_queue_time=0)


def make_counts() -> Counts:
    client = FakeClient(lambda *_: [])
    client.info = replace(client.info, max_num_seqs=4)
    return Counts(lambda refuse: Admissions.of(client, SETTINGS, refuse), KeyCounts(RequestRates()))


class Side:
    """A front's side of a line, and the desk at its other end."""

    def __init__(self, counts: Counts):
        self.desk = Desk(counts)
        self.rejected: list[str] = []
        self.lost = asyncio.Event()

    async def connect(self) -> Side:
        ours, theirs = socket.socketpair()
        self.far = await Line.over(theirs, self.desk.answer, self.desk.close)
        self.line = await Line.over(ours, lambda body: None, self.lost.set)
        self.gate = RemoteGate(self.line, "generating", self.rejected.append)
        self.keys = RemoteKeys(self.line)
        return self

    async def heard(self) -> None:
        """All that was told has arrived."""
        await self.line.ask(LookAt("tokenizing", None))


# ---------------------------------------------------------------- the line


async def test_messages_keep_their_order_and_answers_find_their_questions() -> None:
    ours, theirs = socket.socketpair()
    heard: list[Body] = []
    gate = asyncio.Event()

    async def later() -> Body:
        await gate.wait()
        return Counted(2, 2)

    def answer(body: Body) -> Body | Awaitable[Body] | None:
        heard.append(body)
        if isinstance(body, Cancelled):
            return later()
        return Counted(1, 1) if isinstance(body, Count) else None

    far = await Line.over(theirs, answer, lambda: None)
    line = await Line.over(ours, lambda body: None, lambda: None)
    slow = asyncio.ensure_future(line.ask(Cancelled(b"x" * 200_000)))  # more than a socket holds
    await asyncio.sleep(0)
    line.tell(FrontReady())
    assert await line.ask(Count()) == Counted(1, 1)
    assert [type(body) for body in heard] == [Cancelled, FrontReady, Count]
    gate.set()
    assert await slow == Counted(2, 2)
    line.close()
    far.close()


async def test_a_question_fails_when_the_line_is_closed() -> None:
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    line = await Line.over(ours, lambda body: None, lost.set)
    asking = asyncio.ensure_future(line.ask(Count()))
    await asyncio.sleep(0)
    theirs.close()
    with pytest.raises(ConnectionError):
        await asking
    await lost.wait()
    with pytest.raises(ConnectionError):
        await line.ask(Count())
    line.tell(FrontReady())  # is for nothing


# ---------------------------------------------------------------- the desk


async def outcome(asking: Awaitable[Any]) -> tuple[Any, ApiError | None]:
    """A reservation, or why there is none."""
    try:
        return await asking, None
    except ApiError as error:
        return None, error


def said(error: ApiError | None) -> Any:
    """All but when to try again."""
    return error and (error.status_code, error.code, error.message.partition("Try again")[0])


async def test_gates_at_the_desk_decide_as_one_gate() -> None:
    """Random requests over three lines, and the same ones with one admission: equal answers, equal counts."""
    rng = random.Random(5)
    counts, model = make_counts(), make_counts().admissions.generating
    sides = [await Side(counts).connect() for _ in range(3)]
    held: list[tuple[Side, Any, LocalReservation, int]] = []
    refused = 0
    for _ in range(1500):
        chance = rng.random()
        if chance < 0.45:
            side, tenant = rng.choice(sides), rng.choice([None, "a", "b"])
            prompts, tokens = rng.randint(1, 3), rng.randint(1, 40)
            ours, expected = await outcome(model.admit(prompts, tokens, tenant))
            theirs, error = await outcome(side.gate.admit(prompts, tokens, tenant))
            assert said(error) == said(expected)
            refused += error is not None
            if ours is not None:
                held.append((side, theirs, ours, prompts))
        elif held:
            side, theirs, ours, prompts = held[rng.randrange(len(held))]
            index = rng.randrange(prompts)
            if chance < 0.6:
                theirs.started(index)
                ours.started(index)
            elif chance < 0.8:
                theirs.finished(index)
                ours.finished(index)
                assert theirs.num_unfinished == ours.num_unfinished
            else:
                held = [entry for entry in held if entry[2] is not ours]
                theirs.__exit__(None, None, None)
                ours.__exit__(None, None, None)
            await side.heard()
        real = counts.admissions.generating
        assert (real.num_prompts, real.num_queued_tokens) == (model.num_prompts, model.num_queued_tokens)
    assert refused > 100
    assert sum(len(side.rejected) for side in sides) == refused
    assert {"queue_full", "queued_tokens"} <= {reason for side in sides for reason in side.rejected}


async def test_what_a_front_held_is_free_when_it_is_gone() -> None:
    counts = make_counts()
    first, second = await Side(counts).connect(), await Side(counts).connect()
    reservation = await first.gate.admit(2, 10)
    await reservation.measured([10, 20])
    kept = await second.gate.admit(1, 7)
    assert (await first.keys.begin("key", 1, None)).counted
    assert not (await second.keys.begin("key", 1, None)).counted
    reservation.finished(0)
    await first.heard()
    gate = counts.admissions.generating
    assert (gate.num_prompts, gate.num_queued_tokens) == (2, 27)
    assert first.desk.close() == 1  # of two prompts, one was not finished
    assert (gate.num_prompts, gate.num_queued_tokens) == (1, 7)
    assert (await second.keys.begin("key", 1, None)).counted
    kept.release()
    kept.release()
    second.keys.end("key")
    await second.heard()
    assert (gate.num_prompts, gate.num_queued_tokens, dict(counts.keys.running)) == (0, 0, {})


async def test_a_request_that_is_cancelled_while_the_desk_is_asked_holds_nothing() -> None:
    counts = make_counts()
    side = await Side(counts).connect()
    for asking in (side.gate.admit(1, 5), side.keys.begin("key", 5, None)):
        task = asyncio.ensure_future(asking)
        await asyncio.sleep(0)  # the question is on its way
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await side.heard()
    assert (counts.admissions.generating.num_prompts, dict(counts.keys.running)) == (0, {})


class SlowRates(RequestRates):
    """As where Redis is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def take(self, tenant: str, limit: int) -> RateWindow:
        await self.gate.wait()
        return await super().take(tenant, limit)


@pytest.mark.parametrize("how", ["it is cancelled", "the front is gone"])
async def test_a_key_is_not_counted_for_a_request_that_has_ended_before(how: str) -> None:
    rates = SlowRates()
    counts = make_counts()
    counts.keys = KeyCounts(rates)
    side = await Side(counts).connect()
    asking = asyncio.ensure_future(side.keys.begin("key", 5, 100))
    while not counts.keys.running:
        await asyncio.sleep(0.001)
    if how == "it is cancelled":
        asking.cancel()
        await asyncio.sleep(0.05)
    else:
        side.desk.close()
    assert counts.keys.running["key"] == 1
    rates.gate.set()
    while counts.keys.running:
        await asyncio.sleep(0.001)
    assert not side.desk._keys
    assert not side.desk._ended


async def test_what_is_refused_tells_all_that_a_client_is_told() -> None:
    side = await Side(make_counts()).connect()
    with pytest.raises(ApiError, match=r"The request has 9 prompts, but the service accepts at most 8") as impossible:
        await side.gate.admit(9, 1)
    assert (impossible.value.status_code, impossible.value.param) == (400, "prompt")
    assert side.rejected == []
    for _ in range(8):
        await side.gate.admit(1, 1)
    with pytest.raises(ApiError, match="The service is full: it has 8 prompts") as full:
        await side.gate.look()
    assert full.value.headers is not None
    assert int(full.value.headers["Retry-After"]) >= 1
    assert side.rejected == ["queue_full"]


# ---------------------------------------------------------------- connections


def test_each_process_sees_what_the_others_have(tmp_path: Path) -> None:
    path = tmp_path / "shares"
    Shares.make(path, 3)
    first, second, third = (Shares(path, place) for place in range(3))
    assert (first.elsewhere, first.ahead) == (0, False)
    first.show(4)
    second.show(1)
    third.show(2)
    assert [shares.elsewhere for shares in (first, second, third)] == [3, 6, 5]
    assert [shares.ahead for shares in (first, second, third)] == [True, False, True]


def test_connections_that_are_limited_are_limited_over_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "shares"
    Shares.make(path, 2)
    mine, theirs = (Slots(shares=Shares(path, place)) for place in range(2))
    for slots in (mine, theirs):
        slots.sizes, slots.shared = SlotSizes(3, 2, 100), True
    taken = [mine.open(), theirs.open(), mine.open()]
    assert not any(slot.is_reserve for slot in taken)
    late = theirs.open()
    assert late.is_reserve
    refusal = late.ask(b"/v1/completions")
    assert refusal is not None
    assert "3 connections" in refusal.message
    taken[0].close()
    assert late.ask(b"/v1/completions") is None
    assert not late.is_reserve
    assert mine.open().is_reserve
    # Where only files are the limit, each process has its own.
    theirs.shared = False
    assert not theirs.open().is_reserve


async def test_a_process_that_has_more_connections_leaves_the_next_to_others(tmp_path: Path) -> None:
    """Its neighbour takes it if it can; else this one does, a moment later."""
    path = tmp_path / "shares"
    Shares.make(path, 2)
    other = Shares(path, 1)
    slots = Slots(shares=Shares(path, 0))
    slots.sizes = SlotSizes(100, 2, 100)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    made: list[Slot] = []

    def protocol(slot: Slot) -> asyncio.Protocol:
        made.append(slot)
        return asyncio.Protocol()

    acceptor = Acceptor(listener, slots, protocol, None, 1.0)
    waits: list[bool] = []
    leave = acceptor._leave_to_others
    acceptor._leave_to_others = lambda shares: bool(waits.append(leave(shares)) or waits[-1])  # type: ignore[method-assign]
    acceptor.start(10)
    clients = []
    for number, count in enumerate((0, 0, 5), 1):  # the other one has as many, fewer, more
        other.show(count)
        client = socket.socket()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
        clients.append(client)
        while len(made) < number:
            await asyncio.sleep(0.001)
        assert waits == {1: [False], 2: [False, True, False], 3: [False, True, False, False]}[number]
    acceptor.close()
    for client in clients:
        client.close()


@pytest.mark.parametrize("value", [0, 65, -1])
def test_the_number_of_processes_has_bounds(value: int) -> None:
    with pytest.raises(ConfigError, match="api_server_count"):
        ServerSettings(api_server_count=value)
