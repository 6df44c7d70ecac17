"""Sampling by kernels for GPUs: against torch's, against exact distributions, alone and in a crowd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from support.gpu import kernels
from support.poison import poisoned
from test_native_sampling import KINDS, by_rank, used
from test_sampler import FILTERS, allowed_rows, batch_of, distribution, mixed_rows, warped

from engine.backends.triton import sampling, sampling_best, sampling_draw, sampling_edit, sampling_walk, sampling_wide
from engine.backends.triton.sampling import SIZES, Sizes
from engine.execution import sampler, sampler_captured, sampler_device, sampler_torch
from engine.execution.pending import LateStep
from engine.execution.sampler_captured import CapturedSampler
from engine.execution.sampler_device import DeviceSampler
from engine.execution.transfers import Download
from engine.interface.sampling_table import Kind, new_version
from engine.scheduling.philox import uniforms
from engine.scheduling.plan import PromptLogprobRows, StepResult

pytestmark = pytest.mark.slow

# Of what is rare with the sizes that serve, much: rows with more candidates than are collected, several splits.
SMALL = Sizes(split=128, few=4, room=16, depth=2)
MIXED = mixed_rows()
few = settings(max_examples=8, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """Where kernels run, in memory that holds NaN, or -1, until something is written there."""
    with kernels() as where, poisoned(sampling, sampling_edit, sampler_device, sampler_captured):
        yield where


def test_watched_tokens(device: torch.device) -> None:
    logits = random_logits(2, 300, seed=3)
    batch = batch_of([{"watch": [0, 299, 5]}, {"watch": [7, 7, 1], "bias": {7: 5.0}}], 300)
    assert not CapturedSampler.serves(batch)
    found = DeviceSampler(device, sizes=SMALL).sample(logits.to(device), batch).result().watched
    expected = sampler_torch.sample(logits, batch).watched
    assert found is not None
    assert expected is not None
    np.testing.assert_allclose(found, expected, atol=2e-6)


def random_logits(rows: int, vocabulary: int, seed: int, scale: float = 2.0, ties: bool = False) -> Tensor:
    """Rows that lie apart, with NaN between them."""
    wide = torch.full((rows, vocabulary + 3), torch.nan)
    wide[:, :vocabulary] = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale
    if ties:
        wide = (wide * 2).round() / 2
    return wide[:, :vocabulary]


def sample(logits: Tensor, rows: Sequence[dict[str, Any]], device: torch.device, sizes: Sizes = SIZES) -> StepResult:
    before = logits.clone()
    on_device = logits.to(device)
    result = DeviceSampler(device, sizes=sizes).sample(on_device, batch_of(rows)).result()
    assert torch.equal(on_device.cpu(), before) or before.isnan().any()
    return result


def assert_same(mine: StepResult, other: StepResult, rows: Sequence[dict[str, Any]]) -> None:
    """What rows may use is the same, but for rounding."""
    for i, row in enumerate(rows):
        ours, theirs = used(mine, i, row), used(other, i, row)
        possible = ~np.isnan(theirs["logprobs"])
        assert (np.isnan(ours["logprobs"]) == ~possible).all(), row
        for name, values in ours.items():
            wanted = theirs[name]
            if name in ("tokens", "scores", "logprobs", "ranks"):
                values, wanted = values[possible], wanted[possible]
            assert np.allclose(values, wanted, rtol=2e-6, atol=2e-6), (name, row, values, wanted)


# ------------------------------------------------------------------ torch's choices


@few
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_the_kernels_choose_what_torch_chooses(data: st.DataObject, seed: int) -> None:
    rows = data.draw(st.lists(st.sampled_from([*KINDS, *MIXED]), min_size=1, max_size=6))
    vocabulary = data.draw(st.sampled_from([20, 97, 1000, 5003]))
    logits = random_logits(len(rows), vocabulary, seed, data.draw(st.sampled_from([0.5, 2.0, 8.0])))
    sizes = data.draw(st.sampled_from([SIZES, SMALL])) if vocabulary <= 1000 else SIZES
    with kernels() as device:
        ours = sample(logits, rows, device, sizes)
    assert_same(ours, sampler_torch.sample(logits, batch_of(rows)), rows)


@pytest.mark.parametrize(
    ("row", "scale"),
    [
        ({"top_k": 300, "top_p": 0.9}, 0.7),
        ({"top_k": 700}, 0.7),
        ({"top_p": 0.97}, 0.7),
        ({"min_p": 0.001}, 0.7),
        ({"top_p": 0.9}, 2.0),  # the threshold is in the lowest quarter of its first bracket
    ],
    ids=str,
)
def test_filters_that_keep_many_tokens(device: torch.device, row: dict[str, Any], scale: float) -> None:
    """At the sizes that serve, too: flat rows of more tokens than are collected."""
    logits = random_logits(3, 20_011, 3, scale)
    rows = [{**row, "draws": [0.1, 0.3, 0.7, 0.9]}, {"draws": [0.5]}, {**row, "temperature": 1.7, "draws": [0.999]}]
    assert_same(sample(logits, rows, device), sampler_torch.sample(logits, batch_of(rows)), rows)


@pytest.mark.parametrize(("vocabulary", "sizes"), [(97, SMALL), (1000, SIZES)])
def test_masks(device: torch.device, vocabulary: int, sizes: Sizes) -> None:
    """Step after step with other masks."""
    ours = DeviceSampler(device, sizes=sizes)
    for seed in range(2):
        rows = allowed_rows(vocabulary)[seed:]
        logits = random_logits(len(rows), vocabulary, seed=20 + seed)
        found = ours.sample(logits.to(device), batch_of(rows, vocabulary)).result()
        assert_same(found, sampler_torch.sample(logits, batch_of(rows, vocabulary)), rows)


# ------------------------------------------------------------------ exact distributions


@st.composite
def filters(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "temperature": draw(st.sampled_from([1.0, 0.3, 0.8, 1.9, 1e-4, 1e30])),
        "top_k": draw(st.sampled_from([0, 0, 1, 3, 7, 20, 60, 1000])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-9, 0.999])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0])),
    }


def exact(logits: Tensor, row: dict[str, Any]) -> np.ndarray:
    """Probabilities [vocabulary] of one row under filters, by sorting; what ties with the last that is kept stays."""
    scaled = (logits / torch.tensor(row["temperature"])).numpy()
    weights = np.exp(scaled.astype(np.float64) - scaled.max())
    order = np.argsort(-scaled, kind="stable")
    best = order[: row["top_k"] or len(order)]
    smallest = scaled[best[-1]]
    if row["top_p"] < 1.0:
        before = weights[best].cumsum() - weights[best]
        smallest = scaled[best[before < np.float32(row["top_p"]) * weights[best].sum()][-1]]
    weights[(scaled < smallest) | (weights < np.float32(row["min_p"]))] = 0.0
    return weights / weights.sum()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(row=filters(), seed=st.integers(0, 2**20), data=st.data())
def test_draws_are_those_of_the_exact_distribution(row: dict[str, Any], seed: int, data: st.DataObject) -> None:
    """A number in the middle of a token's interval gives that very token: so what filters keep, with what
    probabilities and in what order is right. Ties and impossible tokens among them."""
    vocabulary = data.draw(st.sampled_from([7, 97, 300]))
    logits = random_logits(1, vocabulary, seed, data.draw(st.sampled_from([0.3, 2.0, 6.0])), data.draw(st.booleans()))
    if data.draw(st.booleans()):
        logits[0, :: data.draw(st.sampled_from([2, 3]))] = -torch.inf
    probabilities = exact(logits[0], row)
    tokens = np.flatnonzero(probabilities > 2e-6)
    tokens = tokens[:: max(1, len(tokens) // 8)]
    row["draws"] = (probabilities.cumsum() - probabilities / 2)[tokens]
    with kernels() as device:
        found = sample(logits, [row], device, data.draw(st.sampled_from([SIZES, SMALL])))
    assert found.tokens[0].tolist() == tokens.tolist()


@pytest.mark.parametrize(("row", "sizes"), [(FILTERS[0], SMALL), (FILTERS[4], SMALL), (FILTERS[7], SIZES)], ids=str)
def test_draws_are_spread_as_the_distribution_is(device: torch.device, row: dict[str, Any], sizes: Sizes) -> None:
    stats = pytest.importorskip("scipy.stats")
    number = 150
    logits = random_logits(1, 20, seed=5, scale=1.0)
    draws = uniforms([11] * number, [0] * number, range(number))
    tokens = sample(logits, [{**row, "draws": draws}], device, sizes).tokens[0]
    expected = distribution(warped(logits[0].clone(), row)) * number
    counts = np.bincount(tokens, minlength=20)
    assert (counts[expected == 0.0] == 0).all()
    likely = expected >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum())
    assert len(wanted) > 2
    assert stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3


def test_the_borders_of_the_unit_interval(device: torch.device) -> None:
    """0 gives the first possible token, the largest number below 1 the last; never an impossible one."""
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 140, 290]] = 0.0
    draws = [0.0, np.nextafter(1.0, 0.0), 0.5, np.nextafter(1 / 3, 0.0), np.nextafter(1 / 3, 1.0)]
    for row in ({}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.1}, {"top_k": 2}):
        for sizes in (SIZES, SMALL):
            assert sample(logits, [{**row, "draws": draws}], device, sizes).tokens[0].tolist() == [7, 290, 140, 7, 140]


# ------------------------------------------------------------------ ties, extremes, what is no number


@pytest.mark.parametrize("sizes", [SIZES, SMALL], ids=["served", "small"])
def test_of_equal_logits_the_lowest_token_comes_first(device: torch.device, sizes: Sizes) -> None:
    """Whether they fit into what is collected or not."""
    logits = random_logits(2, 160, seed=6, ties=True)
    logits[1, 30:] = 1.0
    logits[1, 100] = -0.0
    logits[1, :30] = 0.0
    rows: list[dict[str, Any]] = [{"beam_width": 9, "num_logprobs": 5}, {"beam_width": 9, "num_logprobs": 20}]
    found = sample(logits, rows, device, sizes)
    greedy = sample(logits, [{"temperature": 0.0}] * 2, device, sizes)
    for i in range(2):
        order = by_rank(logits[i].numpy())
        assert found.tokens[i].tolist() == order[:9].tolist()
        assert greedy.tokens[i, 0] == order[0]
        number = rows[i]["num_logprobs"]
        assert found.top_ids[i, :number].tolist() == order[:number].tolist()


def test_temperatures_far_apart(device: torch.device) -> None:
    logits = random_logits(4, 200, seed=7, scale=50.0)
    rows = [{"temperature": t, "draws": [0.99]} for t in (0.0, 1e-45, 1e-6, 1e-4)]
    assert sample(logits, rows, device).tokens[:, 0].tolist() == logits.argmax(dim=-1).tolist()
    hot = [{"temperature": 1e30, "top_p": 0.5, "draws": [(token + 0.5) / 200]} for token in (0, 50, 150, 199)]
    flat = sample(logits, [{**row, "top_p": 1.0} for row in hot], device)
    assert flat.tokens[:, 0].tolist() == [0, 50, 150, 199]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_no_distribution_harms_itself_alone(device: torch.device, bad: float) -> None:
    rows = [MIXED[i] for i in (0, 1, 3, 4, 6, 8, 12)]
    clean = random_logits(len(rows), 300, seed=8)
    before = sample(clean, rows, device)
    for victims, place in (([0, 2, 4], 211), ([1, 3, 5, 6], slice(None))):
        logits = clean.clone()
        logits[victims, place] = bad
        found = sample(logits, rows, device)
        assert ((found.tokens >= 0) & (found.tokens < 300)).all()
        whole = isinstance(place, slice)
        for i, row in enumerate(rows):
            if i not in victims:
                ours, theirs = used(found, i, row), used(before, i, row)
                assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
            elif whole or bad != -torch.inf:
                assert np.isnan(found.logprobs[i, 0]), row
                if "beam_width" in row and not np.isneginf(bad):
                    assert np.isnan(found.scores[i, 0])
            else:
                assert np.isfinite(found.logprobs[i, 0])
                assert found.tokens[i, 0] != 211


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_possible_token_fails_alone(device: torch.device, temperature: float) -> None:
    found = sample(torch.zeros(2, 4), [{"temperature": temperature, "ban": range(4)}, {}], device)
    assert np.isnan(found.logprobs[0, 0])
    assert found.logprobs[1, 0] == pytest.approx(np.log(0.25))


# ------------------------------------------------------------------ alone and in a crowd


@pytest.mark.parametrize("sizes", [SIZES, SMALL], ids=["served", "small"])
def test_rows_are_to_the_bit_what_they_are_alone(device: torch.device, sizes: Sizes) -> None:
    rows = [*MIXED[:8], MIXED[12], {"top_p": 0.99, "draws": [0.7]}, {"top_k": 50, "draws": [0.2]}]
    logits = random_logits(len(rows), 300, seed=9, ties=True)
    crowd = sample(logits, rows, device, sizes)
    for i, row in enumerate(rows):
        alone = used(sample(logits[i : i + 1], [row], device, sizes), 0, row)
        for name, values in used(crowd, i, row).items():
            assert values.tobytes() == alone[name].tobytes(), (name, row)


# ------------------------------------------------------------------ what comes from elsewhere


def test_the_sampler_takes_the_kernels_where_they_serve(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kept = DeviceSampler.sample

    def counted(self: DeviceSampler, *arguments: Any) -> Any:
        calls.append(1)
        return kept(self, *arguments)

    monkeypatch.setattr(DeviceSampler, "sample", counted)
    logits = random_logits(len(MIXED), 50, seed=10)
    ours = sampler.sample(logits.to(device), batch_of(MIXED))
    assert calls == [1]
    assert_same(ours, sampler_torch.sample(logits, batch_of(MIXED)), MIXED)


def test_prompts_are_scored_as_by_torch(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(9, 12, generator=generator), torch.randn(12, 301, generator=generator)
    numbers = np.arange(9, dtype=np.int32)
    rows = PromptLogprobRows(rows=numbers, targets=numbers * 30, num_logprobs=numbers % 4)
    on_device = head.to(device)
    ours = sampler.score_prompt(lambda x: x @ on_device, hidden.to(device), rows).result()
    theirs = sampler_torch.score(hidden @ head, rows.targets, rows.num_logprobs, 3)
    assert (ours.ranks == theirs.ranks).all()
    assert np.allclose(ours.logprobs, theirs.logprobs, rtol=2e-6, atol=2e-5)
    for i in range(9):
        assert (ours.top_ids[i, : i % 4] == theirs.top_ids[i, : i % 4]).all()
        assert np.allclose(ours.top_logprobs[i, : i % 4], theirs.top_logprobs[i, : i % 4], rtol=2e-6, atol=2e-5)


def test_scoring_prompts_waits_for_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts are computed before any is fetched; the step is over when the last one is there."""
    logits = random_logits(7, 60, seed=12)
    numbers = np.arange(7, dtype=np.int32)
    rows = PromptLogprobRows(rows=numbers, targets=numbers * 8, num_logprobs=np.full(7, 2, dtype=np.int32))
    monkeypatch.setattr(sampler, "PROMPT_ROWS", 3)
    waited: list[Download] = []
    arrived = False
    wait = Download.wait

    def noted(self: Download) -> Any:
        waited.append(self)
        return wait(self)

    monkeypatch.setattr(Download, "wait", noted)
    monkeypatch.setattr(Download, "ready", property(lambda self: arrived))
    scores = sampler.score_prompt(lambda x: x, logits.to(device), rows)
    step = LateStep(candidates=StepResult.empty(), prompt_logprobs=scores)
    assert not step.ready
    assert not waited
    arrived = True
    assert step.ready
    found, expected = step.result().prompt_logprobs, sampler_torch.score(logits, rows.targets, rows.num_logprobs, 2)
    assert len(waited) == 12
    assert step.ready
    assert step.result().prompt_logprobs is found
    assert found is not None
    assert (found.ranks == expected.ranks).all()
    assert (found.top_ids == expected.top_ids).all()
    assert np.allclose(found.logprobs, expected.logprobs, rtol=2e-6, atol=2e-5)
    assert np.allclose(found.top_logprobs, expected.top_logprobs, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_other_formats(device: torch.device, dtype: torch.dtype) -> None:
    logits = random_logits(len(MIXED), 97, seed=11).to(dtype)
    rows = MIXED[:9]
    ours = DeviceSampler(device).sample(logits[:9].to(device), batch_of(rows)).result()
    assert_same(ours, sampler_torch.sample(logits[:9].float(), batch_of(rows)), rows)


# ------------------------------------------------------------------ what is sent, and what is never waited for


KERNELS = {"summarize", "choose", "wide", "best", "report", "count_larger", "_penalize", "_mask"}


def recorded(names: set[str], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel's launch that leaves its name."""

    def launch(*arguments: Any, **named: Any) -> Any:
        names.add(name)
        return run(*arguments, **named)

    return launch


@contextmanager
def nothing_waits() -> Iterator[None]:
    """On a GPU, an error where the host would wait for it."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_steady_step_sends_what_changed_and_waits_for_nothing(device: torch.device) -> None:
    rows = [MIXED[i] for i in (0, 1, 4, 6, 9, 8)]
    logits = random_logits(len(rows), 97, seed=13)
    on_device = logits.to(device)
    sampler_ = DeviceSampler(device, max_rows=32)
    first = batch_of(rows)
    numbers = np.full_like(first.uniforms, 0.25)
    last_history = first.edits.copy()
    last_history["token"][np.flatnonzero(last_history["kind"] == Kind.HISTORY)[-1]] = 30
    changed = replace(first, edits=last_history, edits_version=new_version())
    steps = [first, first, replace(first, uniforms=numbers), changed]
    sent, addresses, results = [], set(), []
    sampler_.sample(on_device, first).result()  # compiles
    sampler_ = DeviceSampler(device, max_rows=32)
    for batch in steps:
        before = sampler_.uploads.sent
        with nothing_waits():
            samples = sampler_.sample(on_device, batch)
            samples.fetch()
        sent.append(sampler_.uploads.sent - before)
        addresses.add((samples.first.data_ptr(), samples.tokens.data_ptr()))
        results.append(samples)
        assert samples.first.tolist() == samples.tokens[:, 0].tolist()
    assert sent[0] > 400
    assert sent[1] == 0
    assert sent[2] == -(-numbers.nbytes // 16) * 16
    assert 0 < sent[3] < 400
    assert len(addresses) == 1
    for batch, samples in zip(steps, results, strict=True):  # fetched before the memory was used again
        assert_same(samples.result(), sampler_torch.sample(logits, batch), rows)


def test_a_sampler_serves_batches_of_all_sizes_one_after_the_other(device: torch.device) -> None:
    ours = DeviceSampler(device, max_rows=2, sizes=SMALL)
    for kinds, vocabulary in ((MIXED[:2], 97), (MIXED, 97), (MIXED[6:9], 97), (MIXED[:5], 131), (MIXED[9:10], 131)):
        logits = random_logits(len(kinds), vocabulary, seed=14)
        found = ours.sample(logits.to(device), batch_of(kinds)).result()
        assert_same(found, sampler_torch.sample(logits, batch_of(kinds)), kinds)


def test_warming_up_starts_all_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing behind that the next batch would notice."""
    launched = set()
    for module in (sampling_best, sampling_draw, sampling_edit, sampling_walk, sampling_wide):
        for name, kernel in vars(module).items():
            if name in KERNELS:
                monkeypatch.setattr(kernel, "run", recorded(launched, name, kernel.run))
    ours = DeviceSampler(device, max_rows=4)
    ours.warm(97)
    assert launched == KERNELS
    logits = random_logits(4, 97, seed=17)
    assert_same(
        ours.sample(logits.to(device), batch_of(MIXED[:4])).result(), sample(logits, MIXED[:4], device), MIXED[:4]
    )


def test_scores_start_what_warming_up_has_compiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles anew for an address that is no multiple of 16, whatever the number of tokens."""
    addresses: list[int] = []
    for module, name in ((sampling_draw, "choose"), (sampling_wide, "wide")):
        kernel = getattr(module, name)
        run = kernel.run

        def noted(*given: Any, run: Any = run, **others: Any) -> Any:
            addresses.extend(one.data_ptr() for one in given if isinstance(one, torch.Tensor))
            return run(*given, **others)

        monkeypatch.setattr(kernel, "run", noted)
    ours = DeviceSampler(device, max_rows=4)
    for rows in range(1, 6):
        targets, counts = np.arange(rows, dtype=np.int32), np.ones(rows, dtype=np.int32)
        found = ours.score(random_logits(rows, 97, seed=rows).to(device), targets, counts, 1).result()
        assert np.isfinite(found.logprobs).all()
    assert len(addresses) > 100
    assert not any(address % 16 for address in addresses)


# ------------------------------------------------------------------ what a CUDA graph can hold

STEADY: list[dict[str, Any]] = [
    {"temperature": 0.0, "draws": [0.0]},
    {"draws": [0.3]},
    {"top_p": 0.9, "temperature": 1.5, "draws": [0.8]},
    {"top_k": 3, "draws": [0.5]},
    {"temperature": 0.0, "draws": [0.0], "top_k": 5},
]


def test_one_capture_serves_any_mixture(device: torch.device) -> None:
    """Padded rows, batches that change, numbers that are counted up; replayed from a graph where there is a GPU."""
    captured = CapturedSampler(8, 300, device, sizes=SMALL)
    logits = random_logits(8, 300, seed=15).to(device)
    logits[5:] = torch.nan  # whatever was left there
    captured.launch(logits)
    graph = None
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.launch(logits)
    for rows in (STEADY, STEADY[::-1], STEADY[1:4]):
        batch, count = batch_of(rows), len(rows)
        seeds = np.arange(count, dtype=np.int64) + 70
        choices, positions = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32) * 3
        batch.table["seed"], batch.table["choice"], batch.table["position"] = seeds, choices, positions
        address = captured.tokens.data_ptr()
        captured.put(batch)
        for step in range(3):
            if graph is None:
                captured.launch(logits)
            else:
                graph.replay()
            found = captured.fetch(count).result()
            for i, row in enumerate(rows):
                row["draws"] = uniforms([int(seeds[i])], [int(choices[i])], [int(positions[i]) + step])
            wanted = sampler_torch.sample(logits[:count].cpu(), batch_of(rows))
            assert_same(found, wanted, rows)
            assert captured.tokens[:count].tolist() == found.tokens[:, 0].tolist()
            assert captured.tokens[count:].tolist() == [0] * (8 - count)
        assert captured.tokens.data_ptr() == address
        assert captured.positions[:count].tolist() == (positions + 3).tolist()


@pytest.mark.parametrize(
    "row",
    [
        {"beam_width": 2},
        {"draws": [0.1, 0.2]},
        {"num_logprobs": 0},
        {"ban": [1]},
        {"bias": {1: 1.0}},
        {"force": [2]},
        {"allow": [1]},
        {"typical_p": 0.5},
        {"xtc_probability": 0.5},
    ],
    ids=str,
)
def test_what_a_graph_does_not_hold_is_refused(device: torch.device, row: dict[str, Any]) -> None:
    captured = CapturedSampler(2, 50, device)
    assert captured.serves(batch_of([{}, {}]))
    assert not captured.serves(batch_of([{}, row]))
    with pytest.raises(ValueError, match="takes up to 2 rows with one token each"):
        captured.put(batch_of([{}, row]))
    with pytest.raises(ValueError, match="got 3 rows"):
        captured.put(batch_of([{}] * 3))


def test_logits_that_do_not_fit_are_refused(device: torch.device) -> None:
    captured = CapturedSampler(2, 50, device)
    for shape in ((3, 50), (2, 51)):
        with pytest.raises(ValueError, match="expected up to 2 rows of 50 contiguous logits"):
            captured.launch(torch.zeros(shape, device=device))
