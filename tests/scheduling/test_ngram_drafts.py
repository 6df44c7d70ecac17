"""Drafts from known texts: which they are, when they are worth their time, and that no answer changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import LLAMA, make_adapter
from support.checkpoints import Checkpoint
from support.driving import BOTH_DEPTHS, Job, add, answers, finish, make_engine
from support.executors import use_torch
from support.jobs import CHECKPOINT, MIXED, VOCAB, beams, greedy, prompt, sampled
from support.native import needs_native
from support.seeing import make_seeing_model, make_tokenizer, picture
from test_drafts import JOBS, Oracle, check_same

from engine import ConfigError, Engine, EngineConfig, InvalidRequestError, ModelLoadError, RequestOutput
from engine.interface.request import Decoding, Request
from engine.interface.speculation import SpeculativeConfig, parse_speculative
from engine.scheduling.draft_costs import DraftCosts, DraftGain
from engine.scheduling.earlier_answers import EarlierAnswers
from engine.scheduling.ngram import LONGEST, MOST_CANDIDATES, NGRAM, Drafting, KnownTexts, NgramIndex
from engine.scheduling.plan import StepPlan
from engine.scheduling.sequence import Sequence as Line

NGRAMS = '{"method": "ngram"}'
OTHER = "gpt2-untied"  # has another vocabulary
CIRCLES = greedy(200, allowed_token_ids=[7, 8], logprobs=1)


LIMITED = [
    Job(prompt(5, 12), greedy(24, allowed_token_ids=range(40, 60), logprobs=2)),
    Job(prompt(6, 12), sampled(3, 24, allowed_token_ids=range(9), dry_multiplier=0.8, dry_sequence_breakers=[])),
]


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


def predicted(job: Job, answer: RequestOutput) -> Job:
    """The job with a prediction of its answer in which some tokens are wrong, too many or missing."""
    tokens = list(answer.outputs[0].token_ids)
    tokens[4:5] = []
    tokens[7:7] = [11, 12]
    tokens[11:12] = [13]
    return replace(job, params=replace(job.params, predicted_token_ids=tokens))


def drafting_by(path: str, **settings: Any) -> dict[str, Any]:
    """The settings of an engine that drafts with this model."""
    return settings | {"speculative_config": {"method": "draft_model", "model": path}}


def disturbed(engine: Engine, noise: float) -> Engine:
    """The engine, whose draft model is right less often."""
    model = engine._draft_model._executor.runner.model  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.add_(
                    torch.randn(parameter.shape, generator=generator),
                    alpha=noise * float(parameter.square().mean().sqrt()),
                )
    return engine


@BOTH_DEPTHS
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 24, "max_num_seqs": 16},
        {"block_size": 4, "num_gpu_blocks_override": 45, "kv_cache_dtype": "int8"},
    ],
    ids=["chunks", "few pages"],
)
def test_no_answer_differs_with_a_draft_model(
    settings: dict[str, Any], engines: Callable[..., Engine], checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Whatever can be asked for. The second time, prompts are found in both models' pages."""
    path = str(checkpoint(CHECKPOINT).path)
    jobs = [*JOBS, *LIMITED]
    plain = answers(engines(**settings), jobs)
    one = disturbed(engines(**drafting_by(path, **settings)), 0.05)
    one.scheduler.draft_costs = None
    for _ in range(2):
        before = one.stats()
        check_same(answers(one, jobs), plain)
        drafted = one.stats().num_draft_tokens - before.num_draft_tokens
        accepted = one.stats().num_accepted_draft_tokens - before.num_accepted_draft_tokens
        assert 0 < accepted < drafted
    if "num_gpu_blocks_override" in settings:
        assert one.stats().num_preemptions > 0
    else:
        assert accepted > 40


