"""`octavo serve` as a process of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from httpx._transports import default as transports

# Each `httpx.get` would read all root certificates, which takes 17 ms, and tests ask again and again.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 200  # seconds for what takes a moment: a machine may be busy with other things for long


def wait_for(what: Callable[[], object], why: str, seconds: float = PATIENCE) -> None:
    """Until it is so."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.01)


def children(pid: int, module: str = "engine.process.main") -> list[int]:
    """The engines among a process's children, or the processes of another module."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and module.encode() in command:
            found.append(int(folder.name))
    return sorted(found)


def state_of(pid: int) -> str:
    """A process's state as /proc names it: T is stopped, Z has ended; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """It has not ended."""
    return state_of(pid) not in ("Z", "")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process computes nothing meanwhile: what an engine is asked meanwhile, it computes together. It may be killed
    meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: state_of(pid) == "T", f"process {pid} did not stop")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Service:
    """`octavo serve` as a child process.

    Args:
        arguments: after `octavo serve --port 0`.
        log: takes what it writes.
        under: a command that prepares the process, and then becomes the command that follows.
        folder: where it runs.
    """

    def __init__(self, *arguments: str, log: Path, under: Sequence[str] = (), folder: Path = ROOT):
        self.arguments, self.log = arguments, log
        command = [*under, sys.executable, "-m", "octavo", "serve", "--port", "0", *arguments]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environ = environment() | {"PYTHONPATH": path}
        with log.open("w") as output:
            self.process = subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output)

    def wait_ready(self) -> str:
        """The URL, once the log says it."""

        def url() -> str:
            found = re.search(r"Serving .+ on (http://\S+)", self.log.read_text())
            assert found or self.process.poll() is None, self.log.read_text()
            return found[1] if found else ""

        deadline = time.monotonic() + 2 * PATIENCE
        while not (found := url()):
            assert time.monotonic() < deadline, f"not ready in time:\n{self.log.read_text()}"
            time.sleep(0.05)
        self.url = found
        return found

    def engine(self, but: int = 0) -> int:
        """Its engine's process, once there is one; `but` is a predecessor."""
        found: list[int] = []

        def look() -> bool:
            found[:] = set(children(self.process.pid)) - {but}
            return bool(found)

        wait_for(look, "no engine was started")
        (pid,) = found
        return pid

    def stop(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(PATIENCE)

    def get(self, path: str) -> httpx.Response:
        """The answer on a connection of its own."""
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE)

    def metric(self, name: str) -> float:
        text = self.get("/metrics").text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in:\n{text}"
        return float(found[1])

    def wait_metric(self, name: str, wanted: float) -> None:
        """Until a metric has that value."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.metric(name)) != wanted:
            assert time.monotonic() < deadline, f"{name} is {found} after {PATIENCE} s, not {wanted}"
            time.sleep(0.02)


@contextmanager
def serving(
    *arguments: str, log: Path, signum: int = signal.SIGTERM, ready: bool = True, **options: Any
) -> Iterator[Service]:
    """A service that ends as it should, at the signal: with status 0, and without a traceback in its log. Whatever
    happens meanwhile, it does not outlive the block."""
    service = Service(*arguments, log=log, **options)
    try:
        if ready:
            service.wait_ready()
        yield service
        assert service.stop(signum) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        service.process.kill()
        service.process.wait()


def services_on_demand(folder: Path) -> Iterator[Callable[..., Service]]:
    """Gives a function from arguments to the service that has them, started once, with little memory for pages; at the
    end all of them end as they should."""
    running: dict[tuple[str, ...], Service] = {}
    with contextlib.ExitStack() as stack:

        def get(*arguments: str) -> Service:
            if arguments not in running:
                log = folder / f"service-{len(running)}.log"
                running[arguments] = stack.enter_context(serving("--kv-cache-memory", "64MiB", *arguments, log=log))
            return running[arguments]

        yield get


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    patient = {"OCTAVO_MAX_QUEUE_TIME": "0"}  # what waits for long is not refused: a machine may be busy
    if "API_SERVER_COUNT" in os.environ:  # the same tests with several processes that answer HTTP
        patient["OCTAVO_API_SERVER_COUNT"] = os.environ["API_SERVER_COUNT"]
    return kept | patient | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OCTAVO_SHOW_PROGRESS": "false"}
