"""Drafted tokens change how many steps an answer takes, and nothing that is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support import driving
from support.checkpoints import random_prompt
from support.driving import BOTH_DEPTHS, Job, add, check_pages, finish, make_engine, watching
from support.jobs import MIXED, VOCAB, greedy, prompt, sampled
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ
from test_ahead import MORE
from test_constraints import JOBS as CONSTRAINED
from test_constraints import check_states, counting  # noqa: F401
from test_isolation import faults

from engine import Engine, RequestOutput, Seq2SeqInput
from engine.interface.request import Request
from engine.interface.sampling_table import neutral_rows
from engine.scheduling.plan import SamplingBatch, StepPlan, StepResult
from engine.scheduling.sequence import Sequence as Line

JOBS = [*MIXED, *MORE]


class Oracle:
    """A drafter that was told the answers: of each call it gives `right` tokens that will come and `wrong` others.

    Attributes:
        asked: how often it was asked.
    """

    def __init__(self, answers: Sequence[RequestOutput], right: int | None = None, wrong: int | None = None):
        self._told = {str(number): answer for number, answer in enumerate(answers)}
        self._right, self._wrong = right, wrong
        self.asked = 0

    def prepare(self, wanted: Any, gain: Any) -> bool:
        return False

    def serves(self, request: Request) -> bool:
        return True

    def ended(self, request: Request, sequence: Line) -> None:
        pass

    def propose(self, request: Request, sequence: Line, most: int) -> tuple[list[int], float]:
        assert request.decoding.num_beams == 1
        choice, tokens = sequence.index, sequence.tokens.view()
        self.asked += 1
        place = len(tokens) - len(request.prompt_token_ids)
        told = self._told[request.request_id].outputs[choice].token_ids
        assert told[:place] == tokens[len(request.prompt_token_ids) :].tolist()
        right = (3 * place + choice) % 5 if self._right is None else self._right
        wrong = place % 3 if self._wrong is None else self._wrong
        drafts = told[place : place + right]
        return [*drafts, *[(token + 1) % VOCAB for token in told[place + right : place + right + wrong]]], 1.0


def answers(engine: Engine, jobs: Sequence[Job], oracle: Oracle | None = None) -> list[RequestOutput]:
    """All that is said of the jobs, run together."""
    engine.scheduler.drafter = oracle
    outputs = driving.answers(engine, jobs)
    engine.scheduler.drafter = None
    return outputs


def check_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Tokens, reasons and log-probabilities. These may differ in their last bits: several positions are computed
    together."""
    for answer, other in zip(found, expected, strict=True):
        assert answer.finished
        for choice, wanted in zip(answer.outputs, other.outputs, strict=True):
            assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (
                wanted.token_ids,
                wanted.finish_reason,
                wanted.stop_reason,
            )
            assert choice.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-3)
            check_logprobs(choice.logprobs, wanted.logprobs)
        check_logprobs(answer.prompt_logprobs, other.prompt_logprobs)


def check_logprobs(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    for entry, wanted in zip(found or (), expected or (), strict=True):
        assert (entry is None) == (wanted is None)
        if entry is not None:
            assert list(entry) == list(wanted)
            for token, scored in entry.items():
                assert scored.rank == wanted[token].rank
                assert scored.logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


@BOTH_DEPTHS
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 16},
        {"block_size": 4, "num_gpu_blocks_override": 45},
        {"kv_cache_dtype": "int8"},
    ],
    ids=["roomy", "chunks", "few pages", "int8"],
)
def test_nothing_that_is_said_differs(settings: dict[str, Any], engines: Callable[..., Engine]) -> None:
    """For everything that can be asked for; the second time, prompts are found in pages."""
    one = engines(**settings)
    plain = answers(one, JOBS)
    steps = one.stats().num_steps
    for _ in range(2):
        before = one.stats()
        oracle = Oracle(plain)
        check_same(answers(one, JOBS, oracle), plain)
        assert oracle.asked > 50
        after = one.stats()
        drafted = after.num_draft_tokens - before.num_draft_tokens
        accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
        assert 0 < accepted < drafted
        if "num_gpu_blocks_override" in settings:
            assert one.stats().num_preemptions > 0
        else:
            assert accepted > 40
    if not settings:
        assert after.num_steps - before.num_steps < steps


