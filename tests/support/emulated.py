"""Native kernels of another kind of machine, under an emulator: for `native.use`, like a library of this one.

They are compiled by Zig (`pip install ziglang`) and run by QEMU (`qemu-aarch64-static`, or `qemu-aarch64`). What they
compute is what the machine would, as far as QEMU follows Arm's manual. It says nothing about their speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from engine.backends.native import Library, build
from engine.host.folders import cache_folder

HARNESS = Path(__file__).with_suffix(".cpp")
CPUS = {"neon-i8mm": "max", "neon-dotprod": "neoverse-n1", "neon": "cortex-a72"}
"""The CPU that QEMU emulates for each instruction set: one without further sets, if there is such a CPU."""
_READ, _WRITE, _DONE = 1, 2, 3
_INTEGERS, _FLOATS = 24, 8


def what_lacks() -> str:
    """Why nothing can be emulated here; empty if it can."""
    if importlib.util.find_spec("ziglang") is None:
        return "there is no compiler for Arm (pip install ziglang)"
    if not sys.platform.startswith("linux") or _emulator() is None:
        return "there is no emulator of Arm (qemu-aarch64-static, of the package qemu-user-static)"
    return ""


def _emulator() -> str | None:
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def compiled(isa: str, sources: Iterable[str] = ()) -> Path:
    """The program with these sources of kernels, or all of them. It is kept with compiled kernels."""
    compiler = build.Compiler(
        (sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"), version("ziglang")
    )
    chosen = [build.SOURCES / name for name in sources] or sorted(build.SOURCES.glob("*.cpp"))
    # Faster to compile than -O3. Values do not depend on it: the compiler may not reorder anything.
    flags = tuple("-O1" if flag == "-O3" else flag for flag in build._FLAGS)
    with mock.patch.object(build, "machine", return_value="aarch64"), mock.patch.object(build, "_FLAGS", flags):
        digest = hashlib.sha256("\0".join([build.file_name(isa, compiler), *sources]).encode() + HARNESS.read_bytes())
        target = cache_folder("native") / "emulated" / f"{isa}-{digest.hexdigest()[:20]}"
        if not target.is_file():
            build.build(isa, compiler, target, [HARNESS, *chosen], ("-static", "-nostdlib++"))
    return target


def _symbols(path: Path) -> dict[str, int]:
    """Addresses by name, from the symbol table of an ELF file of 64 bits."""
    data = path.read_bytes()
    sections_at, size, count = *struct.unpack_from("<Q", data, 40), *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * size) for i in range(count)]
    found: dict[str, int] = {}
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names_at = sections[link][4]
        for at in range(offset, offset + length, 24):
            name, _, _, _, address, _ = struct.unpack_from("<IBBHQQ", data, at)
            end = data.index(0, names_at + name)
            found[data[names_at + name : end].decode()] = address
    return found


class EmulatedLibrary(Library):
    """The kernels for an instruction set of aarch64, in a process of an emulator that lives as long as this does."""

    def __init__(self, isa: str, program: Path | None = None) -> None:
        program = program or compiled(isa)
        self.isa, self.name = isa, program.name
        self._symbols = _symbols(program)
        self._command = [_emulator() or "", "-cpu", CPUS[isa], str(program)]
        self._process = self._started()
        self._memory = os.open("/proc/self/mem", os.O_RDWR)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self.close()

    def close(self) -> None:
        """End the process."""
        if self._memory >= 0:
            self._end()
            os.close(self._memory)
            self._memory = -1

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def function(self, name: str, signature: str) -> Callable[..., None]:
        address = self._symbols.get(f"octavo_{name}")
        if address is None:
            raise AttributeError(name)
        letters = signature.replace(" ", "")

        def call(*arguments: Any) -> None:
            integers = [0] * _INTEGERS
            floats = [0.0] * _FLOATS
            counts = [0, 0]
            assert len(arguments) == len(letters)
            for letter, argument in zip(letters, arguments, strict=True):
                if letter == "f":
                    floats[counts[1]] = float(argument)
                else:
                    integers[counts[0]] = _address(argument)
                counts[letter == "f"] += 1
            words = b"".join(struct.pack("<fI", number, 0) for number in floats)
            try:
                self._send(struct.pack(f"<Q{_INTEGERS}q", address, *integers) + words)
                self._serve(name)
            except BaseException:  # a crash, or a test's time is over: the next call begins anew
                self._end()
                self._process = self._started()
                raise

        return call

    def _serve(self, name: str) -> None:
        """Give the call what it reads, and take what it writes, until it is over."""
        while True:
            kind, address, size = struct.unpack("<QQQ", self._receive(24, name))
            if kind == _READ:
                self._send(os.pread(self._memory, size, address))
            elif kind == _WRITE:
                data = self._receive(size, name)
                assert os.pwrite(self._memory, data, address) == size
            else:
                assert kind == _DONE
                return

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        while data:
            data = data[self._process.stdin.write(data) :]

    def _receive(self, size: int, name: str) -> bytes:
        assert self._process.stdout is not None
        parts = []
        while size:
            part = self._process.stdout.read(size)
            if not part:
                raise RuntimeError(f"{name} of {self.isa} ended the emulator with status {self._process.wait()}")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _address(argument: Any) -> int:
    if argument is None:
        return 0
    if isinstance(argument, int):
        return argument
    return ctypes.cast(argument, ctypes.c_void_p).value or 0
