"""The service as a process under pressure: clients that never read, overload, the drain in every phase."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.asgi import events
from support.faults import Gate
from support.service import PATIENCE, Service, stopped, wait_for
from test_http_process import LONG as WITHOUT_END
from test_http_process import complete

pytestmark = pytest.mark.slow

LONG = {**WITHOUT_END, "temperature": 0}  # a stream of megabytes
STALL = 8.0  # seconds; a client that reads is not held up for so long
HELD = 'octavo_kv_pages{state="held"}'


def aborted(reason: str) -> str:
    return f'octavo_requests_aborted_total{{reason="{reason}"}}'


def rejected(reason: str) -> str:
    return f'octavo_requests_rejected_total{{reason="{reason}"}}'


def wait_empty(service: Service) -> None:
    for name in ("octavo_num_requests_in_service", "octavo_num_queued_tokens", HELD):
        service.wait_metric(name, 0)
    for name in ("octavo_num_requests_running", "octavo_num_requests_waiting"):
        service.wait_metric(name, 0)


@pytest.fixture(scope="module")
def start(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Service]]:
    """Starts services; whatever a test does, none survives it."""
    started: list[Service] = []

    def begin(*arguments: str) -> Service:
        common = ("--kv-cache-memory", "64MiB", "--max-num-batched-tokens", "64")
        log = tmp_path_factory.mktemp("log") / "service.log"
        started.append(Service(str(tiny), *common, *arguments, log=log))
        started[-1].wait_ready()
        return started[-1]

    yield begin
    for service in started:
        service.process.kill()
        service.process.wait()
        assert "Traceback" not in service.log.read_text()


@pytest.fixture(scope="module")
def service(start: Callable[..., Service]) -> Iterator[Service]:
    """One for all tests that leave it as it was; stopped while idle, with a connection kept."""
    flags = f"--max-num-seqs 4 --max-num-queued-reqs 4 --stream-keepalive 0.1 --stream-stall-timeout {STALL}"
    one = start(*flags.split(), "--max-queue-time", "0", "--shutdown-timeout", str(2 * PATIENCE))
    yield one
    with httpx.Client(base_url=one.url, timeout=PATIENCE) as kept:
        assert kept.get("/health").status_code == 200
        assert one.stop() == 0  # long before the shutdown timeout


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=PATIENCE) as client:
        yield client


class RawClient:
    """A client that decides itself when to read; its kernel buffers little."""

    def __init__(self, service: Service, body: dict[str, Any], *, path: str = "/v1/completions"):
        where = urlsplit(service.url)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(PATIENCE)
        self.socket.connect((where.hostname, where.port))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        self.socket.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)

    def read(self, count: int = 65536) -> bytes:
        return self.socket.recv(count)

    def read_all(self, pause: float = 0.0, piece: int = 65536) -> bytes:
        """Everything up to the end of a chunked answer."""
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            part = self.socket.recv(piece)
            assert part, f"the connection was closed after {len(data)} bytes: {data[-200:]!r}"
            data += part
            time.sleep(pause)
        return data

    def is_reset(self) -> bool:
        """The server has closed the connection (what it had sent before is thrown away)."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            return True
        return False


def texts(stream: bytes) -> str:
    """The text of a raw stream's events; its chunks are taken apart first."""
    content, rest = b"", stream.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        content, rest = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return "".join(event["choices"][0]["text"] for event in events(content.decode()))


# ---------------------------------------------------------------- clients that do not read, or leave


