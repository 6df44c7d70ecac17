"""Commands that meet a server which is still loading its model, or which is none of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_server import FakeServer

from cli.errors import DroppedError, LoadingError, NoServerError, TalkError
from cli.talking import patience
from cli.talking.model import open_model
from cli.talking.patience import once_loaded
from cli.talking.wire import ServerPlace, Wire
from server.door.loading import _response

READY: tuple[int, Any] = (200, {"data": [{"id": "m", "max_model_len": 50}]})


class Loads(FakeServer):
    """A server that answers as `server.door.loading` does until it has been asked a few times."""

    def __init__(self, *percents: int | None):
        super().__init__()
        self.percents = list(percents)

    async def _answer(self, path: str, data: bytes, writer: Any) -> None:
        if self.percents:
            body = _response("The model m", self.percents.pop(0))[1]
            self.other["/v1/models"] = (503, json.loads(body))
        else:
            self.other["/v1/models"] = READY
        await super()._answer(path, data, writer)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_BETWEEN", 0.0)


def test_a_server_that_loads_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with Loads(None, 12, 12, 80) as server:
        with open_model(None, server.url, api_key=None, default_url="", timeout=60, loading=[]) as model:
            assert model.id == "m"
        assert server.percents == []
        assert f"The server at {server.url} is still loading its model" in capsys.readouterr().err
        server.percents = [5]
        with open_model(None, None, api_key=None, default_url=server.url, timeout=60, loading=[]) as model:
            assert not model.here, "no other model is loaded meanwhile"


def test_a_terminal_shows_the_percentage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    with Loads(None, 12, 80) as server, open_model(
        None, server.url, api_key=None, default_url="", timeout=60, loading=[]
    ):  # fmt: skip
        shown = capsys.readouterr().err
    assert shown.startswith(f"Loading the model at {server.url} ...")
    assert f"\rLoading 12% of the model at {server.url}" in shown
    assert f"\rLoading 80% of the model at {server.url}" in shown


def test_a_server_that_makes_no_progress_is_given_up() -> None:
    def ask() -> None:
        raise LoadingError("loading", 7)

    with pytest.raises(TalkError, match=r"still loading its model, without progress for 1e-09 s \(--timeout\)"):
        once_loaded(ask, "http://there", 1e-9)


def test_a_connection_that_is_lost_as_the_server_takes_over_is_made_again() -> None:
    problems = [LoadingError("loading", 99), DroppedError("closed"), LoadingError("loading", 100)]

    def ask() -> str:
        if problems:
            raise problems.pop(0)
        return "ready"

    assert once_loaded(ask, "http://there", 60) == "ready"


def test_a_server_that_is_dropped_for_good_is_given_up() -> None:
    problems: list[Exception] = [LoadingError("loading", 99)]

    def ask() -> None:
        raise problems.pop(0) if problems else DroppedError("closed")

    with pytest.raises(TalkError, match="without progress"):
        once_loaded(ask, "http://there", 1e-9)


def test_a_server_that_stops_while_it_loads_is_named() -> None:
    problems = [LoadingError("loading", None), NoServerError("refused")]

    def ask() -> None:
        raise problems.pop(0)

    with pytest.raises(TalkError, match="http://there stopped while it was loading") as caught:
        once_loaded(ask, "http://there", 60)
    assert not isinstance(caught.value, NoServerError), "the command would load the bundled model instead"


@pytest.mark.parametrize("body", ["<!DOCTYPE html><h1>Not Found</h1>", {"detail": "Not Found"}])
def test_something_else_than_a_model_server_gets_one_line(body: Any) -> None:
    with FakeServer() as server:
        server.other["/v1/models"] = (404, body)
        with pytest.raises(TalkError) as caught:
            Wire(ServerPlace.parse(server.url)).json("GET", "/v1/models")
    assert str(caught.value) == (
        f"{server.url}/v1/models answered with status 404. Is it an OpenAI-compatible server? (--url)"
    )


@pytest.mark.parametrize(
    "body", [{"error": {"code": 503, "message": "Loading model", "type": "unavailable"}}, "Loading model"]
)
def test_llama_cpp_loads_in_its_own_words(body: Any) -> None:
    with FakeServer() as server:
        server.other["/v1/models"] = (503, body)
        with pytest.raises(LoadingError):
            Wire(ServerPlace.parse(server.url)).json("GET", "/v1/models")
