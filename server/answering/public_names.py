"""Errors of the chat path by the names of an endpoint that is a layer over it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine import InvalidRequestError
from server.errors import ApiError


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


def _worded(message: str, before: str | None, after: str | None) -> str:
    if before and after and before != after and message.startswith(before):
        return after + message[len(before) :]
    return message
