"""`pytest --without-server`: what is skipped, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

SUITE = {
    "conftest.py": "import sys\n"
    "from support.without_server import pytest_addoption, pytest_make_collect_report, pytest_runtest_makereport\n"
    "sys.modules['fastapi'] = sys.modules['zmq'] = sys.modules['numpy.nowhere'] = None\n",
    "test_http.py": "import fastapi.testclient\ndef test_one(): assert False\n",
    "test_mixed.py": "def test_two(): pass\ndef test_three():\n    import zmq\n",
    "test_core.py": "def test_four():\n    import numpy.nowhere\n",
}


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    for name, text in SUITE.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [*command, *arguments, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_packages_beyond_the_core_are_not_asked_for(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--without-server")
    assert "1 failed, 1 passed, 2 skipped" in said
    assert "needs fastapi" in said
    assert "needs zmq" in said
    assert status == 1  # what the core needs is missing in one
    status, said = run(tmp_path, "--without-server", "-k", "not four")
    assert "1 passed, 2 skipped" in said, said
    assert status == 0


@pytest.mark.slow
def test_without_the_option_a_missing_package_is_an_error(tmp_path: Path) -> None:
    status, said = run(tmp_path, "--continue-on-collection-errors")
    assert "2 failed, 1 passed" in said
    assert "1 error" in said
    assert status == 1
