"""Bytes that are no proper HTTP, or too much of it, or too slow, against real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from support.clock import PatientEventLoop
from support.service import PATIENCE, Service, serving

from server.door.limits import BodyLimitMiddleware
from server.door.protocol import BoundedHttpProtocol
from server.door.request_id import RequestIdMiddleware

pytestmark = pytest.mark.slow

KEY = "sk-0123456789-secret"
SECRET = "the patient's name is Rumpelstiltskin"
HOST = b"Host: a\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
POST += b"Authorization: Bearer " + KEY.encode() + b"\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": SECRET, "max_tokens": 1}).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
WHOLE = POST + LENGTH + b"\r\n" + BODY


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With a key and small limits; at the end nothing of all this has left a trace but one line each."""
    log = tmp_path_factory.mktemp("log") / "service.log"
    limits = ("--max-body-size", "64KiB", "--max-header-size", "8KiB")
    with serving("--api-key", KEY, *limits, "--log-format", "json", log=log) as service:
        yield service
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(set(line) >= {"timestamp", "level", "logger", "event"} for line in lines)
    assert {"octavo.server", "octavo.engine"} <= {line["logger"] for line in lines}
    assert not [line for line in lines if "exception" in line or line["level"] == "error"]
    assert "Rumpel" not in log.read_text()
    assert KEY not in log.read_text()


