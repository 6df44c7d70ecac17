"""What holds for the plain decoder holds for models with windows, chunks, ALiBi, experts, sinks or latents, too.

Batches, chunks, preemptions, prefix hits and beams change no answer; each test sees to it that they did happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.driving import (
    Job,
    Strikes,
    Tokens,
    beam_rows,
    make_engine,
    other_rows,
    run,
    run_alone,
    watching,
)
from support.executors import use_torch
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.jobs import MIXED, VOCAB, beams, greedy, prompt, sampled
from torch import Tensor

from engine import Engine
from engine.model.experts import ExpertMatrices

WINDOW = 11
SHAPES = {
    "windowed": replace(
        FAMILY_SHAPES["mistral"],
        vocab=VOCAB,
        settings={**FAMILY_SHAPES["mistral"].settings, "sliding_window": WINDOW},
    ),
    # Chunks of 16 tokens, and layers without positions that see all.
    "chunks": replace(FAMILY_SHAPES["llama4"], vocab=VOCAB),
    "alibi": replace(FAMILY_SHAPES["bloom-odd-heads-untied"], vocab=VOCAB),
    "experts": replace(
        FAMILY_SHAPES["qwen3-moe"], vocab=VOCAB, settings={**FAMILY_SHAPES["qwen3-moe"].settings, "num_experts": 7}
    ),
    "sinks": replace(FAMILY_SHAPES["gpt-oss"], vocab=VOCAB),
    "heads that are experts": replace(FAMILY_SHAPES["jetmoe-odd-untied"], vocab=VOCAB),
    "latents": replace(FAMILY_SHAPES["deepseek-v3"], vocab=VOCAB),
    "states": replace(FAMILY_SHAPES["lfm2"], vocab=VOCAB),
    "matrices as states": replace(FAMILY_SHAPES["qwen3.5-moe"], vocab=VOCAB),
    "a scan beside attention": replace(FAMILY_SHAPES["falcon-h1"], vocab=VOCAB),
    "states of features": replace(FAMILY_SHAPES["jamba"], vocab=VOCAB),
    "a gated recurrence": replace(
        FAMILY_SHAPES["recurrent-gemma"],
        vocab=VOCAB,
        settings={**FAMILY_SHAPES["recurrent-gemma"].settings, "attention_window_size": 200},
    ),
    "decays of features": replace(FAMILY_SHAPES["kimi-linear"], vocab=VOCAB),
    # Half of the jobs reach further than the original length.
    "factors by request": replace(
        FAMILY_SHAPES["phi3-factors-by-request"],
        vocab=VOCAB,
        settings={**FAMILY_SHAPES["phi3-factors-by-request"].settings, "original_max_position_embeddings": 40},
    ),
}
MAX_LEN = 100
# Kinds of decoding that share steps, one of each.
JOBS = [MIXED[number] for number in (0, 2, 3, 5, 6, 8)]
LONG = [Job(prompt(70, 71), greedy(12)), Job(prompt(71, 60), beams(3, 12, ignore_eos=True))]


@dataclass(frozen=True)
class Model:
    """A checkpoint, and what the jobs answer alone on it in a roomy engine, nothing cached."""

    name: str
    path: Path
    answers: list[Tokens]

    @contextmanager
    def engine(self, **settings: Any) -> Iterator[Engine]:
        one = make_engine(self.path, **({"max_model_len": MAX_LEN, "block_size": 4} | settings))
        yield one
        one.close()


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    make_family_checkpoint(SHAPES[request.param], folder)
    plain = Model(request.param, folder, [])
    with plain.engine(enable_prefix_caching=False) as one:
        answers = run_alone(one, [*JOBS, *LONG])
        assert one.stats().num_preemptions == one.stats().prefix_hits == 0
    return replace(plain, answers=answers)


def test_batched_equals_alone(model: Model) -> None:
    """Beams beside other rows; an expert works once on the rows of all of them."""
    with model.engine() as one, watching(one) as plans:
        assert run(one, [*JOBS, *LONG]) == model.answers
    assert sum(1 for plan in plans if beam_rows(plan) and other_rows(plan)) >= 10
    if model.name == "experts":
        with model.engine() as one, watching(one) as plans, products(one) as rows:
            use_torch(one.runner.model)  # the library's products cannot be watched
            assert run(one, [*JOBS, *LONG]) == model.answers
        assert rows
        layers, experts, active = 2, 7, SHAPES["experts"].settings["num_experts_per_tok"]
        tokens = sum(plan.num_tokens for plan in plans)
        assert len(rows) <= 2 * layers * experts * len(plans)
        assert len(rows) < 0.5 * 2 * layers * active * tokens, "products are of groups, not of tokens"


def test_chunked_equals_whole(model: Model) -> None:
    small = {"max_num_batched_tokens": 5, "max_num_seqs": 5}
    with model.engine(enable_prefix_caching=False, **small) as one, watching(one) as plans:
        assert run(one, [*JOBS, *LONG]) == model.answers
    assert max(plan.num_tokens for plan in plans) <= 5
    assert sum(1 for plan in plans if plan.sampling is None or len(plan.sampling.rows) < plan.num_rows) >= 8


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_preempted_equals_undisturbed(caching: bool, model: Model) -> None:
    """Everybody loses everything again and again, in the middle of prompts too."""
    with model.engine(enable_prefix_caching=caching, max_num_batched_tokens=64, max_num_seqs=30) as one:
        strike = Strikes(one, 4, 2)
        assert run(one, [*JOBS, *LONG], strike) == model.answers
        stats = one.stats()
        assert stats.num_preemptions == strike.count > 2 * len(model.answers)
        assert (stats.prefix_hits > 0) == caching


def test_short_of_pages(model: Model) -> None:
    """The scheduler's own preemptions, and pages copied because beams part."""
    pages = 24 if model.name == "windowed" else 40
    with model.engine(num_gpu_blocks_override=pages, max_num_batched_tokens=24, max_num_seqs=24) as one:
        assert run(one, [*JOBS, *LONG]) == model.answers
        stats = one.stats()
        assert stats.num_preemptions > 1
        assert stats.num_page_copies > 0
        assert stats.peak_pages_held <= pages


