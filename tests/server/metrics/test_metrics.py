"""Metrics over a scripted engine: names, buckets, exact counts, both formats, and what survives a restart."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_client import FakeClient, Step, say
from prometheus_client import parser as text_parser
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from test_http_api import MODEL, Api, endless

from engine import ChoiceDelta, EngineStats, InvalidRequestError, RequestDelta, SamplingParams, TokenInput
from server.metrics.buckets import token_counts
from server.metrics.loop_lag import watch_event_loop
from server.metrics.registry import Metrics
from server.metrics.times import PromptTimes

FIRST = [.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160]  # fmt: skip
EACH = [.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5]  # fmt: skip
WHOLE = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36]
TOKENS = [1, 2, 5, 10, 20, 50, 100]  # the fake engine's context is 64 tokens
# Every name that vLLM has too, with its type and, for histograms, the bounds.
SHARED: dict[str, tuple[str, list[float]]] = {
    "num_requests_running": ("gauge", []),
    "num_requests_waiting": ("gauge", []),
    "kv_cache_usage_perc": ("gauge", []),
    "cache_config_info": ("gauge", []),
    "lora_requests_info": ("gauge", []),
    "prompt_tokens": ("counter", []),
    "prompt_tokens_cached": ("counter", []),
    "generation_tokens": ("counter", []),
    "request_success": ("counter", []),
    "num_preemptions": ("counter", []),
    "prefix_cache_queries": ("counter", []),
    "prefix_cache_hits": ("counter", []),
    "spec_decode_num_drafts": ("counter", []),
    "spec_decode_num_draft_tokens": ("counter", []),
    "spec_decode_num_accepted_tokens": ("counter", []),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", []),
    "time_to_first_token_seconds": ("histogram", FIRST),
    "inter_token_latency_seconds": ("histogram", EACH),
    "request_time_per_output_token_seconds": ("histogram", EACH),
    "e2e_request_latency_seconds": ("histogram", WHOLE),
    "request_queue_time_seconds": ("histogram", WHOLE),
    "request_prefill_time_seconds": ("histogram", WHOLE),
    "request_decode_time_seconds": ("histogram", WHOLE),
    "request_prompt_tokens": ("histogram", TOKENS),
    "request_generation_tokens": ("histogram", TOKENS),
    "iteration_tokens_total": (
        "histogram",
        [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000],
    ),
}
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def families(api: Api, accept: str = "") -> dict[str, Metric]:
    """What a scrape says, by name."""
    answer = api.request("GET", "/metrics", headers={"Accept": accept})
    parse = openmetrics_parser if answer.headers["content-type"] == OPEN else text_parser
    return {family.name: family for family in parse.text_string_to_metric_families(answer.text)}


def values(api: Api) -> dict[str, float]:
    """Every sample of a scrape as `name{label="value"}`, labels in order."""
    found = {}
    for family in families(api).values():
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


# ---------------------------------------------------------------- names and formats


@pytest.mark.parametrize("accept", ["", OPEN])
@pytest.mark.parametrize("prefix", ["octavo_", "vllm:"])
def test_the_shared_names_have_the_expected_types_and_buckets(prefix: str, accept: str) -> None:
    found = families(Api(), accept)
    for name, (kind, bounds) in SHARED.items():
        family = found[prefix + name]
        assert family.type == kind, name
        assert family.samples, name
        shown = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        assert shown == ([*bounds, math.inf] if bounds else []), name


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        ("text/html,application/xhtml+xml,*/*;q=0.8", PLAIN),
        ("text/plain;version=0.0.4", PLAIN),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;version=1.0.0;q=0.5", PLAIN),
        ("application/openmetrics-text", OPEN),
        ("application/openmetrics-text;version=2.0.0,application/openmetrics-text;version=1.0.0", OPEN),
        ("application/openmetrics-text;version=nonsense", PLAIN),
        (";;,=;,", PLAIN),
        # Prometheus 2 and Prometheus 3.
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1",
            OPEN,
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
            "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            OPEN,
        ),
        ("application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.6,*/*;q=0.2", OPEN),
    ],
)
def test_a_scraper_gets_a_format_that_it_asked_for(accept: str, content_type: str) -> None:
    api = Api()
    api.complete(prompt="a")
    answer = api.request("GET", "/metrics", headers={"Accept": accept})
    assert answer.headers["content-type"] == content_type
    assert "\nvllm:request_success_total{" in answer.text
    assert "vllm_" not in answer.text
    assert answer.text.endswith("# EOF\n") == (content_type == OPEN)


def test_both_formats_say_the_same() -> None:
    api = Api()
    api.complete(prompt="ab", n=3)

    def said(accept: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families(api, accept).values()
            for sample in family.samples
            if family.name.startswith(("octavo_", "vllm:")) and not sample.name.endswith("_created")
        }

    plain = said("")
    assert len(plain) > 200
    assert said(OPEN) == plain


def test_the_aliases_repeat_our_numbers() -> None:
    api = Api()
    api.complete(prompt="abc", n=2)
    found = families(api)
    for name in SHARED:
        ours = [
            (
                "vllm:" + sample.name.removeprefix("octavo_"),
                sample.labels | {"model_name": MODEL, "engine": "0"},
                sample.value,
            )
            for sample in found[f"octavo_{name}"].samples
        ]
        assert [(sample.name, sample.labels, sample.value) for sample in found[f"vllm:{name}"].samples] == ours
    assert {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")} == set(SHARED)


def test_facts() -> None:
    app = Metrics(FakeClient(lambda *_: []), 'a "model"\n', "1.2.3")
    (text, _) = app.render(None)
    said = {
        sample.name: sample.labels
        for family in text_parser.text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert said["octavo_build_info"] == {"version": "1.2.3"}
    assert said["octavo_model_info"] == {
        "model_name": 'a "model"\n', "dtype": "float32", "device": "cpu", "max_model_len": "64", "max_num_seqs": "8"
    }  # fmt: skip
    assert said["octavo_cache_config_info"] == {
        "block_size": "16", "cache_dtype": "int8", "num_gpu_blocks": "10"
    }  # fmt: skip
    assert said["vllm:cache_config_info"]["model_name"] == 'a "model"\n'
    assert said["vllm:lora_requests_info"].items() >= {
        "max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""
    }.items()  # fmt: skip
    assert "process_resident_memory_bytes" in said


def test_token_counts_reach_the_largest() -> None:
    assert token_counts(1) == (1,)
    assert token_counts(50) == (1, 2, 5, 10, 20, 50)
    assert token_counts(51)[-1] == 100


# ---------------------------------------------------------------- exact counts


class Clock:
    """Time as the test wants it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def samples(metrics: Metrics) -> dict[str, float]:
    """Samples without labels other than le, and without empty buckets."""
    return {
        sample.name.removeprefix("octavo_")
        + (f" <= {sample.labels['le']}" if "le" in sample.labels else ""): sample.value
        for family in metrics.registry.collect()
        if family.name.startswith("octavo_")
        for sample in family.samples
        if set(sample.labels) <= {"le"}
    }


