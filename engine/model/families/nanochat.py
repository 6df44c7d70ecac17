"""nanochat: norms without weights, also of the embedding; rotation the other way round, and norms of queries and keys
after it; squared ReLU; capped logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families.common import activation, decoder_table, dense, linear, plain_decoder, rotary
from engine.model.normalisation import Norm
from engine.model.spec import AfterRotation, Attention, Block, Dense, Lm, ModelSpec, Tokens
from engine.model.table import Entry, Family, Joined, Same, Swapped, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps, weight=False)
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim),
        qk_norm=AfterRotation(norm),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    model = plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        Dense(config.intermediate_size, activation(config.hidden_act)),
        norm=norm,
        head=Lm(tied=config.tie_word_embeddings, softcap=config.final_logit_softcapping),
    )
    assert model.decoder is not None
    embedding = model.decoder.embedding
    assert isinstance(embedding, Tokens)
    return replace(model, decoder=replace(model.decoder, embedding=replace(embedding, norm=norm)))


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    part = block.attention
    assert isinstance(block.ffn, Dense)
    inner, stored = f"{target}.attention.inner", f"{source}.self_attn"
    heads = (part.heads, part.kv_heads, part.kv_heads)
    # With the halves of each head's queries and keys swapped, a rotation turns the other way.
    how = Joined(tuple(n * part.head_dim for n in heads), (Swapped(part.heads), Swapped(part.kv_heads), Same()))
    kinds = ("weight", "bias") if part.qkv_bias else ("weight",)
    return [
        *(Entry(f"{inner}.qkv.{k}", tuple(f"{stored}.{n}_proj.{k}" for n in "qkv"), how, shard_axis=0) for k in kinds),
        *linear(f"{inner}.out", f"{stored}.o_proj", part.out_bias, 1),
        *dense(f"{target}.ffn.inner", f"{source}.mlp", block.ffn, ("fc1", "fc2")),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="nanochat",
    architectures=("NanoChatForCausalLM", "NanoChatModel"),
    headless=("NanoChatModel",),
    brings="norms without weights, also for embeddings, queries and keys; capped logits",
    spec=spec,
    weights=weights,
)
