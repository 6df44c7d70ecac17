"""`octavo batch`: the requests of a file, their answers in another one."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from cli.errors import TalkError
from cli.talking.model import Model, talk
from cli.talking.options import add_place
from cli.terminal.parser import OneLineParser
from cli.terminal.style import note
from server.batches.lines import LinePlace, check_line, places, read_line

PROG = "octavo batch"
DESCRIPTION = """\
Answer the requests of a JSON Lines file, in the format of OpenAI's batches, and write the answers to another file. If
OUT exists, only the requests without an answer in it are sent, so that an interrupted run goes on where it was.

  octavo batch in.jsonl out.jsonl --model MODEL
  octavo batch in.jsonl out.jsonl --url http://127.0.0.1:8000

A line of IN:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
A line of OUT: {"id": "...", "custom_id": "a", "response": {"status_code": 200, "body": {...}}, "error": null}
"""
_RETRY = 0.5  # seconds before a request that found no room is sent again
_INTERVAL = 0.1  # seconds between two looks of the progress
_BAR = 24  # characters

# Takes a path and a body; gives the answer's status, id and body.
Ask = Callable[[str, dict[str, Any]], tuple[int, str, Any]]
# Takes the numbers of answers, of errors among them, and of requests.
Show = Callable[[int, int, int], None]


def parser() -> OneLineParser:
    """Files, place and parallel requests."""
    made = OneLineParser(prog=PROG, usage=f"{PROG} IN OUT [flags]", description=DESCRIPTION)
    made.add_argument("source", metavar="IN", help="file with a request on each line")
    made.add_argument("target", metavar="OUT", help="file for the answers, in the order in which they come")
    made.add_argument(
        "--model",
        metavar="MODEL",
        help="folder, GGUF file or hub id to load, for all requests whatever model they name; with --url, the id of a "
        "model there, for requests that name none",
    )
    made.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="requests that are sent at the same time [32]"
    )
    add_place(made)
    return made


def run(arguments: list[str]) -> int:
    """Answer a file. Returns 0, 1 if it failed or a request did, 2 for wrong flags, or 130 if Ctrl-C stopped it."""
    made = parser()
    given = made.parse_args(arguments)
    if given.concurrency < 1:
        made.error(f"--concurrency must be at least 1, got {given.concurrency}")
    try:
        source, target = Path(given.source), Path(given.target)
        requests = read_requests(source)
        done, failed = read_done(target)
    except (OSError, TalkError) as problem:
        made.error(str(problem))
    left = {id_: place for id_, place in requests.items() if id_ not in done}
    if len(left) < len(requests):
        note(f"{len(requests) - len(left)} of {len(requests)} requests are answered in {target}")
    if not left:
        return int(failed > 0)

    def with_model(model: Model) -> int:
        def ask(path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
            own = {"model": model.id} if model.here or "model" not in body else {}
            return model.wire.answer(path, {**body, **own})

        errors = answer_all(source, target, list(left.values()), ask, given.concurrency, _progress())
        print(file=sys.stderr)
        note(f"{len(left)} requests answered, {errors} of them with an error, in {target}")
        return int(failed + errors > 0)

    return talk(PROG, given, with_model)


def read_requests(source: Path) -> dict[str, LinePlace]:
    """The places of a file's requests, by their ids. Raises TalkError with the line and the reason if a line is not a
    request; OSError if the file cannot be read."""
    found: dict[str, LinePlace] = {}
    for place, line in places(source):
        try:
            value = read_line(line)
        except ValueError as problem:
            raise TalkError(f"{source}, line {place.number}: {problem}") from None
        wrong = check_line(value, None)
        if wrong is None and value["custom_id"] in found:
            wrong = "", f"custom_id {value['custom_id']!r} is also that of line {found[value['custom_id']].number}.", ""
        if wrong is not None:
            raise TalkError(f"{source}, line {place.number}: {wrong[1].removesuffix('.')}")
        found[value["custom_id"]] = place
    if not found:
        raise TalkError(f"{source} has no requests")
    return found


def read_done(target: Path) -> tuple[set[str], int]:
    """The ids of the requests that have an answer in a file, and how many of these are errors. A last line that was cut
    off is removed. Raises TalkError if the file holds something else; OSError if it cannot be read or written."""
    done: set[str] = set()
    failed = end = 0
    if not target.exists():
        return done, failed
    if not target.is_file():  # a device or a pipe: what was written cannot be read again
        raise TalkError(f"{target} is not a file. Name a file for the answers")
    with target.open("r+b") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                value = read_line(line)
                done.add(value["custom_id"])
                failed += value["response"]["status_code"] >= 400
            except (ValueError, KeyError, TypeError):
                raise TalkError(f"{target}, line {number} is not an answer of a batch. Name another file") from None
            end += len(line)
        file.truncate(end)
    return done, failed


def answer_all(source: Path, target: Path, left: list[LinePlace], ask: Ask, concurrency: int, show: Show) -> int:
    """Answer requests, and append each answer to a file as soon as it is there. `concurrency`: so many at the same
    time. Raises TalkError if the server is gone.

    Returns:
        The number of errors among the answers.
    """
    count = errors = 0
    with source.open("rb") as lines, target.open("ab") as answers, ThreadPoolExecutor(concurrency) as threads:
        running: set[Future[dict[str, Any]]] = set()
        rest = iter(left)
        try:
            while True:
                while len(running) < concurrency and (place := next(rest, None)) is not None:
                    lines.seek(place.begin)
                    running.add(threads.submit(_answer, read_line(lines.read(place.size)), ask))
                if not running:
                    return errors
                ended, running = wait(running, timeout=_INTERVAL, return_when=FIRST_COMPLETED)
                for future in ended:
                    entry = future.result()
                    answers.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
                    count, errors = count + 1, errors + (entry["response"]["status_code"] >= 400)
                answers.flush()
                show(count, errors, len(left))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _answer(request: dict[str, Any], ask: Ask) -> dict[str, Any]:
    while True:
        status, id_, body = ask(request["url"], request["body"])
        if status != 503:
            break
        time.sleep(_RETRY)
    response = {"status_code": status, "request_id": id_, "body": body}
    made = f"batch_req_{uuid.uuid4().hex}"
    return {"id": made, "custom_id": request["custom_id"], "response": response, "error": None}


def _progress() -> Show:
    """Shows a bar in a terminal, and a line every ten seconds elsewhere."""
    began = shown = time.monotonic()
    interval = _INTERVAL if sys.stderr.isatty() else 10.0

    def show(count: int, errors: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < interval and count < total:
            return
        shown = now
        pace = count / max(now - began, 1e-9)
        left = f", {(total - count) / pace:.0f} s left" if count else ""
        bar = "#" * (_BAR * count // total)
        text = f"[{bar:.<{_BAR}}] {count}/{total}, {errors} errors, {pace:.1f}/s{left}"
        if sys.stderr.isatty():
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    return show
