"""Command R: parallel blocks with one layer norm without bias, rotary positions of neighbouring features, scaled
logits; in R7B and A (`cohere2`) windows in most layers, and no positions in the others (arXiv:2504.00698)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, layer_windows, plain_decoder, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, EachHead, Gated, Lm, ModelSpec, Parallel
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    second = config.model_type == "cohere2"
    norm = Norm("layer", config.layer_norm_eps)
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim, interleaved=True, in_float32=True) if window or not second else None,
            window=window,
            qk_norm=EachHead(norm) if getattr(config, "use_qk_norm", False) else None,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        for window in (layer_windows(config) if second else [None] * config.num_hidden_layers)
    ]
    return plain_decoder(
        config,
        attentions,
        Gated(config.intermediate_size, activation(config.hidden_act)),
        norm=norm,
        placement=Parallel((norm,)),
        head=Lm(tied=config.tie_word_embeddings, logit_scale=1.0 if config.logit_scale is None else config.logit_scale),
    )


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, norms={"attention.before": "input_layernorm"})


FAMILY = Family(
    name="Command R",
    architectures=("CohereForCausalLM", "CohereModel", "Cohere2ForCausalLM", "Cohere2Model"),
    headless=("CohereModel", "Cohere2Model"),
    brings="parallel gated blocks, scaled logits; full-attention layers without positions",
    spec=spec,
    weights=weights,
)
