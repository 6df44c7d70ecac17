"""Metrics over a real engine in its own process: gauges, pages, times, and a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from support.checkpoints import Checkpoint
from support.faults import Gate
from support.service import PATIENCE

from engine import EngineConfig
from engine.process.client import ProcessEngineClient, RestartPolicy
from server.app import create_app
from server.config.settings import ServerSettings

PAGES = 30
PROMPT = list(range(20, 60))  # three pages, the third half full
LONG = {"max_tokens": 200, "ignore_eos": True}
CLOSED = len(PROMPT) + 20  # where the gate is


class Api:
    """An app over an engine, called on one event loop."""

    def __init__(self, client: ProcessEngineClient):
        self.client = client
        settings = ServerSettings(max_queue_time=0)  # while the gate is closed, all wait
        self.app = create_app(client, None, "tiny", settings=settings)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost", timeout=PATIENCE
        )

    async def complete(self, **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def metrics(self) -> dict[str, float]:
        text = (await self.http.get("/metrics")).text
        return {
            sample.name + "".join(f"{{{value}}}" for name, value in sample.labels.items() if name != "le"): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if family.name.startswith("octavo_") and not sample.name.endswith(("_created", "_bucket"))
        }

    async def wait(self, what: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        deadline = time.monotonic() + PATIENCE
        while not what(found := await self.metrics()):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.01)
        return found


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """While it is closed, no step computes what comes later in a sequence."""
    with pytest.MonkeyPatch.context() as patch:
        yield Gate(tmp_path_factory.mktemp("gate"), patch, CLOSED)


@pytest.fixture(scope="module")
def client(checkpoint: Callable[[str], Checkpoint], gate: Gate) -> Iterator[ProcessEngineClient]:
    """Two rows and 30 pages; one for all tests, because it takes long to start."""
    config = EngineConfig(
        model=str(checkpoint("llama-grouped").path), device="cpu", dtype="float32", show_progress=False,
        skip_tokenizer_init=True, max_num_seqs=2, num_gpu_blocks_override=PAGES,
        speculative_config="off",  # each row gets a token in each step
    )  # fmt: skip
    percents: list[int] = []
    client = ProcessEngineClient(config, RestartPolicy(max_failures=3, first_delay=0.01), tell=percents.append)
    assert percents[-1] == 100
    assert percents == sorted(set(percents)), "each percentage of the weights is told once"
    yield client
    asyncio.run(client.close())


@pytest.fixture
def run(client: ProcessEngineClient, gate: Gate) -> Iterator[Callable[..., None]]:
    """Runs a scenario over an app of its own."""

    def go(scenario: Callable[[Api], Awaitable[None]]) -> None:
        async def live() -> None:
            api = Api(client)
            async with api.http:
                await scenario(api)

        asyncio.run(live())

    yield go
    gate.open()  # a test that failed leaves nothing closed for the others


@pytest.mark.slow
def test_one_after_the_other(run: Callable[..., None], gate: Gate) -> None:
    """The first takes both rows, so the second queues while it decodes; all counts are final with the response."""

    async def scenario(api: Api) -> None:
        before = await api.metrics()
        with capture_logs() as logged:
            gate.close()
            tasks = [asyncio.create_task(api.complete(prompt=PROMPT, n=2, **LONG))]
            await api.wait(lambda found: found["octavo_num_requests_running"] > 0)
            tasks.append(asyncio.create_task(api.complete(prompt=PROMPT, max_tokens=3, ignore_eos=True)))
            await api.wait(lambda found: found["octavo_num_requests_in_service"] == 2)
            began = time.monotonic()
            await asyncio.sleep(0.05)
            held = time.monotonic() - began
            gate.open()
            answers = await asyncio.gather(*tasks)
            found = await api.metrics()
        first, second = (entry for entry in logged if entry["event"] == "request finished")
        for entry in (first, second):
            phases = entry["queue_seconds"] + entry["prefill_seconds"] + entry["decode_seconds"]
            assert 0 < phases <= entry["total_seconds"] + 1e-5
            assert entry["prefill_seconds"] > 0
            assert entry["decode_seconds"] > 0
        assert first["completion_tokens"] == 400
        assert second["queue_seconds"] >= held, "there was no row for it yet"
        # Two full pages of the first one's prompt were still cached.
        assert (first["cached_tokens"], second["cached_tokens"]) == (0, 32)

        def grown(name: str) -> float:
            return found[f"octavo_{name}"] - before[f"octavo_{name}"]

        assert grown("prompt_tokens_total") == sum(a["usage"]["prompt_tokens"] for a in answers) == 80
        assert grown("prompt_tokens_cached_total") == grown("prefix_cache_hits_total") == 32
        assert grown("generation_tokens_total") == sum(a["usage"]["completion_tokens"] for a in answers) == 403
        assert grown("request_success_total{length}") == 3
        assert grown("computed_tokens_total") == grown("iteration_tokens_total_sum") == 80 - 32 + 2 * 199 + 2
        assert grown("steps_total") == grown("step_seconds_count") == grown("iteration_tokens_total_count")
        assert grown("inter_token_latency_seconds_count") == 2 * 199 + 2
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency"):
            assert grown(f"{name}_seconds_count") == 2, name
        assert grown("request_queue_time_seconds_sum") == pytest.approx(
            first["queue_seconds"] + second["queue_seconds"], abs=1e-5
        )
        assert found["octavo_num_requests_running"] == found["octavo_num_requests_waiting"] == 0
        assert found["octavo_kv_cache_usage_perc"] == found["octavo_kv_pages{held}"] == 0
        assert found["octavo_kv_pages{cached}"] > 0

    run(scenario)


def test_gauges_while_it_works_and_preemptions(run: Callable[..., None], gate: Gate) -> None:
    """Two requests that need more pages than there are, and a third that waits for a row."""

    async def scenario(api: Api) -> None:
        before = await api.metrics()
        with capture_logs() as logged:
            longer = LONG | {"max_tokens": 300}
            gate.close()
            tasks = [asyncio.create_task(api.complete(prompt=[i] * 8, **longer)) for i in range(3)]
            busy = await api.wait(
                lambda found: (found["octavo_num_requests_running"], found["octavo_num_requests_waiting"]) == (2, 1)
            )
            gate.open()
            assert busy["octavo_kv_cache_usage_perc"] == busy["octavo_kv_pages{held}"] / PAGES > 0
            await asyncio.gather(*tasks)
        found = await api.metrics()
        grown = {name: value - before[name] for name, value in found.items()}
        assert grown["octavo_num_preemptions_total"] >= 1
        # What was computed again counts once as a prompt.
        assert grown["octavo_prompt_tokens_total"] == 24
        assert grown["octavo_generation_tokens_total"] == 900
        assert grown["octavo_inter_token_latency_seconds_count"] == 3 * 299
        assert found["octavo_num_requests_running"] == found["octavo_num_requests_waiting"] == 0
        assert found["octavo_kv_cache_usage_perc"] == 0
        requests = [entry for entry in logged if entry["event"] == "request finished"]
        assert len(requests) == 3
        for entry in requests:
            phases = entry["queue_seconds"] + entry["prefill_seconds"] + entry["decode_seconds"]
            assert 0 < phases <= entry["total_seconds"] + 1e-5

    run(scenario)


def test_beams_and_a_client_that_leaves(run: Callable[..., None], gate: Gate) -> None:
    async def scenario(api: Api) -> None:
        await api.complete(prompt=PROMPT, use_beam_search=True, n=2, max_tokens=20)
        gate.close()
        found = await api.metrics()
        for name in ("time_to_first_token_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"):
            assert found[f"octavo_{name}_count"] == 1, name
        task = asyncio.create_task(api.complete(prompt=PROMPT, n=2, **LONG))
        await api.wait(lambda found: found["octavo_time_to_first_token_seconds_count"] == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.open()
        found = await api.wait(lambda found: found["octavo_num_requests_running"] == 0)
        assert found["octavo_request_success_total{abort}"] == 2
        assert found["octavo_e2e_request_latency_seconds_count"] == 1
        assert found["octavo_kv_cache_usage_perc"] == 0

    run(scenario)


@pytest.mark.slow
def test_a_restart_and_a_listener_that_fails(
    run: Callable[..., None], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """No counter goes down when the engine is killed; and a fault in what only looks on harms no request."""

    async def scenario(api: Api) -> None:
        def counters(found: dict[str, float]) -> dict[str, float]:
            # A process is no counter of ours; all else that ends in _total, _sum or _count is one.
            return {
                name: value
                for name, value in found.items()
                if name.partition("{")[0].endswith(("_total", "_sum", "_count"))
            }

        await api.complete(prompt=PROMPT, max_tokens=5, ignore_eos=True)
        ever = [counters(await api.metrics())]
        assert ever[0]["octavo_prompt_tokens_total"] >= 40
        gate.close()
        task = asyncio.create_task(api.http.post("/v1/completions", json={"prompt": PROMPT, **LONG}))
        begun = ever[0]["octavo_generation_tokens_total"]
        await api.wait(lambda found: found["octavo_generation_tokens_total"] > begun + 10)
        os.kill(api.client._process.pid, signal.SIGKILL)
        gate.open()
        died = await api.wait(lambda found: found["octavo_engine_up"] == 0)
        assert "octavo_num_requests_running" not in died
        ever.append(counters(died))
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        alive = await api.wait(lambda found: found["octavo_engine_up"] == 1)
        assert alive["octavo_engine_restarts_total"] == 1
        assert alive["octavo_num_requests_running"] == alive["octavo_kv_cache_usage_perc"] == 0
        ever.append(counters(alive))
        await api.complete(prompt=PROMPT, max_tokens=5, ignore_eos=True)
        ever.append(counters(await api.metrics()))
        for before, after in pairwise(ever):
            assert set(before) <= set(after)
            assert [name for name in before if after[name] < before[name]] == []
        assert ever[-1]["octavo_prompt_tokens_total"] - ever[0]["octavo_prompt_tokens_total"] == 80
        assert ever[-1]["octavo_generation_tokens_total"] > begun + 10 + 5
        steps = [found["octavo_steps_total"] - found["octavo_step_seconds_count"] for found in ever]
        assert len(set(steps)) == 1, "each step is observed once"

        def fail(*news: Any) -> None:
            raise ZeroDivisionError("made by the test")

        api.client.on_news = fail
        assert (await api.complete(prompt=PROMPT, max_tokens=5, ignore_eos=True))["usage"]["completion_tokens"] == 5
        assert "made by the test" in caplog.text

    run(scenario)
