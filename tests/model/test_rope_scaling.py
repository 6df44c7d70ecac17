"""Rotary frequencies and attention factors of every scaling, equal to those of `transformers`; settings that are
refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import UnsupportedModelError
from engine.model.families.common import rotary
from engine.model.positions import Rotary, YarnScaling
from engine.model.rotary import RotaryTable, attention_factor, rotary_frequencies

BANDS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.07 * i for i in range(16)],
    "long_factor": [1.1**i for i in range(16)],
    "original_max_position_embeddings": 512,
}
HALF = {"short_factor": LONG["short_factor"][:8], "long_factor": LONG["long_factor"][:8]}  # type: ignore[index]

# Settings of a config: a head of 32 features, 2048 positions.
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.5}},
    "linear-partial": {"rope_parameters": {"rope_type": "linear", "factor": 3, "partial_rotary_factor": 0.5}},
    "linear-older": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear-shrinking": {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "dynamic-partial": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.75}},
    "dynamic-older": {"rope_theta": 2e4, "rope_scaling": {"type": "dynamic", "factor": 8}},
    "dynamic-original-length-is-not-read": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}
    },
    "bands": {"rope_parameters": BANDS | {"original_max_position_embeddings": 512}},
    "bands-wide": {
        "rope_parameters": BANDS
        | {"rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 0.5, "high_freq_factor": 9, "truncate": False}
    },
    "bands-partial": {
        "rope_parameters": BANDS | {"original_max_position_embeddings": 300, "partial_rotary_factor": 0.5}
    },
    "bands-without-length": {"rope_parameters": BANDS},
    "bands-older": {
        "rope_theta": 5e5,
        "rope_scaling": BANDS | {"type": "llama3", "original_max_position_embeddings": 256},
    },
    "yarn": {"rope_parameters": YARN},
    "yarn-partial": {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    "yarn-not-truncated": {"rope_parameters": YARN | {"truncate": False}},
    "yarn-truncate-null": {"rope_parameters": YARN | {"truncate": None}},
    "yarn-own-ramp": {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2.5}},
    "yarn-null-ramp": {"rope_parameters": YARN | {"beta_fast": None, "beta_slow": None}},
    "yarn-steep-ramp": {"rope_parameters": YARN | {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}},
    "yarn-ramp-past-the-end": {"rope_parameters": YARN | {"rope_theta": 20.0, "beta_slow": 1e-3}},
    "yarn-own-attention": {"rope_parameters": YARN | {"attention_factor": 1.7, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "yarn-mscale": {"rope_parameters": YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn-mscale-alone": {"rope_parameters": YARN | {"mscale": 0.707}},
    "yarn-mscale-zero": {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0}},
    "yarn-factor-null": {"rope_parameters": YARN | {"factor": None}},
    "yarn-factor-one": {"rope_parameters": YARN | {"factor": 1.0}},
    "yarn-without-length": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "yarn-length-beside": {"rope_parameters": YARN, "original_max_position_embeddings": 128},
    "yarn-older": {"rope_theta": 1e6, "rope_scaling": YARN | {"type": "yarn"}},
    "longrope": {"rope_parameters": LONG},
    "longrope-partial": {"rope_parameters": LONG | HALF | {"partial_rotary_factor": 0.5}},
    "longrope-own-attention": {"rope_parameters": LONG | {"attention_factor": 1.25, "factor": 9.0}},
    "longrope-own-factor": {"rope_parameters": LONG | {"factor": 9.0}},
    "longrope-factor-one": {"rope_parameters": LONG | {"factor": 1.0}},
    "longrope-without-length": {
        "rope_parameters": {k: v for k, v in LONG.items() if k != "original_max_position_embeddings"}
    },
    "longrope-length-beside": {"rope_parameters": dict(LONG), "original_max_position_embeddings": 1024},
}


def config_with(settings: dict[str, Any]) -> Any:
    """A config of heads of 32 features with these rope settings, whatever its family thinks of partial rotation."""
    own = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    return transformers.LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=2048, **own)


@pytest.mark.parametrize("length", [100, 2048, 8192])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_the_reference(name: str, length: int) -> None:
    """Bit by bit, for the longest sequence before, at and after the lengths of pretraining."""
    config = config_with(SCALINGS[name])
    part = rotary(config, 32, partial=True)
    frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, "cpu", seq_len=length)
    assert torch.equal(rotary_frequencies(part, length), frequencies)
    assert attention_factor(part) == factor
    assert part.dim == 2 * len(frequencies)


def test_lengths_matter_where_they_should() -> None:
    """Dynamic factors change past max_position_embeddings, longrope's past the original length, no others."""
    changed: dict[str, set[int]] = {}
    for name, settings in SCALINGS.items():
        part = rotary(config_with(settings), 32, partial=True)
        base = rotary_frequencies(part, 1)
        lengths = (128, 129, 512, 513, 1024, 1025, 2048, 2049)
        changed[name] = {n for n in lengths if not torch.equal(rotary_frequencies(part, n), base)}
    assert changed["dynamic"] == {2049}
    assert changed["longrope"] == {513, 1024, 1025, 2048, 2049}
    assert changed["longrope-length-beside"] == {1025, 2048, 2049}
    assert changed["longrope-without-length"] == {2049}
    still = {name for name, lengths in changed.items() if not lengths}
    assert still == {name for name in SCALINGS if not name.startswith(("dynamic", "longrope"))}