def token(index: int = 0, count: int = 1) -> ChoiceDelta:
    return ChoiceDelta(index=index, token_ids=[65] * count)


def test_the_times_of_a_prompt(clock: Clock) -> None:
    """Arrival at 1000, first step at 1000.03, first sample at 1000.15; tokens of two answers."""
    client = FakeClient(lambda *_: [])
    metrics = Metrics(client, MODEL)
    times = PromptTimes(1000.0, 7, 2)
    metrics.watch("a", times)
    assert client.on_news is not None

    def step(at: float, *choices: ChoiceDelta, **facts: Any) -> None:
        clock.now = at
        delta = RequestDelta(request_id="a", choices=choices, **facts)
        other = RequestDelta(request_id="somebody else's", choices=[token()])
        client.on_news([other, delta], client.stats())  # type: ignore[misc]

    step(1000.01)  # accepted
    step(1000.2, token(0), token(1), scheduled_time=1000.03, first_token_time=1000.15, num_cached_tokens=4)
    step(1000.26, token(0), token(1))
    step(1000.35, token(1))
    step(1000.55, token(0, 2))  # two at once
    step(1000.6, ChoiceDelta(index=0, token_ids=[]))  # no token
    times.reasons[1] = "stop"  # by a stop string, of which the engine has not heard
    step(1000.7, token(1))
    clock.now = 1000.75
    times.generated, times.reasons = [4, 3], ["length", "stop"]
    metrics.prompt_done(times)
    found = samples(metrics)
    assert found["time_to_first_token_seconds_count"] == 1
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert (
        found["time_to_first_token_seconds_bucket <= 0.1"],
        found["time_to_first_token_seconds_bucket <= 0.25"],
    ) == (0, 1)
    assert found["inter_token_latency_seconds_count"] == 4
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.06 + 0.06 + 0.09 + 0.29)
    assert [found[f"inter_token_latency_seconds_bucket <= {le}"] for le in (0.05, 0.075, 0.1, 0.2, 0.3)] == [
        0,
        2,
        3,
        3,
        4,
    ]
    for name, seconds in (
        ("request_queue_time_seconds", 0.03),
        ("request_prefill_time_seconds", 0.12),
        ("request_decode_time_seconds", 0.4),
        ("e2e_request_latency_seconds", 0.75),
        ("request_time_per_output_token_seconds", 0.4 / 3),
        ("request_prompt_tokens", 7),
        ("request_generation_tokens", 7),
    ):
        assert found[f"{name}_count"] == 1, name
        assert found[f"{name}_sum"] == pytest.approx(seconds), name
    assert times.num_cached == 4
    metrics.unwatch("a")
    step(1001.0, token(0))
    assert samples(metrics)["inter_token_latency_seconds_count"] == 4


