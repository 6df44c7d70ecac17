"""Images by digest: that all are, and that the tool which renews the digests asks a registry as registries want it."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_setup_script import load

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64
pin_images = load("pin_images")


@pytest.mark.parametrize("name", pin_images.FILES)
def test_every_image_has_a_digest(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    found = pin_images.images_in(text)
    assert None not in found.values()
    # And none was overlooked: what is not found is built here, or an earlier stage.
    images = re.findall(r"^\s*image:\s*(\S+)", text, re.MULTILINE)
    assert all(image.partition("@")[0] in found or image.startswith("octavo:") for image in images)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)) | {"${BASE_IMAGE}"}
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) <= stages
    assert "# syntax=" not in text, "the frontend would be an image without a digest"


@pytest.mark.parametrize(
    ("text", "registry", "name", "tag"),
    [
        ("python:3.12", "registry-1.docker.io", "library/python", "3.12"),
        ("prom/prometheus:v3.5.0", "registry-1.docker.io", "prom/prometheus", "v3.5.0"),
        ("ghcr.io/a/b/c:1", "ghcr.io", "a/b/c", "1"),
        ("127.0.0.1:5000/a:1", "127.0.0.1:5000", "a", "1"),
    ],
)
def test_names_are_read_as_docker_reads_them(text: str, registry: str, name: str, tag: str) -> None:
    assert pin_images.Image.parse(text) == pin_images.Image(registry, name, tag)


class Registry(ThreadingHTTPServer):
    """Tells the digest of `team/thing:1` to those with a token.

    Attributes:
        asked: the requests' lines.
    """

    asked: list[str]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            server.asked.append(self.requestline)
            if self.headers.get("Authorization") != "Bearer for-reading":
                self.send_response(401)
                self.send_header("WWW-Authenticate", f'Bearer realm="http://{host}/token",service="here",scope="x"')
            elif self.path == "/v2/team/thing/manifests/1" and "oci.image.index" in self.headers["Accept"]:
                self.send_response(200)
                self.send_header("Docker-Content-Digest", NEW)
            else:
                self.send_response(404)
            self.end_headers()

        def do_GET(self) -> None:
            server.asked.append(self.requestline)
            body = json.dumps({"token": "for-reading"}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with Registry(("127.0.0.1", 0), Handler) as server:
        server.asked = []
        host = f"127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("OCTAVO_INSECURE_REGISTRIES", host)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def files(folder: Path, host: str, tag: str = "1") -> Path:
    """Container files that name the registry's image, once with an old digest."""
    (folder / "Dockerfile").write_text(f"ARG BASE_IMAGE={host}/team/thing:{tag}@{OLD}\nFROM ${{BASE_IMAGE}} AS x\n")
    (folder / "docker-compose.yml").write_text(f"    image: octavo:latest\n    image: {host}/team/thing:{tag}\n")
    (folder / "docker-compose.gpu.yml").write_text("    image: octavo:cuda\n")
    return folder


def test_digests_are_renewed(registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = f"127.0.0.1:{registry.server_address[1]}"
    files(tmp_path, host)
    assert pin_images.main(["--check"], tmp_path) == 1
    assert OLD in (tmp_path / "Dockerfile").read_text()
    assert f"was {OLD}, is {NEW}" in capsys.readouterr().out
    assert pin_images.main([], tmp_path) == 0
    assert (tmp_path / "Dockerfile").read_text().startswith(f"ARG BASE_IMAGE={host}/team/thing:1@{NEW}\nFROM")
    assert (
        f"    image: octavo:latest\n    image: {host}/team/thing:1@{NEW}\n"
        in (tmp_path / "docker-compose.yml").read_text()
    )
    assert (tmp_path / "docker-compose.gpu.yml").read_text() == "    image: octavo:cuda\n"
    assert pin_images.main(["--check"], tmp_path) == 0
    assert registry.asked[1] == "GET /token?scope=repository%3Ateam%2Fthing%3Apull&service=here HTTP/1.1"


def test_a_tag_that_is_not_there_changes_nothing(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path, f"127.0.0.1:{registry.server_address[1]}", tag="9")
    before = shutil.copytree(tmp_path, tmp_path / "before")
    assert pin_images.main([], tmp_path) == 1
    assert "/v2/team/thing/manifests/9: status 404" in capsys.readouterr().err
    assert all((tmp_path / name).read_text() == (before / name).read_text() for name in pin_images.FILES)


def test_a_registry_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files(tmp_path, "registry.invalid")
    assert pin_images.main(["--check"], tmp_path) == 1
    assert "pin_images: https://registry.invalid/v2/team/thing/manifests/1" in capsys.readouterr().err
