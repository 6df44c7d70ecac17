#!/usr/bin/env python3
"""Makes what is published of a version: sdist, a wheel, wheels with the CPU's kernels compiled for Linux on x86-64 and
aarch64, an SBOM of the serving environment, and checksums of them all.

    python3 tools/release.py [--out dist] [--python PATH] [--skip-images]

--out FOLDER     where they go; it must be empty or absent
--python PATH    the interpreter of an environment to describe, which has Octavo's dependencies; without it one is made
                 from requirements/serve.lock, with torch from TORCH_INDEX (default: PyTorch's index for CPUs; empty:
                 pip's configured index), and thrown away
--skip-images    do not ask the registries whether the digests of images are those of their tags

Nothing is uploaded. Needs the extra `release`, and git.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lock import blocks
from torch_source import PUBLIC_CPU_INDEX, pinned_version

ROOT = Path(__file__).resolve().parent.parent
SUMS = "SHA256SUMS"
KERNELS = ("x86_64", "aarch64")  # as setup.py names machines
# Of the environment that the image is built in: not of what serves.
_TOOLS = frozenset({"pip", "wheel"})


class ReleaseError(Exception):
    """The release cannot be made, for a reason that one line explains."""


def project_version(root: Path) -> str:
    """The version that pyproject.toml has."""
    return str(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def check_changelog(text: str, version: str) -> None:
    """The changelog has a section for the version, with a date.

    Raises:
        ReleaseError: it has not.
    """
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE):
        raise ReleaseError(
            f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD': write it, or change the version."
        )


def check_clean(root: Path) -> None:
    """All that is published is committed.

    Raises:
        ReleaseError: it is not.
    """
    ran = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    if ran.stdout:
        raise ReleaseError(f"the checkout has changes that are not committed: {ran.stdout.splitlines()[0].strip()}")


def run(command: Sequence[str | Path], **options: Any) -> None:
    """Run it, saying so.

    Raises:
        ReleaseError: it failed.
    """
    words = " ".join(map(str, command))
    print(f"[release] {words}", file=sys.stderr, flush=True)
    if subprocess.run(command, cwd=ROOT, check=False, **options).returncode != 0:
        raise ReleaseError(f"failed: {words}")


def make_environment(folder: Path) -> Path:
    """A virtual environment with what serves; its interpreter."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--no-deps"]
    index = os.environ.get("TORCH_INDEX", PUBLIC_CPU_INDEX)
    torch = f"torch=={pinned_version((ROOT / 'constraints.txt').read_text(encoding='utf-8'), 'torch')}"
    run([*pip, *(["--index-url", index] if index else []), torch])
    run([*pip, "--require-hashes", "--requirement", "requirements/serve.lock"])
    return python


def make_sbom(python: Path, target: Path, environment: dict[str, str]) -> None:
    """A CycloneDX document, in JSON, of what is installed for an interpreter."""
    tool = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml"]
    options = ["--mc-type", "application", "--output-reproducible", "--of", "JSON", "-o"]
    run([*tool, *options, target, python], env=environment)


def check_sbom(document: dict[str, Any], lock: str, torch: str) -> int:
    """Every package of the lock that is for this platform is in the document, by its version; the number of components.

    Raises:
        ReleaseError: the document lacks one, or has one that is in no lock.
    """
    found = {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in document["components"]}
    locked = {name: block.split("==")[1].split()[0] for name, block in blocks(lock).items()}
    everywhere = {name for name, block in blocks(lock).items() if " ; " not in block.splitlines()[0]}
    missing = sorted(name for name in everywhere if found.get(name) != locked[name])
    if missing:
        raise ReleaseError(f"the SBOM lacks {missing[0]} {locked[missing[0]]}, which is in requirements/serve.lock")
    if found.get("torch", "").partition("+")[0] != torch:
        raise ReleaseError(f"the SBOM has torch {found.get('torch')}, and constraints.txt {torch}")
    strange = sorted(set(found) - set(locked) - _TOOLS - {"torch", "octavo"})
    if strange:
        raise ReleaseError(f"the SBOM has {strange[0]}, which is in no lock: describe an environment of its own")
    return len(found)


def write_sums(folder: Path) -> None:
    """SHA256SUMS of the folder's files, as `sha256sum --check` reads it."""
    names = sorted(path.name for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines), encoding="ascii")


def release(out: Path, python: Path | None, *, images: bool) -> None:
    """All of it.

    Raises:
        ReleaseError: something is not as it has to be; what was made so far stays.
    """
    version = project_version(ROOT)
    if out.exists() and any(out.iterdir()):
        raise ReleaseError(f"{out} is not empty: a release would mix with what is there")
    check_clean(ROOT)
    check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if images:
        run([sys.executable, ROOT / "tools" / "pin_images.py", "--check"])
    out.mkdir(parents=True, exist_ok=True)
    asked = ["git", "log", "-1", "--format=%ct"]
    epoch = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}  # the time in archives and SBOM is the commit's
    run([sys.executable, "-m", "build", "--outdir", out], env=environment)
    for machine in KERNELS:
        wheel = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out)]
        run(wheel, env={**environment, "OCTAVO_KERNELS": machine})
    sbom = out / f"octavo-{version}.cdx.json"
    with tempfile.TemporaryDirectory() as folder:
        make_sbom(python or make_environment(Path(folder)), sbom, environment)
    lock = (ROOT / "requirements" / "serve.lock").read_text(encoding="utf-8")
    torch = pinned_version((ROOT / "constraints.txt").read_text(encoding="utf-8"), "torch")
    count = check_sbom(json.loads(sbom.read_text(encoding="utf-8")), lock, torch)
    write_sums(out)
    print(f"[release] octavo {version}: {count} components; {out}/{SUMS}", file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", type=Path)
    parser.add_argument("--skip-images", action="store_true")
    given = parser.parse_args(arguments)
    try:
        release(given.out.resolve(), given.python, images=not given.skip_images)
    except ReleaseError as problem:
        print(f"release: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