def test_beams_bring_their_tokens_late(clock: Clock) -> None:
    """The first sample ends the prefill, the first certain token is what the client waits for."""
    client = FakeClient(lambda *_: [])
    metrics = Metrics(client, MODEL)
    times = PromptTimes(1000.0, 7, 1)
    metrics.watch("a", times)
    assert client.on_news is not None
    clock.now = 1000.1
    first = RequestDelta(request_id="a", choices=(), scheduled_time=1000.05, first_token_time=1000.1)
    client.on_news([first], client.stats())
    clock.now = 1000.5
    last = RequestDelta(request_id="a", choices=[token(0, 6)], finished=True)
    client.on_news([last], client.stats())
    times.generated, times.reasons = [6], ["length"]
    metrics.prompt_done(times)
    found = samples(metrics)
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(0.5)
    assert found["request_prefill_time_seconds_sum"] == pytest.approx(0.05)
    assert found["request_decode_time_seconds_sum"] == pytest.approx(0.4)
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(0.4 / 5)
    assert found["inter_token_latency_seconds_count"] == 0


def test_counts_of_requests() -> None:
    """Three prompts with two answers each; final when the response is there."""
    api = Api()
    body = api.complete(prompt=["a", "bc", "def"], n=2, max_tokens=9).json()
    found = values(api)
    assert found["octavo_time_to_first_token_seconds_count"] == 3
    assert found["octavo_e2e_request_latency_seconds_count"] == 3
    assert found["octavo_request_prompt_tokens_sum"] == body["usage"]["prompt_tokens"] == 6
    assert found['octavo_request_prompt_tokens_bucket{le="1.0"}'] == 1
    assert found['octavo_request_prompt_tokens_bucket{le="2.0"}'] == 2
    assert found["octavo_request_generation_tokens_sum"] == body["usage"]["completion_tokens"] == 2 * (4 + 5 + 6)
    assert found["octavo_inter_token_latency_seconds_count"] == 2 * (3 + 4 + 5)
    assert found["octavo_request_time_per_output_token_seconds_count"] == 3
    assert found['octavo_request_success_total{finished_reason="length"}'] == 6
    assert found[f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{MODEL}"}}'] == 6
    assert found["octavo_num_requests_running"] == 0
    # The script says nothing about its engine's clock.
    assert found["octavo_request_queue_time_seconds_count"] == found["octavo_request_prefill_time_seconds_count"] == 0
    assert found["octavo_request_decode_time_seconds_count"] == 3


@pytest.mark.parametrize("stream", [True, False])
def test_counts_are_final_before_the_response_ends(stream: bool) -> None:
    """Read whenever something is sent: in a stream, with the event that says why the answer ended."""
    api = Api(lambda request_id, source, params: say(request_id, ["hello"], params))
    metrics: Metrics = api.app.state.service.metrics
    seen = []

    async def call() -> None:
        body = json.dumps({"prompt": "a", "stream": stream}).encode()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            request = next(requests, None)
            return await asyncio.Event().wait() or {} if request is None else request

        async def send(message: Any) -> None:
            if b'"finish_reason":"length"' in message.get("body", b""):
                found = samples(metrics)
                seen.append((found["e2e_request_latency_seconds_count"], found["request_generation_tokens_sum"]))

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": ("c", 1), "server": ("s", 1),
        }  # fmt: skip
        await asyncio.wait_for(api.app(scope, receive, send), 10)

    asyncio.run(call())
    assert seen == [(1, 5)]
    assert values(api)['octavo_request_success_total{finished_reason="length"}'] == 1


