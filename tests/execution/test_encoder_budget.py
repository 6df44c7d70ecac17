"""What a step may hold with an encoder: measured without an encoder input, learned from those that come."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import BartConfig, BartForConditionalGeneration

from engine import Engine, EngineConfig, SamplingParams
from engine.scheduling.budget import StepWork


def test_steps_with_encoder_runs_are_learned_from(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=40, decoder_ffn_dim=40,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=256, pad_token_id=1,
        decoder_start_token_id=2, eos_token_id=2, bos_token_id=0, forced_eos_token_id=None,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(tmp_path)
    engine = Engine(EngineConfig(model=str(tmp_path), device="cpu", show_progress=False, max_step_time=0.5))
    budget = engine._budget
    assert budget is not None
    first = budget.limit()
    assert all(0.0 <= cost < math.inf for cost in (first.costs.pair, first.costs.score))
    assert 1.0 <= first.work < math.inf, "trial steps of the decoder alone give a figure to begin with"
    assert all(not scratch[0].any() for layer in engine.runner.cache.layers for scratch in layer)
    seen: list[StepWork] = []
    observe = budget.observe

    def remember(work: StepWork, seconds: float) -> None:
        seen.append(work)
        observe(work, seconds)

    budget.observe = remember  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add_request("long", [3 + i % 90 for i in range(200)], params)
    while engine.has_unfinished_requests():
        engine.step()
    # 200 tokens that all see each other; and decoder tokens that see these and those before them.
    assert seen[0] == StepWork(tokens=201, prompt_tokens=200, pairs=200 * 200 + 201, scores=1)
    assert seen[1:] == [StepWork(tokens=1, pairs=200 + place, scores=1) for place in (2, 3)]
    assert budget._steps[-1].tokens == 201
    engine.check_integrity()
    engine.close()
