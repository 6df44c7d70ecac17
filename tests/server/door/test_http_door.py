"""What every request passes before a route: its id, the API key, the body's limits; and what the log says."""

from __future__ import annotations

import ast
import asyncio
import hmac
import io
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
import structlog
from fake_client import FakeClient, Script, Step, byte_tokenizer, hf_byte_tokenizer, say
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel, ConfigDict
from schemathesis import GenerationMode
from support.asgi import request
from support.documented import validate

from engine import SamplingParams, TokenInput
from engine.host.logs import LineFormatter, console_line
from engine.text.processor import Tokenizer
from server import logs
from server.app import create_app
from server.config.settings import ServerSettings
from server.door.auth import AuthMiddleware
from server.door.keys import ApiKey, KeyRing
from server.door.limits import BodyLimitMiddleware
from server.door.request_id import RequestIdMiddleware

KEY = "sk-0123456789-secret"
SECRET = "the patient's name is Rumpelstiltskin"
MADE_ID = re.compile(r"[0-9a-f]{32}")


def echo(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
    return say(request_id, ["hello"[: params.max_tokens]] * params.n, params)


class Door:
    """An app behind its front door, called in process; nothing may come out of it but an answer."""

    def __init__(self, script: Script = echo, **chosen: Any):
        self.client = FakeClient(script)
        self.app = create_app(self.client, byte_tokenizer(), "m", settings=ServerSettings(**chosen))

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return request(self.app, method, path, strict=True, **options)

    def complete(self, *, headers: Any = None, **body: Any) -> httpx.Response:
        return self.request("POST", "/v1/completions", json={"prompt": "ab", **body}, headers=headers)


class Answer:
    """What a bare ASGI call brought."""

    def __init__(self, sent: list[Any], num_received: int):
        self.sent, self.num_received = sent, num_received
        self.status = sent[0]["status"]
        self.headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        body = b"".join(message.get("body", b"") for message in sent[1:])
        self.error = json.loads(body)["error"] if self.status >= 400 else {}


def call(app: Any, path: str, *, body: Iterable[Any] = (), wait: float = 0, **scope: Any) -> Answer:
    """A bare ASGI call: the path is what the router sees, as no client library would send it. When all of
    `body` has been received, `receive` takes `wait` seconds and then says that the client has left."""
    sent: list[Any] = []
    left = [*body]
    received = 0

    async def receive() -> Any:
        nonlocal received
        if left:
            received += 1
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or bool(wait)}
        await asyncio.sleep(wait or 20)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    base = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(errors="replace"), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost")], "client": ("192.0.2.7", 1234), "server": ("a", 80),
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(app({**base, **scope}, receive, send), 20))
    return Answer(sent, received)


def error(answer: httpx.Response, status: int, code: str | None) -> str:
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["code"] == code
    return str(found["message"])