def test_a_draft_model_draws_with_the_same_numbers(
    engines: Callable[..., Engine], checkpoint: Callable[[str], Checkpoint]
) -> None:
    """At a temperature of 1, an equal model is always right, and a similar one more often than by chance."""
    path = str(checkpoint(CHECKPOINT).path)
    jobs = [Job(prompt(number, 9 + 10 * number), sampled(number, 28, n=2)) for number in range(3)]
    plain = answers(engines(), jobs)
    one = engines(**drafting_by(path))
    one.scheduler.draft_costs = None
    check_same(answers(one, jobs), plain)
    stats = one.stats()
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens == 6 * 24
    assert stats.num_steps <= 6
    disturbed(one, 0.02)
    check_same(answers(one, jobs), plain)
    drafted = one.stats().num_draft_tokens - stats.num_draft_tokens
    accepted = one.stats().num_accepted_draft_tokens - stats.num_accepted_draft_tokens
    assert 0.3 * drafted < accepted < drafted


def test_a_draft_model_catches_up_with_a_long_prompt(
    engines: Callable[..., Engine], checkpoint: Callable[[str], Checkpoint]
) -> None:
    """In parts, beside steps that go on without drafts; a prefix that it knows it does not read again."""
    path = str(checkpoint(CHECKPOINT).path)
    long = [*prompt(1, 300), *prompt(2, 300)]
    one = engines(**drafting_by(path))
    one.scheduler.draft_costs = None
    runner = one._draft_model._executor.runner  # type: ignore[union-attr]
    sizes: list[int] = []
    launch = runner.launch

    def spy(plan: StepPlan) -> Any:
        sizes.append(plan.num_tokens)
        return launch(plan)

    runner.launch = spy
    (plain,) = answers(engines(), [Job(long, greedy(30))])
    for read in ([256, 256], []):
        sizes.clear()
        check_same(answers(one, [Job(long, greedy(30))]), [plain])
        assert [size for size in sizes if size > 100] == read
    assert one.stats().num_accepted_draft_tokens > 30


def test_a_draft_model_of_texts_ignores_images(tmp_path: Path) -> None:
    """It drafts for a prompt with an image, and for later requests."""
    model = make_seeing_model("llava", tmp_path / "large", seed=1)
    small = transformers.LlamaForCausalLM(model.model.config.text_config)
    small.save_pretrained(tmp_path / "small")
    make_tokenizer().save_pretrained(tmp_path / "small")
    params = sampled(1, 12, logprobs=1)
    answers: list[RequestOutput] = []
    for settings in ({}, drafting_by(str(tmp_path / "small"))):
        one = make_engine(model.path, **settings)
        one.scheduler.draft_costs = None
        assert one.info.vision is not None
        one.add_request("image", model.prompt([9, picture(40, 30), 11, 12], one.info.vision), params)
        answers.append(finish(one)["image"])
        if settings:
            drafted = one.stats().num_draft_tokens
            assert drafted > 4
            one.add_request("text", [9, 10, 11], params)
            finish(one)
            assert one.stats().num_draft_tokens > drafted
        one.close()
    check_same(answers[1:], answers[:1])


def test_a_draft_model_that_fails_fails_no_request(
    engines: Callable[..., Engine], checkpoint: Callable[[str], Checkpoint], caplog: pytest.LogCaptureFixture
) -> None:
    one = engines(**drafting_by(str(checkpoint(CHECKPOINT).path)))
    one.scheduler.draft_costs = None
    runner = one._draft_model._executor.runner  # type: ignore[union-attr]
    jobs = [Job(prompt(1, 9), greedy(40)), Job(prompt(2, 9), sampled(5, 40))]
    plain = answers(engines(), jobs)
    launch, calls = runner.launch, []

    def broken(plan: StepPlan) -> Any:
        calls.append(plan)
        if len(calls) == 12:
            raise MemoryError("made by the test")
        return launch(plan)

    runner.launch = broken
    check_same(answers(one, jobs), plain)
    assert len(calls) == 12
    assert 0 < one.stats().num_accepted_draft_tokens < 40
    assert "the draft model failed" in caplog.text


