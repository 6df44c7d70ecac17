"""The locks of what the image installs agree with pyproject.toml and constraints.txt, and have hashes throughout."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_setup_script import load

ROOT = Path(__file__).resolve().parents[3]
LOCKS = ("serve.lock", "torch-cuda.lock", "build.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
lock = load("lock")


def text_of(name: str) -> str:
    return (ROOT / "requirements" / name).read_text(encoding="utf-8")


def locked(*names: str) -> dict[str, str]:
    """The versions in these locks."""
    return {
        package: re.search(r"==(\S+)", block)[1]  # type: ignore[index]
        for name in names
        for package, block in lock.blocks(text_of(name)).items()
    }


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("name", LOCKS)
def test_every_file_has_its_hash_and_no_other_source(name: str) -> None:
    text = text_of(name)
    assert lock.blocks(text)  # each of which has a hash, or this raises
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    wanted = r"[a-z0-9-]+==[^\s\\]+( ; [^\\]+)? \\|--hash=sha256:[0-9a-f]{64}( \\)?"
    assert [line for line in lines if not re.fullmatch(wanted, line)] == []
    assert "://" not in text


def test_every_dependency_is_locked() -> None:
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["otel"]]
    versions = locked("serve.lock", "torch-cuda.lock")
    for item in map(Requirement, wanted):
        assert versions[canonicalize_name(item.name)] in item.specifier, item
    built = locked("build.lock")
    assert all(built[item.name] in item.specifier for item in map(Requirement, PROJECT["build-system"]["requires"]))


@pytest.mark.parametrize("name", LOCKS)
def test_versions_are_those_that_are_tested(name: str) -> None:
    known = pins()
    versions = locked(name)
    assert {package: version for package, version in versions.items() if known.get(package, version) != version} == {}


def test_what_dependencies_need_is_locked_too() -> None:
    """As far as it is installed here: a lock is installed without looking further."""
    versions, known = locked("serve.lock", "torch-cuda.lock"), pins()
    open_ones = [(Requirement(item), "") for item in PROJECT["project"]["dependencies"]]
    open_ones += [(Requirement(item), "") for item in PROJECT["project"]["optional-dependencies"]["otel"]]
    seen: set[tuple[str, str]] = set()
    while open_ones:
        item, extra = open_ones.pop()
        name = canonicalize_name(item.name)
        if item.marker is not None and not item.marker.evaluate({"extra": extra}):
            continue
        assert name in versions, f"{item} is in no lock: run tools/lock.py"
        try:
            found = distribution(item.name)
        except PackageNotFoundError:
            continue
        if found.version != known.get(name):  # another version's needs
            continue
        for asked in ("", *item.extras):
            if (name, asked) not in seen:
                seen.add((name, asked))
                open_ones += [(Requirement(need), asked) for need in found.requires or ()]
    assert len(seen) > 40


def test_torch_is_apart() -> None:
    """Where it comes from is the builder's choice; what else only GPUs need, too."""
    assert not {name for name in locked("serve.lock") if re.match("torch|triton|nvidia|cuda", name)}
    assert locked("torch-cuda.lock")["torch"] == pins()["torch"]


def test_a_line_that_is_no_requirement_is_refused() -> None:
    good = f"a==1 \\\n    --hash=sha256:{'0' * 64}\n"
    assert list(lock.blocks("# a comment\n" + good)) == ["a"]
    assert lock.split(good + good.replace("a==", "nvidia-x==")) == (good, good.replace("a==", "nvidia-x=="))
    with pytest.raises(lock.LockError, match="--index-url"):
        lock.blocks("--index-url https://example.org/simple\n" + good)
    with pytest.raises(lock.LockError, match="b has no hash"):
        lock.blocks(good + "b==2\n")


def test_uv_is_asked_for_public_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is configured to use; versions that were locked stay where they may."""
    uv = tmp_path / "uv"
    uv.write_text(
        f"""#!{sys.executable}
import os, pathlib, sys
output = pathlib.Path(sys.argv[sys.argv.index("--output-file") + 1])
assert output.read_text() == "before"
assert not [name for name in os.environ if name.startswith("UV_")]
output.write_text(" ".join(sys.argv[1:]))
"""
    )
    uv.chmod(0o755)
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "https://example.org/simple")
    asked = lock.compile_lock(str(uv), ["pyproject.toml"], "before")
    assert "--generate-hashes" in asked
    assert "--no-config" in asked
    assert re.findall(r"https?://\S+", asked) == ["https://pypi.org/simple"]
    uv.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(lock.LockError, match="status 3"):
        lock.compile_lock(str(uv), [], "")


def test_the_image_installs_nothing_without_a_hash_but_torch() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = re.findall(r"pip install [^&;\n]+", dockerfile)
    hashed = [line for line in installs if "--require-hashes --no-deps --requirement requirements/" in line]
    others = [line for line in installs if line not in hashed]
    assert len(hashed) == 4
    assert all("torch" in line or line.rstrip().endswith("--prefix /app/octavo .") for line in others), others


def test_without_uv_it_says_what_to_install(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.symlink_to(sys.executable)
    ran = subprocess.run(
        [script, "-I", ROOT / "tools" / "lock.py"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, "[release]" in ran.stderr) == (1, True)
