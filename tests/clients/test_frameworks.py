"""Agent frameworks that people use, each in a process of its own against `octavo serve`.

They are large, and installed by hand: docs/clients.md says how.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.service import Service, environment

pytestmark = pytest.mark.slow

CHECKS = Path(__file__).resolve().parent / "frameworks"
PYTHON = Path(sys.prefix) / "clients" / "frameworks" / "bin" / "python"
NODE = Path(sys.prefix) / "clients" / "frameworks-node"


def run(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=environment(), cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", ["llama_index", "instructor", "pydantic_ai", "smolagents", "outlines"])
def test_framework(name: str, bundled: Callable[..., Service]) -> None:
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON} (docs/clients.md)")
    run([str(PYTHON), str(CHECKS / "checks.py"), bundled().url, name])


def test_node(bundled: Callable[..., Service], tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (NODE / "node_modules").exists():
        pytest.skip(f"there is no node, or no {NODE / 'node_modules'} (docs/clients.md)")
    (tmp_path / "node_modules").symlink_to(NODE / "node_modules")
    shutil.copy(CHECKS / "checks.mjs", tmp_path)
    assert json.loads(run([node, "checks.mjs", bundled().url], tmp_path)) == ["runTools", "generateObject", "tools"]
