"""One log line per request for generated text: how it ended, what it cost, and nothing of what was said."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import structlog
from fake_client import Script, Step, byte_tokenizer, say
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from test_http_api import MODEL, Api, endless
from test_http_chat import Api as ChatApi

from engine import ChoiceDelta, EngineDeadError, InvalidRequestError, RequestDelta, SamplingParams, TokenInput
from server.app import create_app
from server.config.settings import ServerSettings

SECRET = "the secret"


def timed(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
    """Waits 50 ms in the queue and 20 ms for its first token, says its engine; the first token was cached."""
    now = time.monotonic()
    deltas = say(request_id, ["an answer"] * params.n, params)
    first = replace(deltas[0], scheduled_time=now + 0.05, first_token_time=now + 0.07, num_cached_tokens=1)
    return [first, *deltas[1:]]


def lines(work: Callable[[], Any]) -> list[dict[str, Any]]:
    """What is logged about requests while `work` runs."""
    with capture_logs(processors=[merge_contextvars]) as logged:
        work()
    return [entry for entry in logged if entry["event"] == "request finished"]


def line(work: Callable[[], Any]) -> dict[str, Any]:
    """The one line that is logged."""
    (entry,) = lines(work)
    return dict(entry)


def app(script: Script, **settings: Any) -> Api:
    api = Api(script)
    api.app = create_app(api.client, byte_tokenizer(), MODEL, settings=ServerSettings(**settings))
    return api


def test_drafted_tokens_are_in_the_line() -> None:
    def drafting(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
        deltas = say(request_id, ["abc"], params)
        return [replace(delta, num_draft_tokens=5, num_accepted_draft_tokens=2) for delta in deltas]

    logged = line(lambda: Api(drafting).request("POST", "/v1/completions", json={"prompt": "a"}))
    assert (logged["draft_tokens"], logged["accepted_draft_tokens"]) == (15, 6)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_answered(stream: bool) -> None:
    api = Api(timed)
    answer: list[Any] = []

    def ask() -> None:
        body = {"prompt": [SECRET, SECRET], "n": 2, "stream": stream}
        said = api.request("POST", "/v1/completions", json=body, headers={"X-Request-ID": "from-the-client"})
        answer.append(json.loads(said.text.partition("\n")[0].removeprefix("data: ")))

    logged = line(ask)
    seconds = {name: logged.pop(name) for name in list(logged) if name.endswith(("_seconds", "_second"))}
    assert logged == {
        "event": "request finished", "log_level": "info", "request_id": "from-the-client", "outcome": "ok",
        "id": answer[0]["id"], "path": "/v1/completions", "model": MODEL, "stream": stream, "n": 2, "prompts": 2,
        "prompt_tokens": 2 * len(SECRET), "cached_tokens": 2, "completion_tokens": 4 * len("an answer"),
        "finish_reasons": ["length"] * 4,
    }  # fmt: skip
    assert set(seconds) == {"queue_seconds", "prefill_seconds", "decode_seconds", "total_seconds", "tokens_per_second"}
    assert seconds["queue_seconds"] >= 0.05
    assert 0 < seconds["prefill_seconds"] <= 0.02 + 0.01
    assert seconds["tokens_per_second"] == pytest.approx(36 / seconds["total_seconds"], rel=0.01)
    assert SECRET not in repr(logged)
    assert "answer" not in repr(list(logged.values()))


def test_a_chat() -> None:
    api = ChatApi(timed)
    logged = line(lambda: api.chat(messages=[{"role": "user", "content": SECRET}]))
    assert (logged["path"], logged["outcome"]) == ("/v1/chat/completions", "ok")
    assert logged["id"].startswith("chatcmpl-")
    assert SECRET not in repr(logged)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (
            InvalidRequestError("prompt is too long", param="prompt", code="context_length_exceeded"),
            {"outcome": "refused", "status": 400, "code": "context_length_exceeded", "param": "prompt"},
        ),
        (EngineDeadError("gone"), {"outcome": "error", "error": "EngineDeadError", "log_level": "warning"}),
        (ZeroDivisionError("made by the test"), {"outcome": "error", "error": "ZeroDivisionError"}),
    ],
    ids=["refused", "engine", "fault"],
)
def test_a_request_that_is_not_answered(problem: Exception, expected: dict[str, Any], stream: bool) -> None:
    api = Api(lambda *_: [problem])
    logged = line(lambda: api.complete(prompt=SECRET, stream=stream))
    assert logged.items() >= expected.items()
    assert SECRET not in repr(logged)


def test_a_prompt_that_is_refused_before_the_engine_sees_it() -> None:
    logged = line(lambda: Api().complete(prompt=[1, 2, 100_000]))
    assert (logged["outcome"], logged["status"], logged["param"], logged["prompts"]) == ("refused", 400, "prompt", 0)


def test_an_error_in_the_middle_of_a_stream() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> list[Step]:
        return [*say(request_id, ["abc"], params)[:1], EngineDeadError("gone")]

    api = Api(script)
    logged = line(lambda: api.complete(prompt="a", stream=True))
    assert (logged["outcome"], logged["completion_tokens"], logged["finish_reasons"]) == ("error", 1, [None])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(stream: bool) -> None:
    api = Api(endless)
    logged = line(lambda: api.leave({"prompt": ["a", "b"], "stream": stream}, 2 if stream else 0))
    assert logged["outcome"] == "aborted:disconnect"
    assert logged["finish_reasons"] == [None, None]


def test_a_deadline() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> list[Step]:
        late = ChoiceDelta(index=0, token_ids=(), finish_reason="abort", stop_reason="deadline")
        return [RequestDelta(request_id=request_id, choices=[late], finished=True)]

    logged = line(lambda: Api(script).complete(prompt="a"))
    assert (logged["outcome"], logged["finish_reasons"]) == ("aborted:deadline", ["abort"])
    assert "queue_seconds" not in logged


def test_prompts_are_logged_when_asked_for() -> None:
    api = app(timed, log_prompts=True)
    api.client.info = replace(api.client.info, max_model_len=20_000)
    logged = line(lambda: api.complete(prompt=[SECRET, "x" * 10_000], n=2))
    assert logged["prompt"] == [SECRET, "x" * 2000]
    assert logged["answer"] == ["an answer"] * 4
    assert line(lambda: api.complete(prompt=[5, 6]))["prompt"] == [[5, 6]]


def test_other_routes_have_no_such_line() -> None:
    api = Api()
    assert lines(lambda: [api.request("GET", "/metrics"), api.request("GET", "/v1/completions")]) == []


def test_two_requests_at_once_keep_their_ids() -> None:
    api = Api(timed)

    async def ask(name: str) -> None:
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"prompt": name * 3, "stream": name == "b"}
            await http.post("/v1/completions", json=body, headers={"X-Request-ID": name})

    async def both() -> None:
        await asyncio.gather(ask("a"), ask("b"))

    logged = lines(lambda: asyncio.run(both()))
    assert {(entry["request_id"], entry["stream"]) for entry in logged} == {("a", False), ("b", True)}


def test_the_logger_has_a_name_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """So that it can be found, and turned off, among the others."""
    before = structlog.get_config()
    names: list[str] = []

    def factory(*names_given: str) -> Any:
        names.extend(names_given)
        return structlog.PrintLogger()

    structlog.configure(logger_factory=factory, cache_logger_on_first_use=False)
    try:
        Api(timed).complete(prompt="a")
    finally:
        structlog.configure(**before)
    assert set(names) == {"octavo.request"}
    assert "request finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [({"model": "other"}, 404, "model_not_found", "model"), ({"n": 500}, 400, "invalid_value", "n"),
     ({"logprobs": SECRET}, 400, "invalid_type", "logprobs")],
)  # fmt: skip
def test_a_request_refused_at_once_has_its_line_too(body: dict[str, Any], status: int, code: str, param: str) -> None:
    api = Api(timed)
    sent = {"prompt": SECRET, **body}
    logged = line(lambda: api.request("POST", "/v1/completions", json=sent, headers={"X-Request-ID": "mine"}))
    assert logged == {
        "event": "request finished", "log_level": "info", "request_id": "mine", "outcome": "refused",
        "path": "/v1/completions", "status": status, "code": code, "param": param,
    }  # fmt: skip


# ---------------------------------------------------------------- what gateways say


def asked_with(headers: list[tuple[str, str | bytes]]) -> dict[str, Any]:
    api = Api(timed)
    return line(lambda: api.request("POST", "/v1/completions", json={"prompt": "a"}, headers=headers))  # type: ignore[arg-type]


def test_a_session_and_a_gateways_words_are_in_the_line() -> None:
    logged = asked_with(
        [("X-Session-ID", "user-7/chat 3"), ("X-Gateway-Route", "a"), ("x-gateway-pod-name", "epp-1"), ("X-Other", "b")]
    )
    assert logged["session_id"] == "user-7/chat 3"
    assert logged["gateway"] == {"route": "a", "pod-name": "epp-1"}
    plain = asked_with([])
    assert not {"session_id", "gateway"} & set(plain)


def test_they_are_bounded_and_cannot_write_lines_of_their_own() -> None:
    logged = asked_with(
        [
            ("X-Session-ID", "s" * 5000),
            ("X-Session-ID", "second"),
            ("X-Gateway-Odd", b"a\tb\x7f\xff\x1b[31m"),
            ("X-Gateway-Odd", "again"),
            ("X-Gateway-" + "n" * 65, "long name"),
            ("X-Gateway-", "no name"),
            *[
                (f"X-Gateway-{name}", SECRET)
                for name in ("Api-Key", "Token", "Authorization", "Cookie", "Client-Secret")
            ],
            *[(f"X-Gateway-N{number}", "v" * 200) for number in range(20)],
        ]
    )
    assert logged["session_id"] == "s" * 128 + "..."
    assert logged["gateway"]["odd"] == "a?b???[31m"
    assert len(logged["gateway"]) == 8
    assert logged["gateway"]["n6"] == "v" * 128 + "..."
    assert SECRET not in repr(logged)


def test_one_request_does_not_inherit_them_from_another() -> None:
    api = Api(timed)

    def ask() -> None:
        for headers in ({"X-Session-ID": "one", "X-Gateway-Route": "a"}, {}):
            api.request("POST", "/v1/completions", json={"prompt": "a"}, headers=headers)

    first, second = lines(ask)
    assert (first["session_id"], first["gateway"]) == ("one", {"route": "a"})
    assert not {"session_id", "gateway"} & set(second)
