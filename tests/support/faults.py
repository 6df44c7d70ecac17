"""Code that engines run which tests start: faults, and places where they wait.

It comes as a `sitecustomize`, which each Python runs first, and so into successors of an engine, too.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# Runs `patch(module)` once `engine.engine` is loaded.
_HOOK = """
import importlib.util, os, sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name != "engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())

"""
_WAIT = """
import time

def wait():
    while os.path.exists({file!r}):
        open({held!r}, "w").close()
        time.sleep(0.01)
"""
_WHILE_LOADING = """
def patch(module):
    wait()
"""
_IN_A_STEP = """
def patch(module):
    launch = module.ModelRunner.launch
    def held(self, plan):
        if (plan.positions >= {position}).any():
            wait()
        return launch(self, plan)
    module.ModelRunner.launch = held
"""


def patch_engines(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine that is started from now on runs that code, which defines `patch(module)` of `engine.engine`."""
    (folder / "sitecustomize.py").write_text(_HOOK + code)
    monkeypatch.setenv("PYTHONPATH", str(folder))  # of services
    monkeypatch.syspath_prepend(str(folder))  # of engines of this process


class Gate:
    """A place that engines which are started from now on do not pass while it is closed; it begins open.

    However long this process, or theirs, is held up by others: what they do beyond it, they have not done yet.

    Args:
        folder: for the code and for the file that closes the gate.
        monkeypatch: of the time for which engines are to get the code.
        position: steps wait that compute a token at this position of a sequence, or at a later one; None: engines wait
            while they load.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, position: int | None = None):
        self._file, self._held = folder / "closed", folder / "held"
        code = _WHILE_LOADING if position is None else _IN_A_STEP.format(position=position)
        patch_engines(_WAIT.format(file=str(self._file), held=str(self._held)) + code, folder, monkeypatch)

    def close(self) -> None:
        """Nothing passes from now on."""
        self._file.touch()

    @property
    def holds(self) -> bool:
        """Whether an engine has come to it since it was made, and found it closed."""
        return self._held.exists()

    def open(self) -> None:
        """What waits goes on."""
        self._file.unlink(missing_ok=True)


@contextmanager
def signalled_at_birth(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Gives the list of the processes that this one starts meanwhile; as soon as there is one, this one gets the signal
    that Ctrl-C sends."""
    begun: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            begun.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Popen)
        yield begun
