"""The HTTP API over a tiny checkpoint, engine and all in the test's own process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from engine import EngineConfig
from engine.text.processor import Tokenizer
from server.app import create_app
from server.config.settings import ServerSettings
from support.asgi import Call, request
from support.entities import GlinerFolder
from support.local_client import LocalClient
from support.text_encoders import TextEncoder

MODEL = "tiny"


class LocalApi:
    """An app over a float32 engine of a folder.

    Args:
        engine: its settings.
        settings: the server's.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer | None, engine: dict[str, Any], **settings: Any):
        config = EngineConfig(model=str(path), dtype="float32", device="cpu", show_progress=False, **engine)
        self.client = LocalClient(config)
        self.app = create_app(self.client, tokenizer, MODEL, settings=ServerSettings(**settings))

    def post(self, path: str, **body: Any) -> httpx.Response:
        """The answer to a request; `client` remembers no other."""
        self.client.forget()
        return self.send("POST", path, json=body)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return request(self.app, method, path, **options)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The body of an answer."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


class PoolingApi(LocalApi):
    """An app that serves a checkpoint.

    Args:
        tokenizer: the app has one.
        settings: of the engine.
    """

    def __init__(self, checkpoint: TextEncoder | GlinerFolder, *, tokenizer: bool = True, **settings: Any):
        self.checkpoint = checkpoint
        made = Tokenizer(checkpoint.tokenizer) if tokenizer else None
        super().__init__(checkpoint.path, made, settings, allowed_hosts=("testserver",))  # as schemathesis calls it

    def refused(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """The error of a request that reached no engine."""
        answer = self.post(path, **body)
        assert answer.status_code == status, answer.text
        assert self.client.asked == {}
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def left(self, path: str, **body: Any) -> tuple[int, int]:
        """A client that leaves while the engine works: how many inputs the engine had, and how many were given up."""

        async def leave() -> tuple[int, int]:
            self.client.forget()
            self.client.held = True
            call = Call(self.app, path, body)
            async with asyncio.timeout(10):
                while not self.client.asked:
                    await asyncio.sleep(0.001)
            call.leave()
            await call.wait_end()
            self.client.held = False
            return len(self.client.asked), len(self.client.abandoned)

        return asyncio.run(leave())

    def metric(self, line: str) -> float:
        """The value of a metric, written as it is exposed."""
        lines = self.send("GET", "/metrics").text.splitlines()
        return float(next(found for found in lines if found.startswith(f"{line} ")).rsplit(" ", 1)[1])