class Wire:
    """A connection to the service."""

    def __init__(self, url: str, patience: float = PATIENCE):
        address = httpx.URL(url)
        self.socket = socket.create_connection((address.host, address.port or 80), timeout=patience)
        self.buffer = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes, gap: float = 0.02) -> Wire:
        for part in parts:
            self.socket.sendall(part)
            time.sleep(gap)
        return self

    def _fill(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"closed after {self.buffer!r}"
        self.buffer += data

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, header and body of the next response."""
        while b"\r\n\r\n" not in self.buffer:
            self._fill()
        head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        first, *fields = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
        length = int(headers["content-length"]) if "content-length" in headers else 0
        while len(self.buffer) < length:
            self._fill()
        body, self.buffer = self.buffer[:length], self.buffer[length:]
        return int(first.split()[1]), headers, json.loads(body) if body else None

    def is_closed(self) -> bool:
        """Whether the server ends the connection with nothing more to say."""
        return self.socket.recv(65536) == b"" and not self.buffer


def refused(wire: Wire, status: int, code: str) -> str:
    """The message of an error that ends the connection."""
    found, headers, body = wire.answer()
    assert found == status, body
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert wire.is_closed()
    return str(body["error"]["message"])


def served(wire: Wire) -> None:
    status, _, body = wire.answer()
    assert (status, body["object"]) == (200, "text_completion"), body


# ---------------------------------------------------------------- what is no HTTP


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(POST + LENGTH + CHUNKED + b"\r\n0\r\n\r\n", id="length and coding"),
        pytest.param(POST + CHUNKED + LENGTH + b"\r\n0\r\n\r\n", id="coding and length"),
        pytest.param(POST + LENGTH + LENGTH + b"\r\n" + BODY, id="the same length twice"),
        pytest.param(POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY, id="two lengths"),
        pytest.param(POST + b"Content-Length: 5, 5\r\n\r\n" + BODY, id="a list of lengths"),
        pytest.param(POST + b"Content-Length: -5\r\n\r\n" + BODY, id="negative length"),
        pytest.param(POST + b"Content-Length: +5\r\n\r\n" + BODY, id="signed length"),
        pytest.param(POST + b"Content-Length: 0x5\r\n\r\n" + BODY, id="hexadecimal length"),
        pytest.param(POST + b"Content-Length: 5 5\r\n\r\n" + BODY, id="length with a space"),
        pytest.param(POST + b"Content-Length: \r\n\r\n" + BODY, id="empty length"),
        pytest.param(POST + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n", id="length beyond 64 bits"),
        pytest.param(POST + b"Content-Length : 5\r\n\r\n" + BODY, id="space before the colon"),
        pytest.param(POST + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n", id="coding twice"),
        pytest.param(POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", id="coding gzip"),
        pytest.param(POST + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n", id="coding identity"),
        pytest.param(POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", id="coding unknown"),
        pytest.param(POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n", id="coding with a control character"),
        pytest.param(POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n0\r\n\r\n", id="coding in HTTP/1.0"),
        pytest.param(POST + CHUNKED + b"\r\n-1\r\n", id="negative chunk"),
        pytest.param(POST + CHUNKED + b"\r\n0x1\r\na\r\n", id="hexadecimal chunk"),
        pytest.param(POST + CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n", id="chunk beyond 64 bits"),
        pytest.param(POST + CHUNKED + b"\r\n1\r\nab\r\n0\r\n\r\n", id="chunk longer than it says"),
        pytest.param(POST + CHUNKED + b"\r\nxyz\r\n", id="chunk without a size"),
        pytest.param(GET + b"X: a\r\n b\r\n\r\n", id="folded header"),
        pytest.param(GET + b"X: a\x00b\r\n\r\n", id="NUL in a value"),
        pytest.param(GET + b"X\x00: a\r\n\r\n", id="NUL in a name"),
        pytest.param(b"GET /health\x00 HTTP/1.1\r\n" + HOST + b"\r\n", id="NUL in the path"),
        pytest.param(b"GET /h\xc3\xa9 HTTP/1.1\r\n" + HOST + b"\r\n", id="bytes in the path"),
        pytest.param(GET + b"X: a\rb\r\n\r\n", id="bare carriage return"),
        pytest.param(b"GET /health HTTP/1.1\nHost: a\n\n", id="bare line feeds"),
        pytest.param(GET + b": a\r\n\r\n", id="no name"),
        pytest.param(GET + b"no colon\r\n\r\n", id="no colon"),
        pytest.param(GET + HOST + b"\r\n", id="two hosts"),
        pytest.param(b"GET /health HTTP/1.1\r\n\r\n", id="no host"),
        pytest.param(b"GET /health\r\n\r\n", id="HTTP/0.9"),
        pytest.param(b"GET /health HTTP/0.9\r\n\r\n", id="HTTP/0.9 by name"),
        pytest.param(b"GET /health HTTP/1.2\r\n" + HOST + b"\r\n", id="HTTP/1.2"),
        pytest.param(b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n", id="HTTP/2.0"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2 by prior knowledge"),
        pytest.param(b"GET /hea lth HTTP/1.1\r\n" + HOST + b"\r\n", id="space in the path"),
        pytest.param(b"BREW /health HTTP/1.1\r\n" + HOST + b"\r\n", id="unknown method"),
        pytest.param(b"get /health HTTP/1.1\r\n" + HOST + b"\r\n", id="method in lower case"),
        pytest.param(b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n", id="CONNECT"),
        pytest.param(b"GET http://a HTTP/1.1\r\n" + HOST + b"\r\n", id="target without a path"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(b"\x00" * 100, id="zeros"),
        pytest.param(b"Rumpelstiltskin\r\n\r\n", id="words"),
    ],
)
def test_malformed_http_is_refused_and_the_service_lives(service: Service, sent: bytes) -> None:
    with Wire(service.url) as wire:
        assert refused(wire.send(sent), 400, "malformed_request")
    assert service.get("/health").status_code == 200


def test_the_proper_request_of_all_those_is_served(service: Service) -> None:
    with Wire(service.url) as wire:
        served(wire.send(WHOLE))
        served(wire.send(POST + CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)))
        assert wire.send(b"GET http://other/health HTTP/1.1\r\n" + HOST + b"\r\n").answer()[0] == 200
    with Wire(service.url) as wire:
        assert wire.send(b"GET /health HTTP/1.0\r\n\r\n").answer()[0] == 200
        assert wire.is_closed()


def test_what_follows_a_request_cannot_spoil_its_answer(service: Service) -> None:
    with Wire(service.url) as wire:
        served(wire.send(WHOLE + b"GARBAGE\r\n\r\n"))
        assert wire.is_closed()


def test_a_malformed_body_waits_its_turn_to_be_refused(service: Service) -> None:
    with Wire(service.url) as wire:
        wire.send(WHOLE + WHOLE + POST + CHUNKED + b"\r\nxyz\r\n")
        served(wire)
        served(wire)
        refused(wire, 400, "malformed_request")


def test_pipelined_requests_are_answered_in_order(service: Service) -> None:
    with Wire(service.url) as wire:
        wire.send(WHOLE + GET + b"\r\n" + b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n" + WHOLE)
        served(wire)
        assert wire.answer()[2] == {"status": "ok"}
        assert wire.answer()[0] == 401
        served(wire)


def test_a_wish_for_another_protocol_is_ignored_and_the_body_kept(service: Service) -> None:
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    with Wire(service.url) as wire:
        served(wire.send(POST + wish + LENGTH + b"\r\n", BODY[:9], BODY[9:]))
        served(wire.send(POST + wish + LENGTH + b"\r\n" + BODY))
        # What looks like a request is the body's.
        inner = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
        status, _, body = wire.send(POST + wish + b"Content-Length: %d\r\n\r\n" % len(inner) + inner).answer()
        assert (status, body["error"]["code"]) == (400, "invalid_json")
        served(wire.send(WHOLE))
    with Wire(service.url) as wire:
        socketry = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: YQ==\r\n"
        assert wire.send(GET + socketry + b"\r\n").answer()[0] == 200
        status, _, _ = wire.send(GET.replace(b"/health", b"/v1/models") + socketry + b"\r\n").answer()
        assert status == 401


def test_a_trailer_is_no_header(service: Service) -> None:
    bare = POST.replace(b"Authorization", b"X-Nothing")
    trailer = b"0\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"
    with Wire(service.url) as wire:
        assert wire.send(bare + CHUNKED + b"\r\n%x\r\n%b\r\n" % (len(BODY), BODY) + trailer).answer()[0] == 401


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        pytest.param([GET + b"X: " + b"a" * 9000 + b"\r\n\r\n"], "max_header_size", id="one field"),
        pytest.param([GET + b"X: ", *[b"a" * 3000] * 3], "max_header_size", id="a field that does not end"),
        pytest.param([GET, *[b"%d: " % i + b"a" * 500 + b"\r\n" for i in range(20)]], "8192", id="many fields"),
        pytest.param([b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + HOST + b"\r\n"], "8192", id="the path"),
        pytest.param([b"GET /?" + b"a" * 9000], "8192", id="the query"),
        pytest.param([b"\r\n" * 5000], "8192", id="empty lines"),
        pytest.param([GET + b"X: a\r\n" * 100 + b"\r\n"], "100 fields", id="too many fields"),
        pytest.param([GET + b"X: " + b"a" * 3_000_000], "max_header_size", id="far too much"),
    ],
)
def test_a_header_over_the_limit_is_431(service: Service, parts: list[bytes], said: str) -> None:
    with Wire(service.url) as wire:
        assert said in refused(wire.send(*parts, gap=0.01), 431, "header_too_large")


def test_a_header_within_the_limit_is_served(service: Service) -> None:
    with Wire(service.url) as wire:
        assert wire.send(GET + b"X: " + b"a" * 8000 + b"\r\n\r\n").answer()[0] == 200
        assert wire.send(GET + b"X: a\r\n" * 99 + b"\r\n").answer()[0] == 200
        # In pieces, and over and over: the count begins anew with each request.
        for _ in range(3):
            head = GET + b"X: " + b"a" * 4000 + b"\r\n\r\n"
            assert wire.send(*(head[i : i + 997] for i in range(0, len(head), 997)), gap=0.001).answer()[0] == 200


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_a_body_over_the_limit_is_413_and_its_sender_can_read_that(service: Service, version: bytes) -> None:
    size = 4_000_000
    with Wire(service.url) as wire:
        wire.send(POST.replace(b"HTTP/1.1", version) + b"Content-Length: %d\r\n\r\n" % size, gap=0)
        wire.send(*[b"x" * 100_000] * (size // 100_000), gap=0)  # all of it, then it reads
        status, headers, body = wire.answer()
        assert (status, headers["connection"], body["error"]["code"]) == (413, "close", "body_too_large")
        assert all(word in body["error"]["message"] for word in (str(size), "65536", "--max-body-size"))
        assert wire.is_closed()


def test_a_chunked_body_over_the_limit_is_413(service: Service) -> None:
    with Wire(service.url) as wire:
        wire.send(POST + CHUNKED + b"\r\n", *[b"2710\r\n" + b"x" * 10_000 + b"\r\n"] * 40, gap=0)
        assert wire.answer()[2]["error"]["code"] == "body_too_large"
        assert wire.is_closed()
    with Wire(service.url) as wire:  # a chunk that would fill the memory
        wire.send(POST + CHUNKED + b"\r\nffffffffffff\r\n" + b"x" * 100_000)
        assert wire.answer()[0] == 413


def test_a_request_has_one_answer_whatever_its_body_becomes(service: Service) -> None:
    bare = POST.replace(b"Authorization", b"X-Nothing")
    for head, status in ((bare, 401), (POST, 413)):
        for rest in (b"xyz\r\n", b"0\r\n\r\n" + WHOLE, b"1;" + b"a" * 20_000):
            with Wire(service.url) as wire:
                wire.send(head + CHUNKED + b"\r\n" + b"11170\r\n" + b"x" * 70_000 + b"\r\n")
                assert wire.answer()[0] == status
                wire.send(rest)
                if status == 401 and rest.endswith(WHOLE):
                    served(wire)  # that was a proper body, and a proper request after it
                else:
                    assert wire.is_closed()


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b"1;" + b"a" * 4000, *[b"a" * 4000] * 3], id="chunk extension"),
        pytest.param([b"0\r\nX: " + b"a" * 4000, *[b"a" * 4000] * 3], id="trailer"),
        pytest.param([b"0\r\n", *[b"X: " + b"a" * 1000 + b"\r\n"] * 10], id="trailers"),
    ],
)
def test_what_surrounds_chunks_is_limited_too(service: Service, parts: list[bytes]) -> None:
    with Wire(service.url) as wire:
        refused(wire.send(POST + CHUNKED + b"\r\n", *parts), 400, "malformed_request")


def test_chunks_of_one_byte_are_fine(service: Service) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 3000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with Wire(service.url) as wire:
        served(wire.send(POST + CHUNKED + b"\r\n", chunks[:9000], chunks[9000:], b"0\r\n\r\n"))


def test_a_refusal_before_the_body_keeps_the_connection(service: Service) -> None:
    bare = POST.replace(b"Authorization", b"X-Nothing")
    with Wire(service.url) as wire:
        status, headers, _ = wire.send(bare + LENGTH + b"\r\n").answer()
        assert (status, headers.get("connection")) == (401, None)
        served(wire.send(BODY, WHOLE))


def test_no_100_for_a_body_that_is_not_wanted(service: Service) -> None:
    wait = b"Expect: 100-continue\r\n"
    with Wire(service.url) as wire:
        assert wire.send(POST.replace(b"Authorization", b"X-Nothing") + wait + LENGTH + b"\r\n").answer()[0] == 401
    with Wire(service.url) as wire:
        assert wire.send(POST + wait + b"Content-Length: 99999999\r\n\r\n").answer()[0] == 413
    with Wire(service.url) as wire:
        assert wire.send(POST + wait + LENGTH + b"\r\n").answer()[0] == 100
        served(wire.send(BODY))


def test_a_form_is_refused_with_a_hint(service: Service) -> None:
    form = POST.replace(b"application/json", b"application/x-www-form-urlencoded")
    with Wire(service.url) as wire:
        status, _, body = wire.send(form + LENGTH + b"\r\n" + BODY).answer()
        assert status == 400
        assert "Content-Type: application/json" in body["error"]["message"]


def test_a_client_that_leaves_in_the_middle_harms_no_other(service: Service) -> None:
    for part in (GET, POST + LENGTH + b"\r\n" + BODY[:5], POST + CHUNKED + b"\r\nff\r\nabc", WHOLE):
        with Wire(service.url) as wire:
            wire.send(part)
    with Wire(service.url) as wire:
        served(wire.send(WHOLE))


def test_forged_lines_stay_inside_one(service: Service) -> None:
    with Wire(service.url) as wire:
        target = b'/v1/models%0a{"event":%20"forged"}%0d%1b[2J'
        assert wire.send(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n").answer()[0] == 401
    lines = [json.loads(line) for line in service.log.read_text().splitlines()]
    assert 'models\n{"event": "forged"}\r\x1b[2J' in lines[-1]["path"]
    assert not [line for line in lines if line["event"] == "forged"]


# ---------------------------------------------------------------- time


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, unless the path is /early, and answers with its length; /slow takes a while."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    if scope["path"] == "/slow":
        await asyncio.sleep(1)
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def with_server(talk: Callable[[str], None], app: Any = _app, head_timeout: float = 0.5) -> None:
    """Runs `talk` in a thread against uvicorn with short deadlines, which a busy machine does not make shorter."""
    protocol = partial(BoundedHttpProtocol, max_header_size=8192, head_timeout=head_timeout)
    limited = RequestIdMiddleware(BodyLimitMiddleware(app, max_body_size=10_000_000, grace=0.4))
    config = uvicorn.Config(
        limited, http=protocol, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=2
    )  # type: ignore[arg-type]

    async def main() -> None:
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task = asyncio.create_task(server._serve([listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                await asyncio.to_thread(talk, f"http://127.0.0.1:{listener.getsockname()[1]}")
                assert not server.server_state.tasks
            finally:
                server.should_exit = True
                await task
            assert not server.server_state.connections

    with asyncio.Runner(loop_factory=PatientEventLoop) as runner:
        runner.run(asyncio.wait_for(main(), PATIENCE))


def test_a_header_that_never_ends_times_out() -> None:
    def talk(url: str) -> None:
        for first in (b"", b"G", GET, GET + b"\r\n"):
            with Wire(url) as wire:
                if first.endswith(b"\r\n\r\n"):
                    assert wire.send(first, b"GET /next").answer()[0] == 200
                elif first:
                    wire.send(first)
                if first:
                    assert "0.5 seconds" in refused(wire, 408, "request_timeout")
                else:
                    assert wire.is_closed()

    with_server(talk)


@pytest.mark.parametrize("trickle", [b"X-%d: a\r\n", b"\r\n"])
def test_a_trickle_of_header_does_not_extend_the_time(trickle: bytes) -> None:
    def talk(url: str) -> None:
        with Wire(url) as wire:
            parts = [trickle % number if b"%d" in trickle else trickle for number in range(20)]
            wire.send(GET if b"%d" in trickle else b"\r\n", *parts, gap=0.05)
            assert "0.5 seconds" in refused(wire, 408, "request_timeout")

    with_server(talk)


def test_a_body_that_stalls_is_408() -> None:
    def talk(url: str) -> None:
        for head in (b"Content-Length: 10\r\n\r\n", CHUNKED + b"\r\n5\r\n"):
            with Wire(url) as wire:
                wire.send(b"POST / HTTP/1.1\r\n" + HOST + head + b"ab")
                status, headers, body = wire.answer()
                assert (status, headers["connection"], body["error"]["code"]) == (408, "close", "request_timeout")
                assert wire.is_closed()

    with_server(talk)


def test_a_large_body_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.door.limits.BODY_RATE", 1000)

    def talk(url: str) -> None:
        with Wire(url) as wire:
            wire.send(b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 110000\r\n\r\n" + b"x" * 10_000)
            wire.send(*[b"x" * 10_000] * 10, gap=0.1)
            assert wire.answer()[2] == 110_000

    with_server(talk)


def test_an_answered_request_without_its_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    early = b"POST /early HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n"

    def talk(url: str) -> None:
        with Wire(url) as wire:
            assert wire.send(early).answer()[0] == 200
            assert wire.is_closed()
        with Wire(url) as wire, pytest.raises(OSError):
            wire.send(early, *[b"x"] * 900, gap=0.05)

    def talk_in_time(url: str) -> None:
        with Wire(url) as wire:
            assert wire.send(early).answer()[0] == 200
            assert wire.send(b"x" * 1000 + GET + b"\r\n").answer()[0] == 200

    with_server(talk_in_time)
    monkeypatch.setattr("server.door.protocol.LINGER", 0.3)
    with_server(talk)


def test_half_a_request_behind_another_waits_for_its_answer() -> None:
    def talk(url: str) -> None:
        with Wire(url) as wire:
            wire.send(b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\nGET /late HTTP/1.1\r\n")
            assert wire.answer()[0] == 200  # after more than the time for a header
            assert refused(wire, 408, "request_timeout")
        with Wire(url) as wire:
            wire.send(b"GET /slow HTTP/1.1\r\n" + HOST + b"\r\nGET /late HTTP/1.1\r\n")
            assert wire.answer()[0] == 200
            assert wire.send(HOST + b"\r\n").answer()[0] == 200

    with_server(talk, head_timeout=0.9)


def test_an_exception_in_the_app_ends_no_connection_but_its_own() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        raise ZeroDivisionError

    def talk(url: str) -> None:
        with Wire(url) as wire:
            status, _, body = wire.send(GET + b"\r\n").answer()
            assert (status, body["error"]["code"]) == (500, "internal_error")
            assert wire.send(GET + b"\r\n").answer()[0] == 500
            wire.send(b"GET /late HTTP/1.1\r\n" + HOST + b"\r\n")
            assert wire.socket.recv(65536).endswith(b"\r\n\r\n")
            assert wire.is_closed()

    with_server(talk, app)
