"""`octavo batch`: its files, whatever interrupts it. The requests go to a function here."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from cli.commands.batch import answer_all, read_done, read_requests
from cli.errors import TalkError


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in lines))
    return path


def request(number: int) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": str(number)}}


def answered(source: Path, target: Path, ask: Any, concurrency: int = 3) -> int:
    """One run of the command."""
    requests = read_requests(source)
    done, _ = read_done(target)
    left = [place for id_, place in requests.items() if id_ not in done]
    return answer_all(source, target, left, ask, concurrency, lambda *_: None)


def echo(path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    return (400 if body["prompt"] == "3" else 200), "id", {"path": path, **body}


def test_each_request_has_its_answer(tmp_path: Path) -> None:
    source = write(tmp_path / "in", *map(request, range(8)), "")
    assert answered(source, tmp_path / "out", echo) == 1
    entries = [json.loads(item) for item in (tmp_path / "out").read_text().splitlines()]
    assert {entry["custom_id"]: entry["response"]["body"] for entry in entries} == {
        f"r{number}": {"path": "/v1/completions", "prompt": str(number)} for number in range(8)
    }
    assert read_done(tmp_path / "out") == ({f"r{number}" for number in range(8)}, 1)


@pytest.mark.parametrize("after", range(5))
def test_an_interrupted_run_goes_on(tmp_path: Path, after: int) -> None:
    source, target = write(tmp_path / "in", *map(request, range(5))), tmp_path / "out"
    count, lock, asked = 0, threading.Lock(), list[str]()

    def breaking(path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        nonlocal count
        with lock:
            count += 1
            if count > after:
                raise TalkError("the server is gone")
        return echo(path, body)

    def noting(path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
        asked.append(body["prompt"])
        return echo(path, body)

    with pytest.raises(TalkError, match="the server is gone"):
        answered(source, target, breaking, concurrency=1)
    with target.open("a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "r9')  # as a kill leaves it
    answered(source, target, noting)
    assert sorted(asked) == [str(number) for number in range(after, 5)]
    ids = [json.loads(item)["custom_id"] for item in target.read_text().splitlines()]
    assert sorted(ids) == [f"r{number}" for number in range(5)]


def test_a_busy_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.commands.batch._RETRY", 0.0)
    statuses = [503, 503, 200]
    source = write(tmp_path / "in", request(1))
    assert answered(source, tmp_path / "out", lambda path, body: (statuses.pop(0), "id", {})) == 0
    assert statuses == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{no"], "in, line 1: the line is not valid JSON"),
        ([request(1), request(1)], "in, line 2: custom_id 'r1' is also that of line 1"),
        ([request(1) | {"method": "GET"}], "in, line 1: method must be POST, got 'GET'"),
        ([request(1) | {"url": "http://other/v1"}], "in, line 1: url must be a path, got 'http://other/v1'"),
        ([request(1) | {"url": "//other/v1"}], "in, line 1: url must be a path, got '//other/v1'"),
        (
            [request(1) | {"custom_id": "\ud800"}],
            "in, line 1: custom_id must be a string of 1 to 512 characters, got '\\ud800'",
        ),
        ([], "in has no requests"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(TalkError) as caught:
        read_requests(write(tmp_path / "in", *lines))
    assert str(caught.value).endswith(message)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_answers_go_to_files_only(tmp_path: Path) -> None:
    """Reading a device such as /dev/full would never end."""
    os.mkfifo(tmp_path / "out")
    with pytest.raises(TalkError, match="out is not a file"):
        read_done(tmp_path / "out")


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(TalkError, match="line 1 is not an answer of a batch"):
        read_done(write(tmp_path / "out", "notes"))
    assert (tmp_path / "out").read_text() == "notes\n"
