"""Builds the library of kernels: finds a compiler, compiles every source for an instruction set, links.

It uses only the standard library, so that a machine that only builds needs nothing else:

    python -m octavo.engine.backends.native.build      all instruction sets of this kind of machine, beside the package
    python engine/backends/native/build.py             the same, where nothing is installed
    ... DIRECTORY                                      there
    ... --this-cpu DIRECTORY          only the best that this CPU has, under the name that it has in the cache

A library contains the code of one instruction set, and is linked only against C's own libraries (see `src/threads.h`
for how it finds torch's threads).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"

_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    # The source determines every number: the compiler must not fuse or reorder operations.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    # Packed memory is written as one type and read as another.
    "-fno-strict-aliasing",
    "-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes",
)  # fmt: skip
_LINK_FLAGS = ("-shared", "-fPIC", "-Wl,--as-needed", "-Wl,-z,noexecstack")
_LINK_FLAGS_MACOS = ("-shared", "-fPIC", "-undefined", "dynamic_lookup")
_SECONDS = 600


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Compiler flags for an instruction set, and Linux's names of the required CPU features."""

    flags: tuple[str, ...]
    features: frozenset[str]


# Named one by one, because not all compilers agree on the names of levels (x86-64-v3).
_AVX2 = InstructionSet(
    ("-mavx", "-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt"),
    frozenset({"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "popcnt"}),
)
_AVX512_VNNI = InstructionSet(
    (
        *_AVX2.flags,
        *("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
        "-mprefer-vector-width=512",
    ),
    _AVX2.features | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"},
)
_AVX512 = InstructionSet((*_AVX512_VNNI.flags, "-mavx512bf16"), _AVX512_VNNI.features | {"avx512_bf16"})
# Armv8.2 with atomics, which all its CPUs have. The flags are those of GCC and Clang; `_spelled` changes them for Zig.
_NEON_DOTPROD = InstructionSet(("-march=armv8.2-a+dotprod",), frozenset({"atomics", "asimddp"}))
_NEON_I8MM = InstructionSet(("-march=armv8.2-a+dotprod+i8mm+bf16",), _NEON_DOTPROD.features | {"i8mm", "bf16"})
_PORTABLE = {"portable": InstructionSet((), frozenset())}
# Best first, by the machine's name.
_INSTRUCTION_SETS = {
    "x86_64": {
        "avx512": _AVX512,
        "avx512-vnni": _AVX512_VNNI,  # Cascade Lake, Ice Lake, and virtual machines that hide bfloat16
        "avx2": _AVX2,
        **_PORTABLE,
    },
    "aarch64": {
        "neon-i8mm": _NEON_I8MM,  # Neoverse V1 and N2, and later ones
        "neon-dotprod": _NEON_DOTPROD,  # Neoverse N1, Cortex-A76
        "neon": InstructionSet((), frozenset()),  # all aarch64 CPUs have it
        "portable": InstructionSet(("-DOCTAVO_PORTABLE",), frozenset()),  # without our own instructions
    },
}
EMULATED_TILES = "avx512-emulated-tiles"
"""Kernels for Intel's matrix tiles on CPUs without them (`src/tiles.h`). Only tests build and load it."""
_FOR_TESTS = {EMULATED_TILES: InstructionSet((*_AVX512_VNNI.flags, "-DOCTAVO_TILES_EMULATED"), _AVX512_VNNI.features)}


class BuildError(Exception):
    """The library could not be built; the message is the compiler's."""


def machine() -> str:
    """The name of this kind of machine."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def instruction_sets() -> dict[str, InstructionSet]:
    """The instruction sets that a library can be built for on this kind of machine, best first."""
    return _INSTRUCTION_SETS.get(machine(), _PORTABLE)


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Linux's names of the features that all cores have. Empty if the system does not report them."""
    cores: list[set[str]] = []
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, values = line.partition(":")
            if name.strip() in {"flags", "Features"}:  # on x86, on Arm
                cores.append(set(values.split()))
    return set.intersection(*cores) if cores else set()


def supported_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The instruction sets of this CPU, as reported by the system, best first."""
    features = cpu_features(cpuinfo)
    return [name for name, kind in instruction_sets().items() if kind.features <= features]


def _flags_of(name: str) -> tuple[str, ...]:
    return (instruction_sets() | _FOR_TESTS)[name].flags


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler's command and its version text."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler | None:
    """The compiler that CXX names, or the first of c++, g++ and clang++ that works."""
    if sys.platform == "win32":
        return None
    named = os.environ.get("CXX", "").strip()
    for candidate in [named] if named else ["c++", "g++", "clang++"]:
        command = shlex.split(candidate)
        if shutil.which(command[0]) is None:
            continue
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            ran = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
            return Compiler(tuple(command), ran.stdout.strip())
    return None


def file_name(name: str, compiler: Compiler | None = None) -> str:
    """The library's file name, which depends on its sources, flags and machine, and on the compiler if one is given."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    link = _LINK_FLAGS_MACOS if sys.platform == "darwin" else _LINK_FLAGS
    parts = [name, machine(), sys.platform, *_FLAGS, *_flags_of(name), *link]
    if compiler is not None:
        parts += [*compiler.command, compiler.version]
    digest.update("\0".join(parts).encode())
    return f"octavo-{name}-{digest.hexdigest()[:20]}.so"


def _spelled(flags: tuple[str, ...], compiler: Compiler) -> tuple[str, ...]:
    """The flags in the compiler's spelling: for Zig, a CPU and its additional features."""
    if not any(Path(word).name in {"zig", "ziglang"} for word in compiler.command):
        return flags
    return tuple(flag.replace("-march=armv8.2-a", "-mcpu=generic+v8_2a") for flag in flags)


def build(name: str, compiler: Compiler, target: Path, sources: Sequence[Path] = (), link: Sequence[str] = ()) -> None:
    """Build the library for one instruction set; `target` is complete or does not exist. Raises BuildError if the
    compiler fails, or the folder is not writable. `sources` and `link` replace those of the library."""
    flags = (*compiler.command, *_FLAGS, *_spelled(_flags_of(name), compiler))
    link = link or (_LINK_FLAGS_MACOS if sys.platform == "darwin" else _LINK_FLAGS)
    sources = sources or sorted(SOURCES.glob("*.cpp"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
            objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
            with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
                commands = [
                    [*flags, "-c", str(source), "-o", output] for source, output in zip(sources, objects, strict=True)
                ]
                list(workers.map(_run, commands))
            made = Path(folder) / target.name
            _run([*compiler.command, *objects, *link, "-o", str(made)])
            made.chmod(0o755)
            made.replace(target)
    except OSError as error:
        raise BuildError(f"{target.parent}: {error}") from error


def _run(command: list[str]) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_SECONDS} seconds") from error
    if ran.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{ran.stderr.strip()}")


def main(arguments: list[str]) -> int:
    """Build for all instruction sets of this kind of machine, or for this CPU; returns 0 if all were built."""
    this_cpu = arguments[:1] == ["--this-cpu"]
    folders = arguments[this_cpu:]
    if len(folders) > 1 or (this_cpu and not folders) or any(argument.startswith("-") for argument in folders):
        print(__doc__)
        return 2
    folder = Path(folders[0]) if folders else PREBUILT
    compiler = find_compiler()
    if compiler is None:
        print("No C++ compiler was found (c++, g++, clang++, or what CXX names).", file=sys.stderr)
        return 1
    for name in supported_sets()[:1] if this_cpu else instruction_sets():
        target = folder / (file_name(name, compiler) if this_cpu else file_name(name))
        try:
            if not (this_cpu and target.exists()):
                build(name, compiler, target)
        except BuildError as error:
            print(error, file=sys.stderr)
            return 1
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
