"""Families with rotary positions and RMS norms: settings that are refused, and checkpoints in older forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.pages import Pages, close, load, scattered_tables
from support.published import (
    MISTRAL_V01,
    MISTRAL_V03,
    PHI3_4K,
    PHI4_MINI,
    QWEN3_06B,
    QWEN25_05B,
    read,
)

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model import families


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL_V01 | {"sliding_window": 0}, "sliding_window .*at least 1.*got 0"),
        (PHI3_4K | {"sliding_window": -1}, "sliding_window .*at least 1.*got -1"),
        (MISTRAL_V03 | {"layer_types": ["sliding_attention"] * 32}, "'sliding_attention', but sliding_window is null"),
        (QWEN25_05B | {"layer_types": ["sliding_attention"] * 24}, "sliding_window is null"),
        (
            QWEN3_06B | {"layer_types": ["chunked_attention"] * 28},
            "layer_types .*chunked_attention.*full_attention, sliding_attention",
        ),
        (QWEN3_06B | {"is_causal": False}, "is_causal to false"),
        (QWEN25_05B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.*0.5"),
        (MISTRAL_V01 | {"hidden_act": "mish"}, "activation 'mish'"),
        (PHI4_MINI | {"partial_rotary_factor": 0.76}, "even number of features.*0.76 gives 97"),
        (  # which some versions of transformers do not even read
            QWEN25_05B | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"one set for all layers|config\.json cannot be read",
        ),
    ],
)
def test_settings_without_a_part_are_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, config)


def test_the_number_of_layer_types() -> None:
    config = transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], num_hidden_layers=2)
    config.layer_types = ["full_attention"]
    with pytest.raises(UnsupportedModelError, match=r"layer_types .*num_hidden_layers 2, but has 1"):
        families.build_spec(config)


TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3")


@pytest.mark.parametrize("name", NAMES)
def test_headless_checkpoints_with_buffers(name: str, tmp_path: Path) -> None:
    """Names without their prefix, no output matrix, and the frequencies that old versions stored."""
    whole = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(3)
    reference = whole(whole.config_class(**TINY)).eval()
    reference.model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert not any(key.startswith("model.") for key in tensors)
    old = {f"layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    save_file(tensors | old | {"rotary_emb.inv_freq": torch.ones(4)}, file, metadata={"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["architectures"] == [f"{name}Model"]
    prompt = list(range(3, 20))
    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), output_hidden_states=True)
    model = load(tmp_path)
    (hidden,) = Pages(model, scattered_tables([len(prompt)])).step([prompt])
    close(hidden, expected.hidden_states[-1][0])
    with torch.inference_mode():
        close(model.logits(hidden), expected.logits[0])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["Mistral", "Phi3", "Qwen2", "Qwen3"])
def test_the_smallest_windows(name: str, size: int, tmp_path: Path) -> None:
    """One key too few or too many shows most where there are few."""
    whole = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(4)
    upper = {"use_sliding_window": True, "max_window_layers": 0} if name.startswith("Qwen") else {}
    reference = whole(whole.config_class(**TINY, sliding_window=size, **upper)).eval()
    reference.set_attn_implementation("eager")
    reference.save_pretrained(tmp_path)
    prompt = list(range(3, 20))
    with torch.no_grad():
        expected = reference.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    pages = Pages(load(tmp_path), scattered_tables([len(prompt)]))
    found = torch.cat([pages.step([chunk])[0] for chunk in (prompt[:7], prompt[7:8], prompt[8:])])
    close(found, expected)
