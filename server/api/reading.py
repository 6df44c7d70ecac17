"""Turns bytes of a body into a validated model, in bounded memory and without blocking the event loop."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from engine import parse_bytes
from server.api.structure import check_structure
from server.context import Service
from server.errors import ApiError, describe_validation

READ_BODY = "octavo.body"  # in the scope: the validated body, whose `model` selects the service
_SMALL = 64 * 1024  # bytes that are parsed faster than a thread can be started


class StrictJsonRequest(Request):
    """A request whose JSON must be standard JSON: UTF-8, no NaN, no Infinity, and every string valid Unicode.

    Args:
        request: the request as it came.
        model: the class that validates the body.
    """

    def __init__(self, request: Request, model: type[BaseModel]):
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """The validated body. A large body is parsed in a thread, one at a time."""
        content = await self.body()
        service: Service = self.app.state.service
        limit = parse_bytes(service.settings.max_body_size, "max_body_size")
        if len(content) <= _SMALL:
            body = self.read(content, self._model, limit)
        else:
            async with service.reading:
                body = await asyncio.to_thread(self.read, content, self._model, limit)
        self.scope[READ_BODY] = body
        return body

    def read(self, content: bytes, model: type[BaseModel], max_body_size: int) -> BaseModel:
        """Parse the body as the model; see `read_body`."""
        return read_body(content, model, max_body_size)


class StrictJsonRoute(APIRoute):
    """A route whose bodies are read by `StrictJsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, model = super().get_route_handler(), self.body_model()

        async def strict(request: Request) -> Response:
            return await handle(
                request if isinstance(request, StrictJsonRequest) else StrictJsonRequest(request, model)
            )

        return strict

    def body_model(self) -> type[BaseModel]:
        """The class that validates the route's bodies."""
        assert self.body_field is not None
        model = self.body_field.field_info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        return model


class UntypedJsonRoute(StrictJsonRoute):
    """`StrictJsonRoute` for bodies of any Content-Type, because clients that send JSON with curl's default Content-Type
    declare it a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def untyped(request: Request) -> Response:
            others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            headers = [*others, (b"content-type", b"application/json")]
            return await handle(Request({**request.scope, "headers": headers}, request.receive))

        return untyped


def read_body(content: bytes, model: type[BaseModel], max_body_size: int) -> BaseModel:
    """Parse JSON text as a model. Raises ApiError if the text is not JSON, has too much structure, or does not match
    the model.

    Args:
        model: the class that validates it.
        max_body_size: maximum bytes of a body (see `check_structure`).
    """
    if len(content) > _SMALL:
        check_structure(content, max_body_size)
    try:
        value = msgspec.json.decode(content.removeprefix(BOM_UTF8))
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise _unreadable(content, problem) from None
    try:
        return model.model_validate(value)
    except ValidationError as problem:
        errors = problem.errors(include_url=False)
        raise describe_validation([{**error, "loc": ("body", *error["loc"])} for error in errors]) from None


def _unreadable(content: bytes, problem: Exception) -> ApiError:
    reason = f"is not valid JSON: {problem}"
    if isinstance(problem, msgspec.ValidationError):
        reason = f"cannot be read: {str(problem).partition(' - at')[0]}"  # the number is too large
    try:
        content.decode()
    except UnicodeDecodeError as wrong:
        reason = f"is not valid UTF-8: {wrong.reason} at byte {wrong.start}"
    return ApiError(400, f"The body {reason}.", code="invalid_json")