def test_a_draft_model_reads_no_adapter(
    engines: Callable[..., Engine], checkpoint: Callable[[str], Checkpoint]
) -> None:
    """A request with an adapter has the drafts of the base model, and its own answer."""
    made = checkpoint(CHECKPOINT)
    adapter, _ = make_adapter(made.model, LLAMA, 3, gain=0.1)
    jobs = [Job(prompt(1, 9), greedy(40, logprobs=1), {"adapter": name}) for name in ("a", None)]
    found = []
    for settings in ({"max_loras": 1}, drafting_by(str(made.path), max_loras=1)):
        one = engines(**settings)
        one.scheduler.draft_costs = None
        one.load_adapter("a", adapter)
        found.append(answers(one, jobs))
    assert found[0][0].outputs[0].token_ids != found[0][1].outputs[0].token_ids
    check_same(found[1], found[0])
    assert 40 < one.stats().num_accepted_draft_tokens < one.stats().num_draft_tokens


def test_draft_models_that_do_not_fit_are_named(
    engines: Callable[..., Engine], checkpoint: Callable[[str], Checkpoint]
) -> None:
    path = str(checkpoint(CHECKPOINT).path)
    with pytest.raises(ConfigError, match=r"the vocabularies must match, but .* has \d+ tokens and the draft model"):
        engines(**drafting_by(str(checkpoint(OTHER).path)))
    with pytest.raises(ConfigError, match="needs distributed_executor_backend uni, got 'mp'"):
        engines(**drafting_by(path, distributed_executor_backend="mp"))
    one = engines(**drafting_by(path))
    assert one._draft_model is not None
    one._draft_model.check_tokens(one.info, str, str)
    with pytest.raises(ConfigError, match=r"token 300 is '300' in .* and 'x' in the draft model"):
        one._draft_model.check_tokens(one.info, str, lambda token: "x" if token == 300 else str(token))
    with pytest.raises(ModelLoadError, match="nowhere"):
        engines(**drafting_by("/nowhere"))


def test_pages_of_a_draft_model_are_part_of_the_plan(
    engines: Callable[..., Engine], checkpoint: Callable[[str], Checkpoint]
) -> None:
    """Both models' pages fit into `kv_cache_memory`."""
    path = str(checkpoint(CHECKPOINT).path)
    memory = {"kv_cache_memory": 1 << 20, "num_gpu_blocks_override": None}
    alone, both = engines(**memory), engines(**drafting_by(path, **memory))
    assert both.info.num_blocks == alone.info.num_blocks // 2
    assert both._draft_model is not None
    assert both._draft_model._pool.total == both.info.num_blocks


@BOTH_DEPTHS
@pytest.mark.parametrize("method", ["ngram", "suffix", "prediction"])
@pytest.mark.parametrize("settings", [{}, {"block_size": 4, "num_gpu_blocks_override": 45}], ids=["roomy", "few pages"])
def test_no_answer_differs(settings: dict[str, Any], method: str, engines: Callable[..., Engine]) -> None:
    """For everything that can be asked for, and for prompts that repeat themselves."""
    pattern = prompt(5, 6)
    jobs = [*JOBS, *[Job([*pattern, *pattern, *pattern[:3]], job.params) for job in MIXED]]
    plain = answers(engines(**settings), jobs)
    if method == "prediction":
        jobs = [predicted(*pair) for pair in zip(jobs, plain, strict=True)]
    one = engines(**settings, **({} if method == "prediction" else {"speculative_config": method}))
    assert (one.scheduler.draft_costs is None) == (method == "prediction")
    one.scheduler.draft_costs = None  # the clock has no say here
    for _ in range(1 + (method == "suffix")):  # the second time, the answers are known
        before = one.stats()
        check_same(answers(one, jobs), plain)
    if method == "suffix":
        drafted = one.stats().num_draft_tokens - before.num_draft_tokens
        assert one.stats().num_accepted_draft_tokens - before.num_accepted_draft_tokens > 0.5 * drafted
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
    for found, wanted in zip(answers(one, jobs), answers(plain, jobs), strict=True):
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.outputs[0].logprobs == wanted.outputs[0].logprobs
    assert one.stats().num_accepted_draft_tokens > 20


