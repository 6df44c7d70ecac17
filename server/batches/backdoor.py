"""The way of a batch's lines to the routes: past the door, through which their batch has come already."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.door.auth import is_inference
from server.door.keys import ApiKey
from server.door.message_errors import MessageErrors
from server.errors import to_api_error


class BackDoor:
    """The innermost middleware. It counts the clients that wait for the model, and it accepts requests from batches.
    `num_inside`: requests of clients that may make the model work."""

    def __init__(self) -> None:
        self.num_inside = 0
        self._app: ASGIApp | None = None

    def __call__(self, app: ASGIApp) -> ASGIApp:
        self._app = MessageErrors(app)

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST" or not is_inference(scope):
                await app(scope, receive, send)
                return
            self.num_inside += 1
            try:
                await app(scope, receive, send)
            finally:
                self.num_inside -= 1

        return counted

    async def post(
        self, app: FastAPI, path: str, body: dict[str, Any], tenant: str | None, models: list[str] | None
    ) -> tuple[int, str, Any]:
        """The status of a request, its id, and the answer's body. `models`: the only ones that the tenant may use;
        None: all."""
        if self._app is None:
            app.middleware_stack = app.middleware_stack or app.build_middleware_stack()
        assert self._app is not None
        content = json.dumps(body).encode()
        request_id = uuid.uuid4().hex
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())],
            "client": None, "server": ("batch", 80), "app": app,
            "state": {"tenant": tenant, "arrival": time.monotonic(), "in_batch": True},
        }  # fmt: skip
        if models is not None:
            scope["state"]["api_key"] = ApiKey(b"", models=frozenset(models))
        status, parts, sent = 500, list[bytes](), False

        async def receive() -> Message:
            nonlocal sent
            if sent:  # the client stays
                await asyncio.get_running_loop().create_future()
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        try:
            await self._app(scope, receive, send)
        except Exception as problem:  # what no handler of the app took
            error = to_api_error(problem)
            return error.status_code, request_id, error.payload()
        return status, request_id, json.loads(b"".join(parts))
