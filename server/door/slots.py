"""Limits the number of connections and chooses those to close, so that health checks are answered while all are in use.

Each connection takes a slot. Most slots are ordinary. A few more, the reserve, serve only requests that are always
answered (health and metrics). The purpose of a connection is known only once its request has been read. If all ordinary
slots are taken, the connection that has been idle for longest gives up its slot. If the reserve is full too, its oldest
connection that is not being answered is closed. So silent connections cannot block a probe that sends its request at
once.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from server.door.drain import ALWAYS_ANSWERED
from server.door.shares import Shares
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

MOST_RESERVE = 16
FEW = 256  # the start warns if fewer connections than this are possible
OWN_FILES = 64  # file descriptors for the service itself, generously
_SPARE = 16  # of these, descriptors needed later: for a restart of the engine, files, accepting
_LEAST = 3  # slots of a service without free file descriptors
_CANDIDATES = 64  # maximum idle connections that are checked for one to close
_SILENCE = 10.0  # seconds between two log lines about the same thing


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """The numbers of slots."""

    ordinary: int
    reserve: int  # slots only for `ALWAYS_ANSWERED`
    fitting: int  # ordinary slots that the file descriptors allow


def count_slots(wanted: int | None, limit: int | None = None, used: int | None = None) -> SlotSizes:
    """The number of slots: the wanted number, or as many as the file descriptors allow if that is less.

    Args:
        wanted: wanted ordinary slots (the setting max_connections).
        limit: maximum file descriptors of this process; None: ask the system.
        used: file descriptors in use; None: count them.
    """
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = 2**31 if limit == resource.RLIM_INFINITY else limit
    room = max(limit - (_open_files() if used is None else used) - _SPARE, _LEAST)
    reserve = min(max(room // 4, 2), MOST_RESERVE)
    fitting = room - reserve
    return SlotSizes(fitting if wanted is None else min(wanted, fitting), reserve, fitting)


def _open_files() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        if Path(folder).is_dir():
            return len(os.listdir(folder))
    return OWN_FILES


class Slot:
    """A connection's slot, from acceptance to the end."""

    __slots__ = ("_slots", "answering", "drop", "is_reserve", "unsent")

    def __init__(self, slots: Slots, is_reserve: bool):
        self._slots = slots
        self.is_reserve = is_reserve  # whether it is a reserve slot, which ends with its first answer
        self.answering = False
        self.drop: Callable[[], object] = lambda: None  # closes the connection at once
        self.unsent: Callable[[], int] = lambda: 0  # bytes of the last answer that the client has not received yet

    def ask(self, path: bytes | None) -> ApiError | None:
        """A request's head has arrived. Returns an error response if the request may not be served."""
        self.answering = True
        return self._slots.ask(self, path)

    def stir(self) -> None:
        """Note that the client has sent something."""
        self._slots.idle.pop(self, None)

    def rest(self) -> None:
        """All requests are answered, and no other one has begun."""
        self.answering = False
        self._slots.rest(self)

    def close(self) -> None:
        """The connection has ended; idempotent."""
        self._slots.close(self)


class Slots:
    """All connections of the service. `root_path`: the root path from the settings; `ALWAYS_ANSWERED` is recognised
    with and without it."""

    def __init__(
        self,
        root_path: str = "",
        refused: Callable[[str], None] = lambda reason: None,
        dropped: Callable[[str], None] = lambda reason: None,
        shares: Shares | None = None,
    ):
        self.sizes = SlotSizes(1, 2, 1)  # the number of slots; few until it is set
        self.shared = False  # whether `sizes.ordinary` applies to all processes together
        self.idle: dict[Slot, None] = {}  # ordinary slots between two requests, the longest idle first
        self._open: set[Slot] = set()
        self._reserve: dict[Slot, None] = {}  # oldest first
        self._always = {(prefix + path).encode() for path in ALWAYS_ANSWERED for prefix in {"", root_path}}
        self._refused = refused  # called with the reason for each request that gets 503
        # called with the kind (idle or reserve) of each connection that is closed for another one
        self._dropped = dropped
        self.shares = shares  # the connections of all processes, if several share the socket
        self._said = float("-inf")

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self) -> Slot:
        """A connection has been accepted."""
        is_reserve = not self._has_room()
        if is_reserve and len(self._reserve) >= self.sizes.reserve:
            self._drop_reserve()
        slot = Slot(self, is_reserve)
        self._open.add(slot)
        if is_reserve:
            self._reserve[slot] = None
        self._show()
        return slot

    def ask(self, slot: Slot, path: bytes | None) -> ApiError | None:
        """The reason why a request may not be served in this slot, which becomes ordinary if an ordinary slot is free
        by now."""
        if slot.is_reserve and slot in self._reserve and self._has_room():
            del self._reserve[slot]
            slot.is_reserve = False
            self._show()
        if not slot.is_reserve or path in self._always:
            return None
        self._refused("connections")
        self._say()
        message = (
            f"The service has {self.sizes.ordinary} connections, which is the limit (max_connections). Try again "
            "later, or raise --max-connections, and the limit of open files (ulimit -n) with it."
        )
        return ApiError(503, message, code="overloaded", headers={"Retry-After": "1", "Connection": "close"})

    def rest(self, slot: Slot) -> None:
        """Note that the connection waits for its next request."""
        if slot in self._open and not slot.is_reserve:
            self.idle[slot] = None

    def close(self, slot: Slot) -> None:
        """Note that the connection has ended."""
        self._open.discard(slot)
        self._reserve.pop(slot, None)
        self.idle.pop(slot, None)
        self._show()

    def make_room(self) -> bool:
        """Close one connection to free file descriptors; returns whether one could be closed."""
        return self._drop_idle() or self._drop_reserve()

    def _has_room(self) -> bool:
        elsewhere = self.shares.elsewhere if self.shares is not None and self.shared else 0
        return len(self._open) - len(self._reserve) + elsewhere < self.sizes.ordinary or self._drop_idle()

    def _show(self) -> None:
        if self.shares is not None:
            self.shares.show(len(self._open) - len(self._reserve))

    def _drop_idle(self) -> bool:
        # A client that is still receiving its answer would lose the rest.
        done = (slot for slot in islice(self.idle, _CANDIDATES) if not slot.unsent())
        return self._drop(next(done, None), "idle")

    def _drop_reserve(self) -> bool:
        silent = (slot for slot in self._reserve if not slot.answering)
        return self._drop(next(silent, None) or next(iter(self._reserve), None), "reserve")

    def _drop(self, slot: Slot | None, kind: str) -> bool:
        if slot is None:
            return False
        self.close(slot)
        slot.drop()
        self._dropped(kind)
        self._say()
        return True

    def _say(self) -> None:
        now = time.monotonic()
        if now > self._said + _SILENCE:
            self._said = now
            logger.warning(
                "All %d connections are in use (max_connections). Idle ones are closed to accept new ones; beyond "
                "that, "
                "only health and metrics are answered.",
                self.sizes.ordinary,
            )
