"""Workloads from files: JSON lines, or the CSV of the Azure LLM inference traces."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from cli.errors import BenchError

HASH_BLOCK = 512  # tokens for which one of Mooncake's hash ids stands
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_SOURCES = ("prompt", "messages", "turns", "input_length", "input_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request.

    Attributes:
        arrival: seconds after the trace's first request.
        prompt: text or token ids, where the trace has them; else `input_len` says how long one is to be made.
        messages: for the chat endpoint.
        hash_ids: each stands for `HASH_BLOCK` tokens of the prompt; equal ids are equal tokens.
    """

    arrival: float | None = None
    input_len: int | None = None
    output_len: int | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """A trace's rows in the order of their arrival, of which the first is at 0.

    A line of JSON holds the input as `prompt` (text or token ids), `messages`, `turns` (the first is sent) or
    `input_length` / `input_tokens` (a number); and it may hold the arrival as `timestamp` (milliseconds, as
    in Mooncake's traces) or `arrival` (seconds), the answer's length as `output_length` / `output_tokens`, and
    `hash_ids`.

    Args:
        limit: read that many rows at most.

    Raises:
        BenchError: the file cannot be read, or a row is malformed; names file and line.
    """
    rows: list[TraceRow] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            reader = _read_azure(file) if first.startswith(_AZURE[0] + ",") else _read_json(file)
            for number, row in islice(_located(path, reader), limit):
                if rows and (row.arrival is None) != (rows[0].arrival is None):
                    raise BenchError(f"{path}:{number}: either all lines must have an arrival time, or none.")
                rows.append(row)
    except OSError as problem:
        raise BenchError(f"--trace {path}: {problem.strerror or problem}.") from None
    except UnicodeDecodeError as problem:
        raise BenchError(f"--trace {path}: it is not UTF-8 text ({problem.reason}).") from None
    if not rows:
        raise BenchError(f"--trace {path}: the file has no requests.")
    if rows[0].arrival is None:
        return rows
    rows.sort(key=lambda row: row.arrival or 0.0)
    start = rows[0].arrival or 0.0
    return [replace(row, arrival=(row.arrival or 0.0) - start) for row in rows]


def _located(path: Path, reader: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, TraceRow]]:
    """Rows with their line numbers; a wrong one is reported with its place."""
    number = 0
    while True:
        try:
            number, given = next(reader)
            yield number, given() if callable(given) else given
        except StopIteration:
            return
        except (ValueError, KeyError, TypeError) as problem:
            raise BenchError(f"{path}:{number or 1}: {problem}") from None


def _read_azure(lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(lines)
    if missing := set(_AZURE) - set(reader.fieldnames or ()):
        raise ValueError(f"the header lacks {', '.join(sorted(missing))}.")
    for row in reader:
        yield reader.line_num, lambda row=row: _azure_row(row)


def _azure_row(row: Mapping[str, str | None]) -> TraceRow:
    stamp, *lengths = (row[name] for name in _AZURE)
    if stamp is None or None in lengths:
        raise ValueError(f"expected {', '.join(_AZURE)}.")
    try:
        # Seven digits after the point; Python reads up to six of them.
        seconds = datetime.fromisoformat(stamp[:26]).timestamp()
    except ValueError:
        raise ValueError(f"TIMESTAMP must be a date and time, got {stamp!r}.") from None
    sizes = [int(length) if length and length.isdigit() else length for length in lengths]
    return TraceRow(
        arrival=seconds,
        input_len=_count("ContextTokens", sizes[0]),
        output_len=_count("GeneratedTokens", sizes[1]),
    )


def _read_json(lines: Iterator[str]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, lambda line=line: _json_row(line)


def _json_row(line: str) -> TraceRow:
    try:
        row = json.loads(line)
    except ValueError as problem:
        raise ValueError(f"not JSON: {problem}.") from None
    if not isinstance(row, dict):
        raise ValueError(f"a line must be a JSON object, got {line.strip()[:40]!r}.")
    sources = [name for name in _SOURCES if row.get(name) is not None]
    if not sources:
        raise ValueError(f"the input is missing: one of {', '.join(_SOURCES)}.")
    source = sources[0]
    value = row[source]
    made: dict[str, Any] = {}
    if source == "prompt":
        made["prompt"] = _prompt(value)
    elif source == "messages":
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise ValueError("messages must be a list of objects, not empty.")
        made["messages"] = value
    elif source == "turns":
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            raise ValueError("turns must be a list of texts, not empty.")
        made["prompt"] = _prompt(value[0])
    else:
        made["input_len"] = _count(source, value)
    for name in ("output_length", "output_tokens"):
        if row.get(name) is not None:
            made["output_len"] = _count(name, row[name])
    for name, unit in (("timestamp", 1e-3), ("arrival", 1.0)):
        if row.get(name) is not None:
            made["arrival"] = _seconds(name, row[name]) * unit
    hashes = row.get("hash_ids") or ()
    if not isinstance(hashes, list | tuple) or not all(type(item) is int for item in hashes):
        raise ValueError("hash_ids must be a list of integers.")
    return TraceRow(hash_ids=tuple(hashes), **made)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return value
    raise ValueError("prompt must be a text or a list of token ids, not empty.")


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}.")
    return float(value)
