"""An OpenAI-compatible server in a thread, whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from support.service import PATIENCE

JSON = "application/json"
# What the server does with a generation's body: True when it has answered in its own way.
Part = Callable[["FakeServer", dict[str, Any], asyncio.StreamWriter], Any]


class FakeServer:
    """An OpenAI-compatible server in a thread; each answer has as many tokens as were asked for."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
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
