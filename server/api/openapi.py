"""The middleware's part of the OpenAPI document: the API key, and the error responses of the limits."""

from __future__ import annotations

from functools import partial
from typing import Any

from server.api.schemas import MAX_TIMEOUT
from server.config.settings import ServerSettings
from server.door.auth import HEALTH_PATHS, METRICS_PATH, roles_for
from server.door.keys import Role
from server.door.message_errors import MESSAGES_PATH, OLLAMA_PATHS

SCHEME = "api_key"
KEY_SCHEME = "x_api_key"
_ID = {"X-Request-ID": {"$ref": "#/components/headers/X-Request-ID"}}

# Endings of paths that work without the engine.
_WITHOUT_ENGINE = (
    "/count_tokens",
    "/input_tokens",
    "/conversations",
    "/{conversation_id}",
    "/items",
    "/files",
    "/batches",
)
_TIMEOUT = {
    "name": "X-Request-Timeout",
    "in": "header",
    "required": False,
    "description": "Time limit of the request in seconds, like request_timeout in the body. The shorter limit applies.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT},
}


def with_front_door(document: dict[str, Any], settings: ServerSettings) -> dict[str, Any]:
    """The document with the security scheme, the request id's header and the middleware's responses. The API key is
    optional if no key is set."""
    components = document.setdefault("components", {})
    components.setdefault("securitySchemes", {})[SCHEME] = {
        "type": "http",
        "scheme": "bearer",
        "description": "Needed if the server was started with API keys (--api-key, --api-key-file).",
    }
    components["securitySchemes"][KEY_SCHEME] = {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "The same key, as Anthropic's clients send it; read if there is no bearer token.",
    }
    components.setdefault("headers", {})["X-Request-ID"] = {
        "description": "The id that the request sent, if it has 1 to 128 characters of A-Z a-z 0-9 . _ -, else a "
        "new one.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    }
    closed = bool(settings.api_key or settings.api_key_file)
    needless = HEALTH_PATHS | ({METRICS_PATH} if settings.public_metrics else set())
    keys: list[dict[str, list[str]]] = [{SCHEME: []}, {KEY_SCHEME: []}]
    for path, operations in document["paths"].items():
        error = "MessageError" if path.startswith(MESSAGES_PATH) else "ErrorResponse"
        error = "OllamaError" if path.startswith(OLLAMA_PATHS) else error
        add = partial(_add_error, error)
        for operation in operations.values():
            forbidden = "The Host header or the Origin of the web page is not allowed."
            responses: dict[str, Any] = operation.setdefault("responses", {})
            if path not in needless:
                operation["security"] = keys if closed else [*keys, {}]
                add(responses, "401", "The API key is missing or invalid.")
                roles = " or ".join(sorted(roles_for(path)))
                forbidden += f" Or the API key lacks the required role: {roles}."
            if path not in HEALTH_PATHS:
                add(responses, "403", forbidden)
            if path not in needless and roles_for(path) == {Role.INFERENCE}:
                add(
                    responses,
                    "429",
                    "The API key has reached its limit of requests per minute or of concurrent requests.",
                )
            if "requestBody" in operation:
                if path.startswith("/v1/") and not path.endswith(_WITHOUT_ENGINE):
                    operation.setdefault("parameters", []).append(_TIMEOUT)
                add(responses, "408", "The body did not arrive in time.")
                add(responses, "413", "The body is larger than the server's max_body_size.")
            add(responses, "431", "The header is larger than the server's max_header_size.")
            for response in responses.values():
                response.setdefault("headers", {}).update(_ID)
    return document


def _add_error(schema: str, responses: dict[str, Any], status: str, description: str) -> None:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    responses.setdefault(status, {"description": description, "content": content})
