"""A model that is loaded for one command: `octavo serve` on a socket that only this user reaches."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import IO

from cli.errors import NoServerError, TalkError
from cli.talking.wire import Place, Wire
from cli.terminal.style import console, is_rich
from engine import EngineConfig

_LAST_WORDS = 10.0  # seconds that the child gets to stop


@contextlib.contextmanager
def private_server(arguments: Sequence[str], what: str) -> Iterator[Place]:
    """Where the model is served, until the end of the block.

    Args:
        arguments: of `octavo serve`; the engine's variables (OCTAVO_DTYPE ...) count, too.
        what: is loaded, as the user may call it.

    Raises:
        TalkError: it did not start; says why.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder, tempfile.TemporaryFile() as log:
        uds = os.path.join(folder, "s")
        command = [sys.executable, "-P", "-m", f"{__package__}.child", *arguments, "--uds", uds]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_environment(),
            start_new_session=True,  # Ctrl-C is for the answer, not for the model
        )  # fmt: skip
        try:
            place = Place(url=what, uds=uds)
            with _waiting(f"Loading {what} ..."):
                _wait_ready(Wire(place), process, log)
            yield place
        finally:
            _stop(process)


def _environment() -> dict[str, str]:
    """This one's, without what concerns the service: its address, its keys and limits."""
    kept = {f"OCTAVO_{field.name.upper()}" for field in fields(EngineConfig)}
    kept |= {"OCTAVO_DEMO", "OCTAVO_NATIVE", "OCTAVO_NATIVE_ISA"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_") or name in kept}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return environ | {"PYTHONPATH": path, "OCTAVO_LOG_FORMAT": "console"}


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    """A sign of life while it loads, where a person looks on."""
    if is_rich(sys.stderr):
        with console(sys.stderr).status(text):
            yield
        return
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
    yield


def _wait_ready(wire: Wire, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    while process.poll() is None:
        try:
            wire.json("GET", "/health/ready")
            return
        except (NoServerError, TalkError):
            time.sleep(0.05)
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    reason = next((line for line in reversed(lines) if line.startswith("octavo")), lines[-1] if lines else "")
    reason = reason.partition(": ")[2] or reason
    raise TalkError(reason.removeprefix("cannot start: ") or f"the model's server ended with {process.returncode}.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()  # which it understands
    try:
        process.wait(_LAST_WORDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
