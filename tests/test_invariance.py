"""The row count from which on matrix products do not depend on the batch, and that the runner keeps to it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paged_simulator import make_request
from torch import Tensor, nn

from engine.execution.invariance import MOST_ROWS, min_invariant_rows
from engine.execution.kv_cache import KVCache
from engine.execution.runner import ModelRunner
from engine.scheduling.batch import Row, build_plan
from engine.scheduling.plan import StepPlan
from engine.scheduling.sequence import SequenceGroup

SHAPES = [(96, 64), (64, 96), (256, 64), (33, 64), (1000, 48)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(inner, outer) for outer, inner in SHAPES])


def test_the_measured_count_holds_for_other_inputs_too(caplog: pytest.LogCaptureFixture) -> None:
    layers = model()
    with caplog.at_level(logging.INFO, "octavo.execution"):
        least = min_invariant_rows(layers)
    if "may depend" in caplog.text:
        pytest.skip("no row count is invariant on this machine, and the log says so")
    assert 1 <= least <= MOST_ROWS
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for layer in layers:  # type: ignore[attr-defined]
            x = torch.randn(80, layer.weight.shape[1], generator=generator)
            truth = F.linear(x, layer.weight)
            for rows in sorted({least, least + 1, least + 3, 17, 32, 57, 80}):
                if rows >= least:
                    for start in (0, 3, 80 - rows):
                        part = x[start : start + rows].clone()
                        assert torch.equal(F.linear(part, layer.weight)[: 80 - start], truth[start : start + rows])


def test_a_row_does_not_see_what_the_others_hold() -> None:
    """Values of other rows, zeros or infinities, leave a row's bits alone at the measured count."""
    layers = model()
    least = min_invariant_rows(layers)
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for layer in layers:  # type: ignore[attr-defined]
            x = torch.randn(least + 4, layer.weight.shape[1], generator=generator)
            padded = torch.zeros_like(x)
            padded[0], padded[1:3] = x[0], torch.nan
            assert torch.equal(F.linear(x, layer.weight)[0], F.linear(padded, layer.weight)[0])


def test_vectors_and_single_columns_are_no_matrices() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Parameter(torch.ones(64))
            self.column = nn.Parameter(torch.ones(64, 1))

    assert min_invariant_rows(Odd()) == 1


class RecordingModel:
    """Stands in for the transformer: remembers how many rows each product had."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[int] = []

    def __call__(self, token_ids: Tensor, positions: Tensor, caches: Any, slots: Tensor, metadata: Any) -> Tensor:
        assert len(token_ids) == len(positions) >= len(slots) == sum(metadata.query_lens)
        self.tokens.append(len(token_ids))
        return torch.nn.functional.one_hot(token_ids, 8).float() * 9

    def logits(self, hidden: Tensor) -> Tensor:
        self.rows.append(len(hidden))
        return hidden


def plan_for(prompt: list[int], **decoding: Any) -> StepPlan:
    group = SequenceGroup(make_request("r", prompt, **decoding), 0, b"")
    sequence = group.sequences[0]
    sequence.table.extend(range(1, 1 + len(prompt)))
    return build_plan([Row(group, sequence, 0, len(prompt), True)], [], 4)


@pytest.mark.parametrize(("least", "length"), [(1, 3), (5, 3), (5, 9)])
def test_the_runner_pads_every_product_and_no_result(least: int, length: int) -> None:
    stand_in = RecordingModel()
    runner = ModelRunner(
        stand_in,  # type: ignore[arg-type]
        KVCache([(1, 2)], 16, 4, torch.float32, torch.device("cpu")),
        max_num_batched_tokens=4,
        min_rows=least,
    )
    prompt = [1, 2, 3, 4, 5, 6, 7, 0, 1][:length]
    result = runner.execute(plan_for(prompt, prompt_logprobs=1, logprobs=1))
    assert stand_in.tokens == [max(least, length)]
    assert stand_in.rows == [max(least, 1), max(least, length - 1)], "one sampled row, then the prompt's"
    assert result.tokens.tolist() == [[prompt[-1]]]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.top_ids[:, 0].tolist() == prompt[:-1]
    assert np.isfinite(result.prompt_logprobs.logprobs).all()
    without = runner.execute(plan_for(prompt))
    assert without.prompt_logprobs is None
    assert without.tokens.tolist() == [[prompt[-1]]]
