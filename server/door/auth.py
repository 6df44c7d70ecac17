"""API keys: if any is set, every request except to health endpoints needs a key with the right role."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from server.door.keys import ApiKey, KeyRing, Role
from server.door.request_id import client_address
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
METRICS_PATH = "/metrics"
LIVE_PATH = "/playground/live"
METRICS_PATHS = frozenset({METRICS_PATH, LIVE_PATH})
# Information about the service that needs no work of the model: whole paths and beginnings of paths.
ABOUT_PATHS = frozenset(
    {
        "/version", "/load", "/server_info", "/tokenizer_info", "/v1/models", "/models", "/docs", "/openapi.json",
        "/api/tags", "/api/ps", "/api/version",
    }
)  # fmt: skip
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models/load", "/v1/models/unload"})
_KEPT_FOLDERS = ("/v1/responses/", "/v1/conversations", "/v1/files", "/v1/batches")
_COUNTING = frozenset({"/v1/responses/input_tokens"})
_ABOUT_FOLDERS = ("/v1/models/", "/models/", "/docs/")


def routed_path(scope: Scope) -> str:
    """The path in the form of routes: decoded, and without the root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    below = root and (path == root or path.startswith(root.rstrip("/") + "/"))
    return path[len(root) :] if below else path


def roles_for(path: str) -> frozenset[Role]:
    """The roles of which a key needs one for this path, in the form of `routed_path`. A path on no list may make the
    model work. That includes unknown routes."""
    if path in ADMIN_PATHS:
        return frozenset({Role.ADMIN})
    if path in METRICS_PATHS:
        return frozenset({Role.METRICS, Role.ADMIN})
    if path in ABOUT_PATHS or path.startswith(_ABOUT_FOLDERS):
        return frozenset({Role.INFERENCE, Role.ADMIN})
    return frozenset({Role.INFERENCE})


def is_inference(scope: Scope) -> bool:
    """Whether the request may make the model work."""
    return roles_for(routed_path(scope)) == {Role.INFERENCE}


def asks_for_kept(scope: Scope) -> bool:
    """Whether the request is about stored data, so that the model does no work for it."""
    path = routed_path(scope)
    return path.startswith(_KEPT_FOLDERS) and path not in _COUNTING


class AuthMiddleware:
    """Answers 401 to requests without a valid key, and 403 if the key has another role, before the body is read. A key
    is sent as a bearer token or, without one, in X-Api-Key.

    Paths on a list of whole paths, compared with the decoded path that the router sees, need no key. All other paths
    need one, whether or not a route exists. Without keys everything is open. `scope["state"]["tenant"]` then names the
    key of the request; it is not set without a valid key. `scope["state"]["api_key"]` is the `ApiKey` that opened a
    protected path. A key's name is in every log line of the request. `public_metrics`: `METRICS_PATHS` need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        public_metrics: bool = False,
        also_open: Iterable[str] = (),
        model: str | None = None,
    ):
        self._app = app
        self._keys = keys  # read at each request, so that changes apply at once
        self._model = model  # the name of the only model, if there is one: a key for other models may not use it
        self._open = HEALTH_PATHS | (METRICS_PATHS if public_metrics else frozenset()) | frozenset(also_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        key = self._key(scope)
        is_open = self._is_open(scope)
        if key is not None:
            scope.setdefault("state", {})["tenant"] = key.tenant
            if not is_open:
                scope["state"]["api_key"] = key
            if key.name is not None:
                bind_contextvars(api_key_name=key.name)
        refusal = None if is_open else _refusal(scope, key) or self._other_model(scope, key)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            extra = {"status": refusal.status_code, "path": scope["path"], "client": client_address(scope)}
            what = "no valid API key" if key is None else "the API key may not do this"
            logger.warning("Refused: %s.", what, extra=extra)
            await refusal.response()(scope, receive, send)

    def _other_model(self, scope: Scope, key: ApiKey | None) -> ApiError | None:
        """The refusal of a key for other models than the only one."""
        if key is None or self._model is None or key.may_use(self._model) or not is_inference(scope):
            return None
        message = f"This API key may not use the model {self._model}. The models that it may use are not served here."
        return ApiError(403, message, param="model", code="model_not_allowed")

    def _is_open(self, scope: Scope) -> bool:
        return scope["type"] == "http" and routed_path(scope) in self._open

    def _key(self, scope: Scope) -> ApiKey | None:
        given = _headers(scope, b"authorization")
        if not given:  # Anthropic's clients
            named = _headers(scope, b"x-api-key")
            return self._keys.find(named[0].strip()) if len(named) == 1 else None
        if len(given) != 1:
            return None
        scheme, _, key = given[0].partition(b" ")
        found = self._keys.find(key.strip())
        return found if scheme.lower() == b"bearer" else None


def _headers(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope.get("headers", ()) if name.lower() == wanted]


def _refusal(scope: Scope, key: ApiKey | None) -> ApiError | None:
    if key is not None:
        needed = roles_for(routed_path(scope))
        if key.roles & needed:
            return None
        message = (
            f"This API key may not do that: it needs the role {' or '.join(sorted(needed))}, but has "
            f"{' and '.join(sorted(key.roles))}."
        )
        return ApiError(403, message, code="insufficient_permissions")
    if _headers(scope, b"authorization") or _headers(scope, b"x-api-key"):
        message = "The API key is not valid for this server."
    else:
        message = "This server needs an API key: send the header Authorization: Bearer KEY."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