def test_settings_by_layer_type() -> None:
    """Each layer type has its own, with the length of pretraining in them and not beside them."""
    settings = {
        "full_attention": YARN | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = transformers.ModernBertConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=settings
    )
    config.original_max_position_embeddings = 64
    full, sliding = (rotary(config, 32, layer_type) for layer_type in ("full_attention", "sliding_attention"))
    assert sliding == Rotary(32, 1e4)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu", layer_type="full_attention")
    assert torch.equal(rotary_frequencies(full, 4096), frequencies)
    assert attention_factor(full) == factor
    with pytest.raises(UnsupportedModelError, match=r"settings for full_attention, sliding_attention.*one set for all"):
        rotary(config, 32)
    with pytest.raises(UnsupportedModelError, match="needs some for chunked_attention"):
        rotary(config, 32, "chunked_attention")


def test_the_attention_factor_is_in_the_table() -> None:
    part = Rotary(4, 100.0, scaling=YarnScaling(2.0, 32.0, 1.0, 64, attention_factor=1.5))
    table = RotaryTable(part, 6, 3, torch.device("cpu"))
    assert table.cos[0].tolist() == [1.5, 1.5, 1.5, 1.5, 1.0, 1.0]
    frequencies = rotary_frequencies(part, 3)
    torch.testing.assert_close(table.sin[2], 1.5 * (2 * frequencies).sin())


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"rope_type": "mrope"}, "rope_type 'mrope', which is not implemented. Implemented: default, linear"),
    "null": ({"rope_type": None, "factor": 2.0}, "rope_type None, which is not implemented"),
    "linear-no-factor": ({"rope_type": "linear"}, r"factor .*must be a number above 0 \(rope_type linear\): None"),
    "linear-null-factor": ({"rope_type": "linear", "factor": None}, "factor .*: None"),
    "linear-zero": ({"rope_type": "linear", "factor": 0}, "factor .*: 0"),
    "linear-text": ({"rope_type": "linear", "factor": "2"}, "factor .*: '2'"),
    "dynamic-no-factor": ({"type": "dynamic"}, "factor .*: None"),
    "dynamic-two-features": (
        {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.0625},
        "more than 2 rotated features",
    ),
    "bands-no-low": ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor .*: None"),
    "bands-no-high": ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor .*: None"),
    "bands-no-factor": (BANDS | {"factor": None}, "factor .*: None"),
    "bands-reversed": (
        BANDS | {"low_freq_factor": 4.0, "high_freq_factor": 1.0},
        r"high_freq_factor .*must be a number above 4 .*: 1.0",
    ),
    "yarn-length": (YARN | {"original_max_position_embeddings": "512"}, "original_max_position_embeddings .*: '512'"),
    "yarn-attention": (YARN | {"attention_factor": -1.0}, "attention_factor .*: -1.0"),
    "yarn-ramp": (YARN | {"beta_fast": True}, "beta_fast .*: True"),
    "yarn-turns": (YARN | {"beta_fast": 1e308}, "beta_fast .* from 1e-18 to 1e18: 1e[+]308"),
    "longrope-no-short": ({"rope_type": "longrope", "long_factor": [1.0] * 16}, "short_factor .* list of numbers"),
    "longrope-no-long": ({"rope_type": "longrope", "short_factor": [1.0] * 16}, "long_factor .* list of numbers"),
    "longrope-zero": (LONG | {"long_factor": [0.0] * 16}, "long_factor .* list of numbers above 0"),
    "longrope-few": (LONG | {"long_factor": [2.0] * 15}, "long_factor .* must hold 16 values.*holds 15"),
    "theta-null": ({"rope_theta": None}, "rope_theta .*: None"),
    "theta-one": ({"rope_theta": 1.0}, "rope_theta .*above 1 .*: 1.0"),
    "odd": ({"partial_rotary_factor": 0.35}, "even number of features, from 2 to the 32 of a head.*0.35 gives 11"),
    "none": ({"partial_rotary_factor": 0.01}, "0.01 gives 0"),
    "too-many": ({"partial_rotary_factor": 1.5}, "1.5 gives 48"),
    "null-by-type": ({"full_attention": None}, "settings for full_attention"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_settings_that_make_no_sense_are_refused_by_name(name: str) -> None:
    settings, message = REFUSALS[name]
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e4} | settings, max_position_embeddings=2048)
    with pytest.raises(UnsupportedModelError, match=message):
        rotary(config, 32, partial=True)


def test_a_scaling_needs_the_length_it_starts_from() -> None:
    config = SimpleNamespace(rope_parameters=BANDS | {"rope_theta": 1e4}, max_position_embeddings=None)
    with pytest.raises(UnsupportedModelError, match=r"max_position_embeddings .*number of tokens above 1, got None"):
        rotary(config, 32)
