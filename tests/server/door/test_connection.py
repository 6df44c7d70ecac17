"""Connections of clients that take nothing, or little: TCP, Unix sockets and TLS."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.clock import PatientEventLoop
from support.service import PATIENCE

from server.door.connection import WatchedProtocol

STALL = 0.8  # seconds


class Talker(asyncio.Protocol):
    """Writes without end, as long as it may; what uvicorn's protocols do, in short."""

    def __init__(self) -> None:
        self.app_state: dict[str, Any] = {}
        self.lost = asyncio.Event()
        self.most = 0
        self.paused = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        asyncio.get_running_loop().call_soon(self._talk)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        asyncio.get_running_loop().call_soon(self._talk)

    def connection_lost(self, exc: Exception | None) -> None:
        self.paused = True
        self.lost.set()

    def _talk(self) -> None:
        for _ in range(50):
            if self.paused or self.transport.is_closing():
                return
            self.transport.write(b"x" * 1000)
            self.most = max(self.most, self.transport.get_write_buffer_size())
        asyncio.get_running_loop().call_soon(self._talk)


class Watched(WatchedProtocol, Talker):
    stall_timeout = STALL


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run([*command, "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
@pytest.mark.slow
def test_a_client_that_takes_nothing_is_cut_off_and_a_slow_one_is_not(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server_side = client_side = None
    if kind == "tls":
        server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server_side.load_cert_chain(request.getfixturevalue("certificate"))
        client_side = ssl.create_default_context()
        client_side.check_hostname, client_side.verify_mode = False, ssl.CERT_NONE
    made: list[Watched] = []

    def make() -> Watched:
        made.append(Watched())
        return made[-1]

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
        listener.bind(str(tmp_path / "s") if kind == "unix" else ("127.0.0.1", 0))
        address = listener.getsockname()
        server = await loop.create_server(make, sock=listener, ssl=server_side)

        async def connect() -> socket.socket:
            client = socket.socket(listener.family)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(PATIENCE)
            client.connect(address)
            if client_side is not None:
                client = await asyncio.to_thread(client_side.wrap_socket, client)
            while not made:
                await asyncio.sleep(0.01)
            return client

        try:
            with await connect():
                talker = made.pop()
                await asyncio.wait_for(talker.lost.wait(), PATIENCE)
                assert talker._connection.stalled
                assert talker.most < 200_000

            with await connect() as client:
                talker = made.pop()
                for _ in range(2 * 10):  # twice the limit
                    await asyncio.sleep(STALL / 10)
                    assert await asyncio.to_thread(client.recv, 4000)
                assert not talker.lost.is_set()
            await asyncio.wait_for(talker.lost.wait(), PATIENCE)
            assert not talker._connection.stalled
        finally:
            server.close()
            await server.wait_closed()

    with asyncio.Runner(loop_factory=PatientEventLoop) as runner:
        runner.run(asyncio.wait_for(scenario(), PATIENCE))
