"""`octavo serve` as a process, for as long as a measurement lasts; and what measurements of it share."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def served(arguments: Sequence[str], settings: Mapping[str, str], log: Path) -> Iterator[tuple[int, int]]:
    """The service until the end of the block: its port on loopback, and the id of its process.

    Args:
        arguments: of the command line.
        settings: OCTAVO_ variables; those of this process do not count.
        log: where it goes.

    Raises:
        RuntimeError: the service did not start within 300 seconds, with its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")} | dict(settings)
    command = [sys.executable, "-m", "octavo", "serve", *arguments, f"--port={port}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 300
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def parser_of(documentation: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that measurements of a service have in common."""
    parser = argparse.ArgumentParser(description=(documentation or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to keep the result")
    parser.add_argument("serve", nargs="*", help="further arguments of octavo serve, after --")
    return parser


def report(result: Mapping[str, Any], path: Path | None) -> None:
    """Print a result, and keep it in a file if one is named."""
    text = json.dumps(result, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def quantiles(values: list[float]) -> dict[str, float]:
    """Number, median, 99th percentile and maximum, in seconds."""
    if len(values) < 2:
        return {"count": len(values)}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"count": len(values), "p50": round(cuts[49], 4), "p99": round(cuts[98], 4), "max": round(max(values), 4)}
