"""The cost of hostile schemas, expressions and grammars for the requests of others.

One client streams answers of `octavo serve` with the bundled model; another one asks for structured output of one
hostile kind after the other, two requests at a time, and a new schema each time. The time between two tokens of the
stream is compared with that of the same stream alone, and beside harmless schemas. The goal: no kind makes it longer by
more than 50 ms at its worst, but for what harmless ones cost as well. Client and service share the machine.

    python benchmarks/hostile_schemas.py --seconds 4
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from offline import machine
from serving import served

AT_ONCE = 2  # hostile requests
DIFFERENT = (
    64  # requests of a kind, after which they begin anew; made before, so that the client has nothing to compute
)
GOAL = 0.05  # seconds


def any_of(depth: int, salt: int) -> dict[str, Any]:
    """Objects and lists within each other, two ways at each level."""
    if depth == 0:
        return {"type": "string", "maxLength": 100 + salt}
    inner = any_of(depth - 1, salt)
    objects = {"type": "object", "properties": {f"a{depth}": inner}}
    return {"anyOf": [objects, {"type": "array", "items": inner}]}


def references(count: int, salt: int) -> dict[str, Any]:
    """Definitions of which each one names the next four times."""
    defs: dict[str, Any] = {f"d{count}": {"type": "string", "maxLength": 100 + salt}}
    for index in range(count):
        below = {"$ref": f"#/$defs/d{index + 1}"}
        each = [{"type": "object", "properties": {"x": below, other: below}} for other in "yz"]
        defs[f"d{index}"] = {"anyOf": each}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def all_of(count: int, salt: int) -> dict[str, Any]:
    """Alternatives that multiply."""
    each = [
        [{"type": "object", "properties": {f"p{index}": {"const": salt + other}}} for other in range(4)]
        for index in range(count)
    ]
    return {"allOf": [{"anyOf": alternatives} for alternatives in each]}


def properties(count: int, salt: int, **value: Any) -> dict[str, Any]:
    """An object with many optional properties."""
    names = {f"p{index}_{salt}": {"type": "string", **value} for index in range(count)}
    return {"type": "object", "properties": names, "additionalProperties": False}


# What is asked by its name; the argument makes each another one.
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "harmless": lambda salt: {"json": {"type": "object", "properties": {f"a{salt}": {"type": "integer"}}}},
    "anyOf, 12 levels": lambda salt: {"json": any_of(12, salt)},
    "references, 30": lambda salt: {"json": references(30, salt)},
    "allOf of anyOf, 12": lambda salt: {"json": all_of(12, salt)},
    "900 optional properties": lambda salt: {"json": properties(900, salt)},
    "400 patterns": lambda salt: {"json": properties(400, salt, pattern=f"^[ab{salt}]*a[ab]{{12}}$")},
    "100,000 characters": lambda salt: {"json": {"type": "string", "maxLength": 100_000 + salt}},
    "10,000 items": lambda salt: {"json": {"type": "array", "minItems": 10_000 + salt, "items": {"type": "object"}}},
    "states of an expression": lambda salt: {"regex": f"[ab]*a[ab]{{20}}|x{salt}"},
    "repeated repeats": lambda salt: {"regex": f"(a{{1,1000}}){{1,{1000 + salt % 9}}}|x{salt}"},
    "unions": lambda salt: {"regex": "|".join(f"[a-z]*{chr(97 + n)}[a-z]*{salt}" for n in range(26))},
    "letters of Unicode": lambda salt: {"regex": rf"(\p{{L}}|\p{{N}}){{1,5000}}|x{salt}"},
    "an ambiguous grammar": lambda salt: {"grammar": f'start: x x x x "{salt}"?\nx: x x | /./ | /../'},
    "intersections": lambda salt: {
        "grammar": f'start: A | "{salt}"\nA: ' + " & ".join(f"/.*{chr(97 + n) * 3}.*/" for n in range(12))
    },
    "1000 choices": lambda salt: {"choice": [f"{salt} {index} " * 20 for index in range(1000)]},
}


class Stream:
    """A client that streams one answer after the other.

    Attributes:
        gaps: seconds between two events of an answer.
    """

    def __init__(self, client: httpx.AsyncClient):
        self._client = client
        self.gaps: list[float] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
        while True:
            last: float | None = None
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now


def told(gaps: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(gaps)
    return {
        "median": round(1e3 * statistics.median(ordered), 2),
        "p99": round(1e3 * ordered[int(0.99 * len(ordered))], 2),
        "worst": round(1e3 * ordered[-1], 2),
    }


async def measure(port: int, kinds: Sequence[str], seconds: float) -> dict[str, Any]:
    """All kinds, one after the other, between two measurements of the stream alone."""
    result: dict[str, Any] = {"alone": [], "beside": {}}
    limits = httpx.Limits(max_connections=AT_ONCE + 4)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits) as client:
        stream = Stream(client)
        running = asyncio.create_task(stream.run())
        await asyncio.sleep(2)
        for name in ("alone", "harmless", *(kind for kind in kinds if kind != "harmless"), "alone"):
            outcomes: Counter[str] = Counter()
            slowest: list[float] = [0.0]
            stream.gaps = []
            if name == "alone":
                await asyncio.sleep(seconds)
                result["alone"].append(told(stream.gaps))
            else:
                bodies = itertools.cycle([await asyncio.to_thread(body_of, KINDS[name], n) for n in range(DIFFERENT)])
                await asyncio.sleep(0.5)
                stream.gaps = []
                until = time.monotonic() + seconds
                await asyncio.gather(*(hostile(client, bodies, until, outcomes, slowest) for _ in range(AT_ONCE)))
                found = told(stream.gaps) | {"slowest_answer_s": round(slowest[0], 2), "outcomes": dict(outcomes)}
                result["beside"][name] = found
            print(name, result["alone"][-1] if name == "alone" else found, flush=True)
        running.cancel()
    usual = max(result["beside"]["harmless"]["worst"], *(alone["worst"] for alone in result["alone"]))
    result["worst_beyond_the_harmless_ms"] = round(max(kind["worst"] for kind in result["beside"].values()) - usual, 2)
    result["goal_met"] = result["worst_beyond_the_harmless_ms"] <= 1e3 * GOAL
    return result


def body_of(kind: Callable[[int], dict[str, Any]], salt: int) -> bytes:
    """A request of a kind, as it is sent."""
    asked = {"prompt": "Once", "max_tokens": 64, "temperature": 1, "seed": salt, "structured_outputs": kind(salt)}
    return json.dumps(asked).encode()


async def hostile(
    client: httpx.AsyncClient, bodies: Iterator[bytes], until: float, outcomes: Counter[str], slowest: list[float]
) -> None:
    """One request after the other."""
    while time.monotonic() < until:
        began = time.monotonic()
        answer = await client.post(
            "/v1/completions", content=next(bodies), headers={"Content-Type": "application/json"}
        )
        slowest[0] = max(slowest[0], time.monotonic() - began)
        said = answer.json()
        outcomes["200" if answer.status_code == 200 else f"{answer.status_code} {said['error']['code']}"] += 1


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--json", type=Path, help="where to keep the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served((), {}, Path(folder) / "log") as (port, _):
        result = {"machine": machine(), **asyncio.run(measure(port, options.kinds, options.seconds))}
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
