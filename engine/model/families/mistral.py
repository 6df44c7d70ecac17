"""Mistral: LLaMA's blocks with a sliding window in every layer (arXiv:2310.06825); later versions have none."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, rms_decoder, rms_decoder_table, rotary, sliding_window
from engine.model.spec import Attention, Gated, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    slides = config.sliding_window is not None
    # The reference reads no types here and gives all layers the same window; a config that says otherwise was
    # made for another architecture.
    expected = "sliding_attention" if slides else "full_attention"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {expected}):
        raise UnsupportedModelError(
            f"layer_types in the checkpoint's config has {', '.join(others)}, but by sliding_window "
            f"{config.sliding_window} all layers of this architecture have {expected}."
        )
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim),
        window=sliding_window(config.sliding_window) if slides else None,
    )
    ffn = Gated(config.intermediate_size, activation(config.hidden_act))
    return rms_decoder(config, [attention] * config.num_hidden_layers, ffn)


FAMILY = Family(
    name="Mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    headless=("MistralModel",),
    brings="sliding window",
    spec=spec,
    weights=rms_decoder_table,
)
