"""Errors of the chat path by the names of an endpoint that is a layer over it."""

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
        param: of a chat request, maybe with a place in it, such as messages[3].content.
        names: the client's, by those of chat requests; what has none is the same.
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
    """Errors that are raised here name the client's fields; one that begins with its field's name is worded so, too."""
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
    """The chat request that an endpoint makes of its own.

    Args:
        fields: of the chat request; what the endpoint takes may be more than a chat request may hold.
        names: the client's, by those of chat requests.

    Raises:
        ApiError: names the client's field that is wrong.
    """
    return valid(ChatCompletionRequest, fields, names)


def valid(model: type[Model], fields: Mapping[str, Any], names: Mapping[str, str]) -> Model:
    """A body of that class, which an endpoint makes of its own.

    Raises:
        ApiError: names the client's field that is wrong.
    """
    with public_names(names):
        try:
            return model.model_validate(fields)
        except ValidationError as problem:
            raise describe_validation(list(problem.errors(include_url=False))) from None


def _worded(message: str, before: str | None, after: str | None) -> str:
    if before and after and before != after and message.startswith(before):
        return after + message[len(before) :]
    return message