@BOTH_DEPTHS
def test_constraints_follow_their_sequences(counting: None, engines: Callable[..., Engine]) -> None:  # noqa: F811
    """What they do not allow is not drafted; none hears of a token that did not come."""
    one = engines()
    jobs = [*CONSTRAINED, *MIXED[:4]]
    plain = answers(one, jobs)
    before = one.stats().num_steps
    one.scheduler.drafter = Oracle(plain)
    for number, job in enumerate(jobs):
        add(one, str(number), job)
    seen: list[int] = []
    outputs = finish(one, lambda _: seen.append(check_states(one)))
    check_same([outputs[str(number)] for number in range(len(jobs))], plain)
    assert max(seen) > len(CONSTRAINED)
    assert one.stats().num_accepted_draft_tokens > 20
    assert one.stats().num_steps - before < before


@pytest.mark.parametrize("wrong", [0, 1, 3])
@pytest.mark.parametrize("right", range(6))
def test_a_step_gives_one_token_more_than_drafts_were_right(
    right: int, wrong: int, engines: Callable[..., Engine]
) -> None:
    """0 to k of k, greedy and sampled, and pages for no token more than there are."""
    one = engines(block_size=2)
    jobs = [Job(prompt(1, 9), greedy(40)), Job(prompt(2, 11), sampled(4, 40, top_p=0.9, n=2))]
    plain = answers(one, jobs)
    one.scheduler.drafter = Oracle(plain, right, wrong)
    for number, job in enumerate(jobs):
        add(one, str(number), job)
    lengths = {}
    with watching(one) as plans:
        for number in range(6):
            outputs = one.step()
            check_pages(one)
            for group in one.scheduler.groups():
                for sequence in group.sequences:
                    assert len(sequence.table) <= -(-sequence.num_tokens // 2)
            lengths = {output.request_id: [len(a.token_ids) for a in output.outputs] for output in outputs}
            assert lengths == {"0": [1 + number * (right + 1)], "1": [1 + number * (right + 1)] * 2}
    for plan in plans[1:]:
        assert plan.sampling is not None
        assert plan.num_tokens == len(plan.sampling.rows) == 3 * (1 + right + wrong)
    check_same(sorted(finish(one).values(), key=lambda output: output.request_id), plain)


def test_an_answer_ends_where_it_ends_without_drafts(engines: Callable[..., Engine]) -> None:
    """At a stop token in the middle of what was drafted, and at its length; more is never computed."""
    one = engines()
    (plain,) = answers(one, [Job(prompt(3, 9), greedy(30))])
    told = plain.outputs[0].token_ids
    place = next(i for i in range(6, 30) if told[i] not in told[:i])
    jobs = [Job(prompt(3, 9), greedy(30, stop_token_ids=[told[place]]))]
    jobs += [Job(prompt(3, 9), greedy(length)) for length in (1, 2, 3, 7)]
    expected = answers(one, jobs)
    assert expected[0].outputs[0].token_ids == told[: place + 1]
    for job, answer in zip(jobs, expected, strict=True):
        with watching(one) as plans:
            check_same(answers(one, [job], Oracle([plain], right=5, wrong=1)), [answer])
        length = len(answer.outputs[0].token_ids)
        assert len(plans) == 1 + -(-(length - 1) // 6)
        if job.params.max_tokens == length:
            assert max(int(plan.positions.max()) for plan in plans) == 9 + length - 2


def test_pages_of_wrong_drafts_are_not_found_later(engines: Callable[..., Engine]) -> None:
    """What is published is the answer, not what was expected of it."""
    one = engines(block_size=2)
    job = Job(prompt(4, 8), greedy(24))
    plain = answers(one, [job])
    found = answers(one, [job], Oracle(plain, right=2, wrong=4))
    check_same(found, plain)
    later = Job([*job.prompt, *plain[0].outputs[0].token_ids], greedy(12, logprobs=2))
    hits = one.stats().prefix_hits
    again = answers(one, [later])
    assert one.stats().prefix_hits - hits >= 28
    roomy = engines(enable_prefix_caching=False)
    check_same(again, answers(roomy, [later]))


@pytest.mark.parametrize("memory", [False, True])
def test_a_step_that_fails_is_computed_without_drafts(memory: bool, engines: Callable[..., Engine]) -> None:
    """No request fails for what was only expected of it."""
    one = engines()
    jobs = [*JOBS[:4]]
    plain = answers(one, jobs)

    def fault(plan: StepPlan) -> None:
        if plan.sampling is not None and plan.sampling.spans is not None and len(failed) < 2:
            raise MemoryError("not enough memory") if memory else RuntimeError("an id that the embedding has not")

    with faults(one, fault) as failed:
        check_same(answers(one, jobs, Oracle(plain)), plain)
    assert len(failed) == 2
    if memory:
        assert one._stepping._recovery.rows > len(jobs)
    else:
        assert one.stats().num_accepted_draft_tokens > 0


def test_drafts_take_no_page_that_others_need(engines: Callable[..., Engine]) -> None:
    """Where pages are short, rows go on without drafts: nothing is preempted for them."""
    jobs = [Job(prompt(number, 7), greedy(9)) for number in range(4)]
    one = engines(block_size=4, num_gpu_blocks_override=17, enable_prefix_caching=False)
    plain = answers(one, jobs)
    assert one.stats().num_preemptions == 0
    check_same(answers(one, jobs, Oracle(plain, right=8, wrong=0)), plain)
    assert one.stats().num_preemptions == 0


@pytest.mark.slow
def test_a_runner_in_another_process_says_how_many_it_accepts(engines: Callable[..., Engine]) -> None:
    plain = answers(engines(), JOBS)
    apart = engines(distributed_executor_backend="mp")
    check_same(answers(apart, JOBS, Oracle(plain)), plain)
    assert apart.stats().num_accepted_draft_tokens > 40


def test_decoders_behind_an_encoder(tmp_path: Any) -> None:
    """Several positions of a row read its encoder's input."""
    path = make_seq2seq_checkpoint(SEQ2SEQ["bart"], tmp_path).path
    one = make_engine(path)

    def run_all(oracle: Oracle | None) -> list[RequestOutput]:
        one.scheduler.drafter = oracle
        for number in range(4):
            params = greedy(14) if number % 2 else sampled(number, 14)
            one.add_request(str(number), Seq2SeqInput(random_prompt(90, number, 5 + number)), params)
        outputs = finish(one)
        return [outputs[str(number)] for number in range(4)]

    plain = run_all(None)
    check_same(run_all(Oracle(plain)), plain)
    assert one.stats().num_accepted_draft_tokens > 8
    one.close()


def test_a_score_that_is_no_number_is_never_one_of_several() -> None:
    """Its token is sampled again as the first of a step, and the request fails then as it would without drafts."""
    batch = SamplingBatch(
        rows=np.arange(9, dtype=np.int32),
        table=neutral_rows(9),
        uniforms=np.zeros((9, 1)),
        spans=np.array([0, 4, 5, 9], dtype=np.int32),
        drafts=np.array([7, 8, 9, -1, -1, 7, 8, 9, -1], dtype=np.int32),
    )
    tokens = np.array([7, 8, 9, 1, 7, 7, 8, 1, 1], dtype=np.int32)[:, None]
    scores = np.array([-1.0, -1.0, np.nan, -1.0, np.nan, -1.0, -1.0, -1.0, -1.0], dtype=np.float32)[:, None]
    none = np.zeros((9, 0), dtype=np.float32)
    result = StepResult(
        tokens=tokens, scores=scores, logprobs=scores, ranks=np.zeros_like(tokens),
        top_ids=np.zeros((9, 0), dtype=np.int32), top_logprobs=none,
    )  # fmt: skip
    assert result.accepting(batch).accepted is not None
    assert result.accepting(batch).accepted.tolist() == [2, 1, 3]  # type: ignore[union-attr]
