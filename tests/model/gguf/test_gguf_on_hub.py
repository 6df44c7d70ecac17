"""GGUF files on the hub: which one a name means, what is downloaded, what is said where none or several are meant."""

from __future__ import annotations

import socket
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.errors as errors
import pytest

from cli.main import main
from engine.errors import ModelLoadError, NotDownloadedError
from engine.model import checkpoint
from engine.model import hub as hub_module
from engine.model.gguf.on_hub import named_file

FILES = (
    ".gitattributes", "README.md", "config.json", "mmproj-tiny-Q8_0.gguf", "Tiny-1B.Q4_K_M.gguf", "Tiny-1B.Q4_K_S.gguf",
    "Tiny-1B-Q8_0.gguf", "Q8_1/Tiny-Q8_1.gguf", "Big/Tiny-F16-00001-of-00002.gguf", "Big/Tiny-F16-00002-of-00002.gguf",
    "one-IQ4_NL.gguf", "two-IQ4_NL.gguf",
)  # fmt: skip


class Hub:
    """Stands in for the hub: a repository, and the local cache of it."""

    def __init__(self, cache: Path):
        self.cache = cache
        self.downloads: list[str] = []
        self.problem: Exception | None = None

    def list_repo_files(self, model: str, *, revision: str | None, token: str | None) -> list[str]:
        assert (model, revision, token) == ("org/tiny", "main", "secret")
        if self.problem is not None:
            raise self.problem
        return list(FILES)

    def snapshot_download(self, model: str, *, allow_patterns: list[str], local_files_only: bool, **more: Any) -> str:
        assert (model, more) == ("org/tiny", {"revision": "main", "token": "secret"})
        if local_files_only and not self.cache.is_dir():
            raise errors.LocalEntryNotFoundError("not here")
        for name in FILES if not local_files_only else ():
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                self.downloads.append(name)
                (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
                (self.cache / name).write_bytes(b"GGUF")
        return str(self.cache)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "cache")
    monkeypatch.setattr("engine.model.hub.list_repo_files", made.list_repo_files)
    monkeypatch.setattr("engine.model.hub.snapshot_download", made.snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("engine.model.hub._unreachable_because", lambda: None)
    return made


def find(model: str, *, download: bool = True) -> Path:
    return checkpoint.find(model, "main", "secret", download=download)


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        (":Q4_K_M", "Tiny-1B.Q4_K_M.gguf"),
        (":q4_k_s", "Tiny-1B.Q4_K_S.gguf"),
        (":Q8_0", "Tiny-1B-Q8_0.gguf"),
        (":Q8_1", "Q8_1/Tiny-Q8_1.gguf"),
        ("/*Q4_K_M.gguf", "Tiny-1B.Q4_K_M.gguf"),
        ("/Tiny-1B-Q8_0.gguf", "Tiny-1B-Q8_0.gguf"),
        ("/Q8_1/*.gguf", "Q8_1/Tiny-Q8_1.gguf"),
    ],
)
def test_the_file_that_is_meant_is_downloaded_alone(wanted: str, file: str, hub: Hub) -> None:
    """And found again where the hub is out of reach."""
    assert find(f"org/tiny{wanted}") == hub.cache / file
    assert hub.downloads == [file]
    assert find(f"org/tiny{wanted}", download=False) == hub.cache / file
    hub.problem = OSError("no network")
    assert find(f"org/tiny{wanted}") == hub.cache / file
    assert hub.downloads == [file]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            ":Q2_K",
            r"org/tiny \(revision main\) does not contain the GGUF file Q2_K: "
            r"its GGUF files are Big/.*Tiny-1B\.Q4_K_S\.gguf",
        ),
        (":K_M", "does not contain the GGUF file K_M"),
        ("/mmproj*.gguf", "does not contain the GGUF file mmproj"),
        (
            ":IQ4_NL",
            r"matches several files of org/tiny: one-IQ4_NL\.gguf, two-IQ4_NL\.gguf\. Choose one: org/tiny/one-IQ4",
        ),
        (
            ":F16",
            r"Big/Tiny-F16-00001-of-00002\.gguf in 2 parts\. Download and join them first: llama-gguf-split",
        ),
    ],
)
def test_none_and_several(wanted: str, message: str, hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match=message):
        find(f"org/tiny{wanted}")
    assert not hub.downloads


def response(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None)


def test_a_hub_that_does_not_give_it(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotDownloadedError, match="not in the local cache yet"):
        find("org/tiny:Q8_0", download=False)
    hub.problem = OSError("no network")
    with pytest.raises(ModelLoadError, match="not all in the local cache, and the hub cannot be reached"):
        find("org/tiny:Q8_0")
    hub.problem = errors.RepositoryNotFoundError("gone", response=response(404))
    with pytest.raises(ModelLoadError, match=r"neither a local folder nor a public model on the hub.*HF_TOKEN"):
        find("org/tiny:Q8_0")
    hub.cache.mkdir()
    with pytest.raises(NotDownloadedError, match=r"Q8_0 of org/tiny \(revision main\) is not in the local cache yet"):
        find("org/tiny:Q8_0", download=False)


def test_without_a_network_the_hub_is_not_tried_again_and_again(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client would wait for half a minute."""
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("engine.model.hub.list_repo_files", None)  # not called
    monkeypatch.setattr("engine.model.hub.snapshot_download", hub.snapshot_download)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{bound.getsockname()[1]}")
        caplog.set_level("INFO", "octavo.model")
        with pytest.raises(ModelLoadError, match="not all in the local cache, and the hub cannot be reached"):
            find("org/tiny:Q8_0")
        asked, unreachable = caplog.messages
        assert asked.startswith("org/tiny is not a local path. Asking the hub (http://127.0.0.1:")
        assert "Connection refused" in unreachable
        bound.listen()
        assert hub_module._unreachable_because() is None
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:2")
        assert hub_module._unreachable_because() is None, "the proxy knows"


def test_what_names_a_file_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path below a folder that is there is never looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    assert named_file("models/tiny/x.gguf") == ("models/tiny", "x.gguf")
    (tmp_path / "models").mkdir()
    for model in ("models/tiny/x.gguf", "./org/tiny/x.gguf", "../tiny/x.gguf", "/org/tiny/x.gguf", "x.gguf", "org/tiny",
                  "org/tiny/folder", "~/tiny/x.gguf", "tiny:Q8_0"):  # fmt: skip
        assert named_file(model) is None
    with pytest.raises(ModelLoadError, match=r"The file models/tiny/x\.gguf does not exist"):
        find("models/tiny/x.gguf")
    assert main(["models", "models/tiny/x.gguf"]) == 1
