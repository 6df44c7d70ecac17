"""Triton's module in C that starts kernels, compiled into its cache where there is no driver to link it with."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_LIBRARY = "libcuda.so.1"


def compile_starter() -> str | None:
    """Let Triton compile it, unless its cache has it; what is missing for that, if something is.

    It is linked with a library that has the driver's functions by name alone; on a machine with a driver the same names
    are found there. It is for a process of its own, which it leaves with that library.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "a C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's headers"
    from triton import knobs
    from triton.backends.nvidia import driver

    source = (Path(driver.__file__).parent / "driver.c").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\()", source)))
    with tempfile.TemporaryDirectory() as folder:
        library, stand_in = Path(folder) / _LIBRARY, Path(folder) / "names.c"
        stand_in.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}", "-o", str(library), str(stand_in)]
        try:
            subprocess.run(command, check=True)
            ctypes.CDLL(str(library))  # what is linked with it finds it by its name from now on
            sys.setdlopenflags(os.RTLD_LAZY)
            knobs.nvidia.libcuda_path = folder
            driver.CudaUtils()
        except subprocess.CalledProcessError:  # it has said what
            return "something that the C compiler needs"
    return None
