"""Faults of the machine beneath the service: full disks, no shared memory, clocks that jump, little memory, processes
that are stopped, sockets that are gone. Each test sees that the fault was there, and what the service does then."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from support.faults import Gate
from support.service import PATIENCE, ROOT, Service, environment, serving, stopped, wait_for
from test_process import sockets, start, status  # noqa: F401

pytestmark = pytest.mark.slow
Start = Callable[..., Service]
GREEDY = {"prompt": [97, 98], "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def ask(service: Service, max_tokens: int = 5, **body: Any) -> list[int]:
    """The tokens of an answer."""
    body = {**GREEDY, "max_tokens": max_tokens, **body}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def stream(service: Service, max_tokens: int) -> list[int]:
    """The tokens of a stream that ended as it should."""
    body = {**GREEDY, "max_tokens": max_tokens, "stream": True}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
    ids = re.findall(r'"token_ids":\[([\d,]*)\]', re.sub(r'"prompt_token_ids":\[[\d,]*\]', "", answer.text))
    return [int(number) for part in ids for number in part.split(",") if number]


# ---------------------------------------------------------------- other file systems


def can_mount() -> bool:
    """Whether this user may have file systems of a process's own."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/tmp"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


mounting = pytest.mark.skipif(not can_mount(), reason="mounting needs root and unshare(1)")


def mounted(script: str, *arguments: object) -> list[str]:
    """A command that runs a shell script, with its arguments, in a mount namespace of its own, and then becomes the
    command that follows."""
    code = f'set -e\nshift_by={len(arguments)}\n{script}\nshift "$shift_by"\nexec "$@"'
    return ["unshare", "-m", "sh", "-c", code, "sh", *map(str, arguments)]