def test_readers_that_stall_lose_their_connection_and_slow_ones_do_not(service: Service, http: httpx.Client) -> None:
    body = {**LONG, "max_tokens": 1500}
    began = service.metric("octavo_steps_total")
    with ThreadPoolExecutor(2) as pool:
        with stopped(service.engine()):
            never = [RawClient(service, {"prompt": "a", "stream": True, **body, "logprobs": 5}) for _ in range(2)]
            slow = RawClient(service, {"prompt": "b", "stream": True, **body})
            received = pool.submit(slow.read_all, 0.02, 4000)
            whole = pool.submit(complete, http, prompt="b", **body)
            service.wait_metric("octavo_num_requests_in_service", 4)
        expected = whole.result()["choices"][0]["text"]
        steps = service.metric("octavo_steps_total") - began
        assert steps < 1800, "the answers did not share steps: somebody was waited for"
        service.wait_metric(aborted("stall"), 2)
        assert texts(received.result(PATIENCE)) == expected
    assert service.metric(aborted("stall")) == 2
    assert service.metric(aborted("disconnect")) == 0
    assert service.log.read_text().count("did not read for 8 seconds") == 2
    assert all(client.is_reset() for client in never)
    wait_empty(service)


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 3}, {"prompt": ["a", "b"]}, {"num_beams": 4}], ids=str)
@pytest.mark.parametrize("how", ["close", "half-close"])
def test_a_client_that_leaves_frees_its_pages(how: str, fields: dict[str, Any], service: Service) -> None:
    """Closing the sending half counts as leaving: nothing tells it from a client that is gone."""
    before = service.metric(aborted("disconnect"))
    body: dict[str, Any] = {"prompt": "a", **LONG, **fields}
    client = RawClient(service, body)
    prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    service.wait_metric("octavo_num_requests_running", prompts)
    client.socket.shutdown(socket.SHUT_WR) if how == "half-close" else client.socket.close()
    service.wait_metric(HELD, 0)
    service.wait_metric(aborted("disconnect"), before + prompts)
    wait_empty(service)


# ---------------------------------------------------------------- many, and waiting


def test_ten_times_the_queue(service: Service, http: httpx.Client) -> None:
    """Accepted requests answer right, the rest are told when to come back, and nothing leaks."""
    body = {"prompt": "Go", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    expected = complete(http, **body)["choices"][0]["text"]
    before = service.metric(rejected("queue_full"))

    def ask(number: int) -> httpx.Response:
        with httpx.Client(base_url=service.url, timeout=PATIENCE) as http:
            return http.post("/v1/completions", json={**body, "stream": number % 2 == 0})

    with ThreadPoolExecutor(40) as pool:
        with stopped(service.engine()):
            asked = [pool.submit(ask, number) for number in range(40)]
            service.wait_metric(rejected("queue_full"), before + 32)  # four run and four wait
        answers = [answer.result() for answer in asked]
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert (len(served), len(refused)) == (8, 32)
    for answer in served:
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert "".join(event["choices"][0]["text"] for event in events(answer.text)) == expected
        else:
            assert answer.json()["choices"][0]["text"] == expected
    for answer in refused:
        assert answer.json()["error"]["code"] == "overloaded"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert service.metric(rejected("queue_full")) == before + 32
    wait_empty(service)
    assert complete(http, **body)["choices"][0]["text"] == expected


def test_keep_alives_while_queued(service: Service) -> None:
    before = service.metric(aborted("disconnect"))
    first = [RawClient(service, {"prompt": "a", "stream": True, **LONG}) for _ in range(4)]
    service.wait_metric("octavo_num_requests_running", 4)
    queued = RawClient(service, {"prompt": "b", "stream": True, "max_tokens": 3, "ignore_eos": True})
    data = b""
    while data.count(b": keep-alive\n\n") < 3:
        data += queued.read(100)
    assert service.metric("octavo_num_requests_waiting") == 1
    assert data.startswith(b"HTTP/1.1 200")
    assert b"data:" not in data
    for client in first:
        client.socket.close()
    assert texts(data + queued.read_all())
    wait_empty(service)
    assert service.metric(aborted("disconnect")) == before + 4


def test_counters_are_final_right_after_the_answer(service: Service, http: httpx.Client) -> None:
    greedy = {"prompt": "c", "temperature": 0, "ignore_eos": True}
    free = complete(http, **greedy, max_tokens=64)["choices"][0]["text"]
    for fields in ({"max_tokens": 7}, {"stop": free[20:23], "max_tokens": 3000}):
        before = service.metric("octavo_generation_tokens_total")
        usage = complete(http, **greedy, **fields)["usage"]
        lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line[0] != "#")
        for name in ("octavo_num_requests_running", "octavo_num_requests_in_service", HELD):
            assert float(lines[name]) == 0, name
        made = float(lines["octavo_generation_tokens_total"]) - before
        assert made >= usage["completion_tokens"]
        time.sleep(0.2)
        assert service.metric("octavo_generation_tokens_total") - before == made


