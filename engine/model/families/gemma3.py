"""Gemma 3, its text model: Gemma 2's blocks with per-head norms and a rotary base for each kind of layer
(arXiv:2503.19786)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import gemma2
from engine.model.families.common import activation, layer_window, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Gated, Lm, ModelSpec, PerHead, Sandwich, Stack, Tokens
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    if config.attn_logit_softcapping is not None:
        # The reference reads the setting and caps nothing; it is not clear what such a checkpoint means.
        raise UnsupportedModelError(
            "attn_logit_softcapping of the config must be null for Gemma 3, which normalises queries and keys "
            f"instead; got {config.attn_logit_softcapping}."
        )
    norm = Norm("rms", config.rms_norm_eps, unit_offset=True)
    causal = not config.use_bidirectional_attention
    blocks = [
        Block(
            placement=Sandwich(norm, norm, norm, norm),
            attention=Attention(
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                scale=config.query_pre_attn_scalar**-0.5,
                position=rotary(config, config.head_dim, layer_type),
                causal=causal,
                window=layer_window(config, layer_type, causal=causal),
                qk_norm=PerHead(norm),
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
            ),
            ffn=Gated(config.intermediate_size, activation(config.hidden_activation)),
        )
        for layer_type in config.layer_types
    ]
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


FAMILY = Family(
    name="Gemma 3 text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    headless=("Gemma3TextModel",),
    brings="two rotary bases, QK norms per head, sliding windows in most layers",
    spec=spec,
    weights=gemma2.weights,
)
