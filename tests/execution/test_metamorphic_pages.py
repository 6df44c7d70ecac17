"""The same answer whatever happens on the way; each test sees to it that it did happen.

Preemptions, prefix hits, evictions and page copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.driving import (
    BOTH_DEPTHS,
    Job,
    Strikes,
    Tokens,
    add,
    beam_rows,
    finish,
    preempt_all,
    run,
    run_alone,
    tokens_of,
    watching,
)
from support.jobs import MIXED, beams, greedy, prompt, sampled

from engine import Engine, InvalidRequestError, RequestOutput, SamplingParams

# ------------------------------------------------------------------ preemption


@pytest.mark.parametrize(
    "number", [0, 3, 5, 6, 8], ids=["greedy", "three answers", "penalties", "four beams", "two beams, never"]
)
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
@pytest.mark.slow
def test_preempted_at_every_step(
    number: int, caching: bool, engines: Callable[..., Engine], mixed_answers: list[Tokens]
) -> None:
    """However far a request has come, losing its pages changes nothing."""
    one = engines(enable_prefix_caching=caching, block_size=4, max_num_batched_tokens=64)
    steps = 0

    def count(step: int) -> None:
        nonlocal steps
        steps = step + 1

    assert run(one, [MIXED[number]], count) == [mixed_answers[number]]
    assert steps > 8
    for target in range(steps - 1):
        before = one.stats().num_preemptions

        def strike(step: int, target: int = target) -> None:
            if step == target:
                assert preempt_all(one) == 1
                assert one.stats().pages_held == 0

        assert run(one, [MIXED[number]], strike) == [mixed_answers[number]], f"preempted after step {target}"
        assert one.stats().num_preemptions == before + 1


@BOTH_DEPTHS
def test_preempted_after_each_step(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """All requests lose everything again and again, in the middle of prompts too."""
    one = engines(block_size=4, max_num_batched_tokens=64)
    strike = Strikes(one, 3, 2)
    assert run(one, MIXED, strike) == mixed_answers
    assert strike.count > 3 * len(MIXED)
    assert one.stats().num_preemptions == strike.count


@BOTH_DEPTHS
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_preempted_by_a_small_pool(caching: bool, engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """The scheduler's own preemptions, with pages for about two requests."""
    one = engines(block_size=4, num_gpu_blocks_override=40, enable_prefix_caching=caching)
    assert run(one, MIXED, None) == mixed_answers
    stats = one.stats()
    assert stats.num_preemptions > 3
    assert stats.num_page_copies > 0
    assert stats.peak_pages_held <= 40


@BOTH_DEPTHS
@pytest.mark.parametrize("params", [greedy(10), sampled(4, 10, n=2), beams(3, 10)], ids=["greedy", "n", "beams"])
def test_preempted_logprobs(params: SamplingParams, engines: Callable[..., Engine]) -> None:
    """Log-probabilities of prompt and answer are reported once each, also in the middle of a prompt in chunks."""
    params = replace(params, logprobs=2, prompt_logprobs=1)
    jobs = {str(length): Job(prompt(45, length), params) for length in (37, 20, 51)}
    one = engines(block_size=4, max_num_batched_tokens=16, max_num_seqs=9, enable_prefix_caching=False)

    def run_all(between: Callable[[int], None] | None = None) -> dict[str, RequestOutput]:
        for name, job in jobs.items():
            add(one, name, job)
        return finish(one, between)

    whole = run_all()
    preemptions = 0

    def strike(step: int) -> None:
        nonlocal preemptions
        if step in (1, 4, 10, 17, 30):
            preemptions += preempt_all(one)

    broken = run_all(strike)
    assert preemptions == one.stats().num_preemptions >= 8
    for name, job in jobs.items():
        assert broken[name].prompt_logprobs == whole[name].prompt_logprobs
        assert broken[name].outputs == whole[name].outputs
        scored = whole[name].prompt_logprobs or []
        assert scored[0] is None
        assert [next(iter(entry)) for entry in scored[1:] if entry] == job.prompt[1:]
        for answer in whole[name].outputs:
            assert [next(iter(entry)) for entry in answer.logprobs or ()] == answer.token_ids


