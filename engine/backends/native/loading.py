"""Loads the library of kernels: from beside the package or from the cache, or builds it into the cache.

OCTAVO_NATIVE=off disables it; OCTAVO_NATIVE_ISA names an instruction set other than the CPU's best. Without the
library, torch computes everything, more slowly, and one log line says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from engine.backends.native import structures
from engine.backends.native.build import PREBUILT, BuildError, Compiler, build, file_name, find_compiler, supported_sets
from engine.host.folders import cache_folder, make_private, make_spare

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger("octavo.native")

_NO_COMPILER = "no C++ compiler was found (c++, g++, clang++, or what CXX names)"
_KEPT_SECONDS = 30 * 24 * 3600
_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Library:
    """The kernels for one instruction set. Raises OSError if it cannot be loaded. `name`: changes with the sources, so
    that no library reads data packed by another."""

    def __init__(self, isa: str, path: Path):
        self.isa, self.name = isa, path.name
        self._loaded = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)

    def function(self, name: str, signature: str) -> Callable[..., None]:
        """An exported function; the signature has a letter for each argument: pointer, int64, float."""
        found = self._loaded[f"octavo_{name}"]
        found.argtypes = [_TYPES[letter] for letter in signature.replace(" ", "")]
        found.restype = None
        return found

    def check(self) -> None:
        """Compare the structures declared in Python with the library's. Raises RuntimeError if a structure differs."""
        structures.check(self.function)

    def threads(self) -> int:
        """The number of threads that share a kernel's work."""
        count = ctypes.c_int64()
        self.function("count_threads", "p")(ctypes.addressof(count))
        return count.value


class Kernel:
    """A function of the library in use.

    Args:
        name: the name in OCTAVO_EXPORT.
        signature: a letter for each argument, p (pointer: `data_ptr()`, or None), i (int64) or f (float); spaces are
            ignored.
    """

    _made: ClassVar[list[Kernel]] = []

    call: Callable[..., None]
    """Calls it without the interpreter's lock."""

    def __init__(self, name: str, signature: str):
        self.name, self.signature = name, signature
        self.call = self._find_and_call
        Kernel._made.append(self)

    def _find_and_call(self, *arguments: Any) -> None:
        found = current()
        if found is None:
            raise RuntimeError(f"There is no native library that contains {self.name}: call available() first.")
        found.check()
        self.call = found.function(self.name, self.signature)
        self.call(*arguments)

    @classmethod
    def forget(cls) -> None:
        """Look all functions up again at their next call."""
        for kernel in cls._made:
            kernel.call = kernel._find_and_call


def kernels(name: str, signature: str) -> dict[torch.dtype, Kernel]:
    """A kernel that exists as NAME_f32 and NAME_bf16, by format."""
    return {dtype: Kernel(f"{name}_{suffix}", signature) for dtype, suffix in _SUFFIXES.items()}


_UNKNOWN = object()
_library: Any = _UNKNOWN


def current() -> Library | None:
    """The library; the first call loads it, which may take seconds if it must be compiled. None if there is none."""
    global _library
    if _library is _UNKNOWN:
        _library = _load()
    found: Library | None = _library
    return found


def available() -> bool:
    """Whether there are kernels."""
    return current() is not None


@contextlib.contextmanager
def use(chosen: Library | None) -> Iterator[None]:
    """Use another library, or none, within a block."""
    global _library
    before, _library = _library, chosen
    Kernel.forget()
    try:
        yield
    finally:
        _library = before
        Kernel.forget()


def switched_off() -> bool:
    """Whether the environment disables the library."""
    return os.environ.get("OCTAVO_NATIVE", "").strip().lower() in {"off", "0", "no", "false"}


def prospect() -> tuple[str, str]:
    """(instruction set, reason why there is none) of the library that would be loaded now; nothing is compiled."""
    if switched_off():
        return "", "OCTAVO_NATIVE=off"
    isa = _wanted_sets()[0]
    if (PREBUILT / file_name(isa)).is_file() or find_compiler() is not None:
        return isa, ""
    return "", _NO_COMPILER


