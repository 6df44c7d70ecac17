"""API keys: with one set, everything but the health endpoints needs it."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from engine import ConfigError
from server.config.settings import ServerSettings
from server.door.request_id import client_address
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
METRICS_PATH = "/metrics"
LIVE_PATH = "/playground/live"
METRICS_PATHS = frozenset({METRICS_PATH, LIVE_PATH})


def read_api_keys(settings: ServerSettings) -> tuple[str, ...]:
    """The keys of the settings and of the file that they name.

    Raises:
        ConfigError: the file cannot be read, or holds no key, or one that no header can carry. Never shows a key.
    """
    keys = list(settings.api_key)  # checked there
    if settings.api_key_file is not None:
        keys += _read_file(settings.api_key_file)
    return tuple(dict.fromkeys(keys))


def _read_file(name: str) -> list[str]:
    where = f"api_key_file ({name})"
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"{where} cannot be read: {problem.strerror or problem}.") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{where} is not a text in UTF-8.") from problem
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{where} holds no key; write one key a line, or leave --api-key-file out.")
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{where}: key number {number} is not of printable ASCII characters without spaces.")
    return keys


def routed_path(scope: Scope) -> str:
    """The path that routes are compared with: the decoded path without the root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = root and (path == root or path.startswith(root.rstrip("/") + "/"))
    return path[len(root) :] if below else path


class AuthMiddleware:
    """Answers 401 to whoever has no key, before anything of the body is read.

    What needs no key is a list of whole paths, compared with the decoded path that the router sees; all
    else is closed, whether there is a route or not. Without keys everything is open.

    Args:
        keys: each of them opens the service.
        public_metrics: `METRICS_PATHS` need no key.
        also_open: further paths that need none.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Iterable[str], public_metrics: bool = False, also_open: Iterable[str] = ()
    ):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = HEALTH_PATHS | (METRICS_PATHS if public_metrics else frozenset()) | frozenset(also_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._digests or scope["type"] == "lifespan" or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            extra = {"status": 401, "path": scope["path"], "client": client_address(scope)}
            logger.warning("Refused: no valid API key.", extra=extra)
            await _refusal(scope)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and routed_path(scope) in self._open

    def _has_key(self, scope: Scope) -> bool:
        given = _authorization(scope)
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = _digest(key.strip())
        found = False
        for known in self._digests:  # all of them: the time must not tell which one was near
            found |= hmac.compare_digest(known, digest)
        return found and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    # Digests have one length, so the comparison's time does not depend on a key's.
    return hashlib.sha256(key).digest()


def _authorization(scope: Scope) -> list[bytes]:
    return [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]


def _refusal(scope: Scope) -> ASGIApp:
    if _authorization(scope):
        message = "The API key is not valid for this server."
    else:
        message = "This server needs an API key: send the header Authorization: Bearer KEY."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}).response()
