"""Requests per minute of each key, counted by the library `limits`: in this process, or in Redis for several services
together."""

from __future__ import annotations

import logging
import math
import time
from asyncio import timeout
from dataclasses import dataclass
from typing import Any

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage

from engine import ConfigError

logger = logging.getLogger("octavo.server")

PATIENCE = 1.0  # seconds for an answer of Redis
_AGAIN = 10.0  # seconds after a failure until Redis is tried again
_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class RateWindow:
    """A key's count in its current minute, after a request."""

    allowed: bool  # whether the request is within the limit
    limit: int  # requests per minute
    remaining: int  # requests that it may make now
    reset: int  # whole seconds until one more is allowed


class RequestRates:
    """Counts in a sliding window: a minute's requests weigh less and less in the next minute, so that twice the limit
    can never pass at once (`limits` calls it a sliding window counter). Refused requests do not count.

    While Redis is unreachable, this process counts by itself. Raises ConfigError: see `check_storage`. `redis`: URL
    (redis://, rediss://, unix://); None: this process counts.
    """

    def __init__(self, redis: str | None = None):
        self._own = MemoryStorage()
        self._pool = None if redis is None else _pool(redis)
        self._shared: RedisStorage | None = None
        self._failures: tuple[type[Exception], ...] = ()
        if self._pool is not None:
            self._shared = RedisStorage(
                "async+redis://", implementation="redispy", key_prefix="octavo", connection_pool=self._pool
            )
            # TimeoutError is an OSError.
            self._failures = (*_listed(self._shared.base_exceptions), OSError)
        self._ask_again: float | None = None  # time of Redis' last failure

    async def take(self, tenant: str, limit: int) -> RateWindow:
        """Count a request of this tenant, which may make this many per minute."""
        item = RateLimitItemPerMinute(limit)
        if self._shared is not None and self._may_ask():
            try:
                async with timeout(PATIENCE):
                    window = await _take(self._shared, item, tenant)
            except self._failures as problem:
                self._has_failed(problem)
            else:
                self._has_answered()
                return window
        return await _take(self._own, item, tenant)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()

    def _may_ask(self) -> bool:
        if self._ask_again is None:
            return True
        now = time.monotonic()
        if now < self._ask_again:
            return False
        self._ask_again = now + _AGAIN  # one request tries, not all that arrive meanwhile
        return True

    def _has_failed(self, problem: Exception) -> None:
        if self._ask_again is None:
            logger.warning(
                "Redis (rate_limit_storage) does not answer: %s. Requests of API keys are counted in this process "
                "until "
                "it does.",
                type(problem).__name__,
            )
        self._ask_again = time.monotonic() + _AGAIN

    def _has_answered(self) -> None:
        if self._ask_again is not None:
            logger.info("Redis answers again and counts the requests of API keys.")
            self._ask_again = None


async def _take(storage: MemoryStorage | RedisStorage, item: RateLimitItemPerMinute, tenant: str) -> RateWindow:
    key, seconds = item.key_for(tenant), item.get_expiry()
    allowed = await storage.acquire_sliding_window_entry(key, item.amount, seconds)
    # A window's counter is kept through the next window, in which it weighs by the rest of that window's time.
    before, before_left, current, current_left = await storage.get_sliding_window(key, seconds)
    weight = math.floor(before * before_left / seconds)
    if weight:
        reset = before_left - weight * seconds / before
    else:
        reset = current_left - seconds if current else 0.0
    remaining = max(0, item.amount - weight - current)
    # At exactly this moment, which is known to the millisecond, nothing has changed yet; so add a whole second.
    return RateWindow(allowed, item.amount, remaining, math.floor(max(0.0, reset) + 0.001) + 1)


def check_storage(redis: str | None) -> None:
    """Check that `RequestRates` can be made; this does not contact Redis. Raises ConfigError if the URL cannot be used,
    or the package redis is not installed."""
    if redis is not None:
        _pool(redis)


def _pool(url: str) -> Any:
    try:
        from redis.asyncio import BlockingConnectionPool
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError(
            "rate_limit_storage needs the package redis, which is not installed: pip install 'octavo[redis]'."
        ) from None
    try:
        # Retry at once: Redis may have closed an idle connection.
        again = Retry(NoBackoff(), 1)
        return BlockingConnectionPool.from_url(url, max_connections=_CONNECTIONS, timeout=None, retry=again)
    except ValueError:  # its message may repeat the URL, which may contain a password
        raise ConfigError("rate_limit_storage is not a valid Redis URL.") from None


def _listed(kinds: type[Exception] | tuple[type[Exception], ...]) -> tuple[type[Exception], ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)
