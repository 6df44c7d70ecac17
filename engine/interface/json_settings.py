"""Settings that are JSON objects, as in vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError


def as_json(given: Any) -> Any:
    """A mapping as the text that a command line would contain; other values unchanged. Values outside JSON, such as a
    date, become texts."""
    return json.dumps(dict(given), default=str) if isinstance(given, Mapping) else given


def decoded(name: str, given: Any) -> dict[str, Any]:
    """The values of a setting that is a mapping, or a JSON object as text. Raises ConfigError if it is neither."""
    if isinstance(given, Mapping):
        return dict(given)
    try:
        values = json.loads(given)
    except (TypeError, ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is not text"
        raise ConfigError(f"{name} must be a JSON object, got {given!r}: {reason}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} must be a JSON object, got {given!r}.")
    return values
