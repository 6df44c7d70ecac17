"""The pages of tasks, run as they are written: servers are started, requests sent, scripts run, in their order, in a
folder that has tiny checkpoints under the names of the pages' models.

Words and numbers are those of random weights, so that answers are compared by their shape; the bundled models answer as
the page says.
"""

from __future__ import annotations

import contextlib
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
import soundfile
from support.doc_pages import assert_same_shape, blocks, commands, read_shown
from support.image_text import picture
from support.service import PATIENCE, ROOT, Service
from support.speech import RATE, noise
from support.task_models import make_named

PAGES = ("vision", "long-documents", "translation", "transcription", "retrieval")


@contextlib.contextmanager
def serving() -> Iterator[Any]:
    """Gives what runs a command: one that serves a model ends the server before it, others are sent to that server."""
    services: list[Service] = []

    def end() -> None:
        for service in services[-1:]:
            assert service.stop() == 0, service.log.read_text()
            assert "Traceback" not in service.log.read_text()

    def run(command: str, shown: str) -> None:
        words = shlex.split(command)
        if words[:2] == ["octavo", "serve"]:
            end()
            log = Path(f"server-{len(services)}.log").resolve()
            services.append(Service("--kv-cache-memory", "64MiB", *words[2:], log=log, folder=Path.cwd()))
            services[-1].wait_ready()
            return
        assert services, f"no server is started before: {command}"
        sent = re.sub(r"(?:http://)?(?:localhost|127\.0\.0\.1):8000", services[-1].url, command)
        assert sent != command, f"it is sent elsewhere: {command}"
        ran = subprocess.run(["bash", "-c", sent], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert ran.returncode == 0, f"{command}\n{ran.stderr}"
        assert ran.stdout.strip(), f"nothing came of: {command}"
        assert '"error"' not in ran.stdout, f"{command}\n{ran.stdout}"
        if shown and "--demo" in services[-1].arguments:
            assert json.loads(ran.stdout) == json.loads(shown)
        elif shown:
            assert_same_shape(read_shown(shown), json.loads(ran.stdout), command)

    try:
        yield run
        end()
    finally:
        for service in services:
            service.process.kill()
            service.process.wait()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("name", PAGES)
def test_a_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    make_named(page, tmp_path)
    picture(0).save("cat.jpg")
    picture(1).save("dog.jpg")
    picture(2).save("line.jpg")
    soundfile.write("sound.wav", noise(2.5), RATE)
    Path("report.txt").write_text("The choir of Bergen sings at noon. The harbour is wide and deep.\n" * 60)
    with serving() as run:
        for language, text in blocks(page):
            if language == "python":
                printed, names = io.StringIO(), dict[str, Any]()
                with contextlib.redirect_stdout(printed):
                    exec(text, names)
                names["llm"].close()
                assert printed.getvalue().strip(), f"nothing is printed by:\n{text}"
            else:
                assert language == "console", f"nothing runs a block of the language {language or 'none'}:\n{text}"
                for command, shown in commands(text):
                    run(command, shown)


SHOWN = (
    """{"data": [{"label": "cat", "probs": [...], "scores": [{"score": 0.9}, ...], "vectors": [[...], ...]}], ...}"""
)
CAME: dict[str, Any] = {"label": "x", "probs": [0.1], "scores": [{"score": 0.2}], "vectors": [[0.1], [0.2]]}


def test_what_is_shown_may_be_cut() -> None:
    assert_same_shape(read_shown(SHOWN), {"data": [CAME], "usage": {}})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"more": 1}, r"answer\.data\[0\] has other fields"),
        ({"label": 3}, r"answer\.data\[0\]\.label is 3, of another kind than 'cat'"),
        ({"scores": []}, r"answer\.data\[0\]\.scores: "),
        ({"scores": [{"score": 1}]}, r"answer\.data\[0\]\.scores\[0\]\.score is 1, not a number with a fraction"),
        ({"vectors": {}}, r"answer\.data\[0\]\.vectors is no list"),
    ],
)
def test_another_shape_is_told(change: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        assert_same_shape(read_shown(SHOWN), {"data": [CAME | change], "usage": {}})


def test_commands_of_a_block() -> None:
    text = "$ octavo serve a\n$ echo 'b\nc' |\n    cat\n{\"d\":\n  1}\n$ curl e \\\n    -s\n"
    assert list(commands(text)) == [
        ("octavo serve a", ""),
        ("echo 'b\nc' |\n    cat", '{"d":\n  1}'),
        ("curl e \\\n    -s", ""),
    ]
