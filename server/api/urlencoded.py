"""Bodies that are forms, application/x-www-form-urlencoded or multipart/form-data, in as much memory as the body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError

from server.api.base import MAX_FIELDS
from server.api.multipart import read_form
from server.api.reading import StrictJsonRequest, StrictJsonRoute
from server.api.schemas import MAX_PROMPTS
from server.errors import ApiError, describe_validation, shown

KIND, PARTS = "application/x-www-form-urlencoded", "multipart/form-data"
_MOST = MAX_FIELDS + MAX_PROMPTS  # maximum fields, counting each text of a list
_PIECE = 64 * 1024  # bytes that are decoded at a time, because a list of escapes takes far more memory


class FormOrJsonRoute(StrictJsonRoute):
    """A route that reads its body as `StrictJsonRoute` does, or as a form with the same fields.

    A browser sends a form to any site without a preflight; the service refuses requests from pages of other sites by
    their Origin (`server.door.hosts`).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, model = super().get_route_handler(), self.body_model()

        async def either(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            return await handle(_FormRequest(request, model) if kind in (KIND, PARTS) else request)

        return either


class _FormRequest(StrictJsonRequest):
    def __init__(self, request: Request, model: type[BaseModel]):
        # FastAPI reads the body's object only under this name.
        headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
        scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        super().__init__(Request(scope, request.receive), model)
        self._kind = request.headers["content-type"]

    def read(self, content: bytes, model: type[BaseModel], max_body_size: int) -> BaseModel:
        if self._kind.partition(";")[0].strip().lower() == KIND:
            return read_urlencoded(content, model)
        form = read_form(content, self._kind)
        for name in form.files:
            message = f"{shown(name)[1:-1]} is a file, but only text is accepted; send its text."
            raise ApiError(400, message, param=name, code="invalid_body")
        return _validated(form.texts, model)


def read_urlencoded(content: bytes, model: type[BaseModel]) -> BaseModel:
    """A form as a model; a repeated field becomes a list. Raises ApiError if the body is not such a form, has too many
    fields, or does not match the model."""
    if content.count(b"&") >= _MOST:
        raise ApiError(400, f"The form has more than {_MOST} fields.", code="invalid_body")
    fields: dict[str, list[str]] = {}
    for part in content.split(b"&"):
        name, _, value = part.partition(b"=")
        if part:
            fields.setdefault(_text(name), []).append(_text(value))
    return _validated(fields, model)


def _validated(fields: Mapping[str, list[str]], model: type[BaseModel]) -> BaseModel:
    try:
        # Not strict: a form contains only texts, so "2" counts as a number.
        return model.model_validate({k: v[0] if len(v) == 1 else v for k, v in fields.items()}, strict=False)
    except ValidationError as problem:
        errors = problem.errors(include_url=False)
        raise describe_validation([{**error, "loc": ("body", *error["loc"])} for error in errors]) from None


def _text(escaped: bytes) -> str:
    found, at = bytearray(), 0
    while at < len(escaped):
        end = at + _PIECE
        cut = escaped.find(b"%", end - 2, end)  # do not cut an escape of three bytes
        end = cut if cut >= 0 else end
        found += unquote_to_bytes(escaped[at:end].replace(b"+", b" "))
        at = end
    try:
        return found.decode()
    except UnicodeDecodeError as problem:
        reason = f"{problem.reason} at byte {problem.start}"
        raise ApiError(400, f"A part of the form is not valid UTF-8: {reason}.", code="invalid_body") from None
