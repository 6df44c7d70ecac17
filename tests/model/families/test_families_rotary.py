"""Families with rotary positions and RMS norms: configs as they are published, and checkpoints in older forms."""

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
    LLAMA32_1B,
    MISTRAL_V01,
    MISTRAL_V03,
    PHI3_4K,
    PHI3_128K,
    PHI4_MINI,
    QWEN3_06B,
    QWEN25_05B,
    read,
)

from engine.backends.attention.base import Window
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model import families
from engine.model.normalisation import Norm
from engine.model.positions import BandScaling, DynamicScaling, LinearScaling, LongScaling, Rotary, YarnScaling
from engine.model.spec import Attention, Gated, Lm, PerHead, Pre

# The divisors are as many as the published ones, and as large at the ends.
SHORT = [1.05 + 0.02 * i for i in range(48)]
FAR = [1.07 * 1.086**i for i in range(48)]


def expected_attention(heads: int, kv_heads: int, head_dim: int, position: Rotary, **values: Any) -> Attention:
    return Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, position=position, **values
    )


def long_scaling(short: list[float]) -> LongScaling:
    factor = 1.190238  # (1 + log 32 / log 4096) ** 0.5
    return LongScaling(tuple(short), tuple(FAR), 4096, pytest.approx(factor, abs=1e-6))  # type: ignore[arg-type]


QWEN3_NORM = PerHead(Norm("rms", 1e-6))
PUBLISHED: dict[str, tuple[dict[str, Any], Attention, int, bool]] = {
    "Mistral-7B-v0.1": (
        MISTRAL_V01,
        expected_attention(32, 8, 128, Rotary(128, 1e4), window=Window(4095)),
        14336,
        False,
    ),
    "Mistral-7B-v0.3": (MISTRAL_V03, expected_attention(32, 8, 128, Rotary(128, 1e6)), 14336, False),
    "Qwen2.5-0.5B": (QWEN25_05B, expected_attention(14, 2, 64, Rotary(64, 1e6), qkv_bias=True), 4864, True),
    "Qwen3-0.6B": (QWEN3_06B, expected_attention(16, 8, 128, Rotary(128, 1e6), qk_norm=QWEN3_NORM), 3072, True),
    "Phi-3-mini-4k": (PHI3_4K, expected_attention(32, 32, 96, Rotary(96, 1e4), window=Window(2046)), 8192, False),
    "Phi-3-mini-128k": (
        PHI3_128K,
        expected_attention(32, 32, 96, Rotary(96, 1e4, scaling=long_scaling(SHORT)), window=Window(262143)),
        8192,
        False,
    ),
    "Phi-4-mini": (
        PHI4_MINI,
        expected_attention(24, 8, 128, Rotary(96, 1e4, scaling=long_scaling([1.0] * 48)), window=Window(262143)),
        8192,
        True,
    ),
    "Llama-3.2-1B": (
        LLAMA32_1B,
        expected_attention(32, 8, 64, Rotary(64, 5e5, scaling=BandScaling(32.0, 1.0, 4.0, 8192))),
        8192,
        True,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str, tmp_path: Path) -> None:
    config, attention, width, tied = PUBLISHED[name]
    model = read(tmp_path, config)
    norm = Norm("rms", config["rms_norm_eps"])
    assert model.decoder is not None
    assert len(model.decoder.blocks) == config["num_hidden_layers"]
    assert set(map(repr, model.decoder.blocks)) == {repr(model.decoder.blocks[0])}
    block = model.decoder.blocks[0]
    assert block.attention == attention
    assert block.ffn == Gated(width, "silu")
    assert block.placement == Pre(norm, norm)
    assert model.decoder.final_norm == norm
    assert (model.head, model.vocab_size) == (Lm(tied=tied), config["vocab_size"])


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, LinearScaling(4.0)),
        ({"type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 32768)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            YarnScaling(4.0, 32.0, 1.0, 32768, pytest.approx(1.1386294)),  # type: ignore[arg-type]
        ),
    ],
)
def test_scaling_added_to_a_published_config(scaling: dict[str, Any], expected: object, tmp_path: Path) -> None:
    """What model cards say to add to config.json for long texts."""
    for config in (QWEN25_05B, MISTRAL_V03):
        model = read(tmp_path, config | {"rope_scaling": scaling})
        assert model.decoder is not None
        for block in model.decoder.blocks:
            assert isinstance(block.attention.position, Rotary)
            assert block.attention.position.scaling == expected


def test_windows_in_the_upper_layers(tmp_path: Path) -> None:
    for config in (QWEN25_05B, QWEN3_06B):
        upper = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 5, "num_hidden_layers": 8}
        model = read(tmp_path, config | upper)
        assert model.decoder is not None
        assert [block.attention.window for block in model.decoder.blocks] == [None] * 5 + [Window(99)] * 3
        # Without use_sliding_window, the other two settings mean nothing.
        model = read(tmp_path, config | upper | {"use_sliding_window": False})
        assert model.decoder is not None
        assert {block.attention.window for block in model.decoder.blocks} == {None}
        types = ["full_attention", "sliding_attention"] * 4
        model = read(tmp_path, config | upper | {"layer_types": types})
        assert model.decoder is not None
        assert [block.attention.window for block in model.decoder.blocks] == [None, Window(99)] * 4


def test_layer_types_of_mistral_are_heeded(tmp_path: Path) -> None:
    """As transformers does, which reads such a config as a Ministral's."""
    model = read(tmp_path, MISTRAL_V01 | {"layer_types": ["full_attention", "sliding_attention"] * 16})
    assert model.decoder is not None
    assert [block.attention.window for block in model.decoder.blocks] == [None, Window(4095)] * 16


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
