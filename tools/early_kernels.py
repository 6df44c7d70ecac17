"""The CPU's kernels, compiled while packages are downloaded: the first start would wait for them otherwise.

With the standard library alone; the engine finds what was made in the user's cache, and makes itself what was not. See
engine/backends/native/build.py.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """The folder in which the engine looks for kernels, without the packages that engine/host/folders.py needs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "native"


@contextlib.contextmanager
def compiling(root: Path) -> Iterator[None]:
    """Compile beside what happens inside, and be done at its end; what is there already is not made again."""
    try:
        folder = cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, str(root / "engine" / "backends" / "native" / "build.py"), "--this-cpu", str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, RuntimeError):  # there is no home, or nothing can be written there
        process = None
    try:
        yield
        if process is not None:
            process.wait()
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()
