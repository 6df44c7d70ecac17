"""Traces of real loads: Mooncake's JSON lines, the CSV of the Azure LLM inference traces, and lines with texts."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request, as far as the trace describes it; `arrival` is in seconds."""

    arrival: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    prompt: str | None = None


def read_trace(path: Path, limit: int) -> list[TraceRow]:
    """The first `limit` rows, in the order of their arrival.

    Raises:
        ValueError: the file is no trace; its cause says why.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                rows = [_azure_row(row) for row in islice(csv.DictReader(file), limit)]
            else:
                rows = [_json_row(json.loads(line)) for line in islice(filter(str.strip, file), limit)]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path} is no trace.") from problem
    return sorted(rows, key=lambda row: row.arrival or 0.0)


def _azure_row(row: dict[str, str]) -> TraceRow:
    stamp, read, written = (row[name] for name in _AZURE)
    seconds = datetime.fromisoformat(stamp[:26]).timestamp()  # of seven digits after the point, Python reads six
    return TraceRow(arrival=seconds, input_len=int(read), output_len=int(written))


def _json_row(row: dict[str, Any]) -> TraceRow:
    prompt = row.get("prompt") or row.get("turns", [None])[0]
    if not isinstance(prompt, str) and "input_length" not in row:
        raise ValueError("a row has neither a text nor a length")
    arrival = row.get("timestamp")  # milliseconds
    return TraceRow(
        arrival=None if arrival is None else arrival / 1e3,
        input_len=row.get("input_length"),
        output_len=row.get("output_length"),
        prompt=prompt,
    )
