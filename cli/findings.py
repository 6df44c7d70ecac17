"""The verdict of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on one thing.

    Attributes:
        check: what was looked at.
        verdict: FAIL prevents the start.
        found: what was seen.
        fix: what to do about it; "" if nothing.
    """

    check: str
    verdict: Literal["ok", "warn", "FAIL"]
    found: str
    fix: str = ""
