"""Arguments NAME=PATH, which each name one of several models."""

from __future__ import annotations

import re
from pathlib import Path

_NAMED = re.compile(r"([A-Za-z0-9][\w.:-]*)=(.+)", re.ASCII)


def is_named(word: str) -> bool:
    """Whether an argument is NAME=PATH, and not the path of a model."""
    return _NAMED.fullmatch(word) is not None and not Path(word).expanduser().exists()


def split_named(word: str) -> tuple[str, str] | None:
    """Name and path; None if it is not NAME=PATH."""
    match = _NAMED.fullmatch(word)
    return None if match is None else (match[1], match[2])