@pytest.mark.parametrize("by_torch", [False, True], ids=["native", "torch"])
def test_a_draft_without_a_number_fails_no_request(by_torch: bool, engines: Callable[..., Engine]) -> None:
    """The features of a wrong draft token, and of all that follow it, are no numbers."""
    one = engines()
    if by_torch:
        use_torch(one.runner.model)
    jobs = [Job(prompt(number, 9), sampled(number, 24, allowed_token_ids=range(50), logprobs=1)) for number in range(3)]
    plain = answers(one, jobs)
    bad = 200
    with torch.inference_mode():
        one.runner.model.decoder.embedding.tokens[bad] = torch.nan  # not the head's

    class Wrong(Oracle):
        def propose(self, request: Request, sequence: Line, most: int) -> tuple[list[int], float]:
            right, rate = super().propose(request, sequence, most)
            return [*right[:1], bad, *right[1:]], rate

    one.scheduler.drafter = Wrong(plain, right=3, wrong=0)
    found = answers(one, jobs)
    check_same(found, plain)
    assert one.stats().drafted_at[1:4] != (0, 0, 0)
    assert one.stats().accepted_at[0] > 10
    assert sum(one.stats().accepted_at[1:]) == 0


@pytest.mark.parametrize("changed", [None, 5], ids=["right", "one token differs"])
def test_a_prediction_gives_drafts_from_the_first_token_on(changed: int | None, engines: Callable[..., Engine]) -> None:
    """Also where nothing else is drafted, and after a token that differs. Other requests have no drafts."""
    one = engines()
    jobs = [Job(prompt(1, 9), sampled(5, 26)), Job(prompt(2, 9), greedy(26))]
    plain = answers(one, jobs)
    tokens = list(plain[0].outputs[0].token_ids)
    if changed is not None:
        tokens[changed] = (tokens[changed] + 1) % VOCAB
    params = replace(jobs[0].params, predicted_token_ids=tokens)
    steps = one.stats().num_steps
    check_same(answers(one, [replace(jobs[0], params=params), jobs[1]]), plain)
    assert one.stats().num_steps - steps == 26
    steps, before = one.stats().num_steps, one.stats().num_draft_tokens
    check_same(answers(one, [replace(jobs[0], params=params)]), plain[:1])
    assert one.stats().num_steps - steps == 1 + (3 if changed is None else 4)  # 9 tokens in each, the first apart
    assert one.stats().num_draft_tokens > before
    with pytest.raises(InvalidRequestError, match="predicted_token_ids"):
        one.add_request("x", [1, 2], greedy(5, predicted_token_ids=[VOCAB]))


def test_requests_have_their_own_counts_of_drafts(engines: Callable[..., Engine]) -> None:
    """The news of a request count its drafts, and the statistics those of all by their positions."""
    one = engines(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    one.scheduler.draft_costs = None
    add(one, "circles", Job(prompt(1, 9), CIRCLES))
    add(one, "beams", Job(prompt(1, 9), beams(2, 30)))
    counts = {"circles": (0, 0), "beams": (0, 0)}
    while one.has_unfinished_requests():
        for delta in one.step_deltas():
            drafted, accepted = counts[delta.request_id]
            counts[delta.request_id] = drafted + delta.num_draft_tokens, accepted + delta.num_accepted_draft_tokens
    stats = one.stats()
    assert counts == {"circles": (stats.num_draft_tokens, stats.num_accepted_draft_tokens), "beams": (0, 0)}
    assert (sum(stats.drafted_at), sum(stats.accepted_at)) == counts["circles"]
    assert len(stats.drafted_at) == 3
    assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)


def test_earlier_answers_are_drafts_within_a_scope(engines: Callable[..., Engine]) -> None:
    """Of the same tenant and salt, and only if answers are kept."""
    job = Job(prompt(1, 9), sampled(5, 30))
    one = engines(speculative_config="suffix")
    one.scheduler.draft_costs = None
    (plain,) = answers(one, [job])
    used = [one.stats().num_steps]
    options: list[dict[str, Any]] = [{}, {"tenant": "a"}, {"cache_salt": "b"}, {"tenant": "a"}]
    for terms in options:
        before = one.stats().num_steps
        check_same(answers(one, [replace(job, options=terms)]), [plain])
        used.append(one.stats().num_steps - before)
    assert used[0] == used[2] == used[3] == 30
    assert used[1] == used[4] < 10
    other = engines(speculative_config={"method": "suffix", "suffix_decoding_max_cached_requests": 0})
    other.scheduler.draft_costs = None
    for _ in range(2):
        check_same(answers(other, [job]), [plain])
    assert other.stats().num_steps == 60


