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
from support.image_text import make_image_model
from support.service import Service
from support.speech import write_example

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
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
    """The demo model, open and behind a key; a model that reads images, without the live feed, and one that hears."""
    started: list[Service] = []
    images, speech = make_image_model("clip", tmp_path).path, tmp_path / "speech"
    write_example(speech)
    each = ("--max-num-seqs", "32"), ("--api-key", KEY), (str(images), "--no-enable-cache-map"), (str(speech),)
    try:
        for arguments in each:
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
def test_the_playground_in_a_browser(services: list[Service], tmp_path: Path) -> None:
    service, closed, images, speech = services
    environment = os.environ | {
        "OCTAVO_URL": service.url,
        "OCTAVO_KEY_URL": closed.url,
        "OCTAVO_KEY": KEY,
        "OCTAVO_IMAGES_URL": images.url,
        "OCTAVO_SPEECH_URL": speech.url,
        "OCTAVO_SOUND": str(tmp_path / "speech" / "sound.wav"),
        "PYTHON": sys.executable,
        "CHROMIUM": os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS))),
    }
    command = ["node", "--test", "--test-concurrency=1"]
    run = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "# skipped 0" in run.stdout, run.stdout
