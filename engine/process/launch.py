"""Starting the engine's process, and the lifeline that ties the two processes together.

A lifeline is a socket pair: one end is the child's standard input, the other stays here. Each side notices the end of
the other, whatever its cause, because the lifeline closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError
from engine.host.children import start_child
from engine.host.cpus import engine_environment
from engine.host.folders import check_private
from engine.host.loading import Tell
from engine.host.logs import LogFormat
from engine.process.messages import (
    GOODBYE,
    Failed,
    Known,
    Loading,
    Ready,
    Start,
    first_bytes,
    receive_reply,
    send_framed,
)

logger = logging.getLogger("octavo.client")

_PREFIX = "octavo-ipc-locked-"
_LONGEST_FOLDER = 80  # bytes; the whole path of a Unix socket has at most 103 (macOS) or 107 (Linux)
# Threads that wait for each other in a step spin for milliseconds by default (libgomp). Where something else runs too,
# such as the API process, this takes the core from the threads that they wait for. A moment of spinning is enough.
_SPINS = "20000"
_GRACE = 2.0  # seconds for an engine to end by itself
_PAGES_GRACE = 10.0  # and for its pages, where they are kept (`engine.disk.tier.FLUSH_SECONDS`)
# Of this service's variables, those that the engine reads itself.
_READ = frozenset({"OCTAVO_NATIVE", "OCTAVO_NATIVE_ISA"})
_SECRET = re.compile(r"(^|_)(KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
_HUB = ("HF_", "HUGGING_FACE_")  # the prefixes of the hub library's variables


_locks: dict[Path, int] = {}  # descriptors of this process's folders, which hold their locks


def make_folder() -> Path:
    """A new folder that only this user can enter, with a short path. It is locked until it is removed; folders whose
    processes were all killed are removed first. Raises ConfigError if no suitable folder can be made."""
    problem: object = "its path is too long for a socket"
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        _remove_abandoned(Path(parent))
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
            while not _lock(folder):
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        except OSError as error:
            problem = error.strerror or error
            continue
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            return folder
        remove_folder(folder)
    raise ConfigError(
        f"cannot make a folder for the engine's socket in {tempfile.gettempdir()} or /tmp: {problem}. "
        "Set TMPDIR to a writable folder with a short path."
    )


def _lock(folder: Path) -> bool:
    """Lock a new folder; false if another process has taken it for an abandoned one."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:  # a file system without locks, where no folder is ever taken for an abandoned one
        os.close(descriptor)
        return True
    if not folder.exists():
        os.close(descriptor)
        return False
    _locks[folder] = descriptor
    return True


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's private folders that no process has locked."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process uses it, or has removed it
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def kept_folder(folder: Path) -> Path:
    """The folder, if it exists and only this user can write to it; else a new one. A cleaner of temporary files may
    have removed it, and then another user may have made a folder of that name. Raises ConfigError if no suitable folder
    can be made."""
    try:
        check_private(folder)
    except OSError as error:
        _unlock(folder)
        new = make_folder()
        logger.warning("The folder of the engine's socket can no longer be used (%s); the new one is %s.", error, new)
        return new
    return folder


def remove_folder(folder: Path) -> None:
    """Remove the folder and its files. The folder may be gone already."""
    shutil.rmtree(folder, ignore_errors=True)
    _unlock(folder)


def _unlock(folder: Path) -> None:
    if (descriptor := _locks.pop(folder, None)) is not None:
        os.close(descriptor)


class EngineProcess:
    """An engine's process, from its start to its end.

    The object exists before the process is started. So an exception at any moment, for example from a signal handler,
    finds an object to stop.

    Args:
        folder: a folder from `make_folder`.
        number: distinguishes this process's socket from its predecessors'.
        log_format: the format of the process's log lines; None sets up no logging.
        adapters: the adapters of an earlier process, see `Start`.

    Attributes:
        address: ZeroMQ address that the engine binds before it is ready.
        line: this side of the lifeline, once the process is started.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        number: int,
        log_format: LogFormat | None = None,
        adapters: Mapping[str, str] = MappingProxyType({}),
    ):
        self._path = folder / f"engine-{number}"
        self.address = f"ipc://{self._path}"
        if not _downloads(config):
            config = replace(config, hf_token=None)
        self._first = Start(
            config=config,
            address=self.address,
            folder=str(folder),
            log_level=logging.getLogger().getEffectiveLevel(),
            log_format=log_format,
            adapters=dict(adapters),
        )
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self, known: Callable[[], Known] = Known) -> None:
        """Start the process; when this returns, it is loading. `known`: finds facts about the model for the process
        while it imports modules. Raises EngineDeadError if the process cannot be started."""
        try:
            # The child's first bytes name the folder to remove, so the child knows it even if this process is killed at
            # once.
            self.line, self._popen = start_child(
                f"{__package__}.main", _environment(self._first.config), first=first_bytes(self._first)
            )
        except OSError as error:
            raise EngineDeadError(f"cannot start the engine's process ({sys.executable}): {error}.") from error
        told = known()
        with contextlib.suppress(OSError):  # it has ended already, which the wait will show
            send_framed(self.line, told)

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._popen is not None
        return self._popen.pid

    def wait_ready(self, tell: Tell = lambda percent: None) -> Ready:
        """Block until the engine can serve. `tell`: called with the percentage of the weights that are loaded. Raises
        OctavoError: why the engine cannot serve, with the type raised in its process; EngineDeadError if the process
        ended without a message."""
        while isinstance(reply := receive_reply(self.line), Loading):
            tell(reply.percent)
        if isinstance(reply, Ready):
            return reply
        self.stop()
        raise EngineDeadError(f"{self.epitaph()} while it loaded the model.") if reply is None else reply.error()

    def last_words(self) -> str | None:
        """The reason why the process ended, read once the lifeline is readable; None if it ended without a message."""
        reply = receive_reply(self.line)
        return str(reply.error()) if isinstance(reply, Failed) else None

    def epitaph(self, patience: float = 0.3) -> str:
        """A description of the process's end; waits a moment for the exit status."""
        assert self._popen is not None
        try:
            status = self._popen.wait(patience)
        except subprocess.TimeoutExpired:
            return "the engine's process closed its lifeline"
        if status >= 0:
            return f"the engine's process ended with status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        memory = " (out of memory, perhaps)" if -status == signal.SIGKILL else ""
        return f"the engine's process was killed by {name}{memory}"

    def stop(self) -> None:
        """End the process if it is running, and wait until it has ended; blocks for a few seconds at most. Does nothing
        if there is no process."""
        if self._popen is None:
            return
        with contextlib.suppress(OSError):
            self.line.send(GOODBYE, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)  # this also wakes a thread that reads it
        try:
            self._popen.wait(_GRACE + (_PAGES_GRACE if self._first.config.kv_disk else 0.0))
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self.line.close()
        self._path.unlink(missing_ok=True)  # a crash leaves the socket behind


def _downloads(config: EngineConfig) -> bool:
    """Whether the checkpoint may have to come from the hub, because it is neither a folder nor a file."""
    return not Path(config.model).expanduser().exists()


def _environment(config: EngineConfig) -> dict[str, str]:
    """This process's environment, without secrets that the engine does not need: settings arrive over the lifeline, and
    the only token it needs is the hub's, if it downloads."""
    downloads = _downloads(config)
    environment = {
        name: value
        for name, value in engine_environment(config.threads).items()
        if (name in _READ or not name.startswith("OCTAVO_"))
        and (not _SECRET.search(name) or (downloads and name.startswith(_HUB)))
    }
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
    return environment
