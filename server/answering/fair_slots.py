"""Slots for work outside the event loop, shared fairly between keys."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from types import TracebackType


class FairSlots:
    """Like a semaphore, but slots are given round-robin over the waiting tenants, and no tenant gets all slots.

    So whatever one key decodes, another key's next part finds a slot, or waits for at most one part of someone else.
    `slots`: the number of slots, at least 2.
    """

    def __init__(self, slots: int):
        self._slots = slots
        self._held: Counter[str | None] = Counter()
        self._waiting: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()  # none of them empty

    @property
    def num_inside(self) -> int:
        """The number of holders of slots and of those that wait for one."""
        return self._held.total() + sum(len(line) for line in self._waiting.values())

    def of(self, tenant: str | None) -> Turn:
        """A context that holds a slot for a tenant; None: tenants are not distinguished, and all slots may be held."""
        return Turn(self, tenant)

    async def take(self, tenant: str | None) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self._hand_out()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._forget(tenant, place)
            else:
                self.give_back(tenant)
            raise

    def give_back(self, tenant: str | None) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._held.total() < self._slots:
            ready = [name for name in self._waiting if name is None or self._held[name] < self._slots - 1]
            if not ready:
                return
            tenant = ready[0]
            place = self._waiting[tenant][0]
            self._waiting.move_to_end(tenant)
            self._forget(tenant, place)
            if not place.done():  # cancelled before its task ran
                self._held[tenant] += 1
                place.set_result(None)

    def _forget(self, tenant: str | None, place: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant)
        if line is None or place not in line:
            return
        line.remove(place)
        if not line:
            del self._waiting[tenant]


class Turn:
    """A tenant's access to a slot; it may be entered repeatedly."""

    def __init__(self, slots: FairSlots, tenant: str | None):
        self._slots, self._tenant = slots, tenant

    async def __aenter__(self) -> None:
        await self._slots.take(self._tenant)

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.give_back(self._tenant)
