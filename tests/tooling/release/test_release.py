"""The parts of tools/release.py, and a whole release with build and CycloneDX played by others."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_setup_script import load

ROOT = Path(__file__).resolve().parents[3]
release = load("release")
HASH = f" \\\n    --hash=sha256:{'0' * 64}\n"
LOCK = f"a-b==1{HASH}c==2 ; sys_platform == 'win32'{HASH}"
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def sbom(**versions: str) -> dict[str, Any]:
    return {"components": [{"name": name, "version": version} for name, version in versions.items()]}


def test_an_sbom_has_what_the_lock_has() -> None:
    """Names as their authors write them; what is for other platforms may be absent."""
    assert release.check_sbom(sbom(A_b="1", torch="2.13.0+cpu", pip="23"), LOCK, "2.13.0") == 3
    assert release.check_sbom(sbom(A_b="1", c="2", torch="2.13.0"), LOCK, "2.13.0") == 3


@pytest.mark.parametrize(
    ("versions", "problem"),
    [
        ({"torch": "2.13.0"}, "lacks a-b 1"),
        ({"a-b": "3", "torch": "2.13.0"}, "lacks a-b 1"),
        ({"a-b": "1", "torch": "2.12.0"}, "torch 2.12.0, and constraints.txt 2.13.0"),
        ({"a-b": "1"}, "torch None"),
        ({"a-b": "1", "torch": "2.13.0", "pytest": "9"}, "has pytest, which is in no lock"),
    ],
)
def test_an_sbom_of_something_else_is_refused(versions: dict[str, str], problem: str) -> None:
    with pytest.raises(release.ReleaseError, match=re.escape(problem)):
        release.check_sbom(sbom(**versions), LOCK, "2.13.0")


def test_checksums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"two")
    (tmp_path / "a").write_bytes(b"one")
    release.write_sums(tmp_path)
    release.write_sums(tmp_path)  # not of itself
    one, two = (hashlib.sha256(content).hexdigest() for content in (b"one", b"two"))
    assert (tmp_path / "SHA256SUMS").read_text() == f"{one}  a\n{two}  b\n"


def test_the_changelog_has_this_version() -> None:
    """And keeps to its format: versions with their dates, newest first, below what is not released."""
    release.check_changelog(CHANGELOG, release.project_version(ROOT))
    with pytest.raises(release.ReleaseError, match=r"no section '## \[9\.9\.9\] - YYYY-MM-DD'"):
        release.check_changelog(CHANGELOG, "9.9.9")
    sections = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert sections[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", section) for section in sections[1:])
    kinds = set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed project of version 1.0.0."""
    root = tmp_path / "checkout"
    (root / "requirements").mkdir(parents=True)
    (root / "requirements" / "serve.lock").write_text(LOCK)
    (root / "constraints.txt").write_text("torch==2.13.0\n")
    (root / "pyproject.toml").write_text('[project]\nname = "octavo"\nversion = "1.0.0"\n')
    (root / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.0.0] - 2026-01-02\n")
    git = [
        "git",
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=no",
    ]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "All"]):
        subprocess.run([*git, *words], cwd=root, check=True)
    monkeypatch.setattr(release, "ROOT", root)
    return root


def play(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], said: list[list[str]]) -> None:
    """build and cyclonedx-py, as far as the script sees them."""

    def run(command: Sequence[str | Path], **options: Any) -> None:
        words = [str(word) for word in command]
        said.append(words)
        if "build" in words:
            assert options["env"]["SOURCE_DATE_EPOCH"].isdigit()
            machine = options["env"].get("OCTAVO_KERNELS")
            assert (machine is not None) == ("--wheel" in words)
            wheel = "octavo-1.0.0-py3-none-any.whl" if machine is None else f"octavo-1.0.0-{machine}.whl"
            for name in [wheel] if machine else ["octavo-1.0.0.tar.gz", wheel]:
                (Path(words[-1]) / name).write_bytes(name.encode())
        if "cyclonedx_py" in words:
            Path(words[words.index("-o") + 1]).write_text(json.dumps(document))

    monkeypatch.setattr(release, "run", run)


def test_a_release(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str]] = []
    play(monkeypatch, sbom(a_b="1", torch="2.13.0+cpu"), said)
    monkeypatch.setenv("TORCH_INDEX", "https://example.org/cpu")
    out = tmp_path / "dist"
    assert release.main(["--out", str(out)]) == 0
    names = {"octavo-1.0.0.tar.gz", "octavo-1.0.0-py3-none-any.whl", "octavo-1.0.0.cdx.json"}
    names |= {"octavo-1.0.0-x86_64.whl", "octavo-1.0.0-aarch64.whl"}
    assert {path.name for path in out.iterdir()} == {*names, "SHA256SUMS"}
    assert {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()} == names
    images, _, _, _, torch, others, _ = said
    assert images[1:] == [str(checkout / "tools" / "pin_images.py"), "--check"]
    assert torch[-3:] == ["--index-url", "https://example.org/cpu", "torch==2.13.0"]
    assert others[-3:] == ["--require-hashes", "--requirement", "requirements/serve.lock"]
    assert release.main(["--out", str(out)]) == 1  # which is not empty any more


def test_an_environment_that_is_there_is_described(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[list[str]] = []
    play(monkeypatch, sbom(a_b="1", torch="2.13.0"), said)
    assert release.main(["--out", str(tmp_path / "dist"), "--python", sys.executable, "--skip-images"]) == 0
    assert [words[2] for words in said] == ["build", "build", "build", "cyclonedx_py"]
    assert said[-1][-1] == sys.executable


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda root: (root / "new").write_text("x"), "not committed: ?? new"),
        (lambda root: (root / "pyproject.toml").write_text('[project]\nversion = "2"\n'), "not committed: M pyproject"),
    ],
)
def test_what_is_not_committed_is_not_released(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    change: Any, problem: str,
) -> None:  # fmt: skip
    said: list[list[str]] = []
    play(monkeypatch, sbom(), said)
    change(checkout)
    assert release.main(["--out", str(tmp_path / "dist")]) == 1
    assert problem in capsys.readouterr().err
    assert said == []


def test_a_step_that_fails_ends_it() -> None:
    with pytest.raises(release.ReleaseError, match=r"failed: .* exit"):
        release.run([sys.executable, "-c", "exit(3)"])