@BOTH_DEPTHS
@pytest.mark.parametrize("params", [sampled(3, 8, n=3), beams(3, 8, ignore_eos=True)], ids=["n", "beams"])
def test_a_pool_of_exactly_the_worst_case(params: SamplingParams, engines: Callable[..., Engine]) -> None:
    """What is accepted can always be taken up again: nine tokens in three pages, of which two are shared
    for good, and four pages each in the end."""
    job = Job(prompt(48, 9), params)
    expected = run(engines(), [job])
    one = engines(block_size=4, num_gpu_blocks_override=2 + 3 * 2)
    for target in range(7):
        assert run(one, [job], lambda step, target=target: step == target and preempt_all(one)) == expected
    assert one.stats().num_preemptions == 7
    with pytest.raises(InvalidRequestError, match="pages"):
        add(engines(block_size=4, num_gpu_blocks_override=2 + 3 * 2 - 1), "too big", job)


def test_the_least_urgent_is_preempted(engines: Callable[..., Engine]) -> None:
    """Short of pages, the scheduler evicts the lowest priority, and among equals the youngest,
    in whatever order they were admitted."""
    one = engines(block_size=4, num_gpu_blocks_override=16, enable_prefix_caching=False)
    jobs = {
        "first": Job(prompt(46, 9), greedy(30), {"priority": 2}),
        "late but urgent": Job(prompt(47, 9), greedy(30), {"priority": 1}),
    }
    expected = run_alone(one, list(jobs.values()))
    outputs = {}
    before = one.stats().num_preemptions
    for name, job in jobs.items():
        add(one, name, job)
        outputs |= {output.request_id: output for output in one.step()}
    assert one.stats().num_running == 2
    lengths = []
    while "late but urgent" not in outputs or not outputs["late but urgent"].finished:
        outputs |= {output.request_id: output for output in one.step()}
        lengths.append(len(outputs["late but urgent"].outputs[0].token_ids))
    assert lengths == list(range(2, 31))  # a token in each step
    assert one.stats().num_preemptions > before
    assert not outputs["first"].finished
    outputs |= finish(one)
    assert [tokens_of(outputs[name]) for name in jobs] == expected


# ------------------------------------------------------------------ pages


