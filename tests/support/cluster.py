"""A local Ray cluster with Serve as a child process, and what is known of it from outside."""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from support.service import PATIENCE, ROOT, children

RAY = Path(sys.prefix) / "clients" / "ray"  # tools/setup.py puts it there
SCRIPT = ROOT / "tests" / "scale" / "serve_cluster.py"


class Cluster:
    """Ray's processes, until `stop`.

    Args:
        log: takes what they write.
    """

    def __init__(self, log: Path):
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.mkdtemp(prefix="octavo-ray-")
        token = Path(self._folder) / "token"  # Ray's ports are open to the network, and take none without it
        token.write_text(secrets.token_hex(32))
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(RAY)]),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # else 15, and other processes of this machine come first
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(self.port), self._folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), env=environment, text=True,
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self._answer()

    def deploy(self, **arguments: Any) -> None:
        """Deploy the application with these arguments, and wait until it serves."""
        self._tell(arguments)

    def delete(self) -> None:
        """Take the application away, and wait until it is gone."""
        self._tell(None)

    def replicas(self) -> list[int]:
        """The processes of replicas, by the title that Ray gives them."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                title, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            except OSError:
                continue
            if title.startswith(b"ray::ServeReplica:default:Octavo") and self._folder.encode() in environment:
                found.append(int(folder.name))
        return sorted(found)

    def engines(self) -> list[int]:
        """The processes of the replicas' engines."""
        return [engine for replica in self.replicas() for engine in children(replica)]

    @staticmethod
    def engines_of(replica: int) -> list[int]:
        """That of one replica."""
        return children(replica)

    def stop(self) -> None:
        """End all of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert answer == {"done": True}, answer

    def _answer(self) -> Any:
        line = self._answers.get(timeout=2 * PATIENCE)
        assert line, f"the cluster has ended: {self.log.read_text()[-3000:]}"
        return json.loads(line)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")
