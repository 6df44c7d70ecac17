"""Faults inside the engine's process, made there by a `sitecustomize`: exceptions, hangs, and what they end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.faults import Gate, patch_engines
from support.service import PATIENCE, Service, is_running, stopped, wait_for
from test_http_process import LONG
from test_process import loading, sockets, start, status, wait_back  # noqa: F401

pytestmark = pytest.mark.slow

POISON = 126  # a prompt that begins with it breaks the step that computes it
HELLO = list(b"Hello")
LATE = 400  # so does this position in any sequence
BROKEN_STEPS = f"""
def patch(module):
    launch = module.ModelRunner.launch
    def broken(self, plan):
        if ((plan.positions == 0) & (plan.token_ids == {POISON}) | (plan.positions == {LATE})).any():
            raise RuntimeError("made by the test")
        return launch(self, plan)
    module.ModelRunner.launch = broken
"""
# The first engine's scheduler breaks; from its 100th step on, the second one's device.
DEATHS = """
def patch(module):
    mark = sys.modules["sitecustomize"].__file__ + ".second"
    second = os.path.exists(mark)
    open(mark, "w").close()
    update, launch, steps = module.Scheduler.update, module.ModelRunner.launch, []
    def broken_update(self, *arguments):
        if self.stats.num_steps == 50 and not second:
            raise AssertionError("an invariant is broken")
        return update(self, *arguments)
    def broken_launch(self, plan):
        steps.append(plan)
        if len(steps) > 100 and second:
            raise RuntimeError("the device is lost\\n  says the test")
        return launch(self, plan)
    module.Scheduler.update, module.ModelRunner.launch = broken_update, broken_launch
"""


@pytest.fixture
def patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Every engine that is started from now on runs that code."""

    def patch(code: str) -> None:
        patch_engines(code, tmp_path, monkeypatch)

    return patch


def ask(service: Service, prompt: list[int], **body: Any) -> httpx.Response:
    body = {"prompt": prompt, "return_token_ids": True, **body}
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=PATIENCE)


def test_a_broken_step_fails_one_request(start: Callable[..., Service], patched: Callable[[str], None]) -> None:  # noqa: F811
    """The others, in the same steps, answer as they do alone; the engine goes on."""
    patched(BROKEN_STEPS)
    service = start("--no-enable-prefix-caching")
    service.wait_ready()
    engine = service.engine()
    bodies: list[dict[str, Any]] = [
        {"temperature": 0}, {"seed": 5}, {"seed": 6, "n": 3}, {"use_beam_search": True, "n": 3},
    ]  # fmt: skip
    alone = [ask(service, HELLO, max_tokens=150, **body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(9) as pool:
        with stopped(engine):  # until it has heard of all, so that they are in the same steps
            together = [pool.submit(ask, service, HELLO, max_tokens=150, **body) for body in bodies]
            poisoned = [pool.submit(ask, service, [POISON, number], max_tokens=5) for number in range(3)]
            poisoned.append(pool.submit(ask, service, [120] * (LATE - 100), max_tokens=150, ignore_eos=True))
            stream = pool.submit(ask, service, [POISON], max_tokens=5, stream=True)
            service.wait_metric("octavo_num_requests_in_service", 9)
        answers = [future.result() for future in poisoned]
        streamed = stream.result()
    for answer in answers:
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
    # A stream has begun when it was accepted.
    assert streamed.status_code == 200
    assert json.loads(streamed.text.strip().removeprefix("data: "))["error"]["code"] == "internal_error"
    assert [future.result().json()["choices"] for future in together] == alone
    assert "made by the test" in service.log.read_text()
    *events, last = [line for line in ask(service, [97], stream=True, **LONG).text.splitlines() if line]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert sum(len(choice["token_ids"]) for choice in choices) == LATE
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "made by the test" not in error["message"]
    assert service.engine() == engine
    assert service.metric("octavo_engine_restarts_total") == 0
    service.wait_metric('octavo_kv_pages{state="held"}', 0)
    assert service.stop() == 0


def test_faults_that_end_the_engine(start: Callable[..., Service], patched: Callable[[str], None]) -> None:  # noqa: F811
    """A scheduler whose state cannot be trusted any more, and a device that computes nothing any more: a new engine
    serves, and after as many as were allowed the service says why it ends, in one line."""
    patched(DEATHS)
    service = start("--max-engine-failures", "2")
    service.wait_ready()
    broken = ask(service, [97], **LONG)
    assert (broken.status_code, broken.json()["error"]["code"]) == (503, "engine_dead")
    assert "AssertionError: an invariant is broken" in service.log.read_text()
    wait_back(service)
    assert ask(service, [97], max_tokens=3).status_code == 200
    lines = [line for line in ask(service, [97], stream=True, **LONG).text.splitlines() if line]
    assert '"engine_dead"' in lines[-1]
    assert service.process.wait(PATIENCE) == 1
    last = service.log.read_text().splitlines()[-1]
    assert last.startswith("octavo: the engine keeps failing: steps can no longer be computed: RuntimeError: ")
    assert "the device is lost says the test" in last


# ---------------------------------------------------------------- engines that hang


def test_a_hung_engine_is_seen_and_replaced(start: Callable[..., Service], loading: Gate) -> None:  # noqa: F811
    """An idle one is not: that it does nothing is no sign."""
    service = start("--liveness-timeout", "2", "--shutdown-timeout", "300")
    service.wait_ready()
    engine = service.engine()
    time.sleep(2.5)
    assert status(service, "/health/live") == 200
    assert service.engine() == engine
    with stopped(engine), ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, service, [97], **LONG)
        wait_for(lambda: status(service, "/health/live") == 503, "/health/live did not see it")
        answer = running.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert status(service, "/health/live") == 200, "is restarting"
    wait_back(service)
    assert not is_running(engine)
    assert ask(service, [97], max_tokens=3).status_code == 200
    assert "made no progress" in service.log.read_text()

    # And it can be told to end meanwhile.
    loading.close()
    engine = service.engine()
    os.kill(engine, signal.SIGKILL)
    successor = service.engine(but=engine)
    assert service.stop() == 0
    assert not is_running(successor)


@pytest.mark.parametrize("phase", ["loading", "decoding"])
def test_a_hung_engine_does_not_hold_up_the_end(phase: str, start: Callable[..., Service], loading: Gate) -> None:  # noqa: F811
    """SIGTERM ends the service after the drain time and a few seconds, and the engine with it."""
    if phase == "loading":
        loading.close()
    service = start("--shutdown-timeout", "1")
    if phase != "loading":
        service.wait_ready()
    engine = service.engine()
    with ThreadPoolExecutor(1) as pool:
        if phase == "decoding":
            pool.submit(ask, service, [97], **LONG)
            service.wait_metric("octavo_num_requests_running", 1)
        with stopped(engine):
            assert service.stop() == 0
    assert not is_running(engine)
