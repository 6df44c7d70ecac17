"""`python -m server.workers.child`: a process that forks workers, and the main loop of a worker.

It has no threads and loads only the libraries that jobs need, so a fork of it is safe, takes a millisecond, and shares
nearly all of its memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from engine import InvalidRequestError, StructuredOutputsParams
from engine.host.children import leave_signals_to_parent
from engine.host.frames import framed, receive
from engine.host.resident import give_back_code
from engine.text.conversations import load_renderer
from server.workers.configs import find_config
from server.workers.frames import MEMORY, Job, JobOutcome
from server.workers.grammars import load_trial, try_grammar
from server.workers.images import ChatPicture, ImageInput, load_decoders, read_crops, read_picture
from server.workers.sound import SoundPart, decode
from server.workers.templates import TemplateInput, render
from server.workers.texts import TextInput, tokenize

_JOBS: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
    "config": (str, find_config),
    "crops": (ChatPicture, read_crops),
    "grammar": (StructuredOutputsParams, try_grammar),
    "image": (ImageInput, read_picture),
    "render": (TemplateInput, render),
    "sound": (SoundPart, decode),
    "tokenize": (TextInput, tokenize),
}
# Jobs with a lower priority than computing answers, and by how much; their workers end with them, because they cannot
# raise it again.
_NICE = {"grammar": 5}
# Jobs after which the worker's libraries have changed.
_ONCE = frozenset({"config"})


def main() -> None:
    """Fork a worker for each socket that arrives over standard input; end when it closes."""
    leave_signals_to_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children that have ended
    load_decoders()
    load_renderer()
    with contextlib.suppress(InvalidRequestError):  # llguidance is not installed
        load_trial()
    give_back_code()
    gc.freeze()
    control = socket.socket(fileno=os.dup(0))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as line:
            if os.fork() == 0:
                control.close()
                os.close(0)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                with contextlib.suppress(ConnectionError):  # the service hung up before it read the result
                    _work(line)
                os._exit(0)


def _size() -> int:
    with open("/proc/self/statm", encoding="ascii") as facts:
        return int(facts.read().split()[0]) * resource.getpagesize()


def _bound_memory(most: int) -> None:
    """The hard limit stays, so that the next job may have another limit."""
    _, own = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if own == resource.RLIM_INFINITY else min(most, own), own))


def _work(line: socket.socket) -> None:
    """Run jobs until the service hangs up. The kernel ends a late job, whatever it is doing."""
    begun = _size()
    _bound_memory(begun + MEMORY)
    line.sendall(framed(b"%d" % os.getpid()))  # ready
    while (content := receive(line)) is not None:
        job = msgspec.msgpack.decode(content, type=Job)
        _bound_memory(begun + job.memory)
        signal.setitimer(signal.ITIMER_REAL, job.seconds)
        outcome = _do(job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        line.sendall(framed(msgspec.msgpack.encode(outcome)))
        if outcome.is_last:
            return


def _do(job: Job) -> JobOutcome:
    kind, function = _JOBS[job.name]
    lowered = _NICE.get(job.name, 0)
    is_last = lowered > 0 or job.name in _ONCE
    if lowered > 0:
        os.nice(lowered)
    try:
        result = function(msgspec.msgpack.decode(job.payload, type=kind))
        return JobOutcome(result=msgspec.Raw(msgspec.msgpack.encode(result)), is_last=is_last)
    except ValueError as problem:
        return JobOutcome(refused=str(problem), is_last=is_last)
    except MemoryError:
        return JobOutcome(out_of_memory=True, is_last=True)


if __name__ == "__main__":
    main()
