"""Clients that people use, each in a process of its own against `octavo serve`: the OpenAI client of this and the
previous major version, and LangChain's OpenAI classes over both.

`tools/setup.py test` installs what the virtual environment cannot hold beside its own versions.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from support.service import Service, environment

pytestmark = pytest.mark.slow

CHECKS = Path(__file__).resolve().parent
FOLDERS = Path(sys.prefix) / "clients"


@pytest.fixture
def url(bundled: Callable[..., Service]) -> str:
    """Of `octavo serve` with the bundled model."""
    return bundled().url


def pinned(folder: str, package: str) -> str:
    lines = (CHECKS / f"{folder}.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


@pytest.mark.parametrize(
    ("script", "folders"),
    [
        ("openai_checks.py", ()),
        ("openai_checks.py", ("openai-2",)),
        ("langchain_checks.py", ("langchain",)),
        ("langchain_checks.py", ("openai-2", "langchain")),
    ],
    ids=["openai", "openai-2", "langchain", "langchain-on-openai-2"],
)
def test_client(script: str, folders: tuple[str, ...], url: str) -> None:
    missing = [name for name in folders if not (FOLDERS / name / "octavo-pins.txt").exists()]
    if missing:
        pytest.skip(f"no {', '.join(missing)} in {FOLDERS}: python3 tools/setup.py test installs it")
    # No proxy answers there: whatever asks for another machine than the service's fails.
    quiet = {"HTTPS_PROXY": "http://127.0.0.1:9", "LANGSMITH_TRACING": "false"}
    path = os.pathsep.join(str(FOLDERS / name) for name in folders)
    done = subprocess.run(
        [sys.executable, str(CHECKS / script), url],
        env={**environment(), **quiet, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["openai"] == (pinned("openai-2", "openai") if "openai-2" in folders else openai.__version__)
    functions = [node for node in ast.parse((CHECKS / script).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert set(report["checked"]) == {node.name for node in functions if node.name.startswith("check_")}


def test_the_two_versions_are_two() -> None:
    assert int(openai.__version__.partition(".")[0]) == int(pinned("openai-2", "openai").partition(".")[0]) + 1
