"""From the command to the first token: `octavo serve` of a bundled model, asked until it answers.

Seconds are what a person waits; on a busy machine they say little. CPU seconds of all its processes, up to their end
right after the first token, hold there, too.

    python benchmarks/start.py --rounds 5
    python benchmarks/compare_trees.py ../before . --turns 4 start.py --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import median

from offline import ROOT, machine

BODY = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0, "stream": True}
PATIENCE = 300.0  # seconds


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_token(port: int, process: subprocess.Popen[bytes]) -> str:
    """The first line of a stream, asked for until there is one."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    ask = urllib.request.Request(url, json.dumps(BODY).encode(), {"Content-Type": "application/json"})
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(ask, timeout=PATIENCE) as answer:
                return str(answer.readline(), "utf-8")
        except OSError:  # it does not listen yet
            time.sleep(0.02)
    raise SystemExit(f"no answer within {PATIENCE:.0f} s, exit status {process.poll()}")


def start_once(demo: str) -> tuple[float, float]:
    """Seconds to the first token, and CPU seconds of the whole start."""
    port, before = free_port(), cpu_seconds()
    command = [sys.executable, "-m", "octavo", "serve", "--demo", demo, "--port", str(port), "--log-level", "warning"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            line = first_token(port, process)
            seconds = time.perf_counter() - began
        finally:
            process.send_signal(signal.SIGTERM)
    assert line.startswith("data: {"), line
    return seconds, cpu_seconds() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", default="chat", choices=("chat", "seq2seq"))
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", default=ROOT / "benchmarks" / "results" / "start.json")
    args = parser.parse_args()
    rounds = [start_once(args.demo) for _ in range(args.rounds)]
    result = {
        "benchmark": "start",
        "machine": machine(),
        "demo": args.demo,
        "seconds_to_first_token": round(median(seconds for seconds, _ in rounds), 2),
        "cpu_seconds": round(median(cpu for _, cpu in rounds), 2),
        "rounds": [{"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)} for seconds, cpu in rounds],
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: result[name] for name in ("seconds_to_first_token", "cpu_seconds")}))


if __name__ == "__main__":
    main()
