"""Access to the store of responses for routes; its failures become HTTP errors."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from fastapi import Request

from server.context import Service
from server.errors import ApiError
from server.response_store import ResponseStore, StoreError

T = TypeVar("T")


def tenant_of(request: Request) -> str | None:
    """The tenant of a request; None without API keys."""
    return getattr(request.state, "tenant", None)


def store_of(service: Service, name: str) -> ResponseStore:
    """The store, for a field or an endpoint that needs one. Raises ApiError if there is no store."""
    if service.response_store is None:
        message = f"{name} needs a response store, but this server has none: start it with --response-store FILE"
        raise ApiError(400, f"{message}, or send the whole conversation.", param=name, code="unsupported_parameter")
    return service.response_store


async def asked(service: Service, answer: Awaitable[T]) -> T:
    """The result of a call to the store. Raises ApiError: 500 if the call failed."""
    try:
        return await answer
    except StoreError as problem:
        failed(service, problem)


def failed(service: Service, problem: StoreError) -> NoReturn:
    """The error for a request whose store failed. Raises ApiError: 500, always."""
    note_failure(service, problem)
    message = "The response store failed. See the server's log for the reason."
    raise ApiError(500, message, code="internal_error") from problem


def note_failure(service: Service, problem: StoreError) -> None:
    """Count and log a failure of the store."""
    service.metrics.store_failed()
    if service.response_store is not None:
        service.response_store.complain(problem)