def test_a_stop_string_ends_what_is_counted() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
        return say(request_id, ["one two three"], params)

    api = Api(script)
    usage = api.complete(prompt="a", stop=" two").json()["usage"]
    found = values(api)
    assert found["octavo_request_generation_tokens_sum"] == usage["completion_tokens"] == len("one two")
    assert found['octavo_request_success_total{finished_reason="stop"}'] == 1


def test_what_is_cut_short_has_no_duration() -> None:
    api = Api(endless)
    api.leave({"prompt": ["a", "b"], "stream": True}, 2)
    found = values(api)
    assert found["octavo_time_to_first_token_seconds_count"] == 2
    assert found["octavo_e2e_request_latency_seconds_count"] == found["octavo_request_generation_tokens_count"] == 0
    assert found['octavo_request_success_total{finished_reason="abort"}'] == 2


def test_a_refused_prompt_counts_as_nothing() -> None:
    api = Api(lambda *_: [InvalidRequestError("no", param="prompt")])
    assert api.complete(prompt="a").status_code == 400
    found = values(api)
    assert sum(value for name, value in found.items() if name.startswith("octavo_request_success_total")) == 0
    assert found["octavo_e2e_request_latency_seconds_count"] == 0


def test_aborts_and_rejections() -> None:
    metrics = Metrics(FakeClient(lambda *_: []), MODEL)
    metrics.aborted("stall", 2)
    metrics.aborted("stall")
    metrics.rejected("queue_full")
    text = metrics.render(None)[0].decode().splitlines()
    assert 'octavo_requests_aborted_total{reason="stall"} 3.0' in text
    assert 'octavo_requests_rejected_total{reason="queue_full"} 1.0' in text


# ---------------------------------------------------------------- the engine's statistics


class Counting(FakeClient):
    """An engine whose statistics the test sets."""

    def __init__(self) -> None:
        super().__init__(lambda *_: [])
        self.current = EngineStats()

    def stats(self) -> EngineStats:
        super().stats()  # raises if it is dead
        return self.current

    def step(self, **changes: Any) -> None:
        self.current = replace(self.current, num_steps=self.current.num_steps + 1, **changes)
        assert self.on_news is not None
        self.on_news([], self.current)


def test_steps_are_observed_one_by_one() -> None:
    client = Counting()
    client.current = EngineStats(num_steps=4, step_seconds=2.0, computed_tokens=100)  # from before the service
    metrics = Metrics(client, MODEL)
    client.step(step_seconds=2.003, computed_tokens=164)
    client.step(step_seconds=2.103, computed_tokens=165)
    client.on_news([], client.current)  # type: ignore[misc]  # news of commands
    found = samples(metrics)
    assert found["step_seconds_count"] == found["iteration_tokens_total_count"] == 2
    assert found["step_seconds_sum"] == pytest.approx(0.103)
    assert found["step_seconds_bucket <= 0.005"] == 1
    assert found["iteration_tokens_total_sum"] == 65
    assert (found["iteration_tokens_total_bucket <= 1.0"], found["iteration_tokens_total_bucket <= 50.0"]) == (1, 1)
    assert found["steps_total"] == 6


