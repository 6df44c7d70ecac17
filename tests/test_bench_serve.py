"""`octavo bench serve` from end to end over loopback, against a server that plays a part and against Octavo's app."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fake_client import VOCAB_SIZE, FakeClient, byte_tokenizer, say
from support.service import PATIENCE

from cli.main import main as octavo
from server.app import create_app

ROOT = Path(__file__).resolve().parent.parent
JSON = "application/json"
# What the server does with a generation's body: True when it has answered in its own way.
Part = Callable[["FakeServer", dict[str, Any], asyncio.StreamWriter], Any]


class FakeServer:
    """An OpenAI-compatible server in a thread; each answer has as many tokens as were asked for."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.times: list[float] = []
        self.connections = self.running = self.most_running = 0
        self.token_delay = 0.0
        self.play: Part | None = None
        self.other: dict[str, tuple[int, Any]] = {
            "/v1/models": (200, {"object": "list", "data": [{"id": "fake/model", "max_model_len": 4096}]}),
            "/version": (200, {"version": "9.9"}),
            "/tokenize": (200, {"count": 5, "tokens": [3, 5, 7, 11, 13]}),
        }
        self.keep_alive = True
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)

    @property
    def sent(self) -> list[dict[str, Any]]:
        """The bodies, without the warm-up's."""
        return self.bodies[1:]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line.split(":")[1] for line in head.split("\r\n") if line.startswith("Content-Length:")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                self.heads.append(head)
                await self._answer(head.split(" ")[1], body, writer)
                if not self.keep_alive:
                    writer.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, data: bytes, writer: asyncio.StreamWriter) -> None:
        if path in self.other:
            status, value = self.other[path]
            return self.whole(writer, status, value)
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return self.whole(writer, 404, {"detail": "Not Found"})
        body = json.loads(data)
        self.bodies.append(body)
        self.times.append(time.perf_counter())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.play is not None and await self.play(self, body, writer):
                return None
            if not body.get("stream"):
                await asyncio.sleep(self.token_delay)
                choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
                return self.whole(writer, 200, {"choices": choices, "usage": self.usage(body)})
            self.begin(writer)
            for number in range(body["max_tokens"]):
                await asyncio.sleep(self.token_delay)
                last = number == body["max_tokens"] - 1
                self.event(writer, self.piece(path, " x", "length" if last else None))
            self.event(writer, {"choices": [], "usage": self.usage(body)})
            self.end(writer)
            await writer.drain()
        finally:
            self.running -= 1

    @staticmethod
    def piece(path: str, text: str, finish_reason: str | None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if "chat" in path else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": finish_reason, **said}]}

    @staticmethod
    def usage(body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt", body.get("messages"))
        return {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}

    def whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        close = "" if self.keep_alive else "Connection: close\r\n"
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {JSON}\r\nContent-Length: {len(data)}\r\n{close}\r\n"
        writer.write(head.encode() + data)

    @staticmethod
    def begin(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    @staticmethod
    def event(writer: asyncio.StreamWriter, value: Any) -> None:
        data = f": comment\n\ndata: {json.dumps(value)}\n\n".encode()
        for part in (data[:15], data[15:]):  # chunks need not be events
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    @staticmethod
    def end(writer: asyncio.StreamWriter) -> None:
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def main(arguments: list[str]) -> int:
    """The exit status of `octavo bench serve`."""
    return octavo(["bench", "serve", *arguments])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as made:
        yield made


def bench(server: FakeServer, tmp_path: Path, arguments: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "result.json"
    path.unlink(missing_ok=True)
    assert main(["--url", server.url, "--json", str(path), *arguments.split()]) == status
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 1) -> str:
    """The message of a benchmark that does not run."""
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def gather(count: int) -> Part:
    """The first so many answers begin when as many requests are there."""

    async def play(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        while len(server.bodies) > 1 and len(server.sent) < count:
            await asyncio.sleep(0.001)
        return False

    return play


def test_a_closed_load(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.token_delay, server.play = 0.002, gather(6)
    result = bench(server, tmp_path, "--num-requests 30 --concurrency 6 --input-len 5:9 --output-len 4 --save-requests")
    assert len(server.sent) == 30
    assert server.most_running == 6
    assert server.connections <= 7  # they are used again
    assert {token for body in server.sent for token in body["prompt"]} <= {3, 5, 7, 11, 13}
    assert result["requests"] == {
        "completed": 30, "failed": 0, "interrupted": 0, "overloaded_503": 0, "errors": {}, "error_examples": {},
    }  # fmt: skip
    sizes = sum(len(body["prompt"]) for body in server.sent)
    assert result["tokens"] == {
        "input": sizes, "cached": None, "output": 120, "output_counted_by": "server", "per_event": 1.0,
    }  # fmt: skip
    assert result["server"] == {"url": server.url, "model": "fake/model", "version": "9.9", "max_model_len": 4096}
    counts = {name: None if found is None else found["count"] for name, found in result["latency_ms"].items()}
    assert counts == {"ttft": 30, "itl": 90, "tpot": 30, "e2e": 30, "lag": 30}
    assert set(result["latency_ms"]["ttft"]) == {"count", "mean", "std", "min", "p50", "p90", "p95", "p99", "max"}
    assert result["latency_ms"]["ttft"]["min"] >= 2
    assert result["latency_ms"]["e2e"]["min"] >= 8
    assert result["throughput"]["output_tokens_per_s"] == pytest.approx(120 / result["duration_s"])
    assert result["itl_counted_by"] == "token"
    assert {"cpu", "cores", "python", "system"} <= set(result["machine"])
    assert result["settings"]["concurrency"] == 6
    assert result["settings"]["input_len"] == "5:9"
    rows = result["rows"]
    assert sorted(row["index"] for row in rows) == list(range(30))
    assert all(len(row["event_times"]) == 4 and row["event_tokens"] == [1] * 4 for row in rows)
    assert all(row["scheduled"] <= row["sent"] <= row["event_times"][0] <= row["ended"] for row in rows)
    shown = capsys.readouterr().out
    for line in (
        "requests                30 completed, 0 failed",
        "output tokens           120",
        "time to first token",
    ):
        assert line in shown


def test_an_open_load_does_not_wait_for_answers(server: FakeServer, tmp_path: Path) -> None:
    server.play = gather(25)
    result = bench(server, tmp_path, "--num-requests 25 --request-rate inf --output-len 1")
    assert result["requests"]["completed"] == 25
    assert server.most_running == 25
    assert result["settings"]["request_rate"] == "inf"
    server.times.clear()
    server.token_delay, server.play = 0.3, None
    result = bench(server, tmp_path, "--num-requests 12 --request-rate 60 --output-len 1 --save-requests --warmup 0")
    due = [row["scheduled"] for row in result["rows"]]
    sent = [row["sent"] for row in result["rows"]]
    assert due == sorted(due)
    assert due[-1] > 0
    assert all(late >= on_time for on_time, late in zip(due, sent, strict=True))
    assert max(due) < result["duration_s"]


@pytest.mark.slow
def test_a_duration_ends_the_load(server: FakeServer, tmp_path: Path) -> None:
    server.token_delay = 0.01
    result = bench(server, tmp_path, "--duration 2 --concurrency 3 --output-len 2 --save-requests")
    assert result["requests"]["completed"] == len(server.sent) > 3
    assert max(row["scheduled"] for row in result["rows"]) < 2
    result = bench(server, tmp_path, "--duration 0.3 --request-rate 50 --output-len 1 --save-requests")
    assert all(row["scheduled"] < 0.3 for row in result["rows"])


def test_a_trace_of_texts_is_replayed(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"prompt": f"text {number}", "output_tokens": number + 1, "arrival": number / 10} for number in range(4)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    result = bench(server, tmp_path, f"--trace {trace} --trace-speed 2 --save-requests")
    assert [(body["prompt"], body["max_tokens"]) for body in server.sent] == [
        ("text 0", 1), ("text 1", 2), ("text 2", 3), ("text 3", 4),
    ]  # fmt: skip
    assert [row["scheduled"] for row in result["rows"]] == pytest.approx([0, 0.05, 0.1, 0.15])
    assert all(body["ignore_eos"] for body in server.sent)
    trace.write_text('{"prompt": "open end"}\n')
    bench(server, tmp_path, f"--trace {trace} --concurrency 1 --output-len 3")
    assert server.bodies[-1]["max_tokens"] == 3
    assert "ignore_eos" not in server.bodies[-1]


def test_chat_and_whole_answers(server: FakeServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--endpoint chat --num-requests 5 --input-len 8 --output-len 3")
    assert result["tokens"]["output"] == 15
    assert result["latency_ms"]["itl"]["count"] == 10
    assert all(body["messages"][0]["content"] for body in server.sent)
    server.bodies.clear()
    result = bench(server, tmp_path, "--no-stream --num-requests 5 --output-len 3")
    assert not any("stream" in body for body in server.bodies)
    assert result["tokens"]["output"] == 15
    assert (result["latency_ms"]["ttft"], result["latency_ms"]["tpot"]) == (None, None)
    assert result["latency_ms"]["e2e"]["count"] == 5


def test_headers_and_extra_fields(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "first-key,second-key")
    result = bench(server, tmp_path, '--num-requests 2 --output-len 1 --extra-body {"top_k":7,"stream_options":null}')
    assert all("Authorization: Bearer first-key\r\n" in head for head in server.heads)
    assert all(body["top_k"] == 7 and body["stream_options"] is None for body in server.sent)
    assert "first-key" not in json.dumps(result) + capsys.readouterr().out
    server.heads.clear()
    bench(server, tmp_path, "--num-requests 2 --output-len 1 --api-key other")
    assert all("Authorization: Bearer other\r\n" in head for head in server.heads)


async def every_third(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    number = len(server.sent)
    if number % 3 == 1:
        error = {"error": {"message": "too many requests wait", "code": "overloaded"}}
        server.whole(writer, 503, error)
    elif number % 3 == 2:
        server.begin(writer)
        server.event(writer, server.piece("", "x", None))
        server.event(writer, {"error": {"message": "the engine died", "type": "server_error"}})
        server.end(writer)
    return number % 3 != 0


def test_errors_are_counted_by_kind(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.play = every_third
    result = bench(
        server, tmp_path, "--num-requests 9 --concurrency 3 --output-len 2 --slo-ttft 60000 --slo-tpot 60000"
    )
    assert result["requests"] == {
        "completed": 3, "failed": 6, "interrupted": 0, "overloaded_503": 3,
        "errors": {"http 503": 3, "stream error": 3},
        "error_examples": {"http 503": "too many requests wait", "stream error": "the engine died"},
    }  # fmt: skip
    assert result["tokens"]["output"] == 6
    assert result["latency_ms"]["ttft"]["count"] == 3
    assert result["goodput"]["requests"] == 3
    shown = capsys.readouterr().out
    assert "http 503 (overloaded)" in shown
    assert "the engine died" in shown
    assert "(3 of 3)" in shown


async def hang_up(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    if not server.sent:
        return False
    if len(server.sent) % 2:
        server.begin(writer)
        server.event(writer, server.piece("", "x", None))
        await writer.drain()
        writer.close()
    else:
        await asyncio.Event().wait()
    return True


async def two_by_two(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
    server.begin(writer)
    for start in range(0, body["max_tokens"], 2):
        piece = server.piece("", " x x", "length" if start + 2 == body["max_tokens"] else None)
        if body.get("return_token_ids"):
            piece["choices"][0]["token_ids"] = [1, 2]
        server.event(writer, piece)
    server.event(writer, {"choices": [], "usage": server.usage(body)})
    server.end(writer)
    return True


def test_tokens_that_come_together_are_told_of(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.play = two_by_two
    result = bench(server, tmp_path, "--num-requests 3 --output-len 8")
    assert (result["tokens"]["output"], result["tokens"]["per_event"]) == (24, 2.0)
    assert (result["itl_counted_by"], result["latency_ms"]["itl"]["count"]) == ("event", 9)
    assert "Events hold 2.00 tokens on average" in capsys.readouterr().out
    result = bench(server, tmp_path, "--num-requests 3 --output-len 8 --return-token-ids")
    assert (result["itl_counted_by"], result["latency_ms"]["itl"]["count"]) == ("token", 18)
    assert not any("Events hold" in note for note in result["notes"])


@pytest.mark.parametrize("owner", ["octavo", "vllm"])
def test_a_server_that_is_known_is_asked_for_token_ids(server: FakeServer, tmp_path: Path, owner: str) -> None:
    server.play = two_by_two
    card = {"id": "fake/model", "max_model_len": 4096, "owned_by": owner}
    server.other["/v1/models"] = 200, {"object": "list", "data": [card]}
    result = bench(server, tmp_path, "--num-requests 3 --output-len 8")
    assert (result["itl_counted_by"], result["latency_ms"]["itl"]["count"]) == ("token", 18)
    assert result["settings"]["return_token_ids"] is True
    server.bodies.clear()
    result = bench(server, tmp_path, "--num-requests 3 --output-len 8 --no-return-token-ids")
    assert result["itl_counted_by"] == "event"
    bench(server, tmp_path, "--num-requests 1 --output-len 8 --no-stream")
    assert not any("return_token_ids" in body for body in server.bodies)


@pytest.mark.slow
def test_connections_that_break_and_answers_that_never_come(server: FakeServer, tmp_path: Path) -> None:
    server.play = hang_up
    result = bench(server, tmp_path, "--num-requests 4 --concurrency 4 --output-len 2 --timeout 4", status=1)
    assert result["requests"]["errors"] == {"connection": 2, "timeout": 2}
    assert "closed the connection" in result["requests"]["error_examples"]["connection"]
    assert "--timeout" in result["requests"]["error_examples"]["timeout"]
    assert result["throughput"]["output_tokens_per_s"] == 0


def test_a_server_that_closes_after_each_answer(server: FakeServer, tmp_path: Path) -> None:
    server.keep_alive = False
    result = bench(server, tmp_path, "--num-requests 20 --concurrency 2 --output-len 2")
    assert result["requests"]["completed"] == 20  # a connection that was closed meanwhile is no error
    assert server.connections >= 20


def test_wrong_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([], "choose a kind: serve"),
        (["train"], "unknown kind 'train'"),
        (["serve", "--concurency", "3"], "unknown flag --concurency"),
        (["serve", "--concurrency", "many"], "--concurrency"),
    ):
        with pytest.raises(SystemExit) as ended:
            octavo(["bench", *arguments])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
    assert main(["--trace", "x", "--input-len", "3"]) == 2
    assert octavo(["bench", "--help"]) == 0


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # taken, but nothing listens
        port = probe.getsockname()[1]
        shown = refused(capsys, ["--url", f"http://127.0.0.1:{port}"])
    assert f"port {port}" in shown
    assert "--url" in shown


def test_what_the_server_refuses_at_the_start(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    url, few = ["--url", server.url], ["--output-len", "1", "--num-requests", "1"]
    assert "--model other: the server has fake/model" in refused(capsys, [*url, "--model", "other"])
    shown = refused(capsys, [*url, "--input-len", "4000", "--output-len", "100"])
    assert "up to 4100 tokens, more than the server's context of 4096" in shown
    server.other["/tokenize"] = (404, {"detail": "Not Found"})
    shown = refused(capsys, url)
    assert "404" in shown
    assert "--vocab-size" in shown
    assert main([*url, *few, "--vocab-size", "50"]) == 0
    assert max(server.bodies[-1]["prompt"]) < 50
    assert main([*url, *few, "--prompts", "text"]) == 0
    assert "The server does not tokenize" in capsys.readouterr().out
    server.other["/v1/models"] = (401, {"error": {"message": "no key was sent"}})
    shown = refused(capsys, url)
    assert "no key was sent" in shown
    assert "--api-key" in shown
    server.other["/v1/models"] = (404, "no such page")
    assert "set --model" in refused(capsys, url)
    assert main([*url, *few, "--vocab-size", "50", "--model", "any"]) == 0
    assert server.bodies[-1]["model"] == "any"


def test_a_server_cannot_command_the_terminal(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "evil\x1b[2J\nrequests  1000"
    server.other["/v1/models"] = (200, {"data": [{"id": name}]})
    assert bench(server, tmp_path, "--num-requests 1 --output-len 2")["server"]["model"] == name
    assert capsys.readouterr().out.startswith(r"evil\x1b[2J\nrequests  1000 at http://")
    assert r"evil\x1b[2J\nrequests" in refused(capsys, ["--url", server.url, "--model", "x"])


def test_a_warm_up_that_fails_ends_it(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        server.whole(writer, 400, {"error": {"message": "ignore_eos is not supported"}})
        return True

    server.play = refuse
    shown = refused(capsys, ["--url", server.url, "--warmup", "2"])
    assert "the warm-up failed (http 400): ignore_eos is not supported" in shown
    assert len(server.bodies) == 2


def test_a_malformed_trace_and_one_that_is_too_long(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 5}\n{"input_length": "many"}\n')
    assert f"{trace}:2: input_length" in refused(capsys, ["--url", server.url, "--trace", str(trace)])
    trace.write_text('{"input_length": 5, "output_length": 1}\n{"input_length": 9000, "output_length": 2}\n')
    shown = refused(capsys, ["--url", server.url, "--trace", str(trace)])
    assert "1 of 2 requests of the trace are longer than the server's context of 4096" in shown
    assert "9002" in shown
    shown = refused(capsys, ["--url", server.url, "--trace", str(trace), "--num-requests", "3"], status=2)
    assert "--num-requests is 3, but" in shown
    assert server.bodies == []


def test_ctrl_c_shows_what_there_is(server: FakeServer, tmp_path: Path) -> None:
    async def stall(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if len(server.sent) > 5:
            await asyncio.Event().wait()
        return False

    server.play = stall
    path = tmp_path / "result.json"
    arguments = ["bench", "serve", "--url", server.url, "--json", str(path)]
    arguments += ["--num-requests", "50", "--concurrency", "2", "--output-len", "2"]
    command = [sys.executable, "-m", "octavo", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while server.running < 2 or len(server.sent) < 7:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert "5 completed, 0 failed, 2 interrupted" in shown
    assert "Stopped; this is what was measured" in errors
    assert "Traceback" not in errors
    assert json.loads(path.read_text())["requests"]["interrupted"] == 2


def test_against_octavo_s_own_app(tmp_path: Path) -> None:
    """Its /v1/models, /tokenize, /version, streams and usage are understood."""
    client = FakeClient(lambda request_id, prompt, params: say(request_id, ["abcdef"[: params.max_tokens]], params))
    app = create_app(client, byte_tokenizer(), "octavo/test", version="1.2.3")
    listener = socket.create_server(("127.0.0.1", 0))
    service = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(service.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        url, path = f"http://127.0.0.1:{listener.getsockname()[1]}/v1", tmp_path / "result.json"
        few = ["--num-requests", "6", "--concurrency", "3", "--input-len", "7", "--output-len", "5"]
        for more in ([], ["--no-return-token-ids"], ["--endpoint", "completions", "--no-stream"]):
            assert main(["--url", url, "--json", str(path), *few, *more]) == 0
            result = json.loads(path.read_text())
            assert (result["server"]["model"], result["server"]["version"]) == ("octavo/test", "1.2.3")
            assert (result["tokens"]["input"], result["tokens"]["output"]) == (42, 30)
            assert result["requests"]["completed"] == 6
        prompts = [source.token_ids for source, _ in client.asked.values()]
        assert all(len(prompt) == 7 and max(prompt) < VOCAB_SIZE for prompt in prompts)
        assert all(params.ignore_eos for _, params in client.asked.values())
    finally:
        service.should_exit = True
        thread.join(PATIENCE)
