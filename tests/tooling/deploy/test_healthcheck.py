"""The health check of the container: where it asks, and what it makes of the answer."""

from __future__ import annotations

import shutil
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cli.healthcheck import Address, find, flags, main, serving_arguments

ROOT = Path(__file__).resolve().parents[3]


# ---------------------------------------------------------------- where it asks


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ([], {}, Address()),
        ([], {"OCTAVO_HOST": "0.0.0.0", "OCTAVO_PORT": "9000"}, Address(port=9000)),
        ([], {"OCTAVO_HOST": "::"}, Address(host="::1")),
        ([], {"OCTAVO_HOST": "10.1.2.3"}, Address(host="10.1.2.3")),
        ([], {"OCTAVO_HOST": "", "OCTAVO_PORT": "", "OCTAVO_UDS": ""}, Address()),
        ([], {"OCTAVO_SSL_CERTFILE": "/c.pem"}, Address(tls=True)),
        ([], {"OCTAVO_UDS": "/run/octavo.sock", "OCTAVO_PORT": "9000"}, Address(port=0, uds="/run/octavo.sock")),
        (["--port", "9001"], {"OCTAVO_PORT": "9000"}, Address(port=9001)),
        (["--max-num-seqs", "4", "--port=9001", "model"], {}, Address(port=9001)),
        (["--port", "1", "--port", "2"], {}, Address(port=2)),
        (["--ssl-certfile=/c.pem", "--uds", "/s"], {}, Address(port=0, uds="/s", tls=True)),
        (["--uds", "null"], {"OCTAVO_UDS": "/s"}, Address()),
        (["--port"], {}, Address()),
        ([], {"OCTAVO_PORT": "tcp://10.0.0.1:8000"}, Address()),  # Kubernetes, for a Service called octavo
    ],
)
def test_flags_are_stronger_than_variables(given: list[str], environ: dict[str, str], expected: Address) -> None:
    assert find(flags(given), environ) == expected


def test_the_file_of_settings_is_weakest(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("port: 9002\nhost: 10.0.0.1\nssl-certfile: /c.pem\nmax_num_seqs: 4\nuds:\n")
    assert find({}, {"OCTAVO_CONFIG": str(file)}) == Address("10.0.0.1", 9002, tls=True)
    assert find(flags(["--config", str(file), "--port", "9003"]), {"OCTAVO_HOST": "10.0.0.2"}) == Address(
        "10.0.0.2", 9003, tls=True
    )
    file.write_text("")
    assert find({}, {"OCTAVO_CONFIG": str(file)}) == Address()


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "80a"])
def test_a_port_that_cannot_be_asked(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", port], {}) == 1
    assert "OCTAVO_PORT" in capsys.readouterr().err


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "octavo.yaml"
    assert main(["--config", str(file)], {}) == 1
    file.write_text("port: [\n")
    assert main(["--config", str(file)], {}) == 1
    missing, broken = capsys.readouterr().err.splitlines()
    assert "OCTAVO_PORT" in missing
    assert "is not valid YAML" in broken


def test_the_running_services_own_flags_are_found(tmp_path: Path) -> None:
    def process(number: int, *words: str) -> None:
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())

    assert serving_arguments(tmp_path) == []
    process(12, "python3", "-m", "engine.process.main")
    process(11, "cat", "serve", "--port", "1")
    (tmp_path / "3").mkdir()  # a process that has just ended
    assert serving_arguments(tmp_path) == []
    process(10, "/app/venv/bin/python3", "/app/venv/bin/octavo", "serve", "--port", "9000")
    assert flags(serving_arguments(tmp_path)) == {"port": "9000"}
    process(1, "/sbin/docker-init", "--", "octavo", "serve", "/models/x", "--port", "9001")
    assert flags(serving_arguments(tmp_path)) == {"port": "9001"}
    assert serving_arguments(tmp_path / "none") == []


# ---------------------------------------------------------------- what it makes of the answer


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine answers late."""
    monkeypatch.setattr("cli.healthcheck.problem.__defaults__", (120.0,))


class Health(BaseHTTPRequestHandler):
    """Answers /health with the server's status, and remembers what was asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        body = b'{"error": {"message": "draining"}}'
        self.send_response(self.server.status if self.path == "/health" else 404)  # type: ignore[attr-defined]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing is to be said."""


class Server(socketserver.ThreadingTCPServer):
    """On loopback.

    Attributes:
        status: of the answer.
        asked: the paths so far.
    """

    allow_reuse_address = True
    daemon_threads = True
    status = 200

    def __init__(self, address: object, family: int = socket.AF_INET):
        self.address_family = family
        self.asked: list[str] = []
        super().__init__(address, Health)  # type: ignore[arg-type]


@contextmanager
def running(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_ready_and_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with running(Server(("127.0.0.1", 0))) as server:
        port = str(server.server_address[1])
        # A proxy is for the outside.
        environ = {"OCTAVO_HOST": "0.0.0.0", "OCTAVO_PORT": port, "http_proxy": "http://127.0.0.1:1"}
        assert main(["--port", port], environ) == 0
        assert capsys.readouterr().err == ""
        server.status = 503
        assert main(["--port", port], environ) == 1
        assert "/health answered 503" in (text := capsys.readouterr().err)
        assert "draining" in text
        assert text.count("\n") == 1
        assert server.asked == ["/health", "/health"]


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:  # bound, but not listening: as a service that loads its model
        bound.bind(("127.0.0.1", 0))
        assert main(["--port", str(bound.getsockname()[1])], {}) == 1
    assert "refused" in capsys.readouterr().err


def test_a_service_that_hangs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cli.healthcheck.problem.__defaults__", (0.2,))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert main(["--port", str(silent.getsockname()[1])], {}) == 1
    assert "timed out" in capsys.readouterr().err


def test_something_else_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def greet() -> None:
            connection, _ = other.accept()
            connection.recv(1000)
            connection.sendall(b"220 mail\r\n")
            connection.close()

        thread = threading.Thread(target=greet)
        thread.start()
        assert main(["--port", str(other.getsockname()[1])], {}) == 1
        thread.join()
    assert "not ready" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets here")
def test_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with running(Server(path, socket.AF_UNIX)) as server:
        assert main(["--uds", path], {}) == 0
        assert server.asked == ["/health"]
    assert main(["--uds", path], {}) == 1


def test_tls_with_a_certificate_for_another_name(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=llm.example.org"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server(("127.0.0.1", 0))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with running(server):
        port = str(server.server_address[1])
        assert main(["--port", port], {"OCTAVO_SSL_CERTFILE": str(certificate)}) == 0
        assert server.asked == ["/health"]
        assert main(["--port", port], {}) == 1, "plain HTTP"


def test_as_a_command_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, cli.healthcheck as check; code = check.main(['--port', '1'], {}); "
        "print(code, *({'engine', 'torch', 'pydantic', 'uvicorn', 'starlette', 'yaml', 'asyncio'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1"]
    assert "refused" in ran.stderr
