"""The shared state of the fronts, as one front sees it: it asks the desk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from engine import EngineInfo, EngineStats, RequestDelta
from server.answering.turns import Turns
from server.commons import Commons
from server.door.key_counts import Begun
from server.door.rates import RateWindow
from server.errors import ApiError
from server.gates import Gate
from server.metrics.requests import RequestMetrics
from server.processes.line import Line
from server.processes.messages import (
    Admit,
    BeginKey,
    Body,
    CancelElsewhere,
    Cancelled,
    EndKey,
    GateName,
    KeyBegun,
    LookAt,
    Measured,
    Noted,
    Refused,
    ReleaseSlots,
    Render,
    RenderedMetrics,
)

T = TypeVar("T")

_numbers = count(1)


class RemoteGate:
    """A gate whose counts the desk keeps."""

    def __init__(self, line: Line, name: GateName, rejected: Callable[[str], None]):
        self._line = line
        self._name = name  # the gate's name
        self._rejected = rejected  # called with the reason for each refused request

    async def look(self, tenant: str | None = None) -> None:
        """Raises ApiError: 503 if there is no room."""
        await self.ask(LookAt(self._name, tenant))

    async def admit(
        self,
        prompts: int,
        tokens: int,
        tenant: str | None = None,
        deadline: float | None = None,
        *,
        patient: bool = False,
    ) -> RemoteReservation:
        """Raises ApiError: there is no room."""
        reservation = RemoteReservation(self, self._line, prompts)
        try:
            asked = Admit(reservation.number, self._name, prompts, tokens, tenant, deadline)
            await self.ask(asked, counts=not patient)
        except BaseException:  # its answer may come too late
            reservation.release()
            raise
        return reservation

    async def ask(self, question: Body, *, counts: bool = True) -> None:
        """Ask the desk; a refusal is counted unless `counts` is false. Raises ApiError if the desk refuses the
        request."""
        answer = await self._line.ask(question)
        if isinstance(answer, Refused):
            if counts and answer.reason is not None:
                self._rejected(answer.reason)
            raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code, headers=answer.headers)


class RemoteReservation:
    """The slots of one request, kept at the desk."""

    def __init__(self, gate: RemoteGate, line: Line, prompts: int):
        self._gate = gate
        self._line = line
        self._held = [True] * prompts
        self._released = False
        self.number = next(_numbers)  # the request's number at the desk
        self.num_unfinished = prompts  # prompts that have not ended normally, also after the release

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Release all slots still held; idempotent."""
        if not self._released:
            self._released = True
            self._line.tell(ReleaseSlots(self.number))

    async def measured(self, tokens: Sequence[int]) -> None:
        """Report the numbers of tokens of the prompts. Raises ApiError: 503 if there are too many."""
        await self._gate.ask(Measured(self.number, list(tokens)))

    def started(self, index: int) -> None:
        """Record that a prompt's first token has come."""
        self._note("started", index)

    def progressed(self, index: int, tokens: int) -> None:
        """Record that this many of a prompt's tokens no longer wait."""
        self._note("progressed", index, tokens)

    def finished(self, index: int) -> None:
        """Record that a prompt's answers are complete."""
        if self._held[index] and not self._released:
            self._held[index] = False
            self.num_unfinished -= 1
            self._note("finished", index)

    def _note(self, method: Literal["started", "progressed", "finished"], *arguments: int) -> None:
        if not self._released:
            self._line.tell(Noted(self.number, method, list(arguments)))


class RemoteKeys:
    """Requests of API keys, counted at the desk."""

    def __init__(self, line: Line):
        self._line = line
        self._counted: dict[str, list[int]] = {}  # numbers of running requests, by tenant

    async def begin(self, tenant: str, concurrency: int | None, per_minute: int | None) -> Begun:
        """A request of a key has arrived."""
        number = next(_numbers)
        try:
            answer = _of(KeyBegun, await self._line.ask(BeginKey(number, tenant, concurrency, per_minute)))
        except BaseException:  # its answer may come too late
            self._line.tell(EndKey(number))
            raise
        if answer.counted:
            self._counted.setdefault(tenant, []).append(number)
        return Begun(answer.running, None if answer.window is None else RateWindow(*answer.window), answer.counted)

    def end(self, tenant: str) -> None:
        """Count the end of one of the tenant's requests; it does not matter which."""
        numbers = self._counted[tenant]
        self._line.tell(EndKey(numbers.pop()))
        if not numbers:
            del self._counted[tenant]


class Steps:
    """Reports each step of the engine, from its statistics. `stepped`: called with each step's tokens and the number of
    requests that wait for the next step."""

    def __init__(self) -> None:
        self._latest = EngineStats()
        self.stepped: Callable[[int, int], None] = lambda tokens, num_waiting: None

    def follow(self, stats: EngineStats) -> None:
        """The latest statistics; those of a new engine begin at 0."""
        before = self._latest if stats.num_steps >= self._latest.num_steps else EngineStats()
        self._latest = stats
        steps = stats.num_steps - before.num_steps
        if steps > 0:
            self.stepped((stats.computed_tokens - before.computed_tokens) // steps, stats.num_waiting)


def remote_commons(line: Line, metrics: RequestMetrics, steps: Steps, num_fronts: int, lines: Gate) -> Commons:
    """The shared state, as seen from a front.

    Args:
        line: the connection to the desk.
        steps: the engine's steps, which determine when inputs are submitted.
        num_fronts: the number of fronts; they share the engine's room for inputs.
        lines: limits the lines of batches, all of which begin in one front.
    """

    def make_turns(info: EngineInfo) -> Turns:
        turns = Turns(max(info.max_num_seqs // num_fronts, 1), max(info.max_num_batched_tokens // num_fronts, 1))
        steps.stepped = turns.stepped
        return turns

    async def render(accept: str | None) -> tuple[bytes, str]:
        answer = _of(RenderedMetrics, await line.ask(Render(accept)))
        return answer.content, answer.content_type

    async def cancel(response_id: str, tenant: str | None) -> dict[str, Any] | None:
        answer = _of(Cancelled, await line.ask(CancelElsewhere(response_id, tenant))).answer
        return None if answer is None else json.loads(answer)

    async def close() -> None:
        """Do nothing: the caller closes the connection itself, last of all."""

    return Commons(
        metrics=metrics,
        generating=RemoteGate(line, "generating", metrics.rejected),
        pooling=RemoteGate(line, "pooling", metrics.rejected),
        tokenizing=RemoteGate(line, "tokenizing", metrics.rejected),
        lines=lines,
        keys=RemoteKeys(line),
        make_turns=make_turns,
        render=render,
        cancel=cancel,
        close=close,
    )


def follow_news(metrics: RequestMetrics, steps: Steps) -> Callable[[Sequence[RequestDelta], EngineStats], None]:
    """The object that observes the engine's updates."""

    def on_news(deltas: Sequence[RequestDelta], stats: EngineStats) -> None:
        steps.follow(stats)
        metrics.note(deltas)

    return on_news


def _of(kind: type[T], answer: Body) -> T:
    assert isinstance(answer, kind), answer
    return answer