def test_cached_equals_fresh(model: Model) -> None:
    """A second run finds its prompts in the cache and computes so much less."""
    with model.engine() as one:
        for _ in range(2):
            before = one.stats()
            assert run(one, [*JOBS, *LONG]) == model.answers
        after = one.stats()
        hits = sum(4 * ((len(job.prompt) - 1) // 4) for job in [*JOBS, *LONG])
        assert before.prefix_hits == 0
        assert after.prefix_hits == hits
        assert after.computed_tokens - before.computed_tokens == before.computed_tokens - hits


def test_beams_share_pages(model: Model) -> None:
    """A prompt is held once for all beams, and what lies outside a window is not held at all."""
    job = Job(prompt(72, 64), beams(8, 10, ignore_eos=True))
    with model.engine(max_num_batched_tokens=16, max_num_seqs=8, enable_prefix_caching=False) as one:
        run(one, [job])
        held, copies = one.stats().peak_pages_held, one.stats().num_page_copies
    assert copies > 0
    # 8 beams of 10 tokens have 3 pages each of their own at most; the prompt has 16.
    assert held <= (8 * 3 + 16 if model.name != "windowed" else 8 * (3 + 1) + WINDOW // 4)
    assert model.name == "windowed" or held > 16


def test_a_long_answer_frees_what_is_behind_it(model: Model) -> None:
    with model.engine(enable_prefix_caching=False) as one:
        run(one, [Job(prompt(73, 9), sampled(1, 80))])
        held = one.stats().peak_pages_held
    assert held == (WINDOW // 4 + 2 if model.name == "windowed" else 22)


@contextmanager
def products(engine: Engine) -> Iterator[list[int]]:
    """Rows of each product with an expert's matrix."""
    rows: list[int] = []

    def counted(compute: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
        def forward(x: Tensor, expert: int) -> Tensor:
            rows.append(len(x))
            return compute(x, expert)

        return forward

    for module in engine.runner.model.modules():
        if isinstance(module, ExpertMatrices):
            module.forward = counted(module.forward)  # type: ignore[method-assign]
    yield rows
