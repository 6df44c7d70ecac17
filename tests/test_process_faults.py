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
from test_http_process import Service
from test_http_process import checkpoint as tiny  # noqa: F401
from test_process import LONG, engine_of, is_running, prefilling, sockets, start, status, wait_for  # noqa: F401

# Runs `patch(module)` once `engine.engine` is loaded.
HOOK = """
import importlib.util, os, sys

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name != "engine.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())

"""
POISON = "~"  # a prompt that begins with it breaks the step that computes it
LATE = 400  # so does this position in any sequence
# A step takes a few milliseconds, however fast the machine: requests that are sent together are in the same steps.
BROKEN_STEPS = f"""
import time

def patch(module):
    launch = module.ModelRunner.launch
    def broken(self, plan):
        time.sleep(0.004)
        if ((plan.positions == 0) & (plan.token_ids == {ord(POISON)}) | (plan.positions == {LATE})).any():
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
        (tmp_path / "sitecustomize.py").write_text(HOOK + code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return patch


def ask(service: Service, prompt: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/completions", json={"prompt": prompt, **body}, timeout=60)


def test_a_broken_step_fails_one_request(start: Callable[..., Service], patched: Callable[[str], None]) -> None:  # noqa: F811
    """The others, in the same steps, answer as they do alone; the engine goes on."""
    patched(BROKEN_STEPS)
    service = start("--no-enable-prefix-caching")
    service.wait_ready()
    engine = engine_of(service)
    bodies: list[dict[str, Any]] = [
        {"temperature": 0}, {"seed": 5}, {"seed": 6, "n": 3}, {"use_beam_search": True, "n": 3},
    ]  # fmt: skip
    alone = [ask(service, "Hello", max_tokens=150, **body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = [pool.submit(ask, service, "Hello", max_tokens=150, **body) for body in bodies]
        broken = []
        while not all(future.done() for future in together):
            broken.append(ask(service, POISON + " is not computed", max_tokens=5))
            streamed = ask(service, POISON, max_tokens=5, stream=True)
    assert len(broken) > 2
    for answer in broken:
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
    # A stream has begun when it was accepted.
    assert streamed.status_code == 200
    assert json.loads(streamed.text.strip().removeprefix("data: "))["error"]["code"] == "internal_error"
    assert [future.result().json()["choices"] for future in together] == alone
    assert "made by the test" in service.log.read_text()
    lines = [line for line in ask(service, "a", stream=True, **LONG).text.splitlines() if line]
    assert len(lines) > 100
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "made by the test" not in error["message"]
    assert engine_of(service) == engine
    assert service.metric("octavo_engine_restarts_total") == 0
    service.wait_metric('octavo_kv_pages{state="held"}', 0, 2)
    assert service.stop() == 0


def test_faults_that_end_the_engine(start: Callable[..., Service], patched: Callable[[str], None]) -> None:  # noqa: F811
    """A scheduler whose state cannot be trusted any more, and a device that computes nothing any more: a new engine
    serves, and after as many as were allowed the service says why it ends, in one line."""
    patched(DEATHS)
    service = start("--max-engine-failures", "2")
    service.wait_ready()
    broken = ask(service, "a", **LONG)
    assert (broken.status_code, broken.json()["error"]["code"]) == (503, "engine_dead")
    assert "AssertionError: an invariant is broken" in service.log.read_text()
    wait_for(lambda: status(service) == 200, 90, "the engine did not come back")
    assert ask(service, "a", max_tokens=3).status_code == 200
    lines = [line for line in ask(service, "a", stream=True, **LONG).text.splitlines() if line]
    assert '"engine_dead"' in lines[-1]
    assert service.process.wait(60) == 1
    last = service.log.read_text().splitlines()[-1]
    assert last.startswith("octavo: the engine keeps failing: no step can be computed any more: RuntimeError: ")
    assert "the device is lost says the test" in last


# ---------------------------------------------------------------- engines that hang


def test_a_hung_engine_is_seen_and_replaced(start: Callable[..., Service]) -> None:  # noqa: F811
    """An idle one is not: that it does nothing is no sign."""
    service = start("--liveness-timeout", "0.5")
    service.wait_ready()
    engine = engine_of(service)
    time.sleep(2.5)
    assert status(service, "/health/live") == 200
    assert engine_of(service) == engine
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, service, "a", **LONG)
        service.wait_metric("octavo_num_requests_running", 1, 30)
        os.kill(engine, signal.SIGSTOP)
        wait_for(lambda: status(service, "/health/live") == 503, 20, "/health/live did not see it")
        answer = running.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert status(service, "/health/live") == 200, "it is being started again"
    wait_for(lambda: status(service) == 200, 90, "the engine did not come back")
    assert not is_running(engine)
    assert ask(service, "a", max_tokens=3).status_code == 200
    assert "made no progress" in service.log.read_text()

    engine = engine_of(service)
    os.kill(engine, signal.SIGKILL)
    successor = engine_of(service, but=engine)
    began = time.monotonic()
    assert service.stop() == 0, "while the engine is started again"
    assert time.monotonic() - began < 15
    assert not is_running(successor)


@pytest.mark.parametrize("phase", ["loading", "decoding"])
def test_a_hung_engine_does_not_hold_up_the_end(phase: str, start: Callable[..., Service]) -> None:  # noqa: F811
    """SIGTERM ends the service after the drain time and a few seconds, and the engine with it."""
    service = start("--shutdown-timeout", "1")
    if phase != "loading":
        service.wait_ready()
    engine = engine_of(service)
    with ThreadPoolExecutor(1) as pool:
        if phase == "decoding":
            pool.submit(ask, service, "a", **LONG)
            service.wait_metric("octavo_num_requests_running", 1, 30)
        os.kill(engine, signal.SIGSTOP)
        began = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - began < 20
    assert not is_running(engine)


def test_sigterm_in_prefill(start: Callable[..., Service]) -> None:  # noqa: F811
    service = start()
    service.wait_ready()
    engine = engine_of(service)
    with prefilling(service) as answers:
        service.process.send_signal(signal.SIGTERM)
    assert isinstance(answers[0], httpx.Response)
    assert answers[0].status_code == 200
    assert service.process.wait(60) == 0
    assert not is_running(engine)
