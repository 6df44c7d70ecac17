"""A client that waits for first tokens, beside a batch of a thousand lines and without it.

`octavo serve` with the bundled model, or another one, over loopback. One client at a time asks with short pauses, and
takes the time from the first byte sent to the first token. It does so in turns: alone, and while a batch runs that is
created before the turn and cancelled after it. The goal: the 99th percentile beside the batch is at most 1.3 times the
one alone. Client and service share the machine.

    python benchmarks/batch_beside.py --requests 300 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from offline import machine
from serving import parser_of, quantiles, report, served

GOAL = 1.3
LINES = 1000
ENDED = ("completed", "failed", "expired", "cancelled")


def first_token(http: httpx.Client, number: int) -> float:
    """The seconds to the first token of a stream that no other request resembles."""
    prompt = f"{number} times Anna saw a cat and Ben liked a dog. " * 4
    body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "stream": True}
    began, found = time.monotonic(), 0.0
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not found and line.startswith("data: "):
                found = time.monotonic() - began
    return found


def begin_batch(http: httpx.Client, turn: int) -> str:
    """Create the batch, and wait until its first lines are answered."""
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{turn} {number}: Once upon a time, ", "max_tokens": 128, "ignore_eos": True},
        }
        for number in range(LINES)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).raise_for_status()
    body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    id_ = str(http.post("/v1/batches", json=body).raise_for_status().json()["id"])
    while not look(http, id_)["request_counts"]["completed"]:
        time.sleep(0.05)
    return id_


def look(http: httpx.Client, id_: str) -> dict[str, Any]:
    """The batch now."""
    found: dict[str, Any] = http.get(f"/v1/batches/{id_}").raise_for_status().json()
    return found


def end_batch(http: httpx.Client, id_: str) -> int:
    """Cancel the batch; the lines that it answered meanwhile.

    Raises:
        RuntimeError: it had ended before, so that the turn was not beside it.
    """
    if (before := look(http, id_))["status"] in ENDED:
        raise RuntimeError(f"the batch was {before['status']} before the turn ended; lower --requests")
    http.post(f"/v1/batches/{id_}/cancel").raise_for_status()
    while look(http, id_)["status"] not in ENDED:
        time.sleep(0.05)
    return int(look(http, id_)["request_counts"]["completed"])


def measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """The turns."""
    seen: dict[str, list[float]] = {"alone": [], "beside": []}
    number, answered = 0, 0
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as http:
        for number in range(-20, 0):  # warms up
            first_token(http, number)
        for turn in range(options.rounds):
            for name in ("alone", "beside") if turn % 2 == 0 else ("beside", "alone"):
                batch = begin_batch(http, turn) if name == "beside" else None
                for _ in range(options.requests):
                    seen[name].append(first_token(http, number := number + 1))
                    time.sleep(options.pause)
                answered += 0 if batch is None else end_batch(http, batch)
    alone, beside = quantiles(seen["alone"]), quantiles(seen["beside"])
    ratio = beside["p99"] / alone["p99"]
    return {
        "first token, alone": alone,
        "first token, beside a batch": beside,
        "ratio, p99": round(ratio, 2),
        "lines answered meanwhile": answered,
        "goal met": ratio <= GOAL,
    }


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=300, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of turns")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two requests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*options.serve, "--batch-store", str(Path(folder) / "batches")]
        with served(arguments, {}, Path(folder) / "log") as (port, _):
            result = {"machine": machine(), **measure(port, options)}
    report(result, options.json)


if __name__ == "__main__":
    main()
