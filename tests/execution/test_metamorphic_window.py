"""Sliding windows in all layers: freed pages, hits without a beginning and small pools change no answer.

The window is put into the layers of the tiny LLaMA, which makes a Mistral of it; the reference is that one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import reference
from support.checkpoints import Checkpoint
from support.driving import BOTH_DEPTHS, Job, Strikes, Tokens, make_engine, run, run_alone
from support.jobs import CHECKPOINT, beams, greedy, prompt, sampled

from engine import Engine, InvalidRequestError
from engine.backends.attention.base import Window
from engine.model.families import build_spec
from engine.model.spec import ModelSpec

WINDOW = 18
LONG = [
    Job(prompt(30, 90), greedy(50)),
    Job(prompt(31, 61), sampled(3, 30, n=3)),
    Job(prompt(32, 75), beams(3, 24, ignore_eos=True)),
    Job(prompt(33, 7), sampled(4, 60)),
    Job(prompt(34, 40), beams(4, 20, length_penalty=0.5)),
]


def windowed_spec(config: Any) -> ModelSpec:
    """The model's parts, each attention with a window."""
    spec = build_spec(config)
    assert spec.decoder is not None
    blocks = tuple(
        dataclasses.replace(block, attention=dataclasses.replace(block.attention, sees=Window(WINDOW - 1)))
        for block in spec.decoder.blocks
    )
    return dataclasses.replace(spec, decoder=dataclasses.replace(spec.decoder, blocks=blocks))


@pytest.fixture
def windowed(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Like `engines`, with windows."""
    monkeypatch.setattr("engine.execution.starting.build_spec", windowed_spec)
    return engines


def answers_of_whole_tables(path: Path, **settings: Any) -> list[Tokens]:
    """What the jobs answer alone, computed by an engine that keeps every page and has nothing cached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.execution.starting.build_spec", windowed_spec)
        patch.setattr(ModelSpec, "attention_span", None)
        plain = make_engine(path, enable_prefix_caching=False, block_size=4, **settings)
    result = run_alone(plain, LONG)
    assert plain.stats().peak_pages_held >= 35, "no page was freed"
    plain.close()
    return result


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[[str], Checkpoint]) -> list[Tokens]:
    """With pages in the model's own format."""
    return answers_of_whole_tables(checkpoint(CHECKPOINT).path)


def poison(engine: Engine) -> None:
    """Make every page that is neither held nor cached unreadable: page 0, too."""
    pool = engine.scheduler.pool
    unused = [0, *pool._free]
    for layer in engine.runner.cache.layers:
        for tensor in layer:
            if tensor.is_floating_point():  # of int8 pages the scales, which make everything NaN
                tensor[unused] = math.nan


def test_the_reference_s_answers(checkpoint: Callable[[str], Checkpoint], windowed: Callable[..., Engine]) -> None:
    source = checkpoint(CHECKPOINT).model
    settings = {**source.config.to_dict(), "sliding_window": WINDOW, "attn_implementation": "eager"}
    settings = {name: value for name, value in settings.items() if name not in ("model_type", "architectures")}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**settings)).eval()
    model.load_state_dict(source.state_dict())
    one = windowed(block_size=4)
    assert one.scheduler.config.window == WINDOW
    for seed, length in ((51, 70), (41, 5)):
        tokens = prompt(seed, length)
        continued = reference.greedy(model, tokens, None, 40)
        assert reference.greedy(source, tokens, None, 40).answers != continued.answers, "the window changes the answer"
        for expected, job in (
            (continued, Job(tokens, greedy(40))),
            (
                reference.beams(model, tokens, None, 20, num_beams=4, n=4),
                Job(tokens, beams(4, 20, ignore_eos=True)),
            ),
        ):
            assert expected.margin > reference.MIN_MARGIN
            assert run(one, [job]) == [[answer.tokens for answer in expected.answers]]