@pytest.fixture
def logged() -> Iterator[Callable[..., io.StringIO]]:
    """Sets logging up as the service does, on a stream that the test reads."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn.error")
    before = root.handlers[:], root.level, uvicorn.level

    def start(log_format: Any = "json", level: str = "info", **options: Any) -> io.StringIO:
        stream = io.StringIO()
        logs.configure(level, log_format, stream=stream, **options)
        return stream

    for handler in before[0]:  # else a new set-up closes those of the test runner
        root.removeHandler(handler)
    yield start
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    for handler in before[0]:
        root.addHandler(handler)
    root.setLevel(before[1])
    uvicorn.setLevel(before[2])
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# ---------------------------------------------------------------- the request's id


@pytest.mark.parametrize("given", ["a", "0", "Ab-9_z.", "x" * 128])
def test_a_good_request_id_comes_back_and_stays_out_of_the_engine(given: str) -> None:
    door = Door()
    answer = door.complete(headers={"X-Request-ID": given})
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == [given]
    assert not any(given in name for name in door.client.asked if len(given) > 1)


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\tb", "a/b", "é", "a,b", '"', "%0a"])
def test_any_other_request_id_is_replaced(given: str | None) -> None:
    headers = [] if given is None else [(b"x-request-id", given.encode())]
    found = [Door().request("GET", "/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(MADE_ID.fullmatch(item) for item in found)
    assert found[0] != found[1]


def test_of_two_request_ids_neither_counts() -> None:
    answer = Door().request("GET", "/health", headers=[("X-Request-ID", "one"), ("X-Request-ID", "two")])
    assert MADE_ID.fullmatch(answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("POST", "/v1/completions", {"prompt": "a", "stream": True}, 200),
        ("POST", "/v1/completions", {"prompt": 7}, 400),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("OPTIONS", "/v1/completions", None, 405),
        ("POST", "/v1/completions", {"prompt": "a" * 5000}, 413),
    ],
)
def test_every_answer_carries_the_id(method: str, path: str, body: Any, status: int) -> None:
    door = Door(max_body_size=1000)
    answer = door.request(method, path, json=body, headers={"X-Request-ID": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine")
    if status >= 400:
        assert set(answer.json()) == {"error"}


def test_an_unexpected_exception_is_answered_with_the_id_and_logged_once_with_it(logged: Any) -> None:
    def broken(*_: Any) -> Iterable[Step]:
        raise ZeroDivisionError(SECRET)

    stream = logged()
    answer = Door(broken).complete(headers={"X-Request-ID": "mine"})
    assert error(answer, 500, "internal_error")
    assert "Rumpel" not in answer.text
    assert answer.headers["x-request-id"] == "mine"
    (line,) = [item for item in lines(stream) if "exception" in item]
    assert (line["request_id"], line["level"]) == ("mine", "error")
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert "ZeroDivisionError" in line["exception"]
    assert SECRET not in line["event"]


class _Broken:
    def __init__(self, app: Any):
        pass

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise LookupError("in a middleware")


def test_an_exception_in_a_middleware_is_answered_and_logged_too(logged: Any) -> None:
    stream = logged()
    door = Door()
    door.app.add_middleware(_Broken)
    inside = door.request("GET", "/health")
    outside = call(RequestIdMiddleware(_Broken(None)), "/health", headers=[(b"x-request-id", b"mine")])
    assert error(inside, 500, "internal_error")
    assert (outside.status, outside.headers["x-request-id"], outside.error["code"]) == (500, "mine", "internal_error")
    ids = [item["request_id"] for item in lines(stream) if "in a middleware" in item.get("exception", "")]
    assert ids == [inside.headers["x-request-id"], "mine"]


def test_a_request_that_the_server_cancels_gets_an_answer(logged: Any) -> None:
    async def cancelled(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    stream = logged()
    answer = call(RequestIdMiddleware(cancelled), "/")
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert "exception" not in lines(stream)[0]


def test_a_bound_field_does_not_outlive_its_request(logged: Any) -> None:
    stream = logged()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        logging.getLogger("octavo.test").info("here")
        structlog.contextvars.bind_contextvars(tokens=1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def twice() -> None:
        async def drop(message: Any) -> None:
            assert message

        for name in (b"one", b"two"):  # one task, as with requests in one connection's pipeline
            await RequestIdMiddleware(app)({"type": "http", "headers": [(b"x-request-id", name)]}, drop, drop)

    asyncio.run(twice())
    assert [(item["request_id"], item.get("tokens")) for item in lines(stream)] == [("one", None), ("two", None)]


# ---------------------------------------------------------------- API keys

OPEN = {"/health", "/health/live", "/health/ready"}


def bearer(key: str | bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + (key.encode() if isinstance(key, str) else key))]


@pytest.mark.parametrize("path", sorted(OPEN))
def test_health_needs_no_key(path: str) -> None:
    assert Door(api_key=(KEY,)).request("GET", path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/docs"),
        ("GET", "/redoc"), ("GET", "/openapi.json"), ("GET", "/docs/oauth2-redirect"), ("GET", "/nope"),
        ("GET", "/playground"), ("GET", "/playground/"), ("POST", "/v1/embeddings"),
        ("OPTIONS", "/v1/completions"), ("DELETE", "/v1/models/m"), ("HEAD", "/v1/models"),
    ],
)  # fmt: skip
def test_everything_else_does(method: str, path: str) -> None:
    door = Door(api_key=(KEY,))
    refused = door.request(method, path)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    if method != "HEAD":
        assert error(refused, 401, "invalid_api_key")
    assert door.request(method, path, headers=bearer(KEY)).status_code != 401


@pytest.mark.parametrize(
    "path",
    [
        "/health/", "//health", "/health//live", "/health/live/", "/HEALTH", "/Health", "/health/x", "/healthz",
        "health", "/health;a", "/health?", "/health#", "/health\x00", "/health ", "/health\n", "/./health",
        "/health/.", "/health/../v1/models", "/v1/models/../../health", "/v1/models#/health", "/%68ealth", "/%2Fhealth",
        "", "*", "/v1/models?/health", "/v1/models/health", "http://a/health", "/health/live\\..", "/ｈealth",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_goes_round_the_key(path: str) -> None:
    assert call(Door(api_key=(KEY,)).app, path).status == 401


@pytest.mark.parametrize(
    ("root", "path", "status"),
    [
        ("/api", "/api/health", 200), ("/api", "/health", 200), ("/api/", "/api/health", 401),
        ("/api", "/apihealth", 401), ("/api", "/api", 401), ("/api", "/api/", 200), ("/api", "/api/v1/models", 401),
        ("/api", "/api/api/health", 401),
        ("/health", "/health", 401), ("/health", "/health/v1/models", 401), ("/health", "/health/health/live", 200),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_the_root_path_is_no_way_round_the_key(root: str, path: str, status: int) -> None:
    assert call(Door(api_key=(KEY,)).app, path, root_path=root).status == status


def test_the_host_and_the_raw_path_decide_nothing() -> None:
    headers = [(b"host", b"a/health?"), (b"x-original-url", b"/health"), (b"x-forwarded-prefix", b"/v1")]
    assert call(Door(api_key=(KEY,)).app, "/v1/models", raw_path=b"/health", headers=headers).status == 401
    strange = call(Door(allowed_hosts="*").app, "/nope", headers=[(b"host", b"[::1/?x")])
    assert (strange.status, strange.error["message"]) == (404, "Unknown route: GET /nope. /docs lists the routes.")


@pytest.mark.parametrize(
    ("headers", "opens"),
    [
        (bearer(KEY), True),
        (bearer("second"), True),
        ([(b"Authorization", b"bearer  " + KEY.encode() + b" ")], True),
        (bearer(KEY + "x"), False),
        (bearer(KEY[:-1]), False),
        (bearer(KEY.upper()), False),
        (bearer(""), False),
        (bearer(b"\xff\xfe\x00"), False),
        (bearer("schlüssel"), False),
        (bearer("schlüssel".encode("latin-1")), False),
        (bearer(f"{KEY},second"), False),
        (bearer("x" * 60_000), False),
        ([(b"authorization", KEY.encode())], False),
        ([(b"authorization", b"Basic " + KEY.encode())], False),
        ([(b"authorization", b"")], False),
        ([*bearer(KEY), *bearer(KEY)], False),
        ([(b"x-api-key", KEY.encode())], True),
        ([(b"x-api-key", b"other")], False),
        ([(b"x-api-key", KEY.encode()), (b"x-api-key", KEY.encode())], False),
        ([(b"x-api-key", KEY.encode()), (b"authorization", b"Bearer other")], False),
        ([(b"x-api-key", b"other"), (b"authorization", b"Bearer " + KEY.encode())], True),
        ([(b"cookie", b"authorization=Bearer " + KEY.encode())], False),
    ],
)
def test_what_counts_as_a_key(headers: Any, opens: bool) -> None:
    answer = call(Door(api_key=(KEY, "second")).app, "/v1/models", headers=headers)
    assert answer.status == (200 if opens else 401)
    if not opens:
        assert answer.error["code"] == "invalid_api_key"


def test_a_key_is_no_query_parameter() -> None:
    assert call(Door(api_key=(KEY,)).app, "/v1/models", query_string=b"api_key=" + KEY.encode()).status == 401


def test_all_keys_are_compared_however_early_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    app = Door(api_key=("one", "two", "three")).app
    assert call(app, "/v1/models", headers=bearer("one")).status == 200
    assert call(app, "/v1/models", headers=bearer("no")).status == 401
    assert compared == [(32, 32)] * 6


def test_without_the_key_nothing_is_read() -> None:
    answer = call(
        Door(api_key=(KEY,)).app, "/v1/completions", method="POST", body=[b"{}"], headers=[(b"content-length", b"2")]
    )
    assert (answer.status, answer.num_received) == (401, 0)


def test_a_websocket_is_closed() -> None:
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "websocket", "path": "/health", "headers": [], "root_path": ""}
        await AuthMiddleware(_Broken(None), keys=KeyRing([ApiKey.of(KEY)]))(scope, receive, send)

    asyncio.run(run())
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_metrics_can_be_public() -> None:
    door = Door(api_key=(KEY,), public_metrics=True)
    assert door.request("GET", "/metrics").status_code == 200
    assert call(door.app, "/metrics/").status == 401
    assert door.request("GET", "/version").status_code == 401


def test_without_keys_any_authorization_is_fine() -> None:
    assert Door().request("GET", "/v1/models", headers=bearer("EMPTY")).status_code == 200


def test_keys_are_never_shown(logged: Any) -> None:
    stream = logged(level="debug")
    chosen = ServerSettings(api_key=(KEY,))
    door = Door(api_key=(KEY,))
    shown = [door.request("GET", "/v1/models", headers=bearer(KEY[:-1])).text, repr(chosen), str(chosen)]
    shown += [door.request("GET", path, headers=bearer(KEY)).text for path in ("/openapi.json", "/metrics", "/nope")]
    (line,) = [item for item in lines(stream) if item.get("status") == 401]
    assert (line["level"], line["path"], line["client"]) == ("warning", "/v1/models", "127.0.0.1")
    assert not any(KEY[:-1] in text for text in [*shown, stream.getvalue()])


# ---------------------------------------------------------------- the body's limits

JSON = [(b"content-type", b"application/json")]


def test_a_length_over_the_limit_is_refused_before_anything_is_read(logged: Any) -> None:
    stream = logged()
    answer = call(
        Door(max_body_size="1KiB").app, "/v1/completions", method="POST", body=[b"{}"],
        headers=[*JSON, (b"content-length", b"1025")],
    )  # fmt: skip
    assert (answer.status, answer.num_received, answer.error["code"]) == (413, 0, "body_too_large")
    assert all(word in answer.error["message"] for word in ("1025", "1024", "--max-body-size"))
    assert answer.headers["connection"] == "close"
    (line,) = [item for item in lines(stream) if item.get("status") == 413]
    assert line["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("length", [b"9" * 30, b"9" * 5000])
def test_a_length_beyond_all_numbers_is_too_large(length: bytes) -> None:
    headers = [*JSON, (b"content-length", length)]
    assert call(Door().app, "/v1/completions", method="POST", headers=headers).status == 413


@pytest.mark.parametrize("lengths", [[b"-1"], [b"+1"], [b"x"], [b""], [b"1", b"1"], ["٣".encode()]])
def test_a_length_that_is_none_is_refused(lengths: list[bytes]) -> None:
    headers = [*JSON, *((b"content-length", length) for length in lengths)]
    answer = call(Door().app, "/v1/completions", method="POST", headers=headers)
    assert (answer.status, answer.error["code"]) == (400, "malformed_request")


def test_a_body_of_unknown_length_is_read_up_to_the_limit() -> None:
    app = Door(max_body_size=1000).app
    endless = [b"x" * 300] * 100
    answer = call(app, "/v1/completions", method="POST", headers=JSON, body=endless)
    assert (answer.status, answer.num_received) == (413, 4)
    assert all(word in answer.error["message"] for word in ("1200", "1000", "--max-body-size"))
    whole = json.dumps({"prompt": "ab", "user": "x" * 1000}).encode()[:-402] + b'"}'
    assert len(whole) <= 1000
    assert call(app, "/v1/completions", method="POST", headers=JSON, body=[whole[:500], whole[500:]]).status == 200


def test_the_limit_itself_is_allowed() -> None:
    body = json.dumps({"prompt": "ab"}).encode()
    for limit, status in ((len(body), 200), (len(body) - 1, 413)):
        for headers in (JSON, [*JSON, (b"content-length", str(len(body)).encode())]):
            app = Door(max_body_size=limit).app
            assert call(app, "/v1/completions", method="POST", headers=headers, body=[body]).status == status


def test_a_body_that_stalls_is_given_up(logged: Any) -> None:
    stream = logged()
    door = Door()
    limited = BodyLimitMiddleware(door.app, max_body_size=1000, grace=0.1)
    answer = call(limited, "/v1/completions", method="POST", headers=JSON, body=[b'{"prompt"'], wait=15)
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (408, "request_timeout", "close")
    assert "9 bytes" in answer.error["message"]
    assert not door.client.asked
    assert "408" in stream.getvalue()


def test_an_answer_may_take_longer_than_a_body() -> None:
    async def main() -> httpx.Response:
        go = asyncio.Event()
        door = Door(lambda *given: [go, *echo(*given)])
        limited = BodyLimitMiddleware(door.app, max_body_size=1000, grace=0.05)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(limited), base_url="http://localhost") as http:
            running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "ab"}))
            await asyncio.sleep(0.3)
            assert not running.done()
            go.set()
            return await running

    assert asyncio.run(asyncio.wait_for(main(), 20)).status_code == 200


def test_a_client_that_leaves_while_it_sends_is_no_error(logged: Any) -> None:
    stream = logged()
    door = Door()
    call(door.app, "/v1/completions", method="POST", headers=JSON, body=[b'{"prompt"'], wait=0.05)
    assert not door.client.asked
    assert "exception" not in stream.getvalue()


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", ""]
)
def test_a_body_of_another_type_is_refused_clearly(kind: str) -> None:
    answer = Door().request("POST", "/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert "application/json" in error(answer, 400, "invalid_body")


# ---------------------------------------------------------------- logs

ESCAPES = "\n2026-11-21T00:00:00.000000Z ERROR octavo.server: forged\r\x1b[2J\x9b\u2028\u202e\udcff"


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_client_can_forge_a_line(log_format: str, logged: Any) -> None:
    def broken(*_: Any) -> Iterable[Step]:
        raise RuntimeError(f"step failed: {ESCAPES}")

    stream = logged(log_format, "debug")
    door, closed = Door(broken), Door(api_key=(KEY,))
    sent = {"prompt": "ab", "model": ESCAPES, ESCAPES: 1}
    call(closed.app, "/x" + ESCAPES, headers=[(b"x-request-id", ESCAPES.encode(errors="replace"))])
    call(door.app, "/x" + ESCAPES, method="G\nET")
    body = json.dumps(sent).encode()
    assert call(door.app, "/v1/completions", method="POST", headers=JSON, body=[body]).status in (400, 404)
    assert call(door.app, "/v1/completions", method="POST", headers=JSON, body=[b'{"a":' + b"\n\x1b"]).status == 400
    assert door.complete().status_code == 500
    logging.getLogger("octavo.test").warning("a model: %s", ESCAPES, extra={"model": ESCAPES})
    structlog.get_logger("octavo.test").warning("another: %s", ESCAPES, path=ESCAPES)
    text = stream.getvalue()
    assert text.count("forged") >= 6
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\udc80-\udcff]", text)
    if log_format == "json":
        assert all(set(line) >= {"timestamp", "level", "logger", "event"} for line in lines(stream))
        assert lines(stream)[-1]["path"] == ESCAPES
    else:
        assert not re.search(r"^2026-11-21T00:00:00", text, re.MULTILINE)
        assert all(re.match(r"    |2[0-9-]{9}T\S+ [A-Z]+ \S+: ", line) for line in text.splitlines())
        assert r'path="\n2026-11-21T00:00:00.000000Z ERROR octavo.server: forged\r\x1b[2J' in text


@pytest.mark.parametrize(
    "value", ["plain", "", r"C:\path", 'a" b="c', 'a\\" b="c', "ends with \\", "\n", "x=1", ['a" \\" b\n']]
)
def test_a_value_of_a_line_is_one_field(value: Any) -> None:
    line = console_line({"timestamp": "T", "level": "info", "logger": "l", "event": "e", "first": value, "second": 2})
    found = re.fullmatch(r'T INFO l: e first=("(?:[^"\\]|\\.)*"|[^ ="]+) second=2', line)
    assert found, line
    text = found[1].removeprefix('"').removesuffix('"').replace(r"\"", '"')
    read = ast.literal_eval(text) if isinstance(value, list) else text.encode().decode("unicode_escape")
    assert read == value


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_both_processes_write_the_same_lines(log_format: Any, logged: Any) -> None:
    stream = logged(log_format)
    own = logging.StreamHandler(engine := io.StringIO())
    own.setFormatter(LineFormatter(log_format))
    logger = logging.getLogger("octavo.engine")
    logger.addHandler(own)
    try:
        logger.info("pages: %d", 7)
        try:
            raise ValueError("no\nroom")
        except ValueError:
            logger.exception("it failed")
    finally:
        logger.removeHandler(own)
    moment = re.compile(r"2[0-9-]{9}T[0-9:]{8}\.[0-9]{6}Z")
    assert len(moment.findall(stream.getvalue())) == 2
    assert moment.sub("", engine.getvalue()) == moment.sub("", stream.getvalue())
    assert ("\n    Traceback" in stream.getvalue()) == (log_format == "console")


def test_the_format_follows_the_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert logs.choose_format("auto", Terminal()) == "console"
    assert logs.choose_format("auto", io.StringIO()) == "json"
    assert logs.choose_format("json", Terminal()) == "json"
    assert logs.choose_format("console", io.StringIO()) == "console"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int


@pytest.mark.parametrize("grouped", [False, True])
def test_a_traceback_hides_what_failed_validation(grouped: bool, logged: Any) -> None:
    def invalid(*_: Any) -> Iterable[Step]:
        try:
            _Strict.model_validate({"number": SECRET})
        except ValueError as problem:
            if grouped:
                raise ExceptionGroup("several", [problem]) from None
            raise RuntimeError("no such answer") from problem
        return ()

    stream = logged(level="debug")
    assert error(Door(invalid).complete(), 500, "internal_error")
    (line,) = [item for item in lines(stream) if "exception" in item]
    assert "Input should be a valid integer" in line["exception"]
    assert "Rumpel" not in stream.getvalue()
    shown = logged(level="debug", log_prompts=True)
    Door(invalid).complete()
    assert "Rumpel" in shown.getvalue()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": SECRET},
        {"prompt": SECRET, "stream": True},
        {"prompt": [SECRET, 7]},
        {"prompt": SECRET, "stop": [SECRET] * 99},
        {"prompt": SECRET, "temperature": SECRET},
        {"prompt": SECRET, "logit_bias": {SECRET: SECRET}},
        {"prompt": SECRET, "user": SECRET, SECRET: SECRET},
        {"messages": [{"role": SECRET, "content": SECRET}]},
    ],
)
def test_prompts_are_not_logged(body: dict[str, Any], logged: Any) -> None:
    stream = logged()
    door = Door()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        assert door.request("POST", path, json=body).status_code < 500
        assert door.request("POST", path, content=json.dumps(body)[:-1], headers={"Content-Type": "application/json"})
    assert "Rumpel" not in stream.getvalue()


def test_uvicorn_speaks_through_the_same_formatter(logged: Any) -> None:
    stream = logged()
    logging.getLogger("uvicorn.error").info("what the service says itself")
    logging.getLogger("uvicorn.error").warning("odd: %s", 7, extra={"color_message": "odd: \x1b[1m%d"})
    (line,) = lines(stream)
    assert (line["logger"], line["event"]) == ("uvicorn.error", "odd: 7")
    assert "color_message" not in line


# ---------------------------------------------------------------- the document


def test_the_document_declares_the_front_door() -> None:
    document = Door(api_key=(KEY,), public_metrics=True).app.openapi()
    scheme, named = document["components"]["securitySchemes"]
    assert document["components"]["securitySchemes"][scheme]["scheme"] == "bearer"
    assert document["components"]["securitySchemes"][named]["name"] == "X-Api-Key"
    num_operations = 0
    for path, operations in document["paths"].items():
        for operation in operations.values():
            num_operations += 1
            closed = path not in OPEN | {"/metrics"}
            assert ("security" in operation) == ("401" in operation["responses"]) == closed, path
            assert ("413" in operation["responses"]) == ("requestBody" in operation), path
            assert "422" not in operation["responses"]
            for response in operation["responses"].values():
                assert "X-Request-ID" in response["headers"]
            for status in {"401", "408", "413", "431"} & set(operation["responses"]):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                kind = "MessageError" if path.startswith("/v1/messages") else "ErrorResponse"
                kind = "OllamaError" if path.startswith("/api/") else kind
                assert schema == {"$ref": f"#/components/schemas/{kind}"}
    assert num_operations > 9
    required = document["paths"]["/version"]["get"]["security"]
    assert required == [{scheme: []}, {named: []}]
    assert Door().app.openapi()["paths"]["/version"]["get"]["security"] == [*required, {}]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.slow
def test_the_app_keeps_to_its_document(mode: GenerationMode) -> None:
    tokenizer = hf_byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    chosen = ServerSettings(allowed_hosts=("testserver",))  # as it is called here
    app = create_app(FakeClient(echo), Tokenizer(tokenizer), "m", settings=chosen)
    statuses: Counter[tuple[str, int]] = Counter()
    for found in schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
            continue  # nothing in it can be wrong

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
        )
        def holds(case: Any) -> None:
            answer = case.call()
            statuses[case.operation.path, answer.status_code] += 1
            assert answer.status_code != 422
            if answer.status_code >= 400:
                anthropic = case.operation.path.startswith("/v1/messages") or "anthropic-version" in (
                    case.headers or {}
                )
                named = {"message", "type"} if anthropic else {"message", "type", "param", "code"}
                error = answer.json()["error"]
                assert isinstance(error, str) if case.operation.path.startswith("/api/") else set(error) == named
            validate(case, answer)

        holds()
    assert sum(statuses.values()) >= 100
    expected = 200 if mode is GenerationMode.POSITIVE else 400
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert statuses[path, expected], f"{path} never answered {expected}: {statuses}"