def test_prefix_cached_equals_fresh(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """A second run finds its prompts in the cache and computes so much less."""
    one = engines(block_size=4)
    assert run(one, MIXED) == mixed_answers
    first = one.stats()
    assert first.prefix_hits == 0
    assert run(one, MIXED) == mixed_answers
    second = one.stats()
    hits = sum(4 * ((len(job.prompt) - 1) // 4) for job in MIXED)
    assert second.prefix_hits == hits
    assert second.computed_tokens - first.computed_tokens == first.computed_tokens - hits
    add(one, "again", MIXED[2])
    assert finish(one)["again"].num_cached_tokens == 40


def test_prefixes_are_shared_while_in_use(engines: Callable[..., Engine]) -> None:
    """Requests with a common beginning hold its pages once."""
    one = engines(block_size=4, enable_prefix_caching=True)
    start = prompt(50, 80)
    jobs = [Job([*start, *prompt(51 + i, 5)], greedy(8)) for i in range(6)]
    fresh = run_alone(engines(enable_prefix_caching=False), jobs)
    add(one, "first", jobs[0])
    one.step()
    before = one.stats().computed_tokens
    for number, job in enumerate(jobs[1:]):
        add(one, str(number), job)
    with watching(one) as plans:
        outputs = {output.request_id: output for output in one.step()}
    assert plans[0].num_tokens == 1 + 5 * 5
    assert one.stats().computed_tokens - before == 1 + 5 * 5
    assert one.stats().prefix_hits == 5 * 80
    assert one.stats().pages_held <= 20 + 6 * 3
    outputs |= finish(one)
    assert [tokens_of(outputs[name]) for name in ("first", "0", "1", "2", "3", "4")] == fresh


def test_cache_salt_separates_prefixes(engines: Callable[..., Engine]) -> None:
    """Pages are found only under the salt they were computed with."""
    one = engines(block_size=4)
    tokens = prompt(60, 41)
    result, hits = [], []
    for salt in (None, "a", "b", "a", None, "b"):
        before = one.stats().prefix_hits
        result += run(one, [Job(tokens, greedy(6), {"cache_salt": salt})])
        hits.append(one.stats().prefix_hits - before)
    assert hits == [0, 0, 0, 40, 40, 40]
    assert all(answer == result[0] for answer in result)


@BOTH_DEPTHS
@pytest.mark.parametrize("length", [2, 9])
def test_answers_are_prefixes_of_later_prompts(length: int, engines: Callable[..., Engine]) -> None:
    """The pages that an answer filled serve a conversation's next turn, under the same salt only."""
    one = engines(block_size=4)
    params = greedy(20)
    ((answer,),) = run(one, [Job(prompt(62, length), params, {"cache_salt": "a"})])
    longer = [*prompt(62, length), *answer, *prompt(63, 3)]
    fresh = run(engines(enable_prefix_caching=False), [Job(longer, params)])
    for salt, pages in (("b", 0), ("a", (length + 20 - 1) // 4), (None, 0)):  # the last token was not computed
        before = one.stats().prefix_hits
        assert run(one, [Job(longer, params, {"cache_salt": salt})]) == fresh
        assert one.stats().prefix_hits - before == 4 * pages


def test_prompt_logprobs_take_no_hits(engines: Callable[..., Engine]) -> None:
    """Every position of the prompt must be computed to be scored."""
    one = engines(block_size=4)
    tokens = prompt(61, 41)
    params = greedy(4, prompt_logprobs=2)
    add(one, "first", Job(tokens, params))
    first = finish(one)["first"]
    add(one, "second", Job(tokens, params))
    second = finish(one)["second"]
    assert one.stats().prefix_hits == 0
    assert second.prompt_logprobs == first.prompt_logprobs
    assert len(first.prompt_logprobs or ()) == 41


def test_evicted_prefixes_are_recomputed(engines: Callable[..., Engine]) -> None:
    """A pool too small for all prefixes drops the least recently used ones; answers stay."""
    one = engines(block_size=4, num_gpu_blocks_override=30)
    jobs = [Job(prompt(70 + i, 41), greedy(6)) for i in range(4)]
    fresh = run_alone(engines(enable_prefix_caching=False), jobs)
    for _ in range(2):
        assert run_alone(one, jobs) == fresh
    assert one.stats().prefix_hits == 0  # each was evicted by the three after it
    assert run_alone(one, [jobs[3]]) == [fresh[3]]
    assert one.stats().prefix_hits == 40
    assert one.stats().pages_cached > 0


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_copies_per_beam_step(count: int, engines: Callable[..., Engine]) -> None:
    """A step copies at most one page per beam, whatever the page size and the depth."""
    for block_size in (2, 16):
        one = engines(block_size=block_size)
        with watching(one) as plans:
            run(one, [Job(prompt(80, 21), beams(count, 24, ignore_eos=True))])
        steps = [plan for plan in plans if beam_rows(plan)]
        assert len(steps) == 24
        assert max(len(plan.copies) for plan in steps) <= count
        assert sum(len(plan.copies) for plan in steps) == one.stats().num_page_copies > 0
        for plan in steps:
            targets = plan.copies[:, 1].tolist()
            assert len(set(targets)) == len(targets)


def test_sixteen_beams_share_the_prompt(engines: Callable[..., Engine]) -> None:
    """On a prompt of 1,000 tokens they take under twice the pages of one sequence."""
    one, many = engines(), engines()
    tokens = prompt(90, 1000)
    run(one, [Job(tokens, greedy(24))])
    run(many, [Job(tokens, beams(16, 24, ignore_eos=True))])
    single, group = one.stats().peak_pages_held, many.stats().peak_pages_held
    assert single == -(-1023 // 16)
    assert single < group < 2 * single


def test_answers_share_the_prompt(engines: Callable[..., Engine]) -> None:
    """n answers compute the prompt once."""
    one = engines(block_size=4, enable_prefix_caching=False)
    assert run(one, [Job(MIXED[0].prompt, sampled(3, 8, n=4))])
    assert one.stats().computed_tokens == 19 + 4 * 7
    assert one.stats().num_page_copies == 3  # of the prompt's last, partly filled page
