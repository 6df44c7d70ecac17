"""Errors of the chat path with the field names of an endpoint on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engine import InvalidRequestError
from server.api.chat_schemas import ChatCompletionRequest
from server.errors import ApiError, describe_validation

Model = TypeVar("Model", bound=BaseModel)


def public_name(param: str | None, names: Mapping[str, str]) -> str | None:
    """The field as the client sent it.

    Args:
        param: a chat request's field, perhaps with a path such as messages[3].content.
        names: the client's names by those of chat requests; other names are the same.
    """
    if param is None:
        return None
    end = min((param.find(sign) for sign in ".[" if sign in param), default=len(param))
    name, rest = param[:end], param[end:]
    if name != "tools":
        return names.get(name, param)
    # In chat requests a function is an object within its tool.
    place, _, field = rest.replace(".function", "", 1).partition(".")
    return f"{name}{place}.{names.get(f'tools.{field}', field)}" if field else name + place


@contextmanager
def public_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised in this block get the client's field names, also at the beginning of their messages."""
    try:
        yield
    except InvalidRequestError as problem:
        param = public_name(problem.param, names)
        raise InvalidRequestError(_worded(str(problem), problem.param, param), param=param, code=problem.code) from None
    except ApiError as problem:
        param = public_name(problem.param, names)
        if param == problem.param:
            raise
        message = _worded(problem.message, problem.param, param)
        raise ApiError(
            problem.status_code, message, param=param, code=problem.code, headers=problem.headers
        ) from problem


def chat_request(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatCompletionRequest:
    """The chat request that an endpoint builds. Raises ApiError: names the client's invalid field. `fields`: the chat
    request's fields; the endpoint may allow more than chat does."""
    return valid(ChatCompletionRequest, fields, names)


def valid(model: type[Model], fields: Mapping[str, Any], names: Mapping[str, str]) -> Model:
    """A body of that class, which an endpoint creates itself. Raises ApiError: names the client's field that is
    wrong."""
    with public_names(names):
        try:
            return model.model_validate(fields)
        except ValidationError as problem:
            raise describe_validation(list(problem.errors(include_url=False))) from None


def _worded(message: str, before: str | None, after: str | None) -> str:
    if before and after and before != after and message.startswith(before):
        return after + message[len(before) :]
    return message
