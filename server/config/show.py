"""`octavo config`: every setting, its value, and where that came from."""

from __future__ import annotations

import json
from typing import Any

from server.config.loading import Loaded
from server.config.settings import shown


def as_table(loaded: Loaded) -> str:
    """One line per setting: name, value, origin."""
    rows = [("setting", "value", "from")]
    for name, origin in loaded.origins.items():
        source = f"{origin.kind} {origin.name}".rstrip()
        rows.append((name, _text(shown(name, getattr(loaded.settings, name))), source))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}" for name, value, source in rows)


def as_json(loaded: Loaded) -> str:
    """An object per setting: value, source (flag, variable, file, default) and its name."""
    settings = {
        name: {"value": shown(name, getattr(loaded.settings, name)), "source": origin.kind, "name": origin.name or None}
        for name, origin in loaded.origins.items()
    }
    return json.dumps(settings, indent=2)


def _text(value: Any) -> str:
    if value is None or value == ():
        return "-"
    return json.dumps(value) if isinstance(value, bool) else str(value)
