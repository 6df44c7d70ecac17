"""Greedy tokens, token for token those of `transformers`, on tiny random checkpoints in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import reference
from support.checkpoints import SHAPES, Checkpoint, random_prompt
from support.reference import MIN_MARGIN

from engine import LLM, SamplingParams

LENGTH = 40


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_equals_reference(name: str, checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """All prompts in one batch, each as the reference answers it alone."""
    model = checkpoint(name)
    prompts = model.prompts()
    outputs = shared_llm(name).generate(prompts, SamplingParams(temperature=0.0, max_tokens=LENGTH))
    reasons = set()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.greedy(model.model, prompt, model.eos, LENGTH)
        assert expected.margin > MIN_MARGIN
        answer = output.outputs[0]
        assert answer.token_ids == expected.answers[0].tokens
        assert (answer.finish_reason == "stop") == (answer.token_ids[-1] in model.eos)
        assert answer.stop_reason is None
        reasons.add(answer.finish_reason)
    assert "stop" in reasons


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_past_eos(name: str, checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """A longer answer over many pages, EOS being an ordinary token."""
    model = checkpoint(name)
    prompt = random_prompt(model.vocab, 1, length=37)
    expected = reference.greedy(model.model, prompt, None, 120)
    assert expected.margin > MIN_MARGIN
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    answer = shared_llm(name).generate([prompt], params)[0].outputs[0]
    assert answer.token_ids == expected.answers[0].tokens
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("block_size", [1, 5, 32])
@pytest.mark.parametrize("name", ["llama-grouped", "gpt2-untied"])
def test_any_page_size_and_chunk(name: str, block_size: int, checkpoint: Callable[[str], Checkpoint]) -> None:
    """Pages and chunks of any size give the same tokens."""
    model = checkpoint(name)
    llm = LLM(
        str(model.path),
        device="cpu",
        show_progress=False,
        block_size=block_size,
        num_gpu_blocks_override=640 // block_size,
        max_num_seqs=8,
        max_num_batched_tokens=8,
    )
    prompts = model.prompts()
    for prompt, output in zip(
        prompts, llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=LENGTH)), strict=True
    ):
        expected = reference.greedy(model.model, prompt, model.eos, LENGTH)
        assert expected.margin > MIN_MARGIN
        assert output.outputs[0].token_ids == expected.answers[0].tokens
    llm.engine.check_integrity()
    llm.close()


def test_stop_token_ids_end_like_eos(checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """A stop id is one more EOS to the reference; our answer says which id it was."""
    model = checkpoint("llama-full-tied")
    prompt = model.prompts()[-1]
    free = reference.greedy(model.model, prompt, model.eos, LENGTH)
    stop = free.answers[0].tokens[6]
    expected = reference.greedy(model.model, prompt, [*model.eos, stop], LENGTH)
    assert min(free.margin, expected.margin) > MIN_MARGIN
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, stop_token_ids=[stop])
    answer = shared_llm("llama-full-tied").generate([prompt], params)[0].outputs[0]
    assert answer.token_ids == expected.answers[0].tokens
    assert len(answer.token_ids) < LENGTH
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("name", ["llama-one-kv-bias", "gpt2-tied"])
def test_logprobs_equal_reference(name: str, checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """logprobs and prompt_logprobs are the log-softmax of the reference's logits."""
    model = checkpoint(name)
    prompt = random_prompt(model.vocab, 2, length=21)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    output = shared_llm(name).generate([prompt], params)[0]
    answer = output.outputs[0]
    tokens = [*prompt, *answer.token_ids]
    expected = reference.logprobs(model.model, tokens)
    assert answer.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *answer.logprobs]
    assert len(entries) == len(tokens) - 1
    for place, entry in enumerate(entries):
        row = expected[place]
        token = tokens[place + 1]
        count = 3 if place + 1 < len(prompt) else 5
        best = row.topk(count).indices.tolist()
        assert next(iter(entry)) == token
        assert set(entry) == {token, *best}
        for other, value in entry.items():
            assert value.logprob == pytest.approx(row[other].item(), abs=1e-4)
            assert value.rank == 1 + int((row > row[other]).sum())
    total = sum(entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_logprobs_are_of_the_model_itself(checkpoint: Callable[[str], Checkpoint], shared_llm: Any) -> None:
    """Penalties, temperature and filters change what is drawn, not the log-probabilities reported."""
    model = checkpoint("gpt2-tied")
    prompt = random_prompt(model.vocab, 5, length=9)
    params = SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, seed=4, max_tokens=10,
        ignore_eos=True, logprobs=0, logit_bias={17: 3.0},
    )  # fmt: skip
    answer = shared_llm("gpt2-tied").generate([prompt], params)[0].outputs[0]
    expected = reference.logprobs(model.model, [*prompt, *answer.token_ids])
    assert answer.logprobs is not None
    for place, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        assert list(entry) == [token]
        assert entry[token].logprob == pytest.approx(expected[len(prompt) - 1 + place, token].item(), abs=1e-4)
