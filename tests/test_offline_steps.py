"""How long steps may take in `LLM`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.checkpoints import Checkpoint

from engine import LLM, SamplingParams


@pytest.mark.parametrize(("settings", "cut"), [({}, False), ({"max_step_time": 1e-6}, True)])
def test_a_prompt_is_one_step_unless_time_is_limited(
    checkpoint: Callable[[str], Checkpoint], settings: dict[str, float], cut: bool
) -> None:
    """Offline nobody waits for a step; who sets a limit gets it."""
    folder = str(checkpoint("llama-grouped").path)
    llm = LLM(folder, device="cpu", skip_tokenizer_init=True, show_progress=False, **settings)  # type: ignore[arg-type]
    llm.generate([[5] * 60], SamplingParams(max_tokens=1), use_tqdm=False)
    assert (llm.stats().num_steps > 1) == cut
    llm.close()
