"""Runners in processes of their own, and whether such processes run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from engine import Engine
from engine.process.runner import ProcessExecutor


def executor_of(engine: Engine) -> ProcessExecutor:
    assert isinstance(engine.executor, ProcessExecutor)
    return engine.executor


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_gone(pid: int) -> None:
    for _ in range(200):
        if not is_running(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")
