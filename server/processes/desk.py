"""The shared counts of all fronts: one desk per front, over common gates and counts of keys. When a front ends, its
desk releases the slots that it held."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from server.admission import Admission, LocalReservation
from server.commons import Admissions
from server.door.key_counts import KeyCounts
from server.errors import ApiError
from server.processes.messages import (
    Admit,
    BeginKey,
    Body,
    Done,
    EndKey,
    GateName,
    KeyBegun,
    LookAt,
    Measured,
    Noted,
    Refused,
    ReleaseSlots,
)


class Counts:
    """The state that all desks share.

    Args:
        make: makes the gates from the function that receives reasons of refusals.
        keys: counts the running requests of API keys.
    """

    def __init__(self, make: Callable[[Callable[[str], None]], Admissions], keys: KeyCounts):
        self._reason: str | None = None
        self.admissions = make(self._refuse)
        self.keys = keys

    def gate(self, name: GateName) -> Admission:
        gate = getattr(self.admissions, name)
        assert isinstance(gate, Admission)
        return gate

    def tried(self, work: Callable[[], object]) -> Done | Refused:
        """Do something that may be refused."""
        self._reason = None
        try:
            work()
        except ApiError as error:
            headers = None if error.headers is None else dict(error.headers)
            return Refused(error.status_code, error.message, error.param, error.code, headers, self._reason)
        return Done()

    def _refuse(self, reason: str) -> None:
        self._reason = reason


class Desk:
    """The counterpart of one front, in the process that keeps the shared counts."""

    def __init__(self, counts: Counts):
        self._counts = counts
        self._reservations: dict[int, LocalReservation] = {}
        self._keys: dict[int, str] = {}  # tenants of counted requests, by number
        self._ended: set[int] = set()  # tenants of requests that are still to be counted
        self._closed = False

    def answer(self, body: Body) -> Body | Awaitable[Body] | None:
        """The answer to a message of the front, if the message is about counts."""
        match body:
            case LookAt(gate, tenant):
                return self._counts.tried(lambda: self._counts.gate(gate).check(tenant))
            case Admit():
                return self._counts.tried(lambda: self._admit(body))
            case Measured(number, exact):
                return self._counts.tried(lambda: self._reservations[number].measure(exact))
            case Noted(number, method, arguments):
                getattr(self._reservations[number], method)(*arguments)
            case ReleaseSlots(number):
                self._release(number)
            case BeginKey():
                return self._begin(body)
            case EndKey(number):
                self._end(number)
        return None

    def close(self) -> int:
        """The front has ended: release everything that it held. Returns the number of its unfinished prompts."""
        self._closed = True
        lost = sum(reservation.num_unfinished for reservation in self._reservations.values())
        for number in list(self._reservations):
            self._release(number)
        for number in list(self._keys):
            self._end(number)
        return lost

    def _admit(self, asked: Admit) -> None:
        gate = self._counts.gate(asked.gate)
        self._reservations[asked.number] = gate.reserve(asked.prompts, asked.tokens, asked.tenant, asked.deadline)

    def _release(self, number: int) -> None:
        reservation = self._reservations.pop(number, None)  # none if it was refused
        if reservation is not None:
            reservation.__exit__(None, None, None)

    async def _begin(self, asked: BeginKey) -> KeyBegun:
        begun = await self._counts.keys.begin(asked.tenant, asked.concurrency, asked.per_minute)
        if begun.counted:
            self._keys[asked.number] = asked.tenant
            if self._closed or asked.number in self._ended:  # while Redis was queried
                self._end(asked.number)
        self._ended.discard(asked.number)
        window = begun.window
        shown = None if window is None else (window.allowed, window.limit, window.remaining, window.reset)
        return KeyBegun(begun.running, shown, begun.counted)

    def _end(self, number: int) -> None:
        tenant = self._keys.pop(number, None)
        if tenant is None:
            self._ended.add(number)
        else:
            self._counts.keys.end(tenant)
