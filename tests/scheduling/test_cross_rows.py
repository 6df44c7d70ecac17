"""Beams of one request read their encoder input as one row of cross-attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from engine import Engine, EngineConfig, RequestOutput, SamplingParams
from engine.execution.model_kinds import EncoderDecoder
from engine.model.layers import CrossPages
from engine.scheduling.plan import StepPlan

INPUTS = {"beams": [5, 9, 17, 3, 44, 8, 1], "greedy": [7, 7, 21, 1], "drawn": [5, 9, 17, 3, 44, 8, 1]}
PARAMS = {
    "beams": SamplingParams(num_beams=4, n=4, max_tokens=8, ignore_eos=True),
    "greedy": SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    "drawn": SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("t5")
    config = T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(path)
    return path


def answers(checkpoint: Path) -> dict[str, RequestOutput]:
    """Of all requests in one batch."""
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        max_model_len=32,
        block_size=4,
        num_gpu_blocks_override=80,
        enable_prefix_caching=False,
        show_progress=False,
        max_step_time=0,
        skip_tokenizer_init=True,
    )
    engine = Engine(config)
    for name, tokens in INPUTS.items():
        engine.add_request(name, tokens, PARAMS[name])
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    engine.close()
    return found


def test_rows_of_a_request_are_one_row_of_cross_attention(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cross, seen = EncoderDecoder.cross, []

    def watch(self: EncoderDecoder, plan: StepPlan, query_lens: list[int]) -> CrossPages | None:
        pages = cross(self, plan, query_lens)
        if pages is not None and plan.cross is not None:
            seen.append((pages.metadata.query_lens, pages.metadata.context_lens, len(pages.block_tables)))
        return pages

    def apart(self: EncoderDecoder, plan: StepPlan, query_lens: list[int]) -> CrossPages | None:
        if plan.cross is not None:
            owners = np.arange(plan.num_rows, dtype=np.int32)
            plan = replace(plan, cross=replace(plan.cross, owners=owners))
        return cross(self, plan, query_lens)

    monkeypatch.setattr(EncoderDecoder, "cross", watch)
    joined = answers(checkpoint)
    assert ([1, 1, 1], [7, 4, 7], 3) in seen  # the first step: a row each
    assert ([4, 1, 3], [7, 4, 7], 3) in seen  # requests with equal inputs stay apart
    monkeypatch.setattr(EncoderDecoder, "cross", apart)
    for name, output in answers(checkpoint).items():
        for one, other in zip(joined[name].outputs, output.outputs, strict=True):
            assert_same(one, other)


def assert_same(one: Any, other: Any) -> None:
    assert one.token_ids == other.token_ids
    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-5)
