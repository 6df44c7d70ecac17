"""StableLM: layer norms, partly rotary heads, a gated feed-forward network, parallel blocks (arXiv:2402.17834)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families.common import activation, head, head_norms, norm, projected_block, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, EachHead, Gated, Lm, ModelSpec, Parallel, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = config.hidden_size // config.num_attention_heads
    norm = Norm("layer", config.layer_norm_eps, bias=True)
    block = Block(
        placement=Parallel((norm,)) if config.use_parallel_residual else Pre(attention=norm, ffn=norm),
        attention=Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim, partial=True),
            qkv_bias=config.use_qkv_bias,
            qk_norm=EachHead(Norm("layer", config.layer_norm_eps)) if config.qk_layernorm else None,
        ),
        ffn=Gated(config.intermediate_size, activation(config.hidden_act)),
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
        *norm("decoder.final_norm", "model.norm", bias=True),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"model.layers.{i}"
        assert isinstance(block.ffn, Gated)
        entries += norm(f"{target}.attention.before", f"{source}.input_layernorm", bias=True)
        if isinstance(block.placement, Pre):
            entries += norm(f"{target}.ffn.before", f"{source}.post_attention_layernorm", bias=True)
        entries += projected_block(target, source, replace(block.attention, qk_norm=None), block.ffn)
        if block.attention.qk_norm is not None:
            inner = f"{target}.attention.inner.qk_norm"
            entries += head_norms(inner, f"{source}.self_attn", block.attention, "{}_layernorm", apart=True)
    return WeightTable(
        tuple(entries),
        prefix="model.",
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="StableLM",
    architectures=("StableLmForCausalLM", "StableLmModel"),
    headless=("StableLmModel",),
    brings="partial rotary positions, layer norms, optional parallel blocks",
    spec=spec,
    weights=weights,
)
