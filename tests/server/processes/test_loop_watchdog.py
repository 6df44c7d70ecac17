"""A process whose event loop stands still: how it ends, and what does not end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.service import PATIENCE, ROOT, Service, is_running, state_of, stopped, wait_for
from test_process import sockets, start  # noqa: F401

from server import loop_guard
from server.watchdog import STATUS

# Watches itself; the event loop does `hang` first, and SIGTERM ends it in order. Each line is a sign of life.
WATCHED = """
import asyncio, ctypes, signal, sys, time
from server.watchdog import LoopWatchdog

def hang():
    {hang}

async def main():
    watchdog, end = LoopWatchdog({timeout}), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    watchdog.start()
    print(watchdog._guard.pid if watchdog._guard else 0, flush=True)
    loop.call_soon(hang)
    while not end.is_set():
        await asyncio.sleep(0.1)
        print(watchdog._guard.pid if watchdog._guard else 0, flush=True)
    watchdog.stop()

asyncio.run(main())
"""
HOLDING_THE_LOCK = "ctypes.PyDLL(None).sleep(1000)"
NOT_HOLDING_IT = "time.sleep(1000)"

Watched = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Starts processes with a watchdog; none survives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(timeout: float, hang: str = "pass") -> subprocess.Popen[str]:
        code = WATCHED.format(timeout=timeout, hang=hang)
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def guard_of(process: subprocess.Popen[str]) -> int:
    """The process that watches it at the moment."""
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.mark.slow
@pytest.mark.parametrize("hang", [HOLDING_THE_LOCK, NOT_HOLDING_IT])
def test_a_loop_that_stands_still_is_the_end(hang: str, watched: Watched) -> None:
    """Whether or not another thread of the process could still run."""
    process = watched(1.5, hang)
    guard = guard_of(process)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == STATUS == 3
    assert said.startswith("octavo: the event loop has been blocked for 1.5 seconds (loop_timeout)")
    assert "status 3" in said
    assert "in hang\n" in said, "the stack is missing"
    wait_for(lambda: not is_running(guard), "the guard has not ended")


def test_without_a_limit_nothing_watches(watched: Watched) -> None:
    process = watched(0)
    assert guard_of(process) == 0
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE)[1] == ""
    assert process.returncode == 0


@pytest.mark.slow
def test_a_guard_that_is_killed_is_replaced_and_leaves_when_it_is_told(watched: Watched) -> None:
    process = watched(60)
    first = guard_of(process)
    os.kill(first, signal.SIGKILL)
    while (second := guard_of(process)) == first:  # until the next beat
        pass
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # as a whole group may get them
        wait_for(lambda: ignores(second, signal.SIGQUIT), "the guard has not begun")
        os.kill(second, signum)
    assert is_running(second)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "ended and is restarted" in said
    wait_for(lambda: not is_running(second), "the guard has not ended")


def ignores(pid: int, signum: signal.Signals) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def test_a_guard_goes_with_the_process(watched: Watched) -> None:
    process = watched(60)
    guard = guard_of(process)
    process.kill()
    process.wait(PATIENCE)
    wait_for(lambda: not is_running(guard), "the guard has not ended")


def test_the_time_in_which_a_process_is_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long; afterwards the event loop has the whole limit again."""
    looks = [False] * 5 + [True] * 500 + [False] * 10
    monkeypatch.setattr(loop_guard, "is_silent", lambda seconds: True)
    monkeypatch.setattr(loop_guard, "is_stopped", lambda pid: looks.pop(0))
    loop_guard.watch(1, 10.0)
    assert looks == []


def test_a_heartbeat_begins_the_limit_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    silences = ([True] * 9 + [False]) * 3 + [True] * 10
    monkeypatch.setattr(loop_guard, "is_silent", lambda seconds: silences.pop(0))
    monkeypatch.setattr(loop_guard, "is_stopped", lambda pid: False)
    loop_guard.watch(1, 10.0)
    assert silences == []


def test_a_stopped_process_is_seen_as_such(watched: Watched) -> None:
    process = watched(60)
    guard_of(process)
    assert not loop_guard.is_stopped(process.pid)
    with stopped(process.pid):
        assert loop_guard.is_stopped(process.pid)
    wait_for(lambda: state_of(process.pid) != "T", "it does not go on")
    assert not loop_guard.is_stopped(process.pid)


@pytest.mark.slow
def test_a_process_that_was_stopped_for_long_goes_on(watched: Watched) -> None:
    process = watched(5)
    guard_of(process)
    with stopped(process.pid):
        time.sleep(8)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE)[1] == ""
    assert process.returncode == 0


# The API process alone: SIGUSR1 makes it hang with the interpreter's lock held.
HANGS = """
import ctypes, signal, sys
if "serve" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep(1000))
"""


@pytest.mark.slow
def test_a_service_that_hangs_ends_with_its_engine(
    start: Callable[..., Service],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    service = start("--loop-timeout", "5")
    service.wait_ready()
    engine = service.engine()
    service.process.send_signal(signal.SIGUSR1)
    assert service.process.wait(PATIENCE) == STATUS
    wait_for(lambda: not is_running(engine), "the engine goes on")
    log = service.log.read_text()
    assert "octavo: the event loop has been blocked for 5 seconds (loop_timeout)" in log
    assert "sitecustomize.py" in log.partition("octavo: the event loop")[2]
