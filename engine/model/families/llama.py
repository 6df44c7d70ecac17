"""LLaMA: pre-norm RMS blocks, rotary positions, grouped-query attention, gated SiLU (arXiv:2302.13971)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, head, projected_block, rotary
from engine.model.spec import Attention, Block, Gated, Lm, ModelSpec, Norm, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps)
    block = Block(
        placement=Pre(attention=norm, ffn=norm),
        attention=Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim),
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        ),
        ffn=Gated(config.intermediate_size, activation(config.hidden_act), bias=config.mlp_bias),
    )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("model.embed_tokens.weight",), shard_axis=0),
        Entry("decoder.final_norm.weight", ("model.norm.weight",)),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"model.layers.{i}"
        assert isinstance(block.ffn, Gated)
        entries += [
            Entry(f"{target}.attention.before.weight", (f"{source}.input_layernorm.weight",)),
            Entry(f"{target}.ffn.before.weight", (f"{source}.post_attention_layernorm.weight",)),
            *projected_block(target, source, block.attention, block.ffn),
        ]
    return WeightTable(
        tuple(entries),
        prefix="model.",
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="LLaMA",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    headless=("LlamaModel",),
    brings="rotary positions, grouped queries, gated SiLU, RMS norms; every rope scaling",
    spec=spec,
    weights=weights,
)
