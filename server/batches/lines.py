"""The lines of a batch's input file: one request each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.errors import shown

MOST_LINES = 50_000  # in a batch, as at OpenAI
_MOST_PROBLEMS = 100  # that are listed
_MOST_ID = 512  # characters of a custom_id
_PATH = re.compile(r"/(?!/)")


@dataclass(frozen=True, slots=True)
class LinePlace:
    """A line's place in its file."""

    number: int  # of the line, from 1 on. Empty lines count.
    # begin, size: its bytes
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why a file is no batch; `line` is None if it is about the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def shown(self) -> dict[str, Any]:
        """The problem in OpenAI's shape."""
        return {"code": self.code, "message": self.message, "line": self.line, "param": self.param}


def places(path: Path) -> Iterator[tuple[LinePlace, bytes]]:
    """The lines of a file that are not empty."""
    begin = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield LinePlace(number, begin, len(line)), line
            begin += len(line)


def read_line(line: bytes) -> dict[str, Any]:
    """A line as an object. Raises ValueError if it is none; says so."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("the line is not valid JSON") from None
    if not isinstance(value, dict):
        raise ValueError(f"the line must be a JSON object, got {shown(value)}")
    return value


def check_line(value: dict[str, Any], endpoint: str | None) -> tuple[str, str, str] | None:
    """The first problem of a line: its code, message and field; None if it has none. `endpoint`: the batch's; None:
    any."""
    id_, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(id_, str) or not 0 < len(id_) <= _MOST_ID or not _is_text(id_):
        return (
            "invalid_custom_id",
            f"custom_id must be a string of 1 to {_MOST_ID} characters, got {shown(id_)}.",
            "custom_id",
        )
    if value.get("method") != "POST":
        return "invalid_method", f"method must be POST, got {shown(value.get('method'))}.", "method"
    # A whole address would send the request, and the API key, to another server.
    if not isinstance(url, str) or not _PATH.match(url) or (endpoint is not None and url != endpoint):
        wanted = "a path" if endpoint is None else f"the batch's endpoint, {endpoint}"
        return "invalid_url", f"url must be {wanted}, got {shown(url)}.", "url"
    if not isinstance(body, dict):
        return "invalid_body", f"body must be an object, got {shown(body)}.", "body"
    if body.get("stream"):
        return "invalid_body", "body.stream must be false: a batch has whole answers.", "body.stream"
    return None


def _is_text(value: str) -> bool:
    """No half of a surrogate pair, which no file can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_file(path: Path, endpoint: str, is_served: Callable[[Any], str | None]) -> tuple[int, list[Problem]]:
    """The number of requests in a file, and its problems. `is_served`: returns the fault of a body's model, or None."""
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    count = 0
    for place, line in places(path):
        count += 1
        if count > MOST_LINES or len(problems) >= _MOST_PROBLEMS:
            break
        try:
            value = read_line(line)
        except ValueError as problem:
            problems.append(Problem("invalid_json_line", f"{str(problem).capitalize()}.", place.number))
            continue
        wrong = check_line(value, endpoint)
        if wrong is None:
            before = seen.setdefault(value["custom_id"], place.number)
            message = is_served(value["body"].get("model"))
            if before != place.number:
                message = f"custom_id {shown(value['custom_id'])} is also that of line {before}."
                wrong = "duplicate_custom_id", message, "custom_id"
            elif message is not None:
                wrong = "model_not_found", message, "body.model"
        if wrong is not None:
            problems.append(Problem(wrong[0], wrong[1], place.number, wrong[2]))
    if count > MOST_LINES:
        problems.append(Problem("too_many_requests", f"The file has more than {MOST_LINES} requests. Split it."))
    if not count:
        problems.append(Problem("empty_file", "The file has no requests."))
    return count, problems
