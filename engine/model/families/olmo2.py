"""OLMo 2 and 3: norms after the sublayers, and of all queries and keys at once; in OLMo 3 windows in most layers
(arXiv:2501.00656)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, layer_window, rotary
from engine.model.normalisation import Norm
from engine.model.spec import AfterSublayer, Attention, Block, Gated, Lm, ModelSpec, Stack, Tokens, WholeProjection
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    # Not an attribute of the config unless the checkpoint sets it.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps, in_float32=True)
    layer_types = ["full_attention"] * config.num_hidden_layers
    if config.model_type == "olmo3":
        layer_types = config.layer_types
    blocks = [
        Block(
            placement=AfterSublayer(attention=norm, ffn=norm),
            attention=Attention(
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                position=rotary(config, head_dim, layer_type, in_float32=True),
                window=layer_window(config, layer_type),
                qk_norm=WholeProjection(norm),
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
            ),
            ffn=Gated(config.intermediate_size, activation(config.hidden_act)),
        )
        for layer_type in layer_types
    ]
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=tuple(blocks),
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def weights(model: ModelSpec) -> WeightTable:
    after = {"attention.after": "post_attention_layernorm", "ffn.after": "post_feedforward_layernorm"}
    return decoder_table(model, norms=after)


FAMILY = Family(
    name="OLMo 2 and 3",
    architectures=("Olmo2ForCausalLM", "Olmo2Model", "Olmo3ForCausalLM", "Olmo3Model"),
    headless=("Olmo2Model", "Olmo3Model"),
    brings="norms after the sublayers, QK norms over the whole projection",
    spec=spec,
    weights=weights,
)
