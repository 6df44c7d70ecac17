"""What an installed package is: all of it under one name, so that it stands beside anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from support.checkpoints import Checkpoint

import engine
import octavo

ROOT = Path(__file__).resolve().parents[3]
OURS = ("octavo", "engine", "server", "cli")


def layout() -> Any:
    spec = spec_from_file_location("octavo_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- in a checkout


def test_names_in_the_package_are_the_same_modules() -> None:
    from octavo import SamplingParams
    from octavo.engine.interface import values
    from octavo.server.config.settings import DEMO_MODEL

    assert octavo.engine is engine
    assert SamplingParams is engine.SamplingParams
    assert values is sys.modules["engine.interface.values"]
    assert values.__name__ == values.__spec__.name == "engine.interface.values"
    assert DEMO_MODEL is sys.modules["server.config.settings"].DEMO_MODEL


@pytest.mark.parametrize("name", ["nothing", "import_module_from", "interface"])
def test_the_package_has_what_the_engine_offers_and_no_more(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'octavo' has no attribute '{name}'"):
        getattr(octavo, name)


def test_modules_that_are_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=re.escape("engine.nothing")):
        __import__("octavo.engine.nothing")
    with pytest.raises(ModuleNotFoundError, match=re.escape("octavo.tests")):
        __import__("octavo.tests")


# ---------------------------------------------------------------- how a wheel's modules are made


def test_imports_name_the_outer_package() -> None:
    source = (
        '"""from engine import x"""\nfrom engine import a\nfrom server.b import (\n    c,\n)\nfrom enginery import d\n'
        "from . import engine\nimport numpy\ndef f():\n    if f:\n        from cli.e import engine as g\n"
    )
    assert layout().moved(source, "m.py") == (
        '"""from engine import x"""\nfrom octavo.engine import a\nfrom octavo.server.b import (\n    c,\n)\n'
        "from enginery import d\nfrom . import engine\nimport numpy\ndef f():\n    if f:\n"
        "        from octavo.cli.e import engine as g\n"
    )


@pytest.mark.parametrize("line", ["import engine", "import numpy, server.app", "import engine.llm as llm"])
def test_other_imports_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"m\.py:2: write 'from package import module'"):
        layout().moved(f"import os\n{line}\n", "m.py")


@pytest.mark.parametrize(
    ("kernels", "tag"), [("x86_64", "manylinux_2_28_x86_64"), ("aarch64", "manylinux_2_28_aarch64")]
)
def test_kernels_are_for_a_kind_of_machine(kernels: str, tag: str) -> None:
    assert layout().platform_tag(kernels) == tag


def test_other_machines_have_no_compiled_kernels() -> None:
    with pytest.raises(
        SystemExit, match="OCTAVO_KERNELS is 'sparc'; kernels are compiled for x86_64, aarch64, on Linux"
    ):
        layout().platform_tag("sparc")


# ---------------------------------------------------------------- a wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel's content, and packages of others that have our inner names."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in OURS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    made = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    with ZipFile(wheel) as content:
        content.extractall(folder)
    for name in OURS[1:]:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('another package')\n")
    return folder


def ran(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=installed.parent, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_wheel_has_all_modules_under_one_name(installed: Path) -> None:
    """And all other files; none is for checkouts alone."""
    found = {str(path.relative_to(installed / "octavo")) for path in (installed / "octavo").rglob("*.*")}
    own = {"__init__.py", "__main__.py", "dependencies.py"}  # of octavo/ itself
    names = [name for name in OURS[1:] for _ in (ROOT / name).rglob("*.py")]
    assert len([name for name in found if name.endswith(".py")]) == len(names) + len(own)
    tracked = subprocess.run(["git", "ls-files", *OURS[1:]], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:
        assert found - own == {name for name in tracked.stdout.split("\n") if "." in name}
    assert [path.suffix for path in installed.iterdir() if path.name not in OURS] == [".dist-info"]


@pytest.mark.slow
def test_a_wheel_computes_beside_packages_of_the_same_names(
    installed: Path, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """In its processes as well: the engine's, and the one that the command line starts to talk with."""
    program = (
        "import sys; from octavo import LLM, SamplingParams; "
        f"llm = LLM({str(checkpoint('llama-grouped').path)!r}, device='cpu', show_progress=False); "
        "print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].token_ids); "
        "assert 'engine' not in sys.modules"
    )
    found = ran(installed, "-c", program)
    assert found.returncode == 0, found.stderr
    assert len(eval(found.stdout)) == 4
    said = ran(installed, "-m", "octavo", "complete", "Once upon", "--max-tokens", "3")
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
    health = ran(installed, "-m", "octavo.cli.healthcheck", "--port", "1")
    assert health.returncode == 1
    assert "not ready: 127.0.0.1, port 1" in health.stdout + health.stderr
