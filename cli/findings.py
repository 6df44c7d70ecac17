"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Literal["ok", "warn", "FAIL"]  # ok, warn or FAIL; FAIL prevents the start
    found: str
    fix: str = ""  # the remedy; "" if none is needed
