"""One benchmark in two checkouts of this project, in turns on one machine: what a change made faster or slower.

Each checkout runs its own copy of the benchmark with the same arguments and the same interpreter. Every number of the
JSON that it writes is compared with its namesake of the other checkout, by the median of all turns; settings and counts
are numbers, too, and have the ratio 1.

    python benchmarks/compare_trees.py ../before . --turns 3 step_overhead.py --rounds 1
    python benchmarks/compare_trees.py ../before . --output results/trees-cpu.json cpu.py --quick --peers
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from offline import machine


def numbers(value: Any, path: str = "") -> dict[str, float]:
    """All numbers of a JSON value by their places; members of a list are named by their own `name` or number."""
    if isinstance(value, bool):
        return {}
    if isinstance(value, (int, float)):
        return {path: float(value)}
    members: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        members = [(str(key), member) for key, member in value.items() if key != "machine"]
    elif isinstance(value, list):
        names = [member.get("name") or member.get("dtype") if isinstance(member, dict) else None for member in value]
        members = [
            (str(name or number), member) for number, (name, member) in enumerate(zip(names, value, strict=True))
        ]
    found: dict[str, float] = {}
    for name, member in members:
        found |= numbers(member, f"{path} / {name}" if path else name)
    return found


def run(tree: Path, benchmark: str, arguments: list[str]) -> dict[str, float]:
    """The numbers of one run in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, f"benchmarks/{benchmark}", *arguments, "--output", str(output)]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{benchmark} failed in {tree}:\n{ended.stdout[-1000:]}\n{ended.stderr[-3000:]}")
        return numbers(json.loads(output.read_text(encoding="utf-8")))


def commit_of(tree: Path) -> str:
    """The checkout's commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()


def compare(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of numbers that both have in all turns, and after / before."""
    common = set.intersection(*(set(turn) for own in turns.values() for turn in own))
    rows = {}
    for name in [name for name in turns["after"][0] if name in common]:
        before, after = (median(turn[name] for turn in turns[side]) for side in ("before", "after"))
        rows[name] = {"before": before, "after": after, "ratio": round(after / before, 3) if before else 0.0}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--turns", type=int, default=3, help="of each checkout (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("benchmark", help="a file of benchmarks/ that has --output; its arguments follow")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    turns: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    for turn in range(options.turns):
        for side in ("before", "after") if turn % 2 == 0 else ("after", "before"):
            turns[side].append(run(trees[side], options.benchmark, options.arguments))
            print(f"turn {turn + 1}, {side}: done", file=sys.stderr, flush=True)
    rows = compare(turns)
    for name, row in rows.items():
        if row["ratio"] not in (0.0, 1.0):
            print(f"{name:90}{row['before']:12.4g}{row['after']:12.4g}{row['ratio']:8.3f}")
    if options.output is not None:
        result = {
            "benchmark": options.benchmark,
            "arguments": options.arguments,
            "turns": options.turns,
            "commits": {side: commit_of(tree) for side, tree in trees.items()},
            "machine": machine(),
            "numbers": rows,
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
