"""Kernels and readers of files under AddressSanitizer: what reads or writes beyond an allocation ends the process.

`support/sanitized.py` runs in a process of its own. Its kernels are compiled for this, once a cache. The sanitizer's
allocator is in place of C's, so that it also watches the libraries that read files.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.native.build import find_compiler
from engine.host.folders import cache_folder, make_private

ROOT = Path(__file__).resolve().parents[3]
FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer", "-g1", "-O0")

pytestmark = pytest.mark.slow


def test_nothing_is_read_or_written_beyond_its_end() -> None:
    compiler = find_compiler()
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no compiler")
    asked = [*compiler.command, "-print-file-name=libasan.so"]
    library = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip("the compiler has no AddressSanitizer")
    # The kernels' own flags come first, so that -O0 counts: -O1 takes three times as long to compile.
    folder = cache_folder("sanitizer")
    make_private(folder)
    wrapper = folder / "c++"
    flags = " ".join(FLAGS)
    wrapper.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {" ".join(compiler.command)} "$@" {flags}\n')
    wrapper.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(wrapper),
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has until the end
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "tests", "tests/model/gguf")),
    }
    command = [sys.executable, "-m", "support.sanitized"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    assert "nothing was found" in ran.stdout
