"""The clients of a soak. Each request has a deadline; what it comes to is entered in the ledger."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from load.client import Client, TransportError

from soaking.answers import Answer, Choice
from soaking.cases import COMPLETIONS, Case
from soaking.comparing import differences, vector_differences
from soaking.ledger import Fate, Ledger
from soaking.malformed import Malformed
from soaking.raw import RawConnection
from soaking.service import Service

_MARGIN = 1.0  # seconds around an outage in which an answer may tell of it
_RETRY = 0.5  # seconds after a refusal
_SMALL = 4096  # bytes of a slow reader's buffer


@dataclass(slots=True)
class Outages:
    """When there was no engine: from a kill until the service was ready again."""

    times: list[tuple[float, float]] = field(default_factory=list)

    def overlap(self, begin: float, end: float) -> bool:
        """Whether something of that time was without an engine."""
        return any(first - _MARGIN <= end and begin <= last + _MARGIN for first, last in self.times)


@dataclass(frozen=True, slots=True)
class Known:
    """A case and its answer alone: choices, or the body where it is no text."""

    case: Case
    choices: Mapping[int, Choice]
    body: Any


class _LeftError(Exception):
    """The client has seen enough."""


class _Leaver(Answer):
    """An answer that the client gives up after so many events: what the sink raises closes the connection."""

    def __init__(self, events: int):
        super().__init__()
        self._events = events
        self.given_up = False

    def on_data(self, data: bytes, when: float) -> None:
        super().on_data(data, when)
        if self.num_events >= self._events:
            self.given_up = True
            raise _LeftError


class _Announcer(Answer):
    """An answer that sets an event as soon as its first data has come."""

    def __init__(self, begun: asyncio.Event):
        super().__init__()
        self._begun = begun

    def on_data(self, data: bytes, when: float) -> None:
        super().on_data(data, when)
        self._begun.set()


class Clients:
    """The state that the clients share.

    Attributes:
        long_stream: set each time that one of the longest answers begins to arrive as a stream.

    Args:
        known: the cases, with their answers.
        patience: seconds after which an answer counts as one that never comes.
        label: begins the ids of their requests.
    """

    def __init__(
        self,
        service: Service,
        known: Sequence[Known],
        ledger: Ledger,
        outages: Outages,
        *,
        patience: float,
        seed: int,
        label: str,
    ):
        self._service = service
        self._known = known
        self._ledger = ledger
        self._outages = outages
        self._patience = patience
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._label = label
        self._kept = Client(service.target)
        self.long_stream = asyncio.Event()
        lengths = sorted(_num_tokens(one) for one in known if one.case.streams)
        self._long = lengths[-len(lengths) // 4] if lengths else 0

    def close(self) -> None:
        """Close the connections that are kept."""
        self._kept.close()

    # ------------------------------------------------------------ kinds of clients

    async def ask(self) -> None:
        """One request, streamed or not, over a kept connection or a new one; the answer is taken whole."""
        known = self._rng.choice(self._known)
        stream = known.case.streams and self._rng.random() < 0.7
        is_long = stream and _num_tokens(known) >= self._long
        await self._exchange(known, _Announcer(self.long_stream) if is_long else Answer(), stream=stream)

    async def leave(self) -> None:
        """One that closes the connection: a stream after some events, a whole answer after a moment."""
        known = self._rng.choice([known for known in self._known if known.case.streams])
        stream = self._rng.random() < 0.8
        answer = _Leaver(self._rng.randint(1, 12)) if stream else Answer()
        moment = None if stream else self._rng.uniform(0, 0.3)
        await self._exchange(known, answer, stream=stream, moment=moment)

    async def sip(self) -> None:
        """A reader that is slow and goes on: nothing of its answer may be missing."""
        known = self._rng.choice([known for known in self._known if known.case.streams])
        await self._read(known, size=512, pause=self._rng.uniform(0.005, 0.05), wait=0.0)

    async def stall(self, heavy: Known, seconds: float) -> None:
        """A reader that takes nothing for so long, then what there is: the server has reset it by then, unless all of
        the answer was on its way."""
        await self._read(heavy, size=1 << 16, pause=0.0, wait=seconds)

    async def upload(self) -> None:
        """A body that comes in pieces; its answer is as any other's."""
        known = self._rng.choice([known for known in self._known if known.case.streams])
        await self._read(known, size=1 << 16, pause=0.0, wait=0.0, pieces=5, between=self._rng.uniform(0.05, 0.3))

    async def starve(self) -> None:
        """A body that never comes whole: 408."""
        answer = Answer()
        await self._expect("slow_body", answer, frozenset({408}), itertools.repeat(b" "), pause=2.0, length=100_000)

    async def blunder(self, request: Malformed) -> None:
        """A malformed request."""
        await self._expect(request.name, Answer(), request.statuses, [request.bytes])

    # ------------------------------------------------------------ how they do it

    async def _exchange(self, known: Known, answer: Answer, *, stream: bool, moment: float | None = None) -> None:
        case = known.case
        request_id = self._name(case)
        body = json.dumps({**case.body, "stream": True} if stream else case.body).encode()
        client = self._kept if self._rng.random() < 0.7 else Client(self._service.target)
        begin, left, problem = time.monotonic(), False, ""
        try:
            async with asyncio.timeout(self._patience if moment is None else moment):
                await client.exchange("POST", case.path, body, answer, headers={"X-Request-ID": request_id})
        except TimeoutError:
            left = moment is not None
            problem = f"no answer within {self._patience:g} seconds"
        except TransportError as error:
            left = isinstance(answer, _Leaver) and answer.given_up
            problem = str(error)
        finally:
            if client is not self._kept:
                client.close()
        if not (left or problem):
            answer.finish(case.num_choices)
        self._enter(request_id, known, answer, begin, "left" if left else None, problem)
        if answer.status == 503:
            await asyncio.sleep(_RETRY)

    async def _read(
        self,
        known: Known,
        *,
        size: int,
        pause: float,
        wait: float,
        pieces: int = 1,
        between: float = 0.0,
    ) -> None:
        """A stream over a connection of its own, with small buffers."""
        case, answer = known.case, Answer()
        request_id = self._name(case)
        body = json.dumps({**case.body, "stream": True}).encode()
        begin, problem = time.monotonic(), ""
        fate: Fate | None = None
        try:
            async with (
                asyncio.timeout(self._patience + wait),
                RawConnection(self._service.target, answer, _SMALL) as connection,
            ):
                head = self._service.target.head("POST", case.path, len(body), {"X-Request-ID": request_id})
                step = -(-len(body) // pieces)
                parts = [body[start : start + step] for start in range(0, len(body), step)]
                await connection.send([head, *parts], between)
                if wait:
                    await asyncio.sleep(wait)
                await connection.receive_all(size, pause)
                if connection.complete:
                    answer.finish(case.num_choices)
                elif wait:
                    fate = "stalled"
                else:
                    problem = "the server closed the connection"
        except TimeoutError:
            problem = f"no complete answer within {self._patience:g} seconds"
        except OSError as error:
            problem = f"cannot connect: {error}"
        self._enter(request_id, known, answer, begin, fate, problem)

    async def _expect(
        self,
        name: str,
        answer: Answer,
        statuses: frozenset[int],
        pieces: Any,
        pause: float = 0.0,
        length: int | None = None,
    ) -> None:
        begin = time.monotonic()
        try:
            async with (
                asyncio.timeout(self._patience),
                RawConnection(self._service.target, answer) as connection,
            ):
                if length is not None:
                    await connection.send([self._service.target.head("POST", COMPLETIONS, length)])
                await connection.send(pieces, pause)
                await connection.receive_all()
        except TimeoutError:
            self._ledger.violate(f"{name}: no answer within {self._patience:g} seconds")
            return
        except OSError as error:
            self._ledger.violate(f"{name}: {error}")
            return
        answer.finish(0)
        self._ledger.bad[f"{name} {answer.status}"] += 1
        if answer.status == 503 and (answer.error == "overloaded" or self._excused(begin)):
            self._ledger.bad_away[str(answer.error)] += 1
        elif answer.status not in statuses:
            self._ledger.violate(f"{name}: answered {answer.status}, not {sorted(statuses)}")

    def _name(self, case: Case) -> str:
        return f"{self._label}-{next(self._numbers)}-{case.name}"

    def _excused(self, begin: float) -> bool:
        return self._outages.overlap(begin, time.monotonic())

    def _enter(
        self, request_id: str, known: Known, answer: Answer, begin: float, fate: Fate | None, problem: str
    ) -> None:
        """Judge an answer and enter it."""
        faults = list(answer.faults)
        if fate is None:
            if problem:
                fate = "wrong"
                faults.append(problem)
            elif answer.status == 503 and answer.error == "overloaded":
                fate = "refused"
            elif answer.error == "engine_dead" and self._excused(begin):
                fate = "cut" if answer.streamed else "dead"
            elif answer.error is not None or answer.status != 200:
                fate = "wrong"
                faults.append(f"answered {answer.status} {answer.error}")
            else:
                fate = "complete"
        if fate != "wrong" and answer.status in (0, 200):
            faults += self._compare(known, answer, cut=fate != "complete")
        for fault in faults:
            self._ledger.violate(f"{request_id}: {fault}")
        self._ledger.enter(request_id, known.case, answer, fate)

    def _compare(self, known: Known, answer: Answer, *, cut: bool) -> list[str]:
        if known.case.num_choices:
            self._ledger.compared += 1
            return differences(known.choices, answer.choices, cut=cut)
        if cut:
            return []
        self._ledger.compared += 1
        return vector_differences(known.body, answer.body() or {})


def _num_tokens(known: Known) -> int:
    """Tokens of the longest choice of an answer."""
    return max((len(choice.token_ids) for choice in known.choices.values()), default=0)


async def ask_alone(service: Service, cases: Sequence[Case], patience: float) -> tuple[list[Known], list[str]]:
    """The answers on a quiet server, and the names of cases that it refuses.

    Raises:
        TransportError: the server is not there.
        TimeoutError: an answer never came.
    """
    client, found, refused = Client(service.target), [], []
    for case in cases:
        answer = Answer()
        async with asyncio.timeout(patience):
            await client.exchange("POST", case.path, json.dumps(case.body).encode(), answer)
        answer.finish(case.num_choices)
        if answer.status != 200 or answer.faults:
            refused.append(f"{case.name}: {answer.status} {answer.error or ''} {' '.join(answer.faults)}".strip())
        else:
            found.append(Known(case, answer.choices, None if case.num_choices else answer.body()))
    client.close()
    return found, refused
