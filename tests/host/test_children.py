"""Signals that come while a child is started: none is lost, and nothing stays blocked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from engine.host.children import signals_held

PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopError(Exception):
    """What a handler of these tests raises."""


@pytest.fixture
def came() -> Iterator[list[int]]:
    """Handlers of the test, which note what came."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    before = {signum: signal.signal(signum, note) for signum in PARENTS}
    yield noted
    assert all(signal.getsignal(signum) is note for signum in PARENTS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_handlers_are_called_at_the_end(came: list[int]) -> None:
    with signals_held():
        for signum in PARENTS:
            os.kill(os.getpid(), signum)
        assert came == []
    assert sorted(came) == sorted(PARENTS)


def test_a_child_inherits_that_they_are_blocked(came: list[int]) -> None:
    ask = "import signal; print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    with signals_held():
        said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(int(signum)) for signum in sorted(PARENTS)]


@pytest.mark.parametrize("late", PARENTS)
def test_what_a_late_signals_handler_raises_leaves_all_as_it_was(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another thread took: Python calls its handler as soon as it stands again."""
    original = signal.signal
    handlers: dict[int, Any] = {}

    def raising(number: int, frame: FrameType | None) -> None:
        raise StopError(number)

    before = {signum: original(signum, raising) for signum in PARENTS}

    def put(signum: int, handler: Callable[[int, FrameType | None], Any]) -> Any:
        handlers[signum] = original(signum, handler)
        if handler is raising and signum == late:
            raising(signum, None)
        return handlers[signum]

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", put)
        with pytest.raises(StopError, match=str(int(late))), signals_held():
            pass
    found = {signum: original(signum, handler) for signum, handler in before.items()}
    assert all(handler is raising for handler in found.values())
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


ENDS = """
import time
from engine.host.children import end_with_parent, take_standard_input
line = take_standard_input()
if {waits}:
    line.recv(1)
end_with_parent(line)
print("ready", flush=True)
while True:
    time.sleep(3600)
"""


def test_the_kernel_ends_a_process_whose_parent_has_gone() -> None:
    """While it computes, or before it said that it wants this."""
    for waits, status in ((True, -signal.SIGIO), (False, 0)):
        line, theirs = socket.socketpair()
        if not waits:
            line.close()
        command = [sys.executable, "-c", ENDS.format(waits=waits)]
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE) as process:
            theirs.close()
            assert process.stdout is not None
            if waits:
                line.send(b"x")
                assert process.stdout.readline() == b"ready\n"
                line.close()
            assert process.wait(30) == status


def test_the_kernel_kills_even_a_stopped_process() -> None:
    line, theirs = socket.socketpair()
    program = (
        "import signal, socket, os\n"
        "from engine.host.children import be_killed_with_parent, take_standard_input\n"
        "line = take_standard_input()\n"
        "be_killed_with_parent(line)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=theirs) as process:
        theirs.close()
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        line.close()
        assert process.wait(30) == -signal.SIGKILL
