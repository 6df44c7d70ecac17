"""`octavo serve` as the process that is tried, and what /proc and /metrics say of it (Linux)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from load.client import Client, Target, TransportError

from soaking.checks import Metrics, Usage

ROOT = Path(__file__).resolve().parents[2]
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SAMPLE = re.compile(r"^(octavo_\S+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


class ServiceError(Exception):
    """The service does not do what it must for a soak to go on."""


class Service:
    """The server under trial.

    Args:
        target: where it is.
        process: None: it is not ours; then there are no faults, no /proc and no log.
        log: of the process.
    """

    def __init__(self, target: Target, process: subprocess.Popen[bytes] | None = None, log: Path | None = None):
        self.target = target
        self.process = process
        self.log = log

    @classmethod
    async def start(cls, arguments: Sequence[str], log: Path, patience: float) -> Service:
        """Start one of our own on a port of the system's choice, and wait until it serves.

        Raises:
            ServiceError: it ended, or took too long.
        """
        command = [sys.executable, "-m", "octavo", "serve", "--port", "0", "--log-format", "json"]
        command += ["--max-queue-time", "0.5", *arguments]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=kept, stdout=output, stderr=output)
        try:
            async with asyncio.timeout(patience):
                while not (found := re.search(r"Serving \S+ on (http://[^\s\"]+)", log.read_text())):
                    if process.poll() is not None:
                        raise ServiceError(f"octavo serve ended with {process.returncode}:\n{log.read_text()[-4000:]}")
                    await asyncio.sleep(0.1)
        except BaseException as problem:
            process.kill()
            process.wait()
            if isinstance(problem, TimeoutError):
                raise ServiceError(f"octavo serve was not ready in {patience:g} seconds") from None
            raise
        return cls(Target.parse(found[1]), process, log)

    def stop(self, patience: float) -> int:
        """SIGTERM; returns the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -signal.SIGKILL

    def engine(self) -> int | None:
        """The engine's process, if there is one."""
        return next(self._children(b"engine.process.main"), None)

    def processes(self) -> dict[str, int]:
        """The service's own process, its engine and the processes that answer HTTP for it, by names."""
        assert self.process is not None
        found = {"api": self.process.pid}
        if (engine := self.engine()) is not None:
            found["engine"] = engine
        return found | {f"front {at}": pid for at, pid in enumerate(sorted(self._children(b"server.processes.front")))}

    def _children(self, module: bytes) -> Iterator[int]:
        assert self.process is not None
        for task in _listing(Path(f"/proc/{self.process.pid}/task")):
            try:
                children = [int(child) for child in (task / "children").read_text().split()]
            except OSError:
                continue
            yield from (child for child in children if module in _bytes(Path(f"/proc/{child}/cmdline")))

    def records(self) -> Iterator[dict[str, Any]]:
        """The log's lines; one that is no JSON is an event of level error."""
        assert self.log is not None
        with self.log.open() as lines:
            for line in lines:
                try:
                    yield json.loads(line)
                except ValueError:
                    yield {"level": "error", "event": line.rstrip()}

    async def metrics(self) -> Metrics:
        """The service's own metrics by name and labels.

        Raises:
            TransportError: there is no answer.
        """
        async with asyncio.timeout(60):
            _, text = await self._once("/metrics")
        return {name: float(value) for name, value in _SAMPLE.findall(str(text))}

    async def is_ready(self) -> bool:
        """Whether requests can be served."""
        try:
            async with asyncio.timeout(60):
                status, _ = await self._once("/health/ready")
        except (TransportError, TimeoutError):
            return False
        return status == 200

    async def _once(self, path: str) -> tuple[int, Any]:
        client = Client(self.target)
        try:
            return await client.json("GET", path)
        finally:
            client.close()


def usage(pid: int) -> Usage:
    """The memory, threads and files of a process at this moment.

    Raises:
        OSError: there is no such process.
    """
    folder = Path(f"/proc/{pid}")
    threads = re.search(r"^Threads:\s+(\d+)", (folder / "status").read_text(), re.MULTILINE)
    return Usage(rss_mib(pid), len(list((folder / "fd").iterdir())), int(threads[1]) if threads else 0)


def rss_mib(pid: int) -> float:
    """Resident memory of a process.

    Raises:
        OSError: there is no such process.
    """
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / (1 << 20)


def _listing(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
