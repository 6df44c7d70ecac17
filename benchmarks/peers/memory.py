"""How much memory a contestant takes (Linux)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_FIELDS = {"at_rest": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon"}


def memory_of(pids: Sequence[int]) -> dict[str, int]:
    """MiB of processes: now, at most so far, and what of now is no file's; nothing where the system does not tell."""
    told: dict[str, int] = {}
    for pid in pids:
        status = Path(f"/proc/{pid}/status")
        if not status.exists():
            return {}
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        for name, field in _FIELDS.items():
            told[name] = told.get(name, 0) + int(lines[field].split()[0]) // 1024
    return told
