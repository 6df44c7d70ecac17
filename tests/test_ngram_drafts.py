"""Drafts from a sequence's own tokens: what they are, when they are worth their time, and that no answer changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.driving import BOTH_DEPTHS, Job, add, finish
from support.jobs import MIXED, greedy, prompt
from support.native import needs_native
from test_drafts import JOBS, check_same

from engine import ConfigError, Engine, EngineConfig, RequestOutput
from engine.interface.speculation import SpeculativeConfig, parse_speculative
from engine.scheduling.draft_costs import DraftCosts, DraftGain
from engine.scheduling.ngram import LONGEST, MOST_CANDIDATES, NGRAM, Drafting, NgramIndex

NGRAMS = '{"method": "ngram"}'
CIRCLES = greedy(200, allowed_token_ids=[7, 8], logprobs=1)


def naive(tokens: list[int]) -> tuple[int, int]:
    """The same by comparing all places."""
    size, found = len(tokens), []
    for end in range(size - 1, NGRAM - 1, -1):
        shared = 0
        while shared < min(LONGEST, end) and tokens[end - 1 - shared] == tokens[size - 1 - shared]:
            shared += 1
        if shared >= NGRAM:
            found.append((end, shared))
    found = found[:MOST_CANDIDATES]
    return max(found, key=lambda item: item[1]) if found else (-1, 0)


@given(st.lists(st.integers(0, 3), max_size=120), st.lists(st.integers(1, 9), max_size=30))
def test_the_longest_match_is_found_as_a_sequence_grows(tokens: list[int], parts: list[int]) -> None:
    """However many tokens come at a time, ids up to the largest."""
    largest = (1 << 21) - 1
    ids = np.array([(0, 1, largest, 70_000)[token] for token in tokens], dtype=np.int32)
    index, known = NgramIndex(), 0
    for part in [*parts, len(tokens)]:
        known = min(known + part, len(tokens))
        index.extend(ids[:known])
        assert index.longest(ids[:known]) == naive(ids[:known].tolist())


def test_a_match_that_reaches_the_end_repeats_itself() -> None:
    """A period of two gives as many drafts as are asked for."""
    guess, rate = Drafting().guess(np.array([9, 1, 2, 1, 2, 1, 2], dtype=np.int32), 7)
    assert guess == [1, 2, 1, 2, 1, 2, 1]
    assert 0.3 < rate < 0.8


def test_the_rate_follows_what_came() -> None:
    """Guesses count whether they were drafted or not; matches of other lengths have rates of their own."""
    rng = np.random.default_rng(0)
    pattern = rng.integers(0, 1000, 40).tolist()
    drafting, tokens, rates = Drafting(), [*pattern], []
    for token in pattern:
        rates.append(drafting.guess(np.array(tokens, dtype=np.int32), 8)[1])
        tokens.append(token)
    assert rates[:NGRAM] == [0.0] * NGRAM
    assert rates[-1] > 0.95
    short, tokens, rates = Drafting(), pattern[:], []
    for _ in range(40):  # three tokens that came before, then another than the one that followed
        start = int(rng.integers(0, 36))
        tokens += [int(rng.integers(1000, 10**6)), *pattern[start : start + 3]]
        rates.append(short.guess(np.array(tokens, dtype=np.int32), 8)[1])
    assert rates[-1] < 0.05 < rates[0]


def test_the_time_of_a_token_is_learnt() -> None:
    """Also where it changes, and from steps that vary."""
    rng, costs = np.random.default_rng(1), DraftCosts()
    for each in (0.001, 0.02):
        for _ in range(300):
            tokens = int(rng.integers(1, 10))
            costs.observe(tokens, (0.04 + each * tokens) * rng.uniform(0.97, 1.03))
        assert costs.share == pytest.approx(each / (0.04 + each), rel=0.15, abs=0.01)
    same = DraftCosts()
    for _ in range(50):
        same.observe(1, rng.uniform(0.01, 0.02))
    assert same.share == DraftCosts().share, "steps of one size say nothing of another's time"


def decoded(costs: DraftCosts, each: float, rate: float, steps: int) -> tuple[list[int], float]:
    """The sizes of steps in which any number of drafts may be right, each with this probability, and how many times as
    many tokens they give as steps without drafts."""
    tokens, sizes, seconds, made = 1, [], 0.0, 0.0
    for _ in range(steps):
        taken = 0.04 + each * tokens
        costs.observe(tokens, taken)
        seconds += taken
        made += sum(rate**place for place in range(tokens))
        gain, right, tokens = DraftGain(costs, 1), 1.0, 1
        while tokens < 9 and gain.is_worth(right * rate):
            right *= rate
            gain.count(right)
            tokens += 1
        sizes.append(tokens)
    return sizes, made / seconds * (0.04 + each)


def test_a_slow_moment_does_not_end_drafts_for_good() -> None:
    """After it, no step has drafts that could show that they are cheap. The estimate falls until one has."""
    costs = DraftCosts()
    for tokens in (1, 2, 1, 2, 1):
        costs.observe(tokens, 2.0 if tokens == 2 else 0.04)
    assert costs.share == 1.0
    sizes, gained = decoded(costs, 0.001, 0.9, 1500)
    assert sizes[:20] == [1] * 20
    assert sum(sizes[-500:]) > 8 * 500
    assert gained > 3


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("each", [0.001, 0.02, 0.04, 0.36])
def test_drafts_never_cost_much(each: float, rate: float) -> None:
    """Also where every step could have some: a few have none, so that the cost of the others is known."""
    _, gained = decoded(DraftCosts(), each, rate, 2000)
    assert gained > 0.98
    if each < rate * 0.04:
        assert gained > 1.03


def test_more_drafts_are_taken_the_cheaper_and_the_surer_they_are() -> None:
    def drafts(each: float, rate: float, rows: int = 1) -> int:
        costs = DraftCosts()
        for tokens in (1, 2, 4, 8) * 20:
            costs.observe(tokens, 0.1 + each * tokens)
        gain, right, count = DraftGain(costs, rows), 1.0, 0
        while count < 8 and gain.is_worth(right * rate):
            right *= rate
            gain.count(right)
            count += 1
        return count

    assert drafts(0.001, 0.95) == 8
    assert drafts(0.2, 0.3) == 0
    assert 0 < drafts(0.01, 0.5) < drafts(0.01, 0.8)
    assert drafts(0.05, 0.6, rows=16) < drafts(0.05, 0.6, rows=1)


def outputs(engine: Engine, jobs: list[Job]) -> list[RequestOutput]:
    for number, job in enumerate(jobs):
        add(engine, str(number), job)
    answers = finish(engine)
    return [answers[str(number)] for number in range(len(jobs))]


@BOTH_DEPTHS
@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "num_gpu_blocks_override": 45}], ids=["roomy", "few pages"])
def test_no_answer_differs(settings: dict[str, Any], engines: Callable[..., Engine]) -> None:
    """For everything that can be asked for, and for prompts that repeat themselves."""
    pattern = prompt(5, 6)
    jobs = [*JOBS, *[Job([*pattern, *pattern, *pattern[:3]], job.params) for job in MIXED]]
    plain = outputs(engines(**settings), jobs)
    one = engines(**settings, speculative_config=NGRAMS)
    assert one.scheduler.draft_costs is not None
    one.scheduler.draft_costs = None  # the clock has no say here
    check_same(outputs(one, jobs), plain)
    assert 0 < one.stats().num_accepted_draft_tokens < one.stats().num_draft_tokens
    if settings:
        assert one.stats().num_preemptions > 0


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_the_same_bits(dtype: str, engines: Callable[..., Engine]) -> None:
    """With our own kernels, a token's numbers do not depend on the tokens that are computed beside it."""
    pattern = prompt(6, 7)
    jobs = [Job([*pattern, *pattern, *pattern[:2]], greedy(40, logprobs=3)), Job(prompt(1, 9), CIRCLES)]
    plain, one = engines(dtype=dtype), engines(dtype=dtype, speculative_config="ngram")
    one.scheduler.draft_costs = None
    for found, wanted in zip(outputs(one, jobs), outputs(plain, jobs), strict=True):
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.outputs[0].logprobs == wanted.outputs[0].logprobs
    assert one.stats().num_accepted_draft_tokens > 20


