"""Whole steps by the kernels for GPUs, recorded and one step ahead: the same tokens as on a CPU.

Without a GPU, Triton's interpreter runs them, and what would be recorded is called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from support.checkpoints import random_prompt
from support.driving import Job, add, finish, make_engine, run, run_alone, tokens_of, watching
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.gpu import kernels
from support.jobs import CHECKPOINT, beams, greedy, prompt, sampled
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ

from engine import Engine, RequestOutput
from engine.execution import prompt_graphs
from engine.execution.recording import eager
from engine.model.executors.triton import TritonExecutor

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4}


def check(path: Path, jobs: list[Job], **settings: Any) -> None:
    """The jobs get the answers of a CPU, with steps that were recorded and, where they may, planned ahead."""
    plain = make_engine(path, **(SETTINGS | settings))
    expected = run_alone(plain, jobs)
    plain.close()
    with kernels() as device:
        engine = make_engine(path, **(SETTINGS | settings | {"device": str(device), "async_scheduling": True}))
        try:
            assert isinstance(engine.runner.model.decoder.executor, TritonExecutor)
            if device.type == "cpu":
                engine.runner.use_graphs(4, eager)
            assert run(engine, jobs) == expected
            graphs = engine.runner.graphs
            assert graphs.num_replayed > 2
            assert graphs.sampling.num_replayed > 2
            assert graphs.sampling.num_sent < graphs.sampling.num_replayed
            assert engine.stats().num_steps_ahead > 2
        finally:
            engine.close()


SEARCHES = [
    Job(prompt(4, 3), beams(3, 6, ignore_eos=True)),
    Job(prompt(5, 2), greedy(5)),
    Job(prompt(7, 20), beams(2, 2)),
]
NARROW = SETTINGS | {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 8, "max_model_len": 24}


def search(engine: Engine) -> dict[str, RequestOutput]:
    for number, job in enumerate(SEARCHES):
        add(engine, str(number), job)
    return finish(engine)


@pytest.fixture(scope="module")
def in_turn(checkpoint: Callable[[str], Any]) -> dict[str, RequestOutput]:
    with kernels() as device:
        engine = make_engine(checkpoint(CHECKPOINT).path, **NARROW, device=str(device), async_scheduling=False)
        try:
            return search(engine)
        finally:
            engine.close()


def test_beams_that_run_ahead(
    checkpoint: Callable[[str], Any],
    in_turn: dict[str, RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens and scores as in turn, to the bit; the last prompts come in pieces beside beams that go on."""
    monkeypatch.setattr(prompt_graphs, "_APART", ((8, 8),))
    with kernels() as device:
        engine = make_engine(checkpoint(CHECKPOINT).path, **NARROW, device=str(device), async_scheduling=True)
        try:
            runner = engine.runner
            if device.type == "cpu":
                runner.use_graphs(6, eager)
                runner.use_prompt_graphs(6, 8, eager)
            with watching(engine) as plans:
                ahead = search(engine)
            if device.type == "cpu":
                assert ahead == in_turn
            else:  # whose libraries multiply few rows otherwise than many
                assert {name: tokens_of(one) for name, one in ahead.items()} == {
                    name: tokens_of(one) for name, one in in_turn.items()
                }
            if device.type == "cpu":
                assert runner.graphs.num_replayed > 0
                assert runner.prompt_graphs.num_replayed > 0
        finally:
            engine.close()
    searches = [plan for plan in plans if plan.searches is not None]
    assert len(searches) > 3
    assert any(plan.num_tokens > plan.num_rows for plan in searches)


def test_memory_that_is_short_in_the_middle_of_a_step(checkpoint: Callable[[str], Any]) -> None:
    """Before the device was told all, and after it has counted: the steps that follow do not build on that."""
    jobs = [Job(prompt(1, 9), sampled(2, 6, ignore_eos=True)), Job(prompt(2, 3), sampled(3, 6, ignore_eos=True))]
    path = checkpoint(CHECKPOINT).path
    plain = make_engine(path, **SETTINGS)
    expected = run_alone(plain, jobs)
    plain.close()
    with kernels() as device:
        engine = make_engine(path, **(SETTINGS | {"device": str(device), "async_scheduling": True}))
        if device.type == "cpu":
            engine.runner.use_graphs(4, eager)
        graphs, calls = engine.runner.graphs.sampling, 0
        replay = graphs.run

        def broken(batch: Any, size: int) -> Any:
            nonlocal calls
            calls += len(batch.rows) > 1
            if len(batch.rows) == 1 or calls % 2:
                return replay(batch, size)
            if calls % 4:
                replay(batch, size)
            else:
                graphs._sent, graphs._expected = batch, batch.table["position"]
                graphs._sampler.put(batch)
                graphs._sampler._packed.fill_(255)
            raise torch.OutOfMemoryError("CUDA out of memory, made by the test")

        graphs.run = broken
        engine._stepping._recovery.succeeded = lambda **_: setattr(engine._stepping._recovery, "rows", 2)
        assert run(engine, jobs) == expected
        assert calls >= 4
        assert engine.stats().num_oom_retries >= 2
        engine.close()


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "bloom-odd-heads-untied", "gpt-oss", "phi3-long-factors"])
def test_families(name: str, tmp_path: Path) -> None:
    """The last one turns a short sequence and a long one, each in its own way."""
    make_family_checkpoint(FAMILY_SHAPES[name], tmp_path)
    vocab = FAMILY_SHAPES[name].vocab
    check(tmp_path, [Job(random_prompt(vocab, 1, 9), greedy(4)), Job(random_prompt(vocab, 2, 4), greedy(4))])


def test_encoder_decoder(tmp_path: Path) -> None:
    make_seq2seq_checkpoint(SEQ2SEQ["t5"], tmp_path)
    vocab = SEQ2SEQ["t5"].vocab
    check(tmp_path, [Job(random_prompt(vocab, 1, 7), beams(2, 4)), Job(random_prompt(vocab, 2, 12), greedy(8))])


def test_rows_that_are_no_multiple_of_eight(checkpoint: Callable[[str], Any]) -> None:
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 5}
    with kernels() as device:
        engine = make_engine(checkpoint(CHECKPOINT).path, **(SETTINGS | settings | {"device": str(device)}))
        try:
            if device.type == "cpu":
                engine.runner.use_graphs(5, eager)
            (answer,) = run(engine, [Job(prompt(6, 3), greedy(3, ignore_eos=True))])
            assert len(answer[0]) == 3
            assert engine.runner.graphs.sampling.num_replayed == 3  # the prompt's step is sampled so, too
        finally:
            engine.close()
