"""Beam search, hypothesis for hypothesis and score for score that of `transformers`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support import reference
from support.checkpoints import SHAPES, Checkpoint
from support.reference import MIN_MARGIN, Reference

from engine import CompletionOutput, SamplingParams

PENALTIES = (0.0, 0.6, 1.0, 2.0, -1.0)
STOPPING = (True, False, "never")


def assert_equal(
    ours: Sequence[CompletionOutput], expected: Reference, ends: Sequence[int], length_penalty: float = 1.0
) -> None:
    """The same hypotheses in the same order with the same scores, after clear decisions only."""
    assert expected.margin > MIN_MARGIN
    assert [answer.token_ids for answer in ours] == [answer.tokens for answer in expected.answers]
    for answer, other in zip(ours, expected.answers, strict=True):
        # A negative penalty multiplies the sum of log-probabilities, and with it its rounding, by the length.
        factor = max(1.0, len(other.tokens) ** -length_penalty)
        assert answer.score == pytest.approx(other.score, abs=1e-4 * factor)
        assert (answer.finish_reason == "stop") == (answer.token_ids[-1] in ends)


@pytest.mark.parametrize(
    ("name", "num_beams", "prompts"),
    [
        ("llama-grouped", 4, 3),
        *(pytest.param("llama-grouped", beams, 3, marks=pytest.mark.slow) for beams in (2, 8)),
        *((name, 4, 1) for name in SHAPES if name != "llama-grouped"),
    ],
)
def test_beams_equal_reference(
    name: str, num_beams: int, prompts: int, checkpoint: Callable[[str], Checkpoint], shared_llm: Any
) -> None:
    """Every length penalty with every kind of early stopping, all answers, all requests in one batch."""
    model = checkpoint(name)
    cases = list(itertools.product(PENALTIES, STOPPING, model.prompts()[:prompts]))
    params = [
        SamplingParams(
            num_beams=num_beams,
            n=num_beams,
            length_penalty=penalty,
            early_stopping=stopping,
            max_tokens=10 if penalty == 2.0 else 14,
        )
        for penalty, stopping, _ in cases
    ]
    outputs = shared_llm(name).generate([prompt for _, _, prompt in cases], params, use_tqdm=False)
    lengths = set()
    for (penalty, stopping, prompt), chosen, output in zip(cases, params, outputs, strict=True):
        expected = reference.beams(
            model.model,
            prompt,
            model.eos,
            chosen.max_tokens or 0,
            num_beams=num_beams,
            n=num_beams,
            length_penalty=penalty,
            early_stopping=stopping,
        )
        assert_equal(output.outputs, expected, model.eos, penalty)
        lengths |= {(answer.finish_reason, len(answer.token_ids)) for answer in output.outputs}
    # Beams ended by themselves, at several lengths, and by the limit as well.
    assert len({length for reason, length in lengths if reason == "stop"}) > min(prompts, 2)
    assert ("length", 14) in lengths


def test_fewer_answers_than_beams(checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """n below num_beams returns the best n."""
    model = checkpoint("llama-grouped")
    for n in (1, 2, 3):
        params = SamplingParams(num_beams=4, n=n, max_tokens=14, length_penalty=0.6)
        for prompt, output in zip(
            model.prompts(), shared_llm("llama-grouped").generate(model.prompts(), params), strict=True
        ):
            expected = reference.beams(model.model, prompt, model.eos, 14, num_beams=4, n=n, length_penalty=0.6)
            assert len(output.outputs) == n
            assert_equal(output.outputs, expected, model.eos, 0.6)


def test_no_eos_at_all(checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """Beams that can only end at the limit."""
    model = checkpoint("gpt2-tied")
    params = SamplingParams(num_beams=4, n=4, max_tokens=16, ignore_eos=True)
    outputs = shared_llm("gpt2-tied").generate(model.prompts(), params)
    passed_eos = 0
    for prompt, output in zip(model.prompts(), outputs, strict=True):
        expected = reference.beams(model.model, prompt, None, 16, num_beams=4, n=4)
        assert_equal(output.outputs, expected, ())
        passed_eos += sum(token in model.eos for answer in output.outputs for token in answer.token_ids[:-1])
    assert passed_eos > 0


def test_stop_token_ids_count_as_eos(checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """Stop ids end beams and widen the candidates exactly as further EOS ids do."""
    model = checkpoint("llama-full-tied")
    extra = list(range(20, 240))
    how: dict[str, Any] = {"num_beams": 4, "n": 4, "length_penalty": 2.0, "early_stopping": "never"}
    params = SamplingParams(max_tokens=8, stop_token_ids=extra, **how)
    outputs = shared_llm("llama-full-tied").generate(model.prompts(), params)
    stopped = 0
    for prompt, output in zip(model.prompts(), outputs, strict=True):
        expected = reference.beams(model.model, prompt, [*model.eos, *extra], 8, **how)
        assert_equal(output.outputs, expected, [*model.eos, *extra], 2.0)
        for answer in output.outputs:
            if answer.token_ids[-1] in extra:
                assert answer.stop_reason == answer.token_ids[-1]
                stopped += 1
    assert stopped > 0


def test_one_token(checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """The first step is also the last."""
    model = checkpoint("llama-grouped")
    params = SamplingParams(num_beams=4, n=4, max_tokens=1)
    for prompt, output in zip(
        model.prompts(), shared_llm("llama-grouped").generate(model.prompts(), params), strict=True
    ):
        expected = reference.beams(model.model, prompt, model.eos, 1, num_beams=4, n=4)
        assert_equal(output.outputs, expected, model.eos)


def test_logprobs_of_beams(checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """Each hypothesis reports its own path, and its score is their sum over its length."""
    model = checkpoint("gpt2-untied")
    prompt = model.prompts()[0]
    params = SamplingParams(num_beams=4, n=4, max_tokens=12, logprobs=2)
    for answer in shared_llm("gpt2-untied").generate([prompt], params)[0].outputs:
        expected = reference.logprobs(model.model, [*prompt, *answer.token_ids])
        assert answer.logprobs is not None
        assert answer.score is not None
        total = 0.0
        for place, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            row = expected[len(prompt) - 1 + place]
            assert set(entry) == {token, *row.topk(2).indices.tolist()}
            for other, value in entry.items():
                assert value.logprob == pytest.approx(row[other].item(), abs=1e-4)
            total += entry[token].logprob
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert answer.score == pytest.approx(total / len(answer.token_ids), abs=1e-4)
