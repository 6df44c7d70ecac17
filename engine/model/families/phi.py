"""Phi: parallel blocks with one norm, partial rotary positions, biases even in the head (arXiv:2306.11644)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, head, linear, norm, qkv, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Parallel, PerHead, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    norm = Norm("layer", config.layer_norm_eps, bias=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = Block(
        placement=Parallel((norm,)),
        attention=Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim, partial=True),
            qk_norm=PerHead(norm) if config.qk_layernorm else None,
            qkv_bias=True,
            out_bias=True,
        ),
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
    )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=norm,
    )
    # The bias belongs to the head, which the headless model does not store.
    bias = config.architectures[0] == "PhiForCausalLM"
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings, bias=bias))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("model.embed_tokens.weight",), shard_axis=0),
        *norm("decoder.final_norm", "model.final_layernorm", bias=True),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"model.layers.{i}"
        inner, attention = f"{target}.attention.inner", f"{source}.self_attn"
        projections = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        entries += [
            *norm(f"{target}.attention.before", f"{source}.input_layernorm", bias=True),
            *qkv(f"{inner}.qkv", projections, block.attention),
            *linear(f"{inner}.out", f"{attention}.dense", True, 1),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.fc1", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.fc2", True, 1),
        ]
        if block.attention.qk_norm is not None:
            entries += norm(f"{inner}.qk_norm.queries", f"{attention}.q_layernorm", bias=True)
            entries += norm(f"{inner}.qk_norm.keys", f"{attention}.k_layernorm", bias=True)
    return WeightTable(
        tuple(entries),
        prefix="model.",
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="Phi",
    architectures=("PhiForCausalLM", "PhiModel"),
    headless=("PhiModel",),
    brings="parallel blocks with one norm, partial rotary positions, a bias in the head",
    spec=spec,
    weights=weights,
)
