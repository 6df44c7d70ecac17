"""The service as replicas of Ray Serve, on a real cluster of this machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cluster import RAY, Cluster
from support.service import PATIENCE, is_running, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # each replica starts several processes, on a machine that may be busy
    pytest.mark.skipif(not RAY.is_dir(), reason="there is no Ray here: make test-all installs it"),
]

SMALL = {"kv_cache_memory": "64MiB", "num_cpus": 0.5, "health_check_period_s": 1, "shutdown_timeout": 60}
TWO = SMALL | {"min_replicas": 2, "max_replicas": 2, "liveness_timeout": 2, "max_engine_failures": 1}
STORY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("ray") / "log")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def one(cluster: Cluster) -> Cluster:
    """The cluster with one replica, which may become two."""
    cluster.deploy(
        **SMALL, max_replicas=2, target_ongoing_requests=2, look_back_period_s=2, upscale_delay_s=0, downscale_delay_s=4
    )
    return cluster


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("first\n")
    return path


@pytest.fixture(scope="module")
def two(cluster: Cluster, key_file: Path) -> Cluster:
    """The cluster with two replicas, and a key."""
    cluster.deploy(**TWO, api_key_file=str(key_file))
    return cluster


KEY = {"Authorization": "Bearer first"}


def complete(cluster: Cluster, max_tokens: int, **options: Any) -> str:
    """An answer over a connection of its own."""
    body = {**STORY, "max_tokens": max_tokens}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE, **options)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def metric(cluster: Cluster, name: str) -> float:
    """A metric of the one replica."""
    for line in httpx.get(f"{cluster.url}/metrics", timeout=PATIENCE).text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name}")


class Load:
    """Clients that ask one request after another, until they are stopped.

    Args:
        count: of clients.
        ask: one request; what it raises is counted.
        retries: a client asks again where its request failed.
    """

    def __init__(self, count: int, ask: Callable[[], str], *, retries: bool = False):
        self.outcomes: Counter[str] = Counter()
        self.lost = 0
        self._ask = ask
        self._retries = retries
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(count)
        self._clients = [self._pool.submit(self._run) for _ in range(count)]

    def _run(self) -> None:
        while not self._stop.is_set():
            for _ in range(20 if self._retries else 1):
                try:
                    outcome = self._ask()
                    break
                except httpx.HTTPError as problem:
                    outcome = type(problem).__name__
                    self.outcomes[outcome] += 1
                    time.sleep(0.2 if self._retries else 0)
            else:
                self.lost += 1
                continue
            self.outcomes[outcome] += 1

    def num(self, outcome: str) -> int:
        return self.outcomes[outcome]

    def stop(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.result(PATIENCE)
        self._pool.shutdown()


class TestOneReplica:
    def test_tokens_come_one_by_one(self, one: Cluster) -> None:
        """The first ones are there long before the last; where something holds the machine up, the next time."""
        body = {**STORY, "max_tokens": 200, "stream": True}
        for _ in range(8):
            times = []
            with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                for line in answer.iter_lines():
                    if line:
                        times.append(time.monotonic())
                        last = line
            assert last == "data: [DONE]"
            assert len(times) > 50
            if early := times[10] - times[0] < (times[-1] - times[0]) / 2:
                break
        assert early

    def test_the_door_is_the_services_own(self, one: Cluster) -> None:
        answer = httpx.get(f"{one.url}/v1/nothing", headers={"X-Request-ID": "mine"}, timeout=PATIENCE)
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.headers.get_list("x-request-id") == ["mine"]
        foreign = httpx.get(f"{one.url}/v1/models", headers={"Host": "evil.example.org"}, timeout=PATIENCE)
        assert foreign.status_code == 403

    def test_the_answer_is_that_of_any_service(self, one: Cluster) -> None:
        whole = complete(one, 40)
        body = {**STORY, "max_tokens": 40, "stream": True}
        said = ""
        with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    said += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert said == whole

    def test_a_client_that_leaves_ends_its_request(self, one: Cluster) -> None:
        name = 'octavo_requests_aborted_total{reason="disconnect"}'
        before = metric(one, name)
        body = {**STORY, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
        wait_for(lambda: metric(one, name) == before + 1, "the request was not aborted")
        wait_for(lambda: metric(one, "octavo_num_requests_running") == 0, "the request runs on")

    def test_load_makes_two_of_one_and_quiet_one_of_two(self, one: Cluster) -> None:
        """Nothing is lost on the way, although requests go on all the time."""
        wait_for(lambda: len(one.replicas()) == 1, "there is more than one already")
        expected = complete(one, 60)
        load = Load(8, lambda: complete(one, 60))
        try:
            wait_for(lambda: len(one.engines()) == 2, "load made no second replica", 2 * PATIENCE)
            done = load.num(expected)
            wait_for(lambda: load.num(expected) > done + 50, "two replicas serve nothing")
        finally:
            load.stop()
        little = Load(1, lambda: complete(one, 60))
        try:
            wait_for(lambda: len(one.replicas()) == 1, "quiet took no replica away", 2 * PATIENCE)
            done = little.num(expected)
            wait_for(lambda: little.num(expected) > done + 5, "one replica serves nothing")
        finally:
            little.stop()
        assert set(load.outcomes) == set(little.outcomes) == {expected}


class TestTwoReplicas:
    def test_keys_are_asked_for(self, two: Cluster) -> None:
        assert httpx.get(f"{two.url}/v1/models", timeout=PATIENCE).status_code == 401
        assert httpx.get(f"{two.url}/v1/models", headers=KEY, timeout=PATIENCE).status_code == 200
        assert httpx.get(f"{two.url}/health", timeout=PATIENCE).status_code == 200

    def test_new_replicas_know_new_keys(self, two: Cluster, key_file: Path) -> None:
        key_file.write_text("first\nsecond\n")
        two.deploy(**TWO, api_key_file=str(key_file), keys_version="2")

        def opens() -> bool:
            headers = {"Authorization": "Bearer second"}
            answers = [httpx.get(f"{two.url}/v1/models", headers=headers, timeout=PATIENCE) for _ in range(8)]
            return all(answer.status_code == 200 for answer in answers)

        wait_for(opens, "the new key opens nothing")
        assert httpx.get(f"{two.url}/v1/models", headers=KEY, timeout=PATIENCE).status_code == 200

    @pytest.mark.parametrize("retries", [False, True])
    def test_a_replica_that_is_killed_loses_its_own_requests_alone(self, two: Cluster, retries: bool) -> None:
        wait_for(lambda: len(two.engines()) == 2, "there are not two replicas", 2 * PATIENCE)
        expected = complete(two, 60, headers=KEY)
        load = Load(8, lambda: complete(two, 60, headers=KEY), retries=retries)
        try:
            wait_for(lambda: load.num(expected) > 20, "nothing is served")
            victim = two.replicas()[0]
            (engine,) = set(two.engines()) - set(two.engines_of(two.replicas()[1]))
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: not is_running(engine), "the engine outlives its replica")
            wait_for(lambda: len(two.engines()) == 2, "the replica was not replaced", 2 * PATIENCE)
            done = load.num(expected)
            wait_for(lambda: load.num(expected) > done + 20, "nothing is served any more")
        finally:
            load.stop()
        failed = load.outcomes.total() - load.num(expected)
        assert failed <= 8, load.outcomes  # each client had one request there at most
        assert load.lost == 0 or not retries

    def test_a_replica_whose_engine_hangs_is_replaced(self, two: Cluster) -> None:
        """The engine is given up, once since the settings say so, and the replica with it."""
        wait_for(lambda: len(two.engines()) == 2, "there are not two replicas", 2 * PATIENCE)
        before = set(two.replicas())
        engine = two.engines()[0]
        os.kill(engine, signal.SIGSTOP)
        load = Load(4, lambda: complete(two, 10, headers=KEY))
        try:
            wait_for(lambda: len(before & set(two.replicas())) == 1, "the replica stays", 2 * PATIENCE)
            wait_for(lambda: not is_running(engine), "the engine stays")
            wait_for(lambda: len(two.engines()) == 2, "the replica was not replaced", 2 * PATIENCE)
        finally:
            load.stop()

    def test_what_runs_ends_before_its_replica(self, two: Cluster) -> None:
        """Streams go on to their ends while the application is deleted."""
        wait_for(lambda: len(two.engines()) == 2, "there are not two replicas", 2 * PATIENCE)
        body = {**STORY, "max_tokens": 400, "stream": True}
        begun, last = threading.Barrier(3), []

        def stream() -> None:
            with httpx.stream("POST", f"{two.url}/v1/completions", json=body, headers=KEY, timeout=PATIENCE) as answer:
                lines = answer.iter_lines()
                next(lines)
                begun.wait(PATIENCE)
                for line in lines:
                    if line:
                        last.append(line)
                last.append("end")

        with ThreadPoolExecutor(2) as pool:
            streams = [pool.submit(stream) for _ in range(2)]
            begun.wait(PATIENCE)
            two.delete()
            for done in streams:
                done.result(PATIENCE)
        assert last.count("data: [DONE]") == last.count("end") == 2
        wait_for(lambda: not two.replicas(), "replicas are left")
