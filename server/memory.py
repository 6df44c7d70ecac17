"""Limits the memory of the process that answers HTTP: above the limit, new requests are refused, so that running ones
continue and neither the machine nor the container kills the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from engine import ConfigError, available_memory, parse_bytes
from engine.host.resident import give_back
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

_SHARE = 4  # the default limit: this share of the memory free at start, plus the process's own then ...
_LEAST_ROOM = 256 * 2**20  # ... but at least this
_FRESH = 0.05  # seconds for which a measurement is reused, because requests may come faster
_PERIOD = 1.0  # seconds between measurements without requests
_GROWTH = 16 * 2**20  # bytes of growth since memory was last returned, after which it is returned again ...
_REST = 30.0  # ... but at most once in this many seconds
_COMPLAINT = 60.0  # seconds above the limit without running requests until the log reports it, each time
_MIB = 2**20


def resident_memory() -> int:
    """Resident bytes of this process; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def find_limit(setting: int | str | None, num_processes: int = 1) -> int | None:
    """The maximum bytes for this process, which is about to serve; None for no limit. Raises ConfigError if the process
    already uses more.

    Args:
        setting: max_api_memory: a size, 0 for no limit, or None for the present size plus `_SHARE` of the free memory.
        num_processes: the number of processes that share it.
    """
    if setting == 0:
        return None
    resident = resident_memory()
    if setting is None:
        return resident + max(available_memory() // _SHARE // num_processes, _LEAST_ROOM)
    limit = parse_bytes(setting, "max_api_memory") // num_processes
    if resident >= limit:
        raise ConfigError(
            f"max_api_memory is {limit // _MIB} MiB, but the process already uses {resident // _MIB} MiB before its "
            "first request. Raise --max-api-memory."
        )
    return limit


class MemoryGuard:
    """Whether this process uses more memory than allowed."""

    def __init__(
        self,
        limit: int | None = None,
        resident: Callable[[], int] = resident_memory,
        clock: Callable[[], float] = time.monotonic,
        give_back: Callable[[], None] = give_back,
    ):
        self._limit = limit  # the limit in bytes; None for no limit
        self._resident = resident  # returns the bytes in use
        self._give_back = give_back  # returns freed memory to the system, if possible
        self._clock = clock  # monotonic seconds
        self._looked = self._since = self._complained = float("-inf")
        self._exceeded = False

    def exceeded(self) -> bool:
        """Whether it uses too much, measured a moment ago."""
        now = self._clock()
        if self._limit is not None and now >= self._looked + _FRESH:
            self._looked = now
            size = self._resident()
            if (size > self._limit) != self._exceeded:
                self._change(size, self._limit, now)
        return self._exceeded

    def refusal(self) -> ApiError:
        """The error for a request that is refused meanwhile. Its body is not read."""
        message = (
            f"The service uses more memory than the limit of {(self._limit or 0) // _MIB} MiB (max_api_memory) and "
            f"accepts "
            "no new requests until it uses less. Try again later, or raise --max-api-memory."
        )
        return ApiError(503, message, code="overloaded", headers={"Retry-After": "5", "Connection": "close"})

    @asynccontextmanager
    async def watched(self, num_running: Callable[[], int], period: float = _PERIOD) -> AsyncIterator[None]:
        """A context that returns memory to the system while the process uses too much, and logs if that does not help.

        It also returns memory after the process has grown. glibc's threads keep freed memory: two processes that
        answered HTTP for three minutes used 27 MB each throughout, and the unused part grew from 2 to 27 MB.

        Args:
            num_running: returns the number of requests being answered.
            period: seconds between measurements.
        """
        watch = asyncio.create_task(self._watch(num_running, period), name="octavo-memory")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, num_running: Callable[[], int], period: float) -> None:
        if self._limit is None:
            return
        least, given_back = self._resident(), self._clock()
        while True:
            await asyncio.sleep(period)
            least = min(least, size := self._resident())
            if size > least + _GROWTH and self._clock() >= given_back + _REST:
                await asyncio.to_thread(self._give_back)
                least, given_back = self._resident(), self._clock()
            if self.exceeded():
                await asyncio.to_thread(self._give_back)
                self._looked = float("-inf")
                if self.exceeded() and not num_running():
                    self._complain()

    def _change(self, size: int, limit: int, now: float) -> None:
        self._exceeded = size > limit
        if self._exceeded:
            self._since = self._complained = now
            logger.warning(
                "The HTTP process uses %d MiB of memory, more than %d MiB (max_api_memory): new requests are refused "
                "until it uses less.",
                size // _MIB, limit // _MIB,
            )  # fmt: skip
        else:
            logger.info(
                "The HTTP process uses %d MiB of memory and accepts requests again after %.1f s.",
                size // _MIB, now - self._since,
            )  # fmt: skip

    def _complain(self) -> None:
        now = self._clock()
        if now >= self._complained + _COMPLAINT:
            self._complained = now
            logger.error(
                "The HTTP process has used more memory than max_api_memory for %.0f s, although it is idle: it will "
                "not accept requests until it is restarted. Raise --max-api-memory if it needs more.",
                now - self._since,
            )
