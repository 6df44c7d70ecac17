"""How long steps may take in `LLM`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.checkpoints import Checkpoint

from engine import LLM
from engine import engine as engine_module


@pytest.mark.parametrize(("settings", "limits"), [({}, []), ({"max_step_time": 0.5}, [0.5])])
def test_steps_have_no_limit_unless_one_is_set(
    checkpoint: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    limits: list[float],
) -> None:
    """Offline no client waits for a step, and a prompt is computed fastest in one."""
    plain, made = engine_module.StepBudget, []

    def budget(limit: float, *arguments: Any, **named: Any) -> Any:
        made.append(limit)
        return plain(limit, *arguments, **named)

    monkeypatch.setattr(engine_module, "StepBudget", budget)
    folder = str(checkpoint("llama-grouped").path)
    LLM(folder, device="cpu", skip_tokenizer_init=True, show_progress=False, **settings).close()
    assert made == limits
