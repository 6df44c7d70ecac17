"""GPT-BigCode: GPT-2 with one key and value head for all queries (arXiv:2301.03988)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, even_head_dim, head, linear, norm
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Entry, Family, Interleaved, WeightTable


def spec(config: Any) -> ModelSpec:
    norm = Norm("layer", config.layer_norm_epsilon, bias=True)
    width, heads = config.hidden_size, config.num_attention_heads
    head_dim = even_head_dim(width, heads)
    attention = Attention(
        heads=heads,
        kv_heads=1 if config.multi_query else heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if config.scale_attn_weights else 1.0,
        qkv_bias=True,
        out_bias=True,
    )
    crosses = config.add_cross_attention
    inner = 4 * width if config.n_inner is None else config.n_inner
    block = Block(
        placement=Pre(attention=norm, ffn=norm, cross=norm if crosses else None),
        attention=attention,
        cross=attention if crosses else None,
        ffn=Dense(inner, activation(config.activation_function), bias=True),
    )
    decoder = Stack(
        hidden_size=width,
        embedding=Tokens(vocab_size=config.vocab_size, width=width, positions=Learned(config.max_position_embeddings)),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.wte.weight",), shard_axis=0),
        Entry("decoder.embedding.positions", ("transformer.wpe.weight",)),
        *norm("decoder.final_norm", "transformer.ln_f", bias=True),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        part = block.attention
        fused = Interleaved(part.kv_heads, part.heads // part.kv_heads, part.head_dim)
        entries += [
            *norm(f"{target}.attention.before", f"{source}.ln_1", bias=True),
            *linear(f"{target}.attention.inner.qkv", f"{source}.attn.c_attn", True, 0, fused),
            *linear(f"{target}.attention.inner.out", f"{source}.attn.c_proj", True, 1),
            *norm(f"{target}.ffn.before", f"{source}.ln_2", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.c_fc", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.c_proj", True, 1),
        ]
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        # Causal masks that old checkpoints store as buffers.
        ignored=(r"transformer\.(h\.\d+\.attn\.)?(bias|masked_bias)",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="GPT-BigCode",
    # The second name is of the time before transformers knew the family.
    architectures=("GPTBigCodeForCausalLM", "GPTBigCodeLMHeadModel", "GPTBigCodeModel"),
    headless=("GPTBigCodeModel",),
    brings="multi-query attention, learned positions",
    spec=spec,
    weights=weights,
)
