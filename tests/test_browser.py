"""The playground in a headless Chromium: `tests/browser/`, run by Node against a real service.

`make test-browser` installs what the scripts import; without that, or without Node or Chromium, this is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service import Service

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent / "browser"
KEY = "sk-browser"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str:
    """What there is not, and how to get it; an empty text where all is there."""
    if shutil.which("node") is None:
        return "Node.js is not installed (Debian: apt-get install nodejs npm)"
    if not os.environ.get("CHROMIUM") and not any(map(shutil.which, BROWSERS)):
        return "there is no Chromium (Debian: apt-get install chromium; or name one in CHROMIUM)"
    if not (FOLDER / "node_modules" / "playwright-core").exists():
        return "playwright-core is not installed: make test-browser"
    return ""


@pytest.fixture
def services(tmp_path: Path) -> Iterator[list[Service]]:
    """The demo model, open, behind a key, and without the live feed."""
    started: list[Service] = []
    try:
        for arguments in (("--max-num-seqs", "32"), ("--api-key", KEY), ("--no-enable-cache-map",)):
            service = Service(*arguments, log=tmp_path / f"service-{len(started)}.log")
            started.append(service)
            service.wait_ready()  # one after the other: each has its own time to start
        yield started
    finally:
        for service in started:
            service.process.kill()
            service.process.wait(60)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.timeout(1300)
def test_the_playground_in_a_browser(services: list[Service]) -> None:
    service, closed, silent = services
    environment = os.environ | {
        "OCTAVO_URL": service.url,
        "OCTAVO_KEY_URL": closed.url,
        "OCTAVO_KEY": KEY,
        "OCTAVO_SILENT_URL": silent.url,
        "PYTHON": sys.executable,
        "CHROMIUM": os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS))),
    }
    command = ["node", "--test", "playground.test.mjs"]
    run = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "# skipped 0" in run.stdout, run.stdout
