"""Gemma 2: norms before and after each sublayer, alternating windows, capped scores (arXiv:2408.00118)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, decoder_table, layer_window, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Gated, Lm, ModelSpec, Sandwich, Stack, Tokens
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    if config.use_bidirectional_attention:
        # The reference reads the setting and masks later tokens all the same, but not with every kernel.
        raise UnsupportedModelError(
            "use_bidirectional_attention of the config must be false for Gemma 2, for which bidirectional attention is "
            f"not defined; got {config.use_bidirectional_attention}."
        )
    norm = Norm("rms", config.rms_norm_eps, unit_offset=True)
    blocks = []
    for layer_type in config.layer_types:
        blocks.append(
            Block(
                placement=Sandwich(norm, norm, norm, norm),
                attention=Attention(
                    heads=config.num_attention_heads,
                    kv_heads=config.num_key_value_heads,
                    head_dim=config.head_dim,
                    scale=config.query_pre_attn_scalar**-0.5,
                    position=rotary(config, config.head_dim),
                    window=layer_window(config, layer_type),
                    qkv_bias=config.attention_bias,
                    out_bias=config.attention_bias,
                    softcap=config.attn_logit_softcapping,
                ),
                ffn=Gated(config.intermediate_size, activation(config.hidden_activation)),
            )
        )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size, scale=config.hidden_size**0.5),
        blocks=tuple(blocks),
        final_norm=norm,
    )
    return ModelSpec(
        encoder=None,
        decoder=decoder,
        head=Lm(tied=config.tie_word_embeddings, softcap=config.final_logit_softcapping),
    )


# Norms of a block with one before and one after each sublayer.
SANDWICH_NORMS = {
    "attention.before": "input_layernorm",
    "attention.after": "post_attention_layernorm",
    "ffn.before": "pre_feedforward_layernorm",
    "ffn.after": "post_feedforward_layernorm",
}


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, norms=SANDWICH_NORMS)


FAMILY = Family(
    name="Gemma 2",
    architectures=("Gemma2ForCausalLM", "Gemma2Model"),
    headless=("Gemma2Model",),
    brings="alternating sliding windows, sandwich norms, soft caps, scaled embeddings",
    spec=spec,
    weights=weights,
)