@mounting
def test_caches_on_a_full_disk(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Kernels and quantised weights cannot be kept: the service says so, and serves."""
    cache, compiler = tmp_path / "cache", tmp_path / "cxx"
    cache.mkdir(mode=0o700)
    # What it compiles is larger than the disk; how long that takes is no matter here.
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\nwhile [ "$1" != -o ]; do shift; done\n'
        'head -c 200000 /dev/zero > "$2" || exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("OCTAVO_NATIVE", raising=False)
    full = mounted(
        'mount -t tmpfs -o size=64k,mode=700 none "$1"\nhead -c 60000 /dev/zero > "$1/filler"; df "$1" > "$2"',
        cache,
        tmp_path / "df",
    )
    service = start("--quantization", "int8", under=full)
    service.wait_ready()
    assert (tmp_path / "df").read_text().splitlines()[1].split()[1] == "64"
    log = service.log.read_text()
    assert re.search(r"No native kernels; torch computes everything, which is slower: .+", log), log
    assert "cannot be kept for the next start: " in log
    assert len(ask(service)) == 5
    assert service.stop() == 0
    assert "Traceback" not in service.log.read_text()


@mounting
def test_a_full_disk_for_temporary_files(start: Start, tmp_path: Path) -> None:  # noqa: F811
    """The engine's socket finds another place."""
    full = mounted(
        'mount -t tmpfs -o nr_inodes=1 none "$TMPDIR"\nif touch "$TMPDIR/x" 2>"$1"; then exit 9; fi', tmp_path / "proof"
    )
    service = start(under=full)
    service.wait_ready()
    assert "No space left on device" in (tmp_path / "proof").read_text()
    assert len(ask(service)) == 5
    assert service.stop() == 0


@mounting
def test_without_shared_memory(start: Start, tmp_path: Path) -> None:  # noqa: F811
    """Neither process needs /dev/shm."""
    proof = tmp_path / "proof"
    without = mounted('mount -t tmpfs -o ro none /dev/shm\nif touch /dev/shm/x 2>"$1"; then exit 9; fi', proof)
    service = start(under=without)
    service.wait_ready()
    assert "Read-only file system" in proof.read_text()
    assert stream(service, 50) == ask(service, 50)
    assert service.stop() == 0


@contextlib.contextmanager
def on_a_socket(model: Path, path: Path, log: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """`octavo serve` on a Unix socket, and a client that keeps a connection; it ends in order."""
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--skip-tokenizer-init", "--uds", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=PATIENCE) as http:

            def is_ready() -> bool:
                assert process.poll() is None, "it has ended"
                with contextlib.suppress(httpx.TransportError):
                    return http.get("/health").status_code == 200
                return False

            wait_for(is_ready, "it did not serve")
            yield process, http
            process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


def test_a_full_disk_for_the_log(tiny: Path, sockets: Path, tmp_path: Path) -> None:  # noqa: F811
    """Lines are lost; requests are not."""
    with open("/dev/full", "wb", buffering=0) as full:
        with pytest.raises(OSError, match="No space left"):
            full.write(b"x")
        with on_a_socket(tiny, tmp_path / "s", full) as (_, http):
            for fields, expected in (({}, 200), ({"stream": True}, 200), ({"max_tokens": -1}, 400)):
                answer = http.post("/v1/completions", json={**GREEDY, "max_tokens": 3, **fields})
                assert answer.status_code == expected


# ---------------------------------------------------------------- clocks

_CLOCK = """
import os, time
real, real_ns, file = time.time, time.time_ns, {file!r}
def offset():
    try:
        return os.stat(file).st_size
    except OSError:
        return 0
time.time = lambda: real() - offset()
time.time_ns = lambda: real_ns() - offset() * 10**9
"""


def test_a_clock_that_jumps(
    start: Start,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Back by days, and forth again, while an answer is made: only dates show it."""
    days = 10 * 24 * 3600
    jump = tmp_path / "offset"
    gate = Gate(tmp_path, monkeypatch, position=300)
    code = tmp_path / "sitecustomize.py"  # in both processes
    code.write_text(_CLOCK.format(file=str(jump)) + code.read_text())
    service = start()
    service.wait_ready()
    engine, alone = service.engine(), ask(service, 600)

    def is_off_by(seconds: float) -> bool:
        date = parsedate_to_datetime(service.get("/health/live").headers["date"]).timestamp()
        return abs(time.time() - seconds - date) < 3600

    def turn(seconds: int) -> None:
        with jump.open("wb") as file:
            file.truncate(seconds)
        wait_for(lambda: is_off_by(seconds), "the clock was not turned")

    gate.close()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, service, 600)
        try:
            service.wait_metric("octavo_num_requests_running", 1)
            turn(days)
            assert status(service, "/health/live") == 200
            turn(0)
            turn(days)
        finally:
            gate.open()
        assert running.result() == alone
        assert ask(service, 600) == alone
    assert service.engine() == engine
    assert 0 <= service.metric("octavo_e2e_request_latency_seconds_sum") < 6 * PATIENCE
    assert service.stop() == 0


# ---------------------------------------------------------------- a memory limit


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of our own with a limit of memory, of version 1 or 2."""
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        made = parent / f"octavo-test-{uuid.uuid4().hex[:8]}"
        try:
            made.mkdir()
        except OSError:
            continue
        if (made / limit).exists():
            break
        made.rmdir()
    else:
        pytest.skip("no control group of memory can be made here")
    yield made
    wait_for(lambda: not (made / "cgroup.procs").read_text(), "processes are left in the group")
    made.rmdir()


def test_a_limit_of_memory(group: Path, tiny: Path, tmp_path: Path) -> None:
    """The cache's size follows from the limit, and load stays below it."""
    limit = 1536 << 20
    name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
    (group / name).write_text(str(limit))
    # `max_num_seqs` of the longest requests would take gigabytes: 256 bytes a token, 65,536 tokens, 128 requests.
    under = ["sh", "-c", 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"', "sh", str(group)]
    with serving(str(tiny), "--skip-tokenizer-init", log=tmp_path / "log", under=under) as service:
        pids = set((group / "cgroup.procs").read_text().split())
        engine = service.engine()
        assert {str(service.process.pid), str(engine)} <= pids
        found = re.search(r"KV cache: .*\((\d+) pages of (\d+) tokens\)", service.log.read_text())
        assert found
        size = int(found[1]) * int(found[2]) * 256
        assert size < limit / 4
        with ThreadPoolExecutor(16) as pool:
            prompts = [[97 + number] * 8000 for number in range(24)]
            answers = list(pool.map(lambda prompt: len(ask(service, 64, prompt=prompt)), prompts))
        assert answers == [64] * 24
        assert service.engine() == engine
        assert service.metric("octavo_engine_restarts_total") == 0


# ---------------------------------------------------------------- processes that are stopped


def test_an_engine_that_is_stopped_for_a_while(start: Start) -> None:  # noqa: F811
    """/health/live says so, requests wait; when it goes on, all of them are answered as if nothing had been."""
    service = start(
        "--liveness-timeout", "10", "--max-num-seqs", "4"
    )  # an engine without progress is given up after 30 s
    service.wait_ready()
    engine, alone = service.engine(), ask(service, 200)
    with ThreadPoolExecutor(6) as pool:
        with stopped(engine):
            running: list[Future[list[int]]] = [
                pool.submit(stream if number % 2 else ask, service, 200) for number in range(6)
            ]
            wait_for(lambda: status(service, "/health/live") == 503, "/health/live did not see it")
            assert status(service, "/health/ready") == 200
            assert not any(answer.done() for answer in running)
        assert [answer.result() for answer in running] == [alone] * 6
    assert service.engine() == engine
    assert status(service, "/health/live") == 200
    assert service.stop() == 0


def test_a_service_that_is_stopped_for_a_while(start: Start) -> None:  # noqa: F811
    """Longer than an engine may make no progress: the engine is not blamed, and streams lack nothing."""
    service = start("--liveness-timeout", "1")  # an engine without progress is given up after 3 s
    service.wait_ready()
    engine, alone = service.engine(), ask(service, 4000)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(stream, service, 4000) for _ in range(3)]
        service.wait_metric("octavo_num_requests_running", 3)
        before = service.metric("octavo_generation_tokens_total")
        with stopped(service.process.pid):
            time.sleep(5)  # the fault itself
        assert service.metric("octavo_generation_tokens_total") > before
        assert [answer.result() for answer in running] == [alone] * 3
    assert service.engine() == engine
    assert service.metric("octavo_engine_restarts_total") == 0
    assert service.stop() == 0


# ---------------------------------------------------------------- sockets that are gone


def test_the_engines_socket_is_gone(start: Start, sockets: Path) -> None:  # noqa: F811
    """As when temporary files are cleaned up: the engine goes on, and its successor gets another folder."""
    service = start()
    service.wait_ready()
    (folder,) = sockets.glob("octavo-ipc-*")
    shutil.rmtree(folder)
    assert len(ask(service)) == 5
    engine = service.engine()
    folder.mkdir(mode=0o777)  # another user's, for all that is known
    folder.chmod(0o777)
    os.kill(engine, 9)
    service.wait_metric("octavo_engine_restarts_total", 1)
    assert len(ask(service)) == 5
    (another,) = set(sockets.glob("octavo-ipc-*")) - {folder}
    assert stat.S_IMODE(another.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []
    folder.rmdir()
    assert "The folder of the engine's socket can no longer be used" in service.log.read_text()
    assert service.stop() == 0
    assert not another.exists()


def test_the_services_socket_is_gone(tiny: Path, sockets: Path, tmp_path: Path) -> None:  # noqa: F811
    """Open connections are served; the log says once that there can be no others."""
    path, log = tmp_path / "s", tmp_path / "log"
    with log.open("wb") as output, on_a_socket(tiny, path, output) as (_, http):
        path.unlink()
        with pytest.raises(httpx.ConnectError):
            httpx.Client(transport=httpx.HTTPTransport(uds=str(path))).get("http://x/health")
        assert http.post("/v1/completions", json={**GREEDY, "max_tokens": 3}).status_code == 200
        wait_for(lambda: f"{path} has been removed or replaced" in log.read_text(), "the log does not say it")
        assert http.get("/health").status_code == 200
    assert log.read_text().count("has been removed or replaced") == 1
