"""An app called as a server calls it, by a client that leaves, stalls or reads slowly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from fastapi import FastAPI

from server.context import Service
from support.service import PATIENCE


def request(app: Any, method: str, path: str, *, strict: bool = False, **options: Any) -> httpx.Response:
    """The answer to one request, in an event loop of its own; `strict` raises what comes out of the app besides."""

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=strict)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, **options)

    return asyncio.run(asyncio.wait_for(call(), PATIENCE))


def error(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, in the form that all have."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert 0 < len(body["error"]["message"]) < 400
    return dict(body["error"])


class Called:
    """Requests of tests to an app that they have made."""

    app: Any

    @property
    def service(self) -> Service:
        service = self.app.state.service
        assert isinstance(service, Service)
        return service

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return request(self.app, method, path, **options)

    def counts(self, name: str) -> dict[str, float]:
        """A counter's values by label, without zeros."""
        return counts(self.service, name)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream, without comments. Its last event says that it is done."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    blocks = [block for block in blocks if not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def until(what: Callable[[], object]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(PATIENCE):
        while not what():
            await asyncio.sleep(0.002)


def counts(service: Service, name: str) -> dict[str, float]:
    """A counter's values by label, without zeros."""
    samples = [one for metric in service.metrics.registry.collect() for one in metric.samples]
    found = [one for one in samples if one.name == name and one.value]
    return {next(iter(one.labels.values()), ""): one.value for one in found}


class Call:
    """One request on its way; start it inside an event loop.

    Attributes:
        sent: the ASGI messages that the client has taken.
        reading: while clear, `send` waits, as it does when a client takes nothing.
        task: the app's.
    """

    def __init__(
        self,
        app: FastAPI,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ):
        self.sent: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self._left = asyncio.Event()
        self._news = asyncio.Event()
        self._body: bytes | None = b"" if body is None else json.dumps(body).encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json"), *headers], "client": ("c", 1), "server": ("s", 1),
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        self.sent.append(message)
        self._news.set()

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def wait_sent(self, count: int) -> None:
        """Until so many messages have been taken."""
        async with asyncio.timeout(PATIENCE):
            while len(self.sent) < count:
                self._news.clear()
                await self._news.wait()

    async def wait_end(self) -> None:
        """Until the app has returned."""
        async with asyncio.timeout(PATIENCE):
            await self.task

    @property
    def status(self) -> int:
        """The answer's status."""
        status = self.sent[0]["status"]
        assert isinstance(status, int)
        return status

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers."""
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def text(self) -> str:
        """What of the body has been taken."""
        return b"".join(message.get("body", b"") for message in self.sent[1:]).decode()

    @property
    def complete(self) -> bool:
        """The whole answer has been taken."""
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)


def leave(app: FastAPI, path: str, body: dict[str, Any], begun: Callable[[], object], sent: int = 0) -> Call:
    """A call whose client leaves once the work has begun and so many messages have come."""

    async def whole() -> Call:
        call = Call(app, path, body)
        await call.wait_sent(sent)
        await until(begun)
        call.leave()
        await call.wait_end()
        return call

    return asyncio.run(whole())
