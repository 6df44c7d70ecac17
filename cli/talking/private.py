"""A model that is loaded for one command: `octavo serve` on a private socket of this user, or on a port."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import IO

from cli.errors import NoServerError, TalkError
from cli.talking.wire import ServerPlace, Wire
from cli.terminal.keys import keys_kept
from cli.terminal.waiting import waiting
from engine import EngineConfig
from engine.host.children import own_modules
from server.door.listening import StartupError, bind
from server.door.listening import url as local_url

_TAIL = 4096  # bytes
_PERCENT = re.compile(rb"(\d+)%\|")
_LAST_WORDS = 10.0  # seconds that the child has to stop


@contextlib.contextmanager
def private_server(
    arguments: Sequence[str], what: str, address: tuple[str, int] | None = None
) -> Iterator[ServerPlace]:
    """Serve a model until the end of the block; returns its address. Raises TalkError if the server did not start;
    gives the reason.

    Args:
        arguments: the arguments of `octavo serve`; the engine's variables (OCTAVO_DTYPE ...) apply too.
        what: the model's name for messages.
        address: host and port to serve at, with all variables of the service; None for a private socket of this user.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder, tempfile.TemporaryFile() as log:
        place, listen, environ = _private(os.path.join(folder, "s"), what) if address is None else _public(*address)
        command = [sys.executable, "-P", "-m", f"{__package__}.child", *arguments, *listen]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environ | _own(),
            start_new_session=True,  # Ctrl-C stops the answer, not the model
        )  # fmt: skip
        try:
            with keys_kept(), waiting(what) as show:
                _wait_ready(Wire(place), process, log, show)
            yield place
        finally:
            _stop(process)


def _private(uds: str, what: str) -> tuple[ServerPlace, list[str], dict[str, str]]:
    """An address, the flags for it, and this process's variables without the service's address, keys and limits."""
    kept = {f"OCTAVO_{field.name.upper()}" for field in fields(EngineConfig)}
    kept |= {"OCTAVO_DEMO", "OCTAVO_NATIVE", "OCTAVO_NATIVE_ISA"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_") or name in kept}
    return ServerPlace(url=what, uds=uds), ["--uds", uds], environ


def _public(host: str, port: int) -> tuple[ServerPlace, list[str], dict[str, str]]:
    """An address, the flags for it, and this process's variables. Raises TalkError if the port is taken, the host
    unknown, or a variable asks for a socket or for TLS."""
    for name in ("OCTAVO_UDS", "OCTAVO_SSL_CERTFILE"):
        if os.environ.get(name):
            raise TalkError(
                f"{name} is set, but octavo run only serves plain HTTP on a port. Unset it, or use octavo serve."
            )
    try:
        listener = bind(host, port)  # otherwise another server's answers would be taken for the child's
    except StartupError as problem:
        raise TalkError(str(problem)) from None
    with listener:
        url = local_url(listener)
    return ServerPlace.parse(url), ["--host", host, "--port", url.rpartition(":")[2]], dict(os.environ)


def _own() -> dict[str, str]:
    return own_modules() | {"OCTAVO_LOG_FORMAT": "console", "OCTAVO_SHOW_PROGRESS": "true"}


def _progress(log: IO[bytes]) -> str:
    """The latest percentage of a progress bar in the server's log, for a download or for the weights."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), _TAIL, max(size - _TAIL, 0))  # seek would move the server's position too
    percents = _PERCENT.findall(text)
    return f"{int(percents[-1])}%" if percents else ""


def _wait_ready(wire: Wire, process: subprocess.Popen[bytes], log: IO[bytes], show: Callable[[str], None]) -> None:
    shown = ""
    while process.poll() is None:
        if (progress := _progress(log)) not in ("", shown):
            shown = progress
            show(shown)
        try:
            wire.json("GET", "/health/ready")
            return
        except (NoServerError, TalkError):
            time.sleep(0.05)
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    reason = next((line for line in reversed(lines) if line.startswith("octavo")), lines[-1] if lines else "")
    reason = reason.partition(": ")[2] or reason
    raise TalkError(
        reason.removeprefix("cannot start: ") or f"the model's server ended with status {process.returncode}."
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()  # the child understands this variable
    try:
        process.wait(_LAST_WORDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
