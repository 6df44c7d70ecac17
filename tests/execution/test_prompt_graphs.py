"""Steps that hold prompts, recorded for numbers of tokens and started again with any rows, change no answer.

Without a GPU, Triton's interpreter runs their kernels, and what would be recorded is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from support.checkpoints import random_prompt
from support.driving import Job, make_engine, run, run_alone
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.gpu import kernels
from support.jobs import CHECKPOINT, greedy, prompt, sampled

from engine import Engine
from engine.execution import prompt_graphs
from engine.execution.profiling import largest_steps
from engine.execution.prompt_graphs import LARGEST, PromptGraphs, token_sizes
from engine.execution.recording import eager

SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}
# So that steps of these tests are shared out over several sizes.
FEW = ((8, 16),)


@contextmanager
def recorded(path: Path, **settings: Any) -> Iterator[Engine]:
    chosen = SETTINGS | {"async_scheduling": True} | settings
    with kernels() as device, mock.patch.object(prompt_graphs, "_APART", FEW):
        engine = make_engine(path, **chosen, device=str(device))
        try:
            if device.type == "cpu":
                engine.runner.use_prompt_graphs(4, chosen["max_num_batched_tokens"], eager)
                engine.runner.use_graphs(4, eager)
            yield engine
        finally:
            engine.close()


def check(path: Path, jobs: list[Job], **settings: Any) -> None:
    """The jobs get the answers of a CPU, and no step ran outside of graphs. Padding reads block 0, where NaN is."""
    plain = make_engine(path, **(SETTINGS | settings))
    expected = run_alone(plain, jobs)
    plain.close()
    with recorded(path, **settings) as engine, mock.patch.object(engine.runner.kind, "run") as outside:
        for layer in engine.runner.cache.layers:
            for tensor in layer:
                tensor[0] = torch.nan
        assert run(engine, jobs) == expected
        assert not outside.called
        assert engine.runner.prompt_graphs is not None
        assert engine.runner.prompt_graphs.num_replayed >= 2
        assert engine.stats().num_steps_ahead > 0


def test_sizes_are_close_to_each_other() -> None:
    assert token_sizes(1) == [64]
    assert token_sizes(65) == [64, 128]
    assert token_sizes(600) == [*range(64, 513, 64), 640]
    assert token_sizes(10**6) == [*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256)]
    assert token_sizes(10**6)[-1] == LARGEST


def test_what_is_served(checkpoint: Callable[[str], Any]) -> None:
    """As many tokens and rows as are recorded, of which any may be in one row."""
    engine = make_engine(checkpoint(CHECKPOINT).path, **SETTINGS)
    with mock.patch.object(prompt_graphs, "_APART", FEW):
        runner = engine.runner
        sampled = torch.zeros(8, dtype=torch.int32)
        graphs = PromptGraphs(runner.model, runner.cache, sampled, max_rows=2, max_tokens=16, record=eager)

    def served(tokens: int, rows: int) -> bool:
        return graphs.serves(next(iter(largest_steps(runner, tokens, rows))))

    assert not served(16, 2), "nothing is recorded yet"
    graphs._graphs = dict.fromkeys(graphs._sizes, lambda: None)
    assert served(16, 2)
    assert served(1, 1)
    assert not served(17, 2)
    assert not served(16, 3)
    engine.close()


@pytest.mark.slow
def test_prompts_beside_rows_that_decode(checkpoint: Callable[[str], Any]) -> None:
    """Prompts of several chunks, of one token, and of the whole step; tokens that only the device knows."""
    jobs = [
        Job(prompt(1, 21), greedy(2)),
        Job(prompt(2, 3), sampled(3, 4, ignore_eos=True)),
        Job(prompt(3, 1), greedy(4, ignore_eos=True)),
    ]
    check(checkpoint(CHECKPOINT).path, jobs)


@pytest.mark.slow
def test_sides_of_tokens_are_recorded(tmp_path: Path) -> None:
    """Rows whose rotary factors differ read them at their own offsets."""
    shape = FAMILY_SHAPES["phi3-factors-by-request"]
    make_family_checkpoint(shape, tmp_path)
    jobs = [Job(random_prompt(shape.vocab, 1, 19), greedy(2)), Job(random_prompt(shape.vocab, 2, 70), greedy(4))]
    check(tmp_path, jobs, max_model_len=128)


@pytest.mark.slow
def test_windows_sinks_and_experts(tmp_path: Path) -> None:
    shape = FAMILY_SHAPES["gpt-oss"]
    make_family_checkpoint(shape, tmp_path)
    jobs = [Job(random_prompt(shape.vocab, number, length), greedy(2)) for number, length in ((1, 19), (2, 4))]
    check(tmp_path, jobs)
