"""`octavo serve` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


class Service:
    """`octavo serve` as a child process."""

    def __init__(self, *arguments: str, log: Path):
        self.log = log
        command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *arguments]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=output)

    def wait_ready(self) -> str:
        """The URL, once the log says it."""
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            found = re.search(r"Serving \S+ on (http://\S+)", self.log.read_text())
            if found:
                self.url = found[1]
                return self.url
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"not ready in time:\n{self.log.read_text()}")

    def stop(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(60)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in:\n{text}"
        return float(found[1])

    def wait_metric(self, name: str, wanted: float, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.metric(name) != wanted:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)} after {seconds} s, not {wanted}"
            time.sleep(0.02)


def services_on_demand(folder: Path) -> Iterator[Callable[..., str]]:
    """Gives a function from arguments to the URL of a service that has them, started once, with little memory for
    pages; at the end all of them are ended."""
    running: dict[tuple[str, ...], Service] = {}

    def get(*arguments: str) -> str:
        if arguments not in running:
            log = folder / f"service-{len(running)}.log"
            running[arguments] = Service("--kv-cache-memory", "64MiB", *arguments, log=log)
            running[arguments].wait_ready()
        return running[arguments].url

    yield get
    for service in running.values():
        service.process.kill()
        service.process.wait()


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OCTAVO_SHOW_PROGRESS": "false"}