# ---------------------------------------------------------------- drain


def test_the_drain_lets_everybody_finish_and_refuses_the_rest(
    start: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One decodes, one is in prefill, one is queued, streamed or not; all end in order. One step ahead."""
    gate = Gate(tmp_path, monkeypatch, position=1200)
    gate.close()
    service = start(
        "--async-scheduling", "--max-num-seqs", "2", "--shutdown-timeout", str(PATIENCE), "--served-model-name", "mine"
    )
    decode = RawClient(service, {"prompt": "a", "stream": True, "max_tokens": 2500, "ignore_eos": True})
    decode.read(100)
    bodies = [
        {"prompt": "long prompt " * 200, "max_tokens": 1000, "ignore_eos": True},
        {"prompt": "queued", "max_tokens": 5, "ignore_eos": True, "stream": True},
        {"prompt": "queued", "max_tokens": 5, "ignore_eos": True, "model": "mine"},
    ]
    with httpx.Client(base_url=service.url, timeout=PATIENCE) as kept, ThreadPoolExecutor(3) as pool:
        assert kept.get("/health").status_code == 200
        answers = [pool.submit(kept.post, "/v1/completions", json=bodies[0])]
        wait_for(lambda: gate.holds, "no step came to the gate")  # before that, a short one could come and go
        answers += [pool.submit(kept.post, "/v1/completions", json=body) for body in bodies[1:]]
        wait_for(lambda: "\noctavo_num_requests_in_service 4" in kept.get("/metrics").text, "they did not arrive")
        service.process.send_signal(signal.SIGTERM)
        wait_for(lambda: kept.get("/health").status_code == 503, "it did not begin to stop")
        for path in ("/health", "/health/ready"):
            assert kept.get(path).json()["error"]["code"] == "shutting_down"  # a kept connection
            assert service.get(path).status_code == 503  # a new one
        assert service.get("/health/live").status_code == 200
        late = kept.post("/v1/completions", json=bodies[2])
        assert (late.status_code, late.headers["connection"]) == (503, "close")
        assert late.headers["retry-after"].isdigit()
        assert service.metric(rejected("shutting_down")) == 1
        gate.open()
        assert decode.read_all().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert [answer.result().status_code for answer in answers] == [200, 200, 200]
    assert service.process.wait(PATIENCE) == 0


def test_what_is_late_is_ended_with_an_error(
    start: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming to a client that takes nothing, decoding, queued and unstreamed. Clients that read need not be quick:
    what they have to read is little enough for the kernel to keep."""
    gate = Gate(tmp_path, monkeypatch, position=3000)
    gate.close()
    service = start("--max-num-seqs", "3", "--shutdown-timeout", "1")
    url = f"{service.url}/v1/completions"
    heavy = {"prompt": "a" * 2700, "echo": True, "logprobs": 5}  # half a megabyte
    stalled = RawClient(service, {"stream": True, **LONG, **heavy})
    with ThreadPoolExecutor(3) as pool:
        decoding = pool.submit(
            httpx.post, url, json={"prompt": ["b" * 2960, "c" * 2960], "stream": True, **LONG}, timeout=PATIENCE
        )
        service.wait_metric("octavo_num_requests_running", 3)
        queued = pool.submit(httpx.post, url, json={"prompt": "queued", "stream": True, **LONG}, timeout=PATIENCE)
        whole = pool.submit(httpx.post, url, json={"prompt": "d", **LONG}, timeout=PATIENCE)
        service.wait_metric("octavo_num_requests_in_service", 5)
        service.process.send_signal(signal.SIGTERM)
        assert decoding.result().status_code == 200
        *_, last, end = decoding.result().text.split("\n\n")
        assert ('"shutting_down"' in last, end) == (True, "")
        # The engine waits at the gate: whether it has taken this one before, so that its stream has begun, is open.
        assert queued.result().status_code in (200, 503)
        assert '"shutting_down"' in queued.result().text
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "shutting_down")
    assert service.process.wait(PATIENCE) == 0
    assert "did not finish within 1 seconds (shutdown_timeout)" in service.log.read_text()
    stalled.socket.close()
