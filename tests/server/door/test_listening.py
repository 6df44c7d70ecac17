"""Ports, Unix sockets, TLS and path prefixes: what is refused, and the service behind all of them at once."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_client import FakeClient, byte_tokenizer, say
from support.service import PATIENCE

from engine import EngineConfig
from server import run
from server.app import create_app
from server.config.settings import ServerSettings
from server.door import loading
from server.door.listening import Listener, StartupError, bind, bind_path, check_certificate, is_public, url
from server.door.loading import answering_while_loading
from server.door.root_path import RootPath

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
PASSWORD = "open sesame"


@pytest.mark.parametrize("tls", [False, True])
def test_connections_are_answered_while_the_model_loads(
    tls: bool, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """With 503, whatever they ask and send; afterwards the socket listens on for the service."""
    given: dict[str, str] = {}
    if tls:
        pem = request.getfixturevalue("pem")
        given = {"ssl_certfile": str(pem / "cert.pem"), "ssl_keyfile": str(pem / "key.pem")}
    settings = ServerSettings(port=0, **given)  # type: ignore[arg-type]
    with Listener(settings) as listener, httpx.Client(verify=False, timeout=PATIENCE) as client:
        with answering_while_loading(listener.socket, settings, "some/model") as tell:
            answer = client.get(f"{listener.url}/health/ready")
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
            assert answer.json()["error"]["code"] == "loading"
            assert "some/model is loading" in answer.json()["error"]["message"]
            assert answer.json()["error"]["percent"] is None
            tell(42)
            answer = client.get(f"{listener.url}/health/ready")
            assert answer.json()["error"]["percent"] == 42
            assert "some/model is loading (42% of its weights)" in answer.json()["error"]["message"]
            assert client.head(listener.url).headers["Content-Length"] == answer.headers["Content-Length"]
            assert client.post(f"{listener.url}/v1/completions", content=b"a" * 500_000).status_code == 503
            silent = socket.create_connection(listener.socket.getsockname())  # holds nothing up
            silent.sendall(b"GET")
        silent.close()
        assert not caplog.records, "asyncio logs a task that was cancelled"
        later = socket.create_connection(listener.socket.getsockname())
        listener.socket.settimeout(PATIENCE)
        while listener.socket.accept()[1] != later.getsockname():  # the silent one's may have waited, too
            pass
        later.close()


def test_few_connections_are_open_while_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_MOST_CONNECTIONS", 2)
    settings = ServerSettings(port=0, api_key=("k",))
    with Listener(settings) as listener, answering_while_loading(listener.socket, settings, "some/model"):
        address = listener.socket.getsockname()
        first, second, third = (socket.create_connection(address, PATIENCE) for _ in range(3))
        assert third.recv(1) == b""
        second.sendall(b"GET / HTTP/1.1\r\n\r\n")
        answer = second.makefile("rb").read().decode()
        assert "503 Service Unavailable" in answer
        assert "some/model" not in answer, "without a key"
        for one in (first, second, third):
            one.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="octavo-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem for localhost, its key.pem, the same key under a password, and another key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("pem")
    commands = [
        "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost",
        "rsa -aes256 -passout env:PASSWORD -in key.pem -out locked.pem",
        "genrsa -out other.pem 2048",
    ]
    for command in commands:
        environ = {**os.environ, "PASSWORD": PASSWORD}
        subprocess.run(["openssl", *command.split()], cwd=folder, env=environ, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return folder


# ---------------------------------------------------------------- ports


def test_a_taken_port_is_one_clear_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: .*--port"):
            bind("127.0.0.1", port)
    for host in ("no-such-host.invalid", "a" * 80 + ".invalid"):
        with pytest.raises(StartupError, match=host):
            bind(host, 0)


def test_the_address_is_shown_as_it_can_be_opened() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url(listener) == f"http://127.0.0.1:{port}"
        assert url(listener, tls=True) == f"https://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("host", "public"),
    [("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True),
     ("192.0.2.7", True), ("no-such-host.invalid", True)],
)  # fmt: skip
def test_what_other_machines_can_reach(host: str, public: bool) -> None:
    assert is_public(ServerSettings(host=host)) is public
    assert not is_public(ServerSettings(host=host, uds="/run/o.sock"))


class _EnoughError(Exception):
    pass


@pytest.mark.parametrize(
    ("settings", "warned"),
    [({"host": "0.0.0.0"}, True), ({"host": "127.0.0.1"}, False), ({"host": "0.0.0.0", "api_key": "k"}, False),
     ({"host": "0.0.0.0", "api_key_file": "keys"}, False)],
)  # fmt: skip
def test_an_open_door_is_pointed_out(
    settings: dict[str, str], warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop_here(*arguments: object) -> None:
        raise _EnoughError

    monkeypatch.setattr(run, "serve_alone", stop_here)
    monkeypatch.setattr(run, "_set_up_logging", lambda settings: None)
    with caplog.at_level(logging.WARNING), pytest.raises(_EnoughError):
        run.serve(EngineConfig(model="m"), ServerSettings(port=0, **settings), "0", notes=["first of all"])
    assert caplog.messages[0] == "first of all"
    assert any("without an API key" in message for message in caplog.messages) is warned


# ---------------------------------------------------------------- Unix sockets


def test_a_unix_socket_is_private_and_leaves_nothing(folder: Path) -> None:
    path = folder / "o.sock"
    with Listener(ServerSettings(uds=str(path))) as listener:
        assert listener.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    listener.close()


def test_the_file_of_a_dead_service_is_replaced(folder: Path) -> None:
    path = folder / "o.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    with bind_path(path) as alive:
        alive.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


@pytest.mark.parametrize("listening", [True, False])
def test_the_file_of_a_living_service_is_not(listening: bool, folder: Path) -> None:
    if not listening and not Path("/proc/net/unix").exists():
        pytest.skip("this system does not tell")
    path = folder / "o.sock"
    with bind_path(path) as first:
        if listening:
            first.listen()
        with pytest.raises(StartupError, match=r"another process is using it.*--uds"):
            bind_path(path)
        assert path.exists()


def test_a_socket_that_another_service_has_replaced_stays(folder: Path) -> None:
    path = folder / "o.sock"
    with Listener(ServerSettings(uds=str(path))) as listener:
        assert listener.is_reachable()
        path.unlink()
        assert not listener.is_reachable()
        (folder / "keeps-the-inode").touch()
        with bind_path(path):
            pass
        assert not listener.is_reachable()
    assert path.exists()


def test_paths_that_cannot_be_are_clear_sentences(folder: Path) -> None:
    (folder / "file").write_text("precious")
    with pytest.raises(StartupError, match="exists and is not a socket"):
        bind_path(folder / "file")
    assert (folder / "file").read_text() == "precious"
    with pytest.raises(StartupError, match=r"may have at most 103 bytes, this one has 1\d\d"):
        bind_path(folder / ("x" * 100))
    with pytest.raises(StartupError, match=r"No such file or directory.*--uds"):
        bind_path(folder / "absent" / "o.sock")


# ---------------------------------------------------------------- TLS


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("absent.pem", None, None), r"cannot read \S+absent\.pem: No such.*--ssl-certfile \(OCTAVO_SSL_CERTFILE\)"),
        (("cert.pem", "absent.pem", None), r"cannot read \S+absent\.pem.*--ssl-keyfile"),
        (("cert.pem", "other.pem", None), "does not belong to the certificate"),
        (("cert.pem", None, None), "name the key's file with --ssl-keyfile"),
        (("key.pem", "cert.pem", None), "Correct --ssl-certfile, or correct --ssl-keyfile"),
        (("cert.pem", "locked.pem", None), "is encrypted. Give --ssl-keyfile-password"),
        (("cert.pem", "locked.pem", "wrong-word"), "the password does not open the private key"),
    ],
)  # fmt: skip
def test_a_certificate_that_cannot_be_used(
    files: tuple[str, str | None, str | None], said: str, pem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key, password = files
    settings = ServerSettings(
        ssl_certfile=str(pem / cert), ssl_keyfile=key and str(pem / key), ssl_keyfile_password=password
    )
    with pytest.raises(StartupError, match=said) as refused:
        check_certificate(settings)
    assert "wrong-word" not in str(refused.value)
    assert "\n" not in str(refused.value)
    # Before anything slow is tried.
    monkeypatch.setattr(run, "serve_alone", lambda *arguments: pytest.fail("the service was started"))
    monkeypatch.setattr(run, "_set_up_logging", lambda settings: None)
    with pytest.raises(StartupError, match=said):
        run.serve(EngineConfig(model="m"), settings, "0")


def test_certificates_that_can_be_used(pem: Path) -> None:
    check_certificate(ServerSettings(ssl_certfile=str(pem / "both.pem")))
    check_certificate(ServerSettings(ssl_certfile=str(pem / "cert.pem"), ssl_keyfile=str(pem / "key.pem")))
    check_certificate(
        ServerSettings(
            ssl_certfile=str(pem / "cert.pem"), ssl_keyfile=str(pem / "locked.pem"), ssl_keyfile_password=PASSWORD
        )
    )


# ---------------------------------------------------------------- behind a proxy


@pytest.mark.parametrize("asked", ["/docs", "/llm/docs"])
def test_a_prefix_whether_the_proxy_takes_it_off_or_not(asked: str) -> None:
    app = create_app(FakeClient(lambda *request: say(request[0], ["x"], request[2])), byte_tokenizer(), "m")

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(RootPath(app, "/llm"))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get(path)

    page = asyncio.run(get(asked))
    assert page.status_code == 200
    found = re.search(r"url: '([^']+)'", page.text)
    assert found
    assert found[1] == "/llm/openapi.json"
    schema = asyncio.run(get(found[1]))
    assert schema.json()["servers"] == [{"url": "/llm"}]
    prefix = asked.removesuffix("/docs")
    assert asyncio.run(get(f"{prefix}/v1/models")).json()["data"][0]["id"] == "m"
    assert asyncio.run(get(f"{prefix}/llmx")).status_code == 404


# ---------------------------------------------------------------- all of it


def test_https_over_a_unix_socket_under_a_prefix(pem: Path, folder: Path) -> None:
    path, log = folder / "o.sock", folder / "log"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    settings = folder / "octavo.yaml"
    settings.write_text(f"uds: {path}\nssl-certfile: {pem / 'cert.pem'}\nssl_keyfile: {pem / 'locked.pem'}\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    environ |= {
        "OCTAVO_SSL_KEYFILE_PASSWORD": PASSWORD, "OCTAVO_CONFIG": str(settings), "OCTAVO_SHOW_PROGRES": "false",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "octavo", "serve", "--root-path", "/llm", "--max-num-seqs", "4"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while f"Serving octavo-demo on unix:{path}" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        transport = httpx.HTTPTransport(uds=str(path), verify=ssl.create_default_context(cafile=str(pem / "cert.pem")))
        with httpx.Client(transport=transport, base_url="https://localhost/llm", timeout=60) as http:
            answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3
            assert "/llm/openapi.json" in http.get("/docs").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert sorted(file.name for file in folder.iterdir()) == ["log", "octavo.yaml"], "something was left behind"
    text = log.read_text()
    assert "Traceback" not in text
    assert PASSWORD not in text
    assert "OCTAVO_SHOW_PROGRES is an unknown setting and is ignored; did you mean OCTAVO_SHOW_PROGRESS?" in text
    assert re.search(
        r"Model octavo-demo from \S+: float32 on cpu, up to 512 tokens for prompt and answer together", text
    )
    assert re.search(
        r"KV cache: 2048 tokens in float32 \(128 pages of 16 tokens\)\. It holds 4\.0 requests of 512 tokens\. "
        r"At most 4 requests run at the same time\.",
        text,
    )


def test_the_service_raises_its_file_limit() -> None:
    """A shell's limit would make every connection beyond it fail."""
    code = (
        "import resource\nfrom server.door.listening import raise_file_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\nraise_file_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "(200, 200)", done.stderr