@BOTH_DEPTHS
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_freed_pages_are_never_read(caching: bool, windowed: Callable[..., Engine], answers: list[Tokens]) -> None:
    """Whatever is in them; and a window is all that a sequence holds."""
    one = windowed(block_size=4, enable_prefix_caching=caching, max_num_batched_tokens=64)
    poison(one)
    assert run(one, LONG, lambda _: poison(one)) == answers
    long = windowed(block_size=4, enable_prefix_caching=caching, max_num_batched_tokens=64)
    assert run(long, LONG[:1], lambda _: poison(long)) == answers[:1]
    planned = 90 if long.stats().num_steps_ahead else 64  # ahead, that is both steps of the prompt
    assert long.stats().peak_pages_held <= (WINDOW + planned + 2) // 4 + 1 < 140 // 4
    assert torch.isnan(long.runner.cache.layers[0][0][0]).all(), "page 0 was unreadable all the time"


@BOTH_DEPTHS
def test_preempted_after_each_step(windowed: Callable[..., Engine], answers: list[Tokens]) -> None:
    """All requests lose everything again and again, and go on from what is left of their windows."""
    one = windowed(block_size=4, max_num_batched_tokens=64)
    strike = Strikes(one, 4, 3)
    assert run(one, LONG, strike) == answers
    assert one.stats().num_preemptions == strike.count > 3 * len(LONG)
    assert one.stats().prefix_hits > 1000


@BOTH_DEPTHS
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_a_pool_smaller_than_a_request(caching: bool, windowed: Callable[..., Engine], answers: list[Tokens]) -> None:
    """Without windows they could take 39 pages; with them the widest takes 27."""
    settings = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 12, "enable_prefix_caching": caching}
    one = windowed(num_gpu_blocks_override=27, **settings)
    assert one.info.full_requests == (27 * 4 - 16) / (WINDOW - 1 + 2 * 3)
    assert run(one, LONG) == answers
    assert one.stats().num_preemptions > 1
    assert one.stats().peak_pages_held <= 27
    with pytest.raises(InvalidRequestError, match=r"windows of 18 and steps of up to 16 tokens"):
        run(windowed(num_gpu_blocks_override=20, **settings), LONG[2:3])


def test_prefix_cached_equals_fresh(windowed: Callable[..., Engine], answers: list[Tokens]) -> None:
    """A second run finds its prompts; also where only their ends are left."""
    one = windowed(block_size=4)
    assert run(one, LONG) == answers
    first = one.stats()
    assert run(one, LONG) == answers
    assert one.stats().prefix_hits - first.prefix_hits == sum(4 * ((len(job.prompt) - 1) // 4) for job in LONG)
    small = windowed(block_size=4, num_gpu_blocks_override=24, max_num_batched_tokens=16, max_num_seqs=16)
    for hits in (0, 88):
        before = small.stats().prefix_hits
        assert run(small, LONG[:1]) == answers[:1]
        assert small.stats().prefix_hits - before == hits


def test_chunks_change_nothing(windowed: Callable[..., Engine], answers: list[Tokens]) -> None:
    for budget in (16, 37):
        one = windowed(block_size=4, max_num_batched_tokens=budget, max_num_seqs=16)
        assert run(one, LONG) == answers


def test_int8_pages(
    checkpoint: Callable[[str], Checkpoint], windowed: Callable[..., Engine], answers: list[Tokens]
) -> None:
    """Scales go with their pages: copied, freed and made unreadable, preempted, taken up again without a beginning."""
    expected = answers_of_whole_tables(checkpoint(CHECKPOINT).path, kv_cache_dtype="int8")
    assert expected != answers, "int8 is another cache"
    settings = {"block_size": 4, "kv_cache_dtype": "int8", "max_num_batched_tokens": 16, "max_num_seqs": 12}
    one = windowed(num_gpu_blocks_override=27, **settings)
    poison(one)
    assert run(one, LONG, lambda _: poison(one)) == expected
    stats = one.stats()
    assert stats.num_preemptions > 1
    assert stats.num_page_copies > 0
    assert stats.peak_pages_held <= 27
    small = windowed(num_gpu_blocks_override=24, **settings)
    for hits in (0, 88):
        before = small.stats().prefix_hits
        assert run(small, LONG[:1], lambda _: poison(small)) == expected[:1]
        assert small.stats().prefix_hits - before == hits
