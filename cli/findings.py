"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        verdict: ok, warn or FAIL; FAIL prevents the start.
        fix: the remedy; "" if none is needed.
    """

    check: str
    verdict: Literal["ok", "warn", "FAIL"]
    found: str
    fix: str = ""
