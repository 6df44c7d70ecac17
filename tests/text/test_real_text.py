"""A trained model with its published greedy output: what comes out is that text, to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, SamplingParams

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260k"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the trained test model is not here")


def test_published_greedy_output() -> None:
    """From BOS on, alone and beside other requests."""
    expected = (DATA / "expected_greedy_199.txt").read_text(encoding="utf-8")
    llm = LLM(str(DATA / "hf"), device="cpu", show_progress=False, num_gpu_blocks_override=200)
    greedy = SamplingParams(temperature=0.0, max_tokens=200)
    alone = llm.generate([[1]], greedy)[0].outputs[0]
    assert alone.text == expected
    others = [SamplingParams(temperature=1.0, seed=3, max_tokens=50), SamplingParams(num_beams=4, max_tokens=30)]
    crowd = llm.generate([[1], "One day, Lily", "Tim had a"], [greedy, *others])
    assert crowd[0].outputs[0].text == alone.text
    assert crowd[0].outputs[0].token_ids == alone.token_ids
    llm.engine.check_integrity()
    llm.close()
