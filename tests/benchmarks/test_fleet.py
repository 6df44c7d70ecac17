"""The simulation of fleets: its replicas against plain loops, its routers, its traces, and the results in the tree."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fleet as simulation  # noqa: E402
from fleets.fleet import Fleet, report  # noqa: E402
from fleets.measured import fit, foretold  # noqa: E402
from fleets.replica import Replica, Request, Service, serviceable  # noqa: E402
from fleets.traces import arrivals, made_up, traces  # noqa: E402

PLAIN = Service(step=0.02, token=1e-4, pair=1e-7, row=2e-4, context=1e-6)


def one(service: Service, requests: Sequence[Request]) -> list[Request]:
    """One replica serves them."""
    fleet = Fleet(service, 1, "random")
    fleet.run([replace(request) for request in requests])
    return sorted(fleet.ended, key=lambda request: request.arrival)


def loops(service: Service, requests: Sequence[Request]) -> list[Request]:
    """The same, one step after the other and nothing kept but lists."""
    todo, waiting, prompts, rows = [replace(request) for request in requests], [], [], []
    cache: list[tuple[int, int]] = []  # blocks, least recently used first
    done: list[Request] = []
    now = 0.0

    def touch(request: Request, *, store: bool) -> None:
        for block in request.blocks:
            known = [entry for entry in cache if entry[0] == block]
            if not known and not store:
                return
            if known:
                cache.remove(known[0])
            cache.append((block, request.block))

    def shrink() -> None:
        held = sum(r.tokens + r.output for r in [*(r for r, _ in prompts), *(r for r, _ in rows)])
        while cache and sum(size for _, size in cache) > max(service.cache - held, 0):
            del cache[0]

    while todo or waiting or prompts or rows:
        if not (waiting or prompts or rows):
            now = max(now, todo[0].arrival)
        while todo and todo[0].arrival <= now:
            waiting.append(todo.pop(0))
        while waiting and len(rows) + len(prompts) < service.most_rows:
            request = waiting[0]
            held = sum(r.tokens + r.output for r in [*(r for r, _ in prompts), *(r for r, _ in rows)])
            if held and held + request.tokens + request.output > service.cache:
                break
            del waiting[0]
            count = 0
            for block in request.blocks:
                if block not in [name for name, _ in cache]:
                    break
                count += request.block
            request.cached = min(count, request.tokens - 1)
            touch(request, store=False)
            prompts.append([request, request.cached])
            shrink()
        seconds = service.step + len(rows) * service.row
        seconds += service.context * sum(request.tokens + said for request, said in rows)
        room, tokens, parts = service.most_seconds - seconds, service.most_tokens, []
        for entry in prompts:
            request, start = entry
            count = min(request.tokens - start, tokens)
            fits = int(min(room / (service.token + service.pair * (start + count / 2)), tokens))
            count = min(count, max(fits, 0 if parts else 16))
            if count <= 0:
                break
            part = sum(service.token + service.pair * (position + 1) for position in range(start, start + count))
            parts.append((entry, count))
            seconds, room, tokens = seconds + part, room - part, tokens - count
            if start + count < request.tokens:
                break
        now += seconds
        for row in rows:
            row[1] += 1
        for entry, count in parts:
            entry[1] += count
            if entry[1] == entry[0].tokens:
                prompts.remove(entry)
                entry[0].first = now
                rows.append([entry[0], 1])
                touch(entry[0], store=True)
                shrink()
        for row in [row for row in rows if row[1] >= row[0].output]:
            rows.remove(row)
            row[0].end = now
            touch(row[0], store=True)
            shrink()
            done.append(row[0])
    return sorted(done, key=lambda request: request.arrival)


@pytest.mark.parametrize("seed", range(12))
def test_a_replica_does_what_plain_loops_do(seed: int) -> None:
    rng = random.Random(seed)
    service = replace(
        PLAIN, most_rows=rng.choice([2, 5, 100]), cache=rng.choice([900, 3000, 10**6]),
        most_tokens=rng.choice([100, 2048]), most_seconds=rng.choice([0.03, 0.25, math.inf]),
    )  # fmt: skip
    requests, moment = [], 0.0
    for _ in range(60):
        moment += rng.expovariate(rng.choice([2.0, 30.0]))
        blocks = [(rng.randrange(3), depth) for depth in range(rng.randint(0, 8))]
        names = [hash(tuple(blocks[: end + 1])) for end in range(len(blocks))]
        requests.append(Request(moment, 40 * len(names) + rng.randint(1, 60), rng.randint(1, 30), names, 40))
    for ours, theirs in zip(one(service, requests), loops(service, requests), strict=True):
        assert ours.cached == theirs.cached
        assert ours.first == pytest.approx(theirs.first, rel=1e-9)
        assert ours.end == pytest.approx(theirs.end, rel=1e-9)


def test_a_request_alone() -> None:
    (request,) = one(PLAIN, [Request(3.0, 100, 11)])
    assert request.first == pytest.approx(3.0 + 0.02 + 100 * 1e-4 + 1e-7 * 5050)
    steps = 10 * (0.02 + 2e-4) + 1e-6 * sum(range(101, 111))
    assert request.end - request.first == pytest.approx(steps)


@pytest.mark.parametrize("routing", simulation.ROUTINGS)
def test_every_request_is_answered_once(routing: str) -> None:
    requests = arrivals(made_up(400), 30.0, 900)
    fleet = Fleet(PLAIN, 7, routing)
    fleet.run(requests)
    assert sorted(map(id, fleet.ended)) == sorted(map(id, requests))
    for request in fleet.ended:
        assert request.arrival < request.first <= request.end
        assert 0 <= request.cached < request.tokens
    for number, replica in enumerate(fleet.replicas):
        assert (replica.unfinished, len(replica._rows), replica._held) == (0, 0, 0)
        assert replica.pending == pytest.approx(0.0, abs=1e-6)
        assert set(replica._cached) == {block for block, where in fleet._where.items() if number in where}
    again = Fleet(PLAIN, 7, routing)
    again.run(arrivals(made_up(400), 30.0, 900))
    assert report(again) == report(fleet)


@pytest.mark.slow
def test_routing_by_prefixes_finds_more_and_waits_less() -> None:
    trace = made_up(2000)
    rate = 0.8 * serviceable(PLAIN, trace)
    found = {}
    for routing in simulation.ROUTINGS:
        fleet = Fleet(replace(PLAIN, cache=40_000), 20, routing)
        fleet.run(arrivals(trace, 20 * rate, 6000))
        found[routing] = report(fleet)
    assert found["prefix"]["hit_rate"] > 1.3 * found["least"]["hit_rate"]
    assert found["prefix"]["first_token_p95"] < found["least"]["first_token_p95"] < found["random"]["first_token_p95"]


def test_a_router_by_prefixes_does_not_pile_up_what_begins_alike() -> None:
    """All prompts are the same, and one replica has it at first."""
    fleet = Fleet(PLAIN, 4, "prefix")
    fleet.run([Request(place * 0.001, 2000, 20, range(30), 64) for place in range(200)])
    assert min(replica.busy for replica in fleet.replicas) > 0.5 * max(replica.busy for replica in fleet.replicas)


def test_arrivals_keep_a_traces_pattern_at_another_rate() -> None:
    trace = made_up(2000)
    found = arrivals(trace, 50.0, 6000)
    assert len(found) == 6000
    assert [request.arrival for request in found] == sorted(request.arrival for request in found)
    assert len(found) / (found[-1].arrival - found[0].arrival) == pytest.approx(50.0, rel=0.02)
    assert sum(request.tokens for request in found) == 3 * sum(request.tokens for request in trace)
    common = set.intersection(*(set(request.blocks) for request in trace))
    assert common == set.intersection(*(set(request.blocks) for request in found))
    own = {block for request in trace for block in request.blocks} - common
    assert len({block for request in found for block in request.blocks} - common) == 3 * len(own)


def test_traces_that_are_not_there_are_made_up(tmp_path: Path) -> None:
    assert list(traces(tmp_path)) == ["made-up"]
    folder = tmp_path / "mooncake"
    folder.mkdir()
    line = {"timestamp": 2500, "input_length": 1600, "output_length": 64, "hash_ids": [0, 7]}
    (folder / "conversation_trace.jsonl").write_text(json.dumps(line) + "\n")
    (request,) = traces(tmp_path)["mooncake-conversation"]
    assert request == Request(2.5, 100, 4, [0, 7], 32, first=request.first, end=request.end)
    folder = tmp_path / "azure_llm_2023"
    folder.mkdir()
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44"]
    rows.append("2023-11-16 18:15:50.9951690,396,109")
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text("\n".join(rows))
    first, second = traces(tmp_path)["azure-conversation"]
    assert (first.arrival, first.tokens, first.output, first.blocks) == (0.0, 374, 44, ())
    assert (second.arrival, second.tokens, second.output) == (pytest.approx(4.314579), 396, 109)


def test_a_service_is_found_again_from_its_steps() -> None:
    shapes = [(64, 0, 0, 0), (2000, 0, 0, 0), (500, 1000, 0, 0), (0, 0, 1, 50), (0, 0, 16, 20_000), (0, 0, 40, 900)]
    samples = [dict(zip(("tokens", "start", "rows", "context"), shape, strict=True)) for shape in shapes]
    samples = [sample | {"seconds": foretold(PLAIN, sample)} for sample in samples]
    found = fit(samples)
    for name in ("step", "token", "pair", "row", "context"):
        assert getattr(found, name) == pytest.approx(getattr(PLAIN, name), rel=1e-6)


def test_nothing_known_is_nothing_cached() -> None:
    replica = Replica(PLAIN, lambda block: None, lambda block: None)
    assert replica.known(Request(0.0, 100, 5, [1, 2], 64)) == 0
    assert replica.next_event() == math.inf


def test_the_results_that_are_kept() -> None:
    """The measured steps are met, the simulation met the engine, and the fleets are those of that engine."""
    measured = json.loads((ROOT / "benchmarks/results/fleet-service.json").read_text())
    for sample in measured["samples"]:
        assert sample["fitted"] == pytest.approx(sample["seconds"], rel=0.15)
    for check in measured["checks"]:
        for what in ("first_token", "whole"):
            assert check[f"{what}_simulated"] == pytest.approx(check[f"{what}_measured"], rel=0.25)
    found = json.loads((ROOT / "benchmarks/results/fleet.json").read_text())
    assert found["service"] == measured["service"]
    for trace in found["traces"].values():
        assert {row["replicas"] for row in trace["fleets"]} == set(simulation.SIZES)
        assert {row["routing"] for row in trace["fleets"]} == set(simulation.ROUTINGS)
        assert set(trace["sizing"]) == set(simulation.ROUTINGS)
        for row in trace["sizing"].values():
            assert row["first_token_p95"] <= simulation.TARGET
            assert row["per_token_p50"] <= simulation.EACH
