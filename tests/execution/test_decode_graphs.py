"""Decoding steps that are recorded and started again change no answer.

A CPU records nothing: it calls the recorded function, with the same fixed inputs, padding and bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import random_prompt
from support.driving import Job, add, finish, make_engine, preempt_all, run, run_alone
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.jobs import CHECKPOINT, MIXED, VOCAB, beams, greedy, prompt, sampled
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ
from test_drafts import Oracle, check_same

from engine import Engine, RequestOutput
from engine.backends.native.attention import NativeAttention
from engine.execution import warmup
from engine.execution.cuda_graphs import DecodeGraphs, graph_sizes
from engine.execution.recording import eager
from engine.execution.warmup import record

FAMILIES = {
    "windowed": replace(
        FAMILY_SHAPES["mistral"], vocab=VOCAB, settings={**FAMILY_SHAPES["mistral"].settings, "sliding_window": 11}
    ),
    "alibi": replace(FAMILY_SHAPES["bloom-odd-heads-untied"], vocab=VOCAB),
    "experts": replace(FAMILY_SHAPES["qwen3-moe"], vocab=VOCAB),
    "factors by request": replace(
        FAMILY_SHAPES["phi3-factors-by-request"],
        vocab=VOCAB,
        settings={**FAMILY_SHAPES["phi3-factors-by-request"].settings, "original_max_position_embeddings": 40},
    ),
}
JOBS = [*MIXED, Job(prompt(90, 50), greedy(30)), Job(prompt(91, 1), sampled(5, 25))]
SETTINGS: dict[str, Any] = {"block_size": 4, "max_model_len": 100}


@contextmanager
def recorded(path: Path, max_rows: int = 32, **settings: Any) -> Any:
    """An engine whose decoding steps are recorded."""
    engine = make_engine(path, **(SETTINGS | settings))
    try:
        engine.runner.use_graphs(max_rows, eager)
        yield engine
    finally:
        engine.close()


def replayed(engine: Engine) -> DecodeGraphs:
    assert engine.runner.graphs is not None
    assert engine.runner.graphs.num_replayed > 10
    return engine.runner.graphs


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        make_seq2seq_checkpoint(SEQ2SEQ[name], path)
        return path

    return make


def outputs(engine: Engine, jobs: list[Job]) -> list[RequestOutput]:
    for number, job in enumerate(jobs):
        add(engine, str(number), job)
    answers = finish(engine)
    return [answers[str(number)] for number in range(len(jobs))]


def check(path: Path, jobs: list[Job], **settings: Any) -> None:
    plain = make_engine(path, **(SETTINGS | settings))
    expected = run_alone(plain, jobs)
    plain.close()
    with recorded(path, **settings) as engine:
        assert run(engine, jobs) == expected
        replayed(engine)
        crowd = engine.runner.graphs.state.num_uploaded
        assert run_alone(engine, jobs) == expected
        assert engine.runner.graphs.state.num_uploaded > crowd


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"kv_cache_dtype": "int8"}, {"max_num_batched_tokens": 16, "max_num_seqs": 9}]
)
def test_a_crowd_answers_as_alone(checkpoint: Callable[[str], Any], settings: dict[str, Any]) -> None:
    check(checkpoint(CHECKPOINT).path, JOBS, **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    make_family_checkpoint(FAMILIES[name], tmp_path)
    check(tmp_path, JOBS[-4:])


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_rows_read_their_own_encoder_input(name: str, seq2seq: Callable[[str], Path]) -> None:
    vocab = SEQ2SEQ[name].vocab
    inputs = [random_prompt(vocab, seed, length) for seed, length in ((1, 1), (2, 3), (3, 17), (4, 40))]
    jobs = [Job(tokens, params) for tokens in inputs for params in (greedy(12), beams(3, 8), sampled(1, 9, n=2))]
    check(seq2seq(name), jobs)


def test_rows_that_lose_their_pages_go_on_with_others(checkpoint: Callable[[str], Any]) -> None:
    path = checkpoint(CHECKPOINT).path
    plain = make_engine(path, **SETTINGS)
    expected = run_alone(plain, JOBS)
    plain.close()
    with recorded(path, enable_prefix_caching=False) as engine:
        preempted = 0

        def between(step: int) -> None:
            nonlocal preempted
            preempted += preempt_all(engine) if step in (5, 9) else 0

        assert run(engine, JOBS, between) == expected
        assert preempted
        replayed(engine)


def test_drafts_are_rows_of_a_recorded_step(checkpoint: Callable[[str], Any]) -> None:
    """A row with drafts is computed as so many rows of one token."""
    path = checkpoint(CHECKPOINT).path
    with recorded(path) as one:
        plain = outputs(one, JOBS)
        one.scheduler.drafter = Oracle(plain)
        before, steps = replayed(one).num_replayed, one.stats().num_steps
        check_same(outputs(one, JOBS), plain)
        assert one.stats().num_accepted_draft_tokens > 40
        assert replayed(one).num_replayed - before > (one.stats().num_steps - steps) // 2


def test_steps_beyond_what_was_recorded_run_eagerly(checkpoint: Callable[[str], Any]) -> None:
    path = checkpoint(CHECKPOINT).path
    jobs = [Job(prompt(seed, 5), greedy(12, ignore_eos=True)) for seed in range(6)]
    plain = make_engine(path, **SETTINGS)
    expected = run_alone(plain, jobs)
    plain.close()
    with recorded(path, max_rows=4) as engine:
        assert run(engine, jobs) == expected
        assert engine.runner.graphs.num_replayed == 0
        assert run_alone(engine, jobs) == expected
        replayed(engine)


def test_recording_leaves_the_pages_as_they_were(checkpoint: Callable[[str], Any]) -> None:
    with recorded(checkpoint(CHECKPOINT).path) as engine:
        for layer in engine.runner.cache.layers:
            for tensor in layer:
                assert not torch.count_nonzero(tensor)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [1, 2, 4]), (5, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 16]),
     (20, [1, 2, 4, 8, 16, 24]), (128, [1, 2, 4, *range(8, 129, 8)])],
)  # fmt: skip
def test_sizes_hold_every_number_of_rows(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


def test_what_cannot_be_recorded_runs_eagerly_and_says_so(checkpoint: Callable[[str], Any], caplog: Any) -> None:
    class Recordable(NativeAttention):
        recordable = True

    class Broken:
        def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    caplog.set_level("INFO", logger="octavo.execution")
    engine = make_engine(checkpoint(CHECKPOINT).path, **SETTINGS)
    model = engine.runner.model
    on_gpu = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda"), decoder=model.decoder, spec=model.spec))
    typical = nullcontext()
    record(on_gpu, NativeAttention(), 4, 0)
    assert "Steps run without CUDA graphs: native attention cannot be recorded" in caplog.text
    on_gpu.use_graphs = lambda rows, recorder, *how: engine.runner.use_graphs(rows, Broken(), *how)
    on_gpu.use_prompt_graphs = lambda rows, tokens, recorder: engine.runner.use_prompt_graphs(rows, tokens, Broken())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "CudaRecorder", lambda device: SimpleNamespace(seconds=None))
        patch.setattr(warmup, "typical_row", lambda runner: typical)
        record(on_gpu, Recordable(), 4, 64)
    for steps in ("steps with prompts, of up to 64 tokens", "decoding steps of up to 4 rows"):
        assert f"{steps} run without CUDA graphs, which is slower: recording failed (operation not" in caplog.text
    assert "Traceback" in caplog.text
    assert "--enforce-eager" in caplog.text
    assert engine.runner.graphs is engine.runner.prompt_graphs is None
    engine.close()
