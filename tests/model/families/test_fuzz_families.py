"""A random configuration of each architecture against `transformers`; `support.fuzz` compares as many as one likes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import fuzz
from support.fuzz import compare, shapes_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", sorted(shapes_of()))
def test_a_random_configuration_equals_the_reference(architecture: str, tmp_path: Path) -> None:
    """The first of its configurations that is served and whose experts are clearly chosen; few are not."""
    assert any(compare(architecture, number, tmp_path / str(number)) == "equal" for number in range(6))


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "BertForMaskedLM", "LEDForConditionalGeneration"])
def test_a_difference_is_found(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single weight of the first layer that is not what is stored."""
    load = fuzz.load

    def wrong(*args: Any, **settings: Any) -> Any:
        model = load(*args, **settings)
        next((model.decoder or model.encoder).blocks.parameters()).flatten()[0] += 0.5
        return model

    monkeypatch.setattr(fuzz, "load", wrong)
    with pytest.raises(AssertionError) as caught:
        compare(architecture, 0, tmp_path)
    assert f"{architecture} 0: " in caught.value.__notes__[0]