def test_memory_for_earlier_answers_is_bounded() -> None:
    """The scope that was used longest ago is forgotten, and the beginning of a scope that is too large."""
    answers = EarlierAnswers(most_tokens=400)
    asked = [Request(request_id="r", prompt_token_ids=(1,), decoding=Decoding(max_tokens=1), tenant=t) for t in "abc"]
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 10**5, 60).astype(np.int32) for _ in range(12)]
    for text in texts[:6]:
        answers.add(asked[0], text)
    kept = answers.of(asked[0])
    assert kept is not None
    assert len(kept) <= 200
    assert not list(kept.occurrences(texts[0][:20]))
    (found,) = kept.occurrences(texts[5][:20])
    assert found[0][found[1]] == texts[5][20]
    for text in texts[6:9]:
        answers.add(asked[1], text)
        answers.add(asked[2], text)
    assert answers.num_tokens <= 400
    assert answers.of(asked[0]) is None
    assert answers.of(asked[1]) is not None
    answers.add(asked[1], texts[9][:2])
    assert list(answers.of(asked[2]).occurrences(texts[8][:9]))  # type: ignore[union-attr]


def test_occurrences_vote() -> None:
    """Of equally long ones, most decide, and drafts end where they do not agree or a text ends."""
    texts = KnownTexts()
    for text in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7], [8, 1, 2, 3, 9]):
        texts.add(np.array(text, dtype=np.int32))
    tokens = np.array([50, 1, 2, 3], dtype=np.int32)
    assert Drafting(earlier=texts, votes=True).guess(tokens, 9)[0] == [4]
    assert Drafting(earlier=texts).guess(tokens, 9)[0] == [9]
    longer = np.array([8, 1, 2, 3], dtype=np.int32)
    assert Drafting(earlier=texts, votes=True).guess(longer, 9)[0] == [9]


def test_an_answer_that_repeats_itself_takes_fewer_steps(engines: Callable[..., Engine]) -> None:
    """With two tokens to choose from, a random model runs in circles."""
    job = Job(prompt(1, 9), CIRCLES)
    plain, one = engines(), engines(speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    (expected,) = answers(plain, [job])
    one.scheduler.draft_costs = None
    (found,) = answers(one, [job])
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
        ('{"method": "eagle"}', "method must be one of ngram, suffix, draft_model, mtp, eagle3, off, got 'eagle'"),
        ({"method": "ngram", "num_speculative_tokens": 99}, "an integer from 1 to 32, got 99"),
        (
            {"method": date(2024, 1, 1)},
            "method must be one of ngram, suffix, draft_model, mtp, eagle3, off, got '2024-01-01'",
        ),
        ({"draft": "x"}, "has no field 'draft'; its fields are method, model, num_speculative_tokens"),
        ({"method": "draft_model"}, "model names the draft model of the methods draft_model and eagle3, got method"),
        ({"method": "ngram", "model": "x"}, "got method 'ngram' and model 'x'"),
        ({"model": 5}, "must be a folder, a file or a hub id, got 5"),
        ("draft_model", "must be ngram, suffix, mtp, off or a JSON object, got 'draft_model'"),
        ({"suffix_decoding_max_cached_requests": "all"}, "must be an integer, got 'all'"),
        ("n-gram", "must be ngram, suffix, mtp, off or a JSON object, got 'n-gram'"),
        ("OFF", "must be ngram, suffix, mtp, off or a JSON object, got 'OFF'"),
        ("5", "must be ngram, suffix, mtp, off or a JSON object, got '5'"),
        ("", "must be ngram, suffix, mtp, off or a JSON object, got ''"),
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
    drafter = engines(**settings).scheduler.drafter
    request = Request(request_id="r", prompt_token_ids=(1,), decoding=Decoding(max_tokens=1))
    assert (drafter is not None and drafter.serves(request)) == drafts
    predicting = replace(request, decoding=Decoding(max_tokens=1, prediction=(1, 2)))
    assert (drafter is not None and drafter.serves(predicting)) == (settings.get("speculative_config") != "off")
