"""GPT-NeoX: parallel blocks with two norms, or sequential ones; partial rotary positions (arXiv:2204.06745)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, head, linear, norm, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Parallel, Pre, Stack, Tokens
from engine.model.table import Entry, Family, Interleaved, WeightTable


def spec(config: Any) -> ModelSpec:
    norm = Norm("layer", config.layer_norm_eps, bias=True)
    head_dim = config.hidden_size // config.num_attention_heads
    # No setting of this family, but rotary positions would heed it.
    if (getattr(config, "head_dim", None) or head_dim) != head_dim:
        raise UnsupportedModelError(
            f"head_dim must be hidden_size / num_attention_heads = {head_dim} for this architecture, "
            f"got {config.head_dim}."
        )
    block = Block(
        placement=Parallel((norm, norm)) if config.use_parallel_residual else Pre(norm, norm),
        attention=Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim, partial=True),
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        ),
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
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
        Entry("decoder.embedding.tokens", ("gpt_neox.embed_in.weight",), shard_axis=0),
        *norm("decoder.final_norm", "gpt_neox.final_layer_norm", bias=True),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"gpt_neox.layers.{i}"
        part = block.attention
        by_head = Interleaved(groups=part.heads, queries=1, head_dim=part.head_dim)
        qkv = f"{source}.attention.query_key_value"
        entries += [
            *norm(f"{target}.attention.before", f"{source}.input_layernorm", bias=True),
            *linear(f"{target}.attention.inner.qkv", qkv, part.qkv_bias, 0, by_head),
            *linear(f"{target}.attention.inner.out", f"{source}.attention.dense", part.out_bias, 1),
            *norm(f"{target}.ffn.before", f"{source}.post_attention_layernorm", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.dense_h_to_4h", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.dense_4h_to_h", True, 1),
        ]
    return WeightTable(
        tuple(entries),
        prefix="gpt_neox.",
        # Causal masks and frequencies that old checkpoints store as buffers.
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        renamed=((r"^embed_out\.", "lm_head."),),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="GPT-NeoX",
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    headless=("GPTNeoXModel",),
    brings="parallel blocks with two norms, partial rotary positions, interleaved QKV",
    spec=spec,
    weights=weights,
)