def test_cached_pages_count_as_free() -> None:
    client = Counting()
    metrics = Metrics(client, MODEL)
    client.current = EngineStats(pages_total=10, pages_held=2, pages_cached=7, pages_free=1)
    assert samples(metrics)["kv_cache_usage_perc"] == 0.2
    client.current = EngineStats(pages_total=10, pages_cached=10)
    assert samples(metrics)["kv_cache_usage_perc"] == 0.0
    client.current = EngineStats()  # no pool
    assert samples(metrics)["kv_cache_usage_perc"] == 0.0


def test_no_counter_goes_down_when_the_engine_is_started_again() -> None:
    client = Counting()
    metrics = Metrics(client, MODEL)

    def counters() -> dict[str, float]:
        return {
            sample.name: sample.value
            for family in metrics.registry.collect()
            if family.type == "counter" and family.name.startswith(("octavo_", "vllm:"))
            for sample in family.samples
            if not sample.labels.get("reason") and not sample.name.endswith("_created")
        }

    ever = [counters()]
    for life in range(3):
        client.step(
            prompt_tokens=10, prompt_tokens_cached=3, generation_tokens=20, computed_tokens=30, prefix_queries=12,
            prefix_hits=4, num_preemptions=1, num_page_copies=2, step_seconds=0.5,
        )  # fmt: skip
        if life != 1:  # one life passes without a scrape
            ever.append(counters())
        client.dead = True
        ever.append(counters())
        client.dead, client.current = False, EngineStats()
        client.num_restarts += 1
        if life == 2:
            ever.append(counters())
    client.step(prompt_tokens=1, computed_tokens=1, step_seconds=0.25)
    ever.append(counters())
    for before, after in pairwise(ever):
        assert set(before) == set(after)
        assert [name for name in before if after[name] < before[name]] == []
    last = ever[-1]
    assert last["octavo_prompt_tokens_total"] == last["vllm:prompt_tokens_total"] == 31
    assert last["octavo_generation_tokens_total"] == 60
    assert last["octavo_prefix_cache_hits_total"] == 12
    assert last["octavo_prompt_tokens_cached_total"] == 9
    assert last["octavo_num_preemptions_total"] == last["octavo_engine_restarts_total"] == 3
    assert last["octavo_steps_total"] == samples(metrics)["step_seconds_count"] == 4
    assert samples(metrics)["step_seconds_sum"] == pytest.approx(1.75)


def test_a_dead_engine_has_counters_and_no_gauges() -> None:
    client = Counting()
    metrics = Metrics(client, MODEL)
    client.step(prompt_tokens=5, num_running=3, pages_total=4, pages_held=4)
    client.dead = True
    found = samples(metrics)
    assert found["engine_up"] == 0
    assert found["prompt_tokens_total"] == 5
    assert not {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"} & set(found)


# ---------------------------------------------------------------- the event loop


def test_a_blocked_event_loop_shows() -> None:
    async def run(blocked: float) -> list[float]:
        seen: list[float] = []
        async with watch_event_loop(seen.append, period=0.01):
            await asyncio.sleep(0.03)
            time.sleep(blocked)
            await asyncio.sleep(0.03)
        count = len(seen)
        await asyncio.sleep(0.03)
        assert len(seen) == count, "it goes on after its end"
        return seen

    assert max(asyncio.run(run(0.3))) >= 0.25
    assert min(asyncio.run(run(0.0))) >= 0.0


def test_the_lifespan_watches_the_event_loop() -> None:
    api = Api()

    async def live() -> None:
        async with api.app.router.lifespan_context(api.app):
            deadline = time.monotonic() + 20
            while api.app.state.service.metrics.event_loop_lag._sum.get() == 0.0:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    asyncio.run(live())
    assert values(api)["octavo_event_loop_lag_seconds_count"] >= 1
