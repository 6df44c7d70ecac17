"""GLM-4 and its successors: half of each head's features rotate in pairs of neighbours; norms before each sublayer
(`glm`), or before and after (`glm4`) (arXiv:2406.12793)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import (
    PRE_NORMS,
    activation,
    decoder_table,
    linear,
    plain_decoder,
    projected_attention,
    rotary,
)
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Gated, ModelSpec, Sandwich
from engine.model.table import Entry, Family, WeightTable

_BOTH_NORMS = {
    "attention.before": "input_layernorm",
    "attention.after": "post_self_attn_layernorm",
    "ffn.before": "post_attention_layernorm",
    "ffn.after": "post_mlp_layernorm",
}


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim, partial=True, interleaved=True),
        qkv_bias=config.attention_bias,
    )
    norm = Norm("rms", config.rms_norm_eps)
    return plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        Gated(config.intermediate_size, activation(config.hidden_act)),
        placement=Sandwich(norm, norm, norm, norm) if config.model_type == "glm4" else None,
    )


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
        *linear(f"{target}.ffn.inner.gate_up", f"{source}.mlp.gate_up_proj", False, 0),
        *linear(f"{target}.ffn.inner.down", f"{source}.mlp.down_proj", False, 1),
    ]


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    sandwiched = isinstance(model.decoder.blocks[0].placement, Sandwich)
    return decoder_table(model, _layer, _BOTH_NORMS if sandwiched else PRE_NORMS)


FAMILY = Family(
    name="GLM-4",
    architectures=("GlmForCausalLM", "GlmModel", "Glm4ForCausalLM", "Glm4Model"),
    headless=("GlmModel", "Glm4Model"),
    brings="partial and interleaved rotary positions, sandwich norms",
    spec=spec,
    weights=weights,
)