def test_an_answer_that_repeats_itself_takes_fewer_steps(engines: Callable[..., Engine]) -> None:
    """With two tokens to choose from, a random model runs in circles."""
    job = Job(prompt(1, 9), CIRCLES)
    plain, one = engines(), engines(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    (expected,) = outputs(plain, [job])
    one.scheduler.draft_costs = None
    (found,) = outputs(one, [job])
    check_same([found], [expected])
    assert one.stats().num_steps < plain.stats().num_steps * 0.6
    assert max(one.stats().num_draft_tokens, 1) <= 4 * one.stats().num_steps


def test_news_of_several_tokens_tell_the_sum_after_each(engines: Callable[..., Engine]) -> None:
    """A stop string may end an answer at any of them, and `best_of` ranks answers by it."""
    plain, one = engines(), engines(speculative_config="ngram")
    one.scheduler.draft_costs = None
    sums: list[list[float | None]] = []
    for engine in (plain, one):
        add(engine, "circles", Job(prompt(1, 9), CIRCLES))
        found: list[float | None] = []
        while engine.has_unfinished_requests():
            for delta in engine.step_deltas():
                (choice,) = delta.choices
                assert (choice.sums is None) == (len(choice.token_ids) == 1)
                found += choice.sums or [choice.cumulative_logprob]
                assert found[-1] == choice.cumulative_logprob
        sums.append(found)
    assert one.stats().num_accepted_draft_tokens > 20
    assert sums[1] == pytest.approx(sums[0], abs=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"method": "eagle3"}', "method must be one of ngram, suffix, off, got 'eagle3'"),
        ({"method": "ngram", "num_speculative_tokens": 99}, "an integer from 1 to 32, got 99"),
        ({"method": date(2024, 1, 1)}, "method must be one of ngram, suffix, off, got '2024-01-01'"),
        ({"draft": "x"}, "has no field 'draft'; its fields are method, num_speculative_tokens"),
        ("n-gram", "must be ngram, suffix, off or a JSON object, got 'n-gram'"),
        ("OFF", "must be ngram, suffix, off or a JSON object, got 'OFF'"),
        ("5", "must be ngram, suffix, off or a JSON object, got '5'"),
        ("", "must be ngram, suffix, off or a JSON object, got ''"),
    ],
)
def test_wrong_settings_are_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config") as problem:
        EngineConfig(model="m", speculative_config=given)
    assert message in str(problem.value)


def test_vllms_fields_are_accepted() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    config = EngineConfig(model="m", speculative_config=given)  # type: ignore[arg-type]
    assert config.speculative_config == json.dumps(given)
    assert parse_speculative(given) == SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    assert parse_speculative("off") == SpeculativeConfig(method="off")


@pytest.mark.parametrize(
    ("settings", "drafts"),
    [
        ({}, False),
        ({"max_step_time": 0.25}, True),
        ({"max_step_time": 0.25, "speculative_config": "off"}, False),
        ({"speculative_config": "suffix"}, True),
    ],
)
def test_servers_on_a_cpu_draft(settings: dict[str, Any], drafts: bool, engines: Callable[..., Engine]) -> None:
    """Not where nothing is to depend on the clock, unless it is asked for."""
    assert (engines(**settings).scheduler.drafter is not None) == drafts
