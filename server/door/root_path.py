"""The path prefix under which a proxy publishes the service."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Tells an app about the prefix, whether the proxy strips it or not; links that the app makes (the API's
    documentation) then begin with it."""

    def __init__(self, app: ASGIApp, root_path: str):
        self._app = app  # the whole app with its middleware, which routes by the path after the prefix
        self._root = root_path  # the prefix, such as "/llm"; "" for none

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root and scope["type"] in ("http", "websocket"):
            scope = {**scope, "root_path": self._root}
            if not f"{scope['path']}/".startswith(f"{self._root}/"):
                # As ASGI requires, the path contains the prefix.
                scope["path"] = self._root + scope["path"]
                if scope.get("raw_path") is not None:
                    scope["raw_path"] = self._root.encode() + scope["raw_path"]
        await self._app(scope, receive, send)
