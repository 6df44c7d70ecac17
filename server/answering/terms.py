"""The terms of a request at the engine: its tenant, priority, deadline, and the cached pages that it may share."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from server.api.schemas import MAX_TIMEOUT, ServedBody
from server.config.settings import ServerSettings
from server.errors import ApiError, shown

TIMEOUT_HEADER = "X-Request-Timeout"
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


class DeadlineError(ApiError):
    """A request's deadline has passed before any part of its answer exists."""

    def __init__(self) -> None:
        message = (
            f"The request's time limit ({TIMEOUT_HEADER}, request_timeout) passed before its answer began. Allow "
            "more, or send it when the service is less busy."
        )
        super().__init__(504, message, code="deadline_exceeded")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one HTTP request, as in `EngineClient.submit`."""

    tenant: str | None = None  # identifies the API key; None without keys
    # requests with the same salt share cached pages; None is shared by all requests without one
    cache_salt: str | None = None
    priority: int = 0  # lower comes first, among requests of the same tenant
    deadline: float | None = None  # `time.monotonic()` seconds, or None
    adapter: str | None = None  # the adapter that the request names as its model; None for the base model
    in_batch: bool = False  # whether it is a line of a batch

    def keywords(self) -> dict[str, Any]:
        """The arguments for the engine."""
        named = {} if self.adapter is None else {"adapter": self.adapter}
        return {
            "tenant": self.tenant,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "deadline": self.deadline,
            **named,
        }

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, 0 after it; None without one."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


def read_terms(
    body: ServedBody, request: Request, settings: ServerSettings, arrival: float, adapters: Container[str] = ()
) -> Terms:
    """The terms in the body and the header. Raises ApiError if the header is not a number of seconds.

    Args:
        arrival: `time.monotonic()` seconds when the request arrived, unless an outer layer noted an earlier time.
        adapters: the names of the loaded adapters.
    """
    tenant = getattr(request.state, "tenant", None)
    arrival = getattr(request.state, "arrival", arrival)
    model = getattr(body, "model", None)
    limits = [body.request_timeout, _header_timeout(request)]
    seconds = min((limit for limit in limits if limit is not None), default=None)
    return Terms(
        tenant=tenant,
        cache_salt=scoped_salt(tenant if settings.prefix_cache_scope == "key" else None, body.cache_salt),
        priority=body.priority or 0,
        deadline=None if seconds is None else arrival + seconds,
        adapter=model if isinstance(model, str) and model in adapters else None,
        in_batch=getattr(request.state, "in_batch", False),
    )


def scoped_salt(tenant: str | None, salt: str | None) -> str | None:
    """One salt from tenant and salt, so that no tenant can guess another's; None for neither."""
    if tenant is None and salt is None:
        return None
    return hashlib.sha256(json.dumps([tenant, salt]).encode()).hexdigest()


def _header_timeout(request: Request) -> float | None:
    given = request.headers.getlist(TIMEOUT_HEADER)
    if not given:
        return None
    seconds = float(given[0]) if len(given) == 1 and _DECIMAL.fullmatch(given[0]) else 0.0
    if not 0.0 < seconds <= MAX_TIMEOUT:
        message = (
            f"{TIMEOUT_HEADER} must be sent once, as a number of seconds such as 2.5, above 0 and at most "
            f"{MAX_TIMEOUT}, got {shown(', '.join(given))}."
        )
        raise ApiError(400, message, param=TIMEOUT_HEADER, code="invalid_value")
    return seconds