def _wanted_sets() -> list[str]:
    """Instruction sets in the order in which they are tried."""
    chosen = supported_sets()
    wanted = os.environ.get("OCTAVO_NATIVE_ISA", "").strip()
    if wanted and wanted not in chosen:
        logger.warning("OCTAVO_NATIVE_ISA=%s is ignored: this machine supports %s", wanted, ", ".join(chosen))
    elif wanted:
        chosen = [wanted]
    return chosen


def _load() -> Library | None:
    if switched_off():
        logger.info("OCTAVO_NATIVE=off: torch computes everything")
        return None
    problem = ""
    for isa in _wanted_sets():
        try:
            found = load(isa)
        except (BuildError, OSError) as error:
            logger.debug("no native library for %s", isa, exc_info=True)
            problem = problem or str(error).strip().splitlines()[0]
        else:
            logger.info("Native kernels: %s, %d threads", isa, found.threads())
            return found
    logger.warning("No native kernels; torch computes everything, which is slower: %s", problem)
    return None


def load(isa: str) -> Library:
    """The library for an instruction set of this CPU, built if necessary. Raises BuildError if there is none, and it
    cannot be built; OSError if it cannot be loaded."""
    if sys.platform == "win32":
        raise BuildError("kernels are not compiled on Windows")
    _promote_threads()
    prebuilt = PREBUILT / file_name(isa)
    if prebuilt.is_file():
        return Library(isa, prebuilt)
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(_NO_COMPILER)
    name = file_name(isa, compiler)
    cache, problem = _cache()
    if cache is not None and (not problem or (cache / name).is_file()):
        return _kept(isa, compiler, cache / name)
    try:
        spare = make_spare("native")
    except OSError as error:
        _say_compiling(isa, problem, f"compiled again at every start ({error})")
        with tempfile.TemporaryDirectory(prefix="octavo-native-") as private:
            build(isa, compiler, Path(private) / name)
            return Library(isa, Path(private) / name)
    return _kept(isa, compiler, spare / name, problem)


def _kept(isa: str, compiler: Compiler, target: Path, problem: str = "") -> Library:
    """The library in a folder, built if it is missing; `problem` says why no better folder is used."""
    if not target.is_file():
        with _alone(target.parent / f"{isa}.lock"):
            if not target.is_file():  # no other process has built it meanwhile
                _say_compiling(isa, problem, f"kept in {target.parent}, until it is cleared")
                build(isa, compiler, target)
                _tidy(target.parent)
    with contextlib.suppress(OSError):
        os.utime(target)
    return Library(isa, target)


def _say_compiling(isa: str, problem: str, instead: str) -> None:
    if problem:
        message = (
            "Compiled kernels cannot be kept in the usual folder: %s. They are %s. Set XDG_CACHE_HOME to a folder "
        )
        logger.warning(message + "that only this user can write to.", problem, instead)
    how_often = "" if problem else ", once for this machine"
    logger.info("Compiling kernels for %s%s; this takes a minute or two on few cores.", isa, how_often)


def _tidy(folder: Path) -> None:
    """Remove libraries that have not been loaded for long, and remnants of killed builds."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                if path.suffix == ".so":
                    path.unlink()
                elif path.name.startswith(".building-"):
                    shutil.rmtree(path)


def _cache() -> tuple[Path | None, str]:
    """The folder for libraries, or None if other users could write to every candidate; and the reason, if this user
    cannot write to it."""
    try:
        folder = cache_folder("native")
        make_private(folder)
    except (OSError, RuntimeError) as error:
        return None, str(error)
    return folder, "" if os.access(folder, os.W_OK) else f"{folder} cannot be written to"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let only one process at a time run this block; the system releases the lock of a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _promote_threads() -> None:
    """Make the OpenMP library that torch has loaded visible to libraries that are loaded from now on."""
    with contextlib.suppress(OSError):
        if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
            return
        mapped = {f"/{line.partition('/')[2]}" for line in Path("/proc/self/maps").read_text("utf-8").splitlines()}
        pools = [path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
        # Other packages may have loaded one too.
        pools.sort(key=lambda path: not path.startswith(str(Path(torch.__file__).parent)))
        if pools:
            ctypes.CDLL(pools[0], mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD | os.RTLD_NOW)
