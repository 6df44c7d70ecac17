"""Gemma 2, Gemma 3, OLMo 2 and 3, Command R+ and StableLM 2, which differ in where their norms stand: what is
refused, and configs in their older form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FAMILY_SHAPES
from support.family_shape import build_reference, run
from support.pages import Pages, load, scattered_tables
from support.published import GEMMA_2_2B, GEMMA_3_1B, OLMO_2_7B, OLMO_3_7B, read

from engine.errors import UnsupportedModelError

SLIDING = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GEMMA_2_2B, {**SLIDING, "sliding_window": None}, r"'sliding_attention', but sliding_window is null"),
        (GEMMA_2_2B, {**SLIDING, "sliding_window": 0}, r"sliding_window .* got 0"),
        (GEMMA_2_2B, {**SLIDING, "layer_types": ["chunked_attention"] * 2}, r"layer_types .* 'chunked_attention'"),
        (GEMMA_2_2B, {"use_bidirectional_attention": True}, "bidirectional attention"),
        (GEMMA_3_1B, {**SLIDING, "sliding_window": None}, r"'sliding_attention', but sliding_window is null"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping .* got 50"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "bidirectional attention"),
        (OLMO_3_7B, {"sliding_window": None}, r"'sliding_attention', but sliding_window is null"),
        (OLMO_2_7B, {"hidden_act": "laplace"}, "'laplace'"),
    ],
)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, config, **changes)


def test_configs_in_their_older_form_mean_the_same(tmp_path: Path) -> None:
    """Published Gemma 3 configs have a pattern for the windows, and the rotary bases beside each other."""
    shape = FAMILY_SHAPES["gemma3-scaled-biases-untied"]
    reference = build_reference(shape)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config.pop("layer_types") == ["sliding_attention", "full_attention", "sliding_attention"]
    ropes = config.pop("rope_parameters")
    theta, scaling = ropes["full_attention"].pop("rope_theta"), ropes["full_attention"]
    config |= {
        "sliding_window_pattern": 2,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prompt = list(range(2, 40))
    (ours,) = Pages(load(tmp_path), scattered_tables([len(prompt)])).step([prompt])
    torch.testing.assert_close(ours, run(reference.base_model, prompt).last_hidden_state[0], rtol=1e-4, atol=1e-4)
