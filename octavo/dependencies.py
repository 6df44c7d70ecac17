"""Errors in an environment without a package that Octavo needs."""

from __future__ import annotations

import sys
from pathlib import Path

_OWN = ("octavo", "engine", "server", "cli")


def explain(error: ModuleNotFoundError) -> str | None:
    """A sentence that says what to do about a missing package; None if the missing module is Octavo's own."""
    name = (error.name or "").partition(".")[0]
    if not name or name in _OWN:
        return None
    home = Path(__file__).resolve().parent.parent
    advice = "Run: pip install octavo"
    if (home / "Makefile").is_file():  # a checkout
        advice = f"Run: make -C {home} install, and use {home / '.venv' / 'bin' / 'python'}"
    return f"the package {name}, which Octavo needs, is not installed for {sys.executable}. {advice}"
