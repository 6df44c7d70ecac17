"""From the command to the first token: `octavo serve` of a bundled model or a GGUF file, asked until it answers.

Seconds are what a person waits; on a busy machine they say little. CPU seconds of all its processes, up to their end
right after the first token, hold there, too. Memory is that of all processes a second after that token, and of the
largest one of them (the engine's), with its peak so far (Linux).

    python benchmarks/start.py --rounds 5
    python benchmarks/start.py --model build/sizes/1.5B/q4_k_m.gguf --output start-gguf.json
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
from typing import Any

from offline import ROOT, machine
from peers import process
from peers.memory import memory_of

BODY = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0, "stream": True}
PATIENCE = 300.0  # seconds
Memory = dict[str, int]  # MiB


def family(pid: int) -> list[int]:
    """A process and all that it has started (Linux)."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def memory_after(pid: int) -> Memory:
    """MiB of all processes of a server, and of the largest one; nothing where the system does not tell."""
    time.sleep(1)
    taken = [memory for memory in (memory_of([one]) for one in family(pid)) if memory]
    if not taken:
        return {}
    largest = max(taken, key=lambda memory: memory["at_rest"])
    return {
        "all_at_rest": sum(memory["at_rest"] for memory in taken),
        "largest_at_rest": largest["at_rest"],
        "largest_peak": largest["peak"],
    }


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_token(port: int, server: subprocess.Popen[bytes]) -> str:
    """The first line of a stream, asked for until there is one."""
    url = f"http://127.0.0.1:{port}/v1/completions"
    ask = urllib.request.Request(url, json.dumps(BODY).encode(), {"Content-Type": "application/json"})
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(ask, timeout=PATIENCE) as answer:
                return str(answer.readline(), "utf-8")
        except OSError:  # it does not listen yet
            time.sleep(0.02)
    raise SystemExit(f"no answer within {PATIENCE:.0f} s, exit status {server.poll()}")


def octavo(model: list[str], port: int) -> list[str]:
    """The command."""
    return [sys.executable, "-m", "octavo", "serve", *model, "--port", str(port), "--log-level", "warning"]


def start_once(command: list[str], port: int, environment: dict[str, str]) -> tuple[float, float, Memory]:
    """Seconds to the first token, CPU seconds of the whole start, and memory after it."""
    before = cpu_seconds()
    began = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            line = first_token(port, server)
            seconds = time.perf_counter() - began
            memory = memory_after(server.pid)
        finally:
            server.send_signal(signal.SIGTERM)
    assert line.startswith("data: {"), line
    return seconds, cpu_seconds() - before, memory


def summary(rounds: list[tuple[float, float, Memory]]) -> dict[str, Any]:
    """Medians and each round."""
    return {
        "seconds_to_first_token": round(median(seconds for seconds, _, _ in rounds), 2),
        "cpu_seconds": round(median(cpu for _, cpu, _ in rounds), 2),
        "memory_mib": {name: round(median(each[2][name] for each in rounds)) for name in rounds[0][2]},
        "rounds": [{"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)} for seconds, cpu, _ in rounds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", default="chat", choices=("chat", "seq2seq"))
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file, which llama-server starts with, too")
    parser.add_argument("--peers-dir", type=Path, default=ROOT / ".peers", help="has llama.cpp/bin/llama-server")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--output", type=Path, metavar="FILE", default=ROOT / "benchmarks" / "results" / "start.json")
    args = parser.parse_args()
    model = ["--demo", args.demo] if args.model is None else [str(args.model), "--max-model-len", "4096"]
    peer = process.find("llama.cpp", args.peers_dir) if args.model is not None else None
    ours: list[tuple[float, float, Memory]] = []
    theirs: list[tuple[float, float, Memory]] = []
    for _ in range(args.rounds):
        port = free_port()
        ours.append(start_once(octavo(model, port), port, {"PYTHONPATH": str(ROOT)}))
        if peer is not None:
            port = free_port()
            command = [str(peer.program_folder / "llama-server"), "-m", str(args.model), "-c", "4096"]
            theirs.append(start_once([*command, "--port", str(port)], port, peer.environment))
    result: dict[str, Any] = {
        "benchmark": "start",
        "machine": machine(),
        "model": args.demo if args.model is None else args.model.name,
    }
    result |= summary(ours)
    if theirs:
        result["llama-server"] = summary(theirs)
    args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}))


if __name__ == "__main__":
    main()
