#!/usr/bin/env python3
"""Writes requirements/*.lock: what the image may install, by hashes. Needs uv (of the extra `release`) and PyPI.

    python3 tools/lock.py

serve.lock       what `octavo[otel,redis]` needs, but for torch
torch-cuda.lock  torch as PyPI has it, and what only it brings: libraries for GPUs
build.lock       what builds Octavo itself

Versions are those of constraints.txt; what is not in there keeps the version that it has in the lock. torch for CPUs
comes from PyTorch's own index, whose files are others than PyPI's and have no place here: the image installs it by its
version.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
INDEX = "https://pypi.org/simple"
EXTRAS = ("otel", "redis")
COMPILER = "ziglang"  # a C++ compiler that pip can install, for the kernels
_OF_TORCH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
_BLOCK = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>[^ ;\\]+)(?P<rest>.*(?:\n    .*)*)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")
HEADER = "# Written by tools/lock.py; do not edit. pip install --require-hashes --no-deps --requirement {name}\n"


class LockError(Exception):
    """The lock cannot be made."""


def blocks(text: str) -> dict[str, str]:
    """The requirements of a lock, each with its hashes, by name.

    Raises:
        LockError: a line belongs to none, or one has no hash.
    """
    found = {match["name"]: match[0] for match in _BLOCK.finditer(text)}
    rest = _BLOCK.sub("", text)
    stray = [line for line in rest.splitlines() if line.strip() and not line.startswith("#")]
    if stray:
        raise LockError(f"a lock has a line that is no requirement: {stray[0]!r}")
    for name, block in found.items():
        if not _HASH.search(block):
            raise LockError(f"{name} has no hash")
    return found


def split(text: str) -> tuple[str, str]:
    """A lock in two parts: the packages that do not come with torch, and those that do."""
    rest: list[str] = []
    torch: list[str] = []
    for name, block in blocks(text).items():
        (torch if _OF_TORCH.fullmatch(name) else rest).append(block)
    return "\n".join(rest) + "\n", "\n".join(torch) + "\n"


def compile_lock(uv: str, arguments: Sequence[str], before: str) -> str:
    """The packages that uv resolves, from PyPI alone, whatever this machine is configured to use.

    Args:
        before: a lock whose versions stay where they may.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "all.lock"
        output.write_text(before, encoding="utf-8")
        command = [
            uv, "pip", "compile", "--universal", "--python-version", "3.11", "--generate-hashes", "--no-header",
            "--no-annotate", "--no-config", "--system-certs", "--default-index", INDEX,
            "--constraint", "constraints.txt", "--output-file", str(output), *arguments,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
        ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
        if ran.returncode != 0:
            raise LockError(f"uv ended with status {ran.returncode}")
        return output.read_text(encoding="utf-8")


def write(name: str, text: str) -> None:
    """One lock, under its first line."""
    (FOLDER / name).write_text(HEADER.format(name=f"requirements/{name}") + text, encoding="utf-8")
    print(f"requirements/{name}: {len(blocks(text))} packages")


def read(name: str) -> str:
    """A lock as it is, empty where there is none yet."""
    path = FOLDER / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        print("lock: uv is not installed: pip install -c constraints.txt '.[release]'", file=sys.stderr)
        return 1
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    FOLDER.mkdir(exist_ok=True)
    try:
        rest, torch = split(compile_lock(uv, [*extras, "pyproject.toml"], read("serve.lock") + read("torch-cuda.lock")))
        with tempfile.NamedTemporaryFile("w", suffix=".in", encoding="utf-8") as wanted:
            wanted.write("\n".join([*build, COMPILER]))
            wanted.flush()
            builders = compile_lock(uv, [wanted.name], read("build.lock"))
        write("serve.lock", rest)
        write("torch-cuda.lock", torch)
        write("build.lock", builders)
    except LockError as problem:
        print(f"lock: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
