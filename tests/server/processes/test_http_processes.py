"""Services with two processes that answer HTTP, over real connections: their counts are one service's, and what one of
them loses is its own."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.service import PATIENCE, Service, children, is_running, stopped, wait_for

pytestmark = pytest.mark.slow

TWO = ("--api-server-count", "2", "--kv-cache-memory", "64MiB")
STORY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Any]:
    """Starts services; what is left of them is killed at the end."""
    running: list[Service] = []

    def start(*arguments: str) -> Service:
        running.append(Service(*TWO, *arguments, log=tmp_path / f"{len(running)}.log"))
        running[-1].wait_ready()
        return running[-1]

    yield start
    for service in running:
        service.process.kill()
        service.process.wait()
        assert "Traceback" not in service.log.read_text()


def fronts(service: Service) -> list[int]:
    """Its processes that answer HTTP."""
    return children(service.process.pid, "server.processes.front")


def sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def server_of(service: Service, client: httpx.Response) -> int:
    """The process that has the other end of an answer's connection."""
    stream = client.extensions["network_stream"]
    port = stream.get_extra_info("client_addr")[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port and fields[9] != "0":
            owner = [pid for pid in fronts(service) if fields[9] in sockets(pid)]
            if owner:
                return owner[0]
    raise AssertionError(f"port {port} belongs to no process of the service")


class Streams:
    """Answers that are streamed, each over a connection of its own. They begin together, and each process has some of
    them: whom a connection comes to is the kernel's choice, so that they are opened again where one process has all."""

    def __init__(self, service: Service, count: int, stack: ExitStack, **body: Any):
        for _ in range(20):
            with ExitStack() as attempt:
                if self._open(service, count, attempt, body):
                    stack.push(attempt.pop_all())
                    return
            wait_for(lambda: service.metric("octavo_num_requests_in_service") == 0, "not all were given up")
        raise AssertionError("one process has all connections each time")

    def _open(self, service: Service, count: int, stack: ExitStack, body: dict[str, Any]) -> bool:
        """Whether each process has some. The engine stands still until all are there, and while that is found out: on
        a busy machine the answers would be over by then."""
        engine = service.engine()

        def opened() -> httpx.Response:
            client = stack.enter_context(httpx.Client(base_url=service.url, timeout=PATIENCE))
            return stack.enter_context(client.stream("POST", "/v1/completions", json={**STORY, "stream": True, **body}))

        with ThreadPoolExecutor(count) as pool:
            with stopped(engine):
                opening = at_once(pool, count, opened)
                wait_for(lambda: service.metric("octavo_num_requests_in_service") == count, "not all are there")
            self.answers = [answer.result() for answer in opening]
        with stopped(engine):
            self.servers = [server_of(service, answer) for answer in self.answers]
            return {*self.servers} == {*fronts(service)}

    @staticmethod
    def text(answer: httpx.Response) -> str | None:
        """What an answer says; None where it breaks off."""
        said, ended = "", False
        try:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    said += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        except httpx.TransportError:
            return None
        return said if ended else None


def complete(service: Service, **body: Any) -> httpx.Response:
    """An answer over a connection of its own."""
    headers = body.pop("headers", {})
    return httpx.post(f"{service.url}/v1/completions", json={**STORY, **body}, timeout=PATIENCE, headers=headers)


def counted(service: Service, name: str) -> dict[str, float]:
    """A metric's values by the value of its one label."""
    found = re.findall(rf'^{name}{{\w+="([^"]+)"}} (\S+)$', service.get("/metrics").text, re.MULTILINE)
    return {label: float(value) for label, value in found}


def at_once(pool: ThreadPoolExecutor, count: int, work: Any) -> list[Future[httpx.Response]]:
    return [pool.submit(work) for _ in range(count)]


def test_counts_are_those_of_one_service(services: Any) -> None:
    """What waits while the engine stands still is bounded over both processes, exactly."""
    service = services("--max-num-seqs", "2", "--max-num-queued-reqs", "5", "--max-num-queued-tokens", "100000")
    expected = complete(service, max_tokens=8).json()["choices"][0]["text"]
    with ThreadPoolExecutor(30) as pool:
        with stopped(service.engine()):
            asked = at_once(pool, 30, lambda: complete(service, max_tokens=8))
            wait_for(lambda: sum(future.done() for future in asked) == 23, "not so many were refused")
            assert service.metric("octavo_num_requests_in_service") == 7
        answers = [future.result() for future in asked]
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [503] * 23
    assert {answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200} == {expected}
    assert counted(service, "octavo_requests_rejected_total")["queue_full"] == 23
    assert counted(service, "octavo_request_success_total")["length"] == 8
    assert service.metric("octavo_request_generation_tokens_sum") == 64
    assert service.metric("octavo_num_requests_in_service") == service.metric("octavo_num_queued_tokens") == 0
    seconds = counted(service, "octavo_process_cpu_seconds_total")
    assert set(seconds) == {"desk", "engine", "http-0", "http-1"}
    assert min(seconds.values()) > 0
    assert service.stop() == 0


def test_both_processes_serve_hear_of_the_engines_end_and_finish(services: Any) -> None:
    service = services()
    pids = fronts(service)
    assert len(pids) == 2
    engine = service.engine()
    with ExitStack() as stack:
        streams = Streams(service, 6, stack, max_tokens=480)
        os.kill(engine, signal.SIGKILL)
        assert {*streams.servers} == {*pids}
        for answer in streams.answers:
            said = "".join(answer.iter_text())
            assert '"code":"engine_dead"' in said.replace(" ", "")
    service.engine(but=engine)

    def back() -> bool:
        return all(complete(service, max_tokens=4).status_code == 200 for _ in range(6))

    wait_for(back, "not all processes serve with the new engine")
    assert service.metric("octavo_engine_restarts_total") == 1
    assert service.metric("octavo_http_process_failures_total") == 0
    assert fronts(service) == pids
    check_stop(service)


def check_stop(service: Service) -> None:
    """It waits for what runs in both processes."""
    expected = complete(service, max_tokens=200).json()["choices"][0]["text"]
    with ExitStack() as stack:
        streams = Streams(service, 6, stack, max_tokens=200)
        assert len({*streams.servers}) == 2
        service.process.send_signal(signal.SIGTERM)
        assert {Streams.text(answer) for answer in streams.answers} == {expected}
    assert service.process.wait(PATIENCE) == 0
    log = service.log.read_text()
    assert log.rstrip().splitlines()[-1].count("Stopped.") == 1
    assert not fronts(service)


def test_a_process_that_starts_while_there_is_no_engine_serves_with_the_next(services: Any) -> None:
    service = services("--max-engine-failures", "9")
    victim, engine = fronts(service)[0], service.engine()
    os.kill(victim, signal.SIGKILL)
    for _ in range(3):  # each restart waits longer
        os.kill(engine, signal.SIGKILL)
        engine = service.engine(but=engine)
    wait_for(lambda: "has replaced it" in service.log.read_text(), "the process was not replaced")

    def back() -> bool:
        with ThreadPoolExecutor(8) as pool:
            answers = at_once(pool, 8, lambda: complete(service, max_tokens=4))
            return all(answer.result().status_code == 200 for answer in answers)

    wait_for(back, "not all processes serve")
    assert victim not in fronts(service)
    assert len(fronts(service)) == 2
    assert service.stop() == 0


def test_a_process_that_is_killed_is_replaced_and_loses_only_its_own_streams(services: Any) -> None:
    service = services("--max-num-seqs", "8", "--max-num-queued-reqs", "0")
    before = fronts(service)
    expected = complete(service, max_tokens=480).json()["choices"][0]["text"]
    with ExitStack() as stack:
        streams = Streams(service, 8, stack, max_tokens=480)
        victim = streams.servers[0]
        os.kill(victim, signal.SIGKILL)
        texts = [Streams.text(answer) for answer in streams.answers]
    lost = sum(server == victim for server in streams.servers)
    assert 0 < lost < 8
    assert [text is None for text in texts] == [server == victim for server in streams.servers]
    assert {text for text in texts if text is not None} == {expected}
    service.wait_metric("octavo_http_process_failures_total", 1)
    wait_for(lambda: len(fronts(service)) == 2, "it was not replaced")
    (new,) = set(fronts(service)) - set(before)
    assert is_running(new)
    # Nothing of what is lost holds anything, and nothing that was counted is forgotten.
    assert service.metric("octavo_prompts_lost_total") == lost
    assert service.metric("octavo_num_requests_in_service") == 0
    service.wait_metric("octavo_num_requests_running", 0)
    assert counted(service, "octavo_kv_pages")["held"] == 0
    assert counted(service, "octavo_request_success_total")["length"] == 9 - lost
    # All eight places are free, and the new process takes its part.
    wait_for(lambda: "has replaced it" in service.log.read_text(), "the new one does not serve")
    with ExitStack() as stack:
        again = Streams(service, 8, stack, max_tokens=50)
        assert new in again.servers
        assert [answer.status_code for answer in again.answers] == [200] * 8
    assert service.stop() == 0


# Some of these once changed the path that a framework compared with its list of open ones (CVE-2026-48746).
HOSTS = (
    "localhost", "localhost/health", "localhost/health?", "a?/health", "a#/health", "/health", "?", "a/health/..",
    "a@b/health", "a:1/health", "[::1]/health", "a\\health", "a%2fhealth", "a, b/health",
)  # fmt: skip
TARGETS = (
    "/v1/models", "/v1/models?/health", "/v1/models#/health", "http://a/v1/models", "http://a/health/../v1/models",
    "//health/v1/models", "/health/../v1/models", "/health;/v1/models", "/health%2f..%2fv1/models", "/v1/models/",
    "/playground/../v1/models", "/playground/%2e%2e/v1/models", "/version", "/docs",
)  # fmt: skip


def no_key_is_needed(service: Service) -> list[tuple[str, str, str]]:
    """The pairs of Host and target that are answered without a key, by any of the processes."""
    found, address = [], urlsplit(service.url)
    for host, target in itertools.product(HOSTS, TARGETS):
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as line:
            line.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            status = line.makefile("rb").readline().split()[1].decode()
            if status not in ("400", "401", "403", "404"):
                found.append((host, target, status))
    return found


def test_limits_of_keys_hold_over_both_processes(services: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-of-one concurrency=3\nanother-key rpm=5\n")
    service = services("--api-key-file", str(keys), "--public-metrics", "--allowed-hosts", "*")
    assert no_key_is_needed(service) == []
    one, other = ({"Authorization": f"Bearer {key}"} for key in ("a-key-of-one", "another-key"))
    with ThreadPoolExecutor(20) as pool:
        with stopped(service.engine()):
            asked = at_once(pool, 20, lambda: complete(service, max_tokens=2, headers=one))
            wait_for(lambda: sum(future.done() for future in asked) == 17, "not so many were refused")
        assert sorted(future.result().status_code for future in asked) == [200] * 3 + [429] * 17
        asked = at_once(pool, 20, lambda: complete(service, max_tokens=2, headers=other))
        answers = [future.result() for future in asked]
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 15
    left = sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers)
    assert left == [0] * 16 + [1, 2, 3, 4]
    assert counted(service, "octavo_requests_rejected_total")["key_concurrency"] == 17
    assert counted(service, "octavo_requests_rejected_total")["key_rate"] == 15
    # New keys count in both.
    keys.write_text("a-new-key\n")
    service.process.send_signal(signal.SIGHUP)
    wait_for(lambda: service.log.read_text().count("reloaded the API keys") == 2, "the keys were not read")
    new = {"Authorization": "Bearer a-new-key"}
    assert {complete(service, max_tokens=1, headers=new).status_code for _ in range(6)} == {200}
    assert {complete(service, max_tokens=1, headers=one).status_code for _ in range(6)} == {401}
    # Messages to all processes do no harm while one starts.
    for again in range(1, 4):
        os.kill(fronts(service)[0], signal.SIGKILL)
        late = time.monotonic() + PATIENCE
        while service.log.read_text().count("has replaced it") < again:  # the news comes at any moment of the start
            assert time.monotonic() < late, "the process was not replaced"
            service.process.send_signal(signal.SIGHUP)
            time.sleep(0.0005)
    assert {complete(service, max_tokens=1, headers=new).status_code for _ in range(6)} == {200}
    assert service.stop() == 0


def test_a_second_signal_stops_all_at_once(services: Any) -> None:
    service = services()
    pids, engine = fronts(service), service.engine()
    with ExitStack() as stack:
        streams = Streams(service, 4, stack, max_tokens=480)
        with stopped(engine):
            service.process.send_signal(signal.SIGINT)
            wait_for(lambda: "Stopping" in service.log.read_text(), "it does not stop")
            assert service.stop(signal.SIGINT) == 1
        assert {Streams.text(answer) for answer in streams.answers} == {None}
    for pid in (*pids, engine):
        wait_for(lambda pid=pid: not is_running(pid), f"process {pid} is left")
    assert "second signal" in service.log.read_text()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_nothing_is_left_when_the_first_process_has_ended(
    services: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        service = services()
        pids = [*fronts(service), service.engine()]
        assert list(Path(folder).glob("octavo-ipc-*/metrics/counter_*.db"))
        if how == "killed":
            service.process.kill()
        else:
            assert service.stop() == 0
        for pid in pids:
            wait_for(lambda pid=pid: not is_running(pid), f"process {pid} is left")
        wait_for(lambda: not list(Path(folder).glob("octavo-*")), "files are left")


def test_an_answer_is_cancelled_whichever_process_streams_it(services: Any, tmp_path: Path) -> None:
    service = services("--response-store", str(tmp_path / "store"))
    ended = set()
    deadline = time.monotonic() + PATIENCE
    while len(ended) < 2:  # both where it was asked of the same process, and of the other one
        assert time.monotonic() < deadline
        with httpx.Client(base_url=service.url, timeout=PATIENCE) as client:
            body = {"input": "Tell me a story", "stream": True, "max_output_tokens": 480, "temperature": 1}
            with client.stream("POST", "/v1/responses", json=body) as answer:
                lines = answer.iter_lines()
                first = next(line for line in lines if line.startswith("data: "))
                name = json.loads(first.removeprefix("data: "))["response"]["id"]
                with httpx.Client(base_url=service.url, timeout=PATIENCE) as other:
                    cancelled = other.post(f"/v1/responses/{name}/cancel")
                    same = server_of(service, cancelled) == server_of(service, answer)
                said = "".join(lines).replace(" ", "")
                if '"status":"completed"' in said:  # it was complete before
                    continue
                assert cancelled.json()["status"] == "cancelled", cancelled.text
                assert '"status":"cancelled"' in said
                ended.add(same)
    assert httpx.post(f"{service.url}/v1/responses/resp_unknown/cancel").status_code == 404
    check_background(service)
    assert service.stop() == 0


def check_background(service: Service) -> None:
    """An answer is followed, shown and deleted whichever process makes it."""
    body = {"input": "Tell me a story", "background": True, "max_output_tokens": 60, "ignore_eos": True}
    where = f"{service.url}/v1/responses"
    followed = set()
    while len(followed) < 2:  # by the process that makes it, and by the other one
        with (
            httpx.Client(timeout=PATIENCE) as client,
            client.stream("POST", where, json={**body, "stream": True}) as made,
        ):
            maker, lines = server_of(service, made), made.iter_lines()
            line = next(line for line in lines if line.startswith("data: "))
            id_ = json.loads(line.removeprefix("data: "))["response"]["id"]
        # The client has left.
        with httpx.Client(timeout=PATIENCE) as client:
            with client.stream("GET", f"{where}/{id_}?stream=true&starting_after=1") as resumed:
                followed.add(server_of(service, resumed) == maker)
                texts = [line for line in resumed.iter_lines() if line.startswith("data: ")]
            data = [json.loads(text.removeprefix("data: ")) for text in texts]
            assert [event["sequence_number"] for event in data] == list(range(2, 2 + len(data)))
            assert data[-1]["type"] == "response.incomplete"
            assert data[-1]["response"] == client.get(f"{where}/{id_}").json()
    id_ = httpx.post(where, json={**body, "max_output_tokens": 400}, timeout=PATIENCE).json()["id"]
    assert httpx.delete(f"{where}/{id_}", timeout=PATIENCE).json()["deleted"] is True
    assert httpx.get(f"{where}/{id_}", timeout=PATIENCE).status_code == 404


def test_a_signal_ends_a_start(tmp_path: Path) -> None:
    service = Service(*TWO, log=tmp_path / "log")
    wait_for(lambda: len(fronts(service)) == 2, "they are not started")
    assert service.stop() == 0, service.log.read_text()
    assert "Serving" not in service.log.read_text()
    assert "Stopped." in service.log.read_text()


def test_a_setting_that_is_wrong_ends_the_start(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("this is no database, however long it is looked at " * 100)
    service = Service(*TWO, "--response-store", str(store), log=tmp_path / "log")
    assert service.process.wait(PATIENCE) == 1
    assert "cannot be used" in service.log.read_text()
    assert "Traceback" not in service.log.read_text()
