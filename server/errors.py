"""One error body, OpenAI's, for all errors."""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.routing import Match

from engine import EngineDeadError, InvalidRequestError

logger = logging.getLogger("octavo.server")
request_logger = structlog.get_logger("octavo.request")

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_SHOWN = 80  # maximum characters of a wrong value that an error message repeats


class ErrorDetail(BaseModel):
    """An error, for people (`message`) and for programs (`type`, `param`, `code`)."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """OpenAI's error body."""

    error: ErrorDetail


# Declared for every route: "4XX" also keeps FastAPI from documenting 422, which is never sent.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "Client error."},
    "5XX": {"model": ErrorResponse, "description": "Server error."},
}


class ApiError(HTTPException):
    """An error with the status and body for the client."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status_code, message, dict(headers) if headers else None)
        self.message = message
        self.param = param
        self.code = code

    def payload(self) -> dict[str, Any]:
        """The body as a JSON-ready dictionary."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body(self) -> str:
        """The body as ASCII JSON, because a message may repeat the client's text, including lone surrogates."""
        return json.dumps(self.payload())

    def response(self) -> Response:
        return Response(self.body(), self.status_code, self.headers, media_type="application/json")


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN


def shown(value: Any) -> str:
    """A wrong value for an error message: in ASCII, and shortened if it is long or deeply nested."""
    text = _repr.repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def describe_validation(problems: list[Any]) -> ApiError:
    """One sentence from pydantic's list: the first invalid field, with all its errors."""
    first = problems[0]
    location = list(first["loc"])
    if location[:1] and location[0] in ("body", "path", "query"):
        del location[0]  # its location; "query" may be a field too
    if not location and first["type"] == "limit":
        return ApiError(400, f"The body {first['msg']}.", code="invalid_value")
    if not location:
        return ApiError(400, "The body must be a JSON object with Content-Type: application/json.", code="invalid_body")
    param = _param(location)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is required.", param=param, code="missing_required_parameter")
    if first["type"] == "limit":
        return ApiError(400, f"{param} {first['msg']}.", param=param, code="invalid_value")
    start = len(first["loc"]) - len(location)
    reasons = dict.fromkeys(
        problem["msg"]
        for problem in problems
        if _param(problem["loc"][start:]) == param and problem["type"] != "missing"
    )
    message = f"{param}: {', or: '.join(reasons)}; got {shown(first['input'])}."
    return ApiError(400, message, param=param, code="invalid_type")


def _param(location: Sequence[Any]) -> str:
    """A field's name. For stream_options and questions, the path within it."""
    field, *below = location or ("",)
    if field == "questions" and below:
        # In a list, the question's type follows its index. Below a value are the branches of its type.
        below = [below[0], *below[2:5]] if isinstance(below[0], int) else [below[0][:_SHOWN], *below[1:2]]
    elif field != "stream_options":  # below other fields are the branches of their types too
        below = []
    return ".".join(map(str, [field, *below]))


def to_api_error(problem: Exception) -> ApiError:
    """The error response for any exception. The server's own failures are logged and answered without details."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, RequestValidationError):
        return describe_validation(list(problem.errors()))
    if isinstance(problem, InvalidRequestError) and problem.code == "adapter_not_found":  # unloaded since it was chosen
        return ApiError(404, str(problem), param="model", code="model_not_found")
    if isinstance(problem, InvalidRequestError):
        return ApiError(400, str(problem), param=problem.param, code=problem.code)
    if isinstance(problem, StarletteHTTPException):
        return ApiError(problem.status_code, str(problem.detail), headers=problem.headers)
    if isinstance(problem, EngineDeadError):
        logger.debug("The engine is dead: %s", problem)  # its client has already logged this
        return ApiError(
            503,
            "The engine has stopped and is restarting. Try again later.",
            code="engine_dead",
            headers={"Retry-After": "5"},
        )
    # The exception's message may repeat a prompt, so only the traceback, which hides prompts, is logged.
    logger.error("A request failed: %s", type(problem).__name__, exc_info=problem)
    return ApiError(500, "The server failed to answer this request. See its log for the reason.", code="internal_error")


async def _on_error(request: Request, problem: Exception) -> Response:
    # Asynchronous, because Starlette runs other handlers in a thread, which is too expensive for a refusal.
    error = to_api_error(problem)
    if error.code is None and error.status_code == 404:
        where = f"{request.method} {_path(request)}"
        hint = "No route ends with a slash" if str(request.scope["path"]).endswith("/") else "/docs lists the routes"
        error = ApiError(404, f"Unknown route: {where}. {hint}.", code="unknown_route")
    elif error.code is None and error.status_code == 405:
        headers = dict(error.headers or {})
        if "Allow" in headers:
            headers["Allow"] = _allowed(request) or headers["Allow"]
        allowed = headers.get("Allow", "other methods")
        message = f"{_path(request)} does not answer {request.method}; it answers {allowed}."
        error = ApiError(405, message, code="method_not_allowed", headers=headers)
    _log_refusal(request, error)
    return error.response()


def _log_refusal(request: Request, error: ApiError) -> None:
    """The log line of a model request that was refused before it had a record. Without the message, which may repeat a
    prompt."""
    path = str(request.scope["path"])
    route = getattr(request.scope.get("route"), "path", None)
    asks = request.method == "POST" and route in request.app.state.logged_paths
    logged = getattr(request.state, "recorded", False) or error.status_code in (408, 413)  # the middleware sends these
    if asks and not logged and error.status_code < 500:
        facts = {"path": path, "status": error.status_code, "code": error.code, "param": error.param}
        request_logger.info("request finished", outcome="refused", **facts)


def _allowed(request: Request) -> str:
    """The methods of all routes with this path. Starlette names only those of the first."""
    found = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return ", ".join(found)


def _path(request: Request) -> str:
    # Not request.url, because it is built from the Host header, which may be anything.
    path = str(request.scope["path"])
    return path if len(path) <= _SHOWN else path[:_SHOWN] + "..."


def install(app: FastAPI, logged_paths: Collection[str]) -> None:
    """Answer every exception with OpenAI's error body. A refused POST request to one of `paths` gets a log line."""
    app.state.logged_paths = logged_paths
    for kind in (StarletteHTTPException, RequestValidationError, InvalidRequestError, EngineDeadError, Exception):
        app.add_exception_handler(kind, _on_error)
