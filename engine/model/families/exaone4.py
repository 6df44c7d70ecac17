"""EXAONE 4: norms after the sublayers and of each head's queries and keys; where layers have windows, the others have
no positions (arXiv:2507.11407)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, layer_windows, plain_decoder, rotary
from engine.model.normalisation import Norm
from engine.model.spec import AfterSublayer, Attention, Gated, ModelSpec, PerHead
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps)
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim) if window or config.sliding_window is None else None,
            window=window,
            qk_norm=PerHead(norm),
        )
        for window in layer_windows(config)
    ]
    return plain_decoder(
        config,
        attentions,
        Gated(config.intermediate_size, activation(config.hidden_act)),
        placement=AfterSublayer(norm, norm),
    )


def weights(model: ModelSpec) -> WeightTable:
    after = {"attention.after": "post_attention_layernorm", "ffn.after": "post_feedforward_layernorm"}
    return decoder_table(model, norms=after)


FAMILY = Family(
    name="EXAONE 4",
    architectures=("Exaone4ForCausalLM", "Exaone4Model"),
    headless=("Exaone4Model",),
    brings="norms after the sublayers, QK norms per head, layers without positions",
    spec=spec,
    weights=weights,
)
