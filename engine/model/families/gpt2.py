"""GPT-2: pre-norm layer-norm blocks, learned positions, multi-head attention, GELU, tied head."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, head
from engine.model.spec import Attention, Block, Dense, Learned, Lm, ModelSpec, Norm, Pre, Stack, Tokens
from engine.model.table import Entry, Family, Transposed, WeightTable


def spec(config: Any) -> ModelSpec:
    norm = Norm("layer", config.layer_norm_epsilon, bias=True)
    head_dim = config.hidden_size // config.num_attention_heads
    ffn = Dense(config.n_inner or 4 * config.hidden_size, activation(config.activation_function), bias=True)
    blocks = []
    for layer in range(config.num_hidden_layers):
        scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        attention = Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=scale,
            qkv_bias=True,
            out_bias=True,
        )
        crosses = config.add_cross_attention
        blocks.append(
            Block(
                placement=Pre(attention=norm, ffn=norm, cross=norm if crosses else None),
                attention=attention,
                cross=attention if crosses else None,
                ffn=ffn,
            )
        )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(
            vocab_size=config.vocab_size, width=config.hidden_size, positions=Learned(config.max_position_embeddings)
        ),
        blocks=tuple(blocks),
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def _affine(target: str, source: str) -> list[Entry]:
    return [Entry(f"{target}.{kind}", (f"{source}.{kind}",)) for kind in ("weight", "bias")]


def _matrix(target: str, source: str, shard_axis: int) -> list[Entry]:
    """A layer stored [in, out], with its bias."""
    return [
        Entry(f"{target}.weight", (f"{source}.weight",), Transposed(), shard_axis=shard_axis),
        Entry(f"{target}.bias", (f"{source}.bias",), shard_axis=0 if shard_axis == 0 else None),
    ]


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.wte.weight",), shard_axis=0),
        Entry("decoder.embedding.positions", ("transformer.wpe.weight",)),
        *_affine("decoder.final_norm", "transformer.ln_f"),
        *head(model, "lm_head"),
    ]
    for i in range(len(model.decoder.blocks)):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        entries += [
            *_affine(f"{target}.attention.before", f"{source}.ln_1"),
            *_matrix(f"{target}.attention.inner.qkv", f"{source}.attn.c_attn", shard_axis=0),
            *_matrix(f"{target}.attention.inner.out", f"{source}.attn.c_proj", shard_axis=1),
            *_affine(f"{target}.ffn.before", f"{source}.ln_2"),
            *_matrix(f"{target}.ffn.inner.up", f"{source}.mlp.c_fc", shard_axis=0),
            *_matrix(f"{target}.ffn.inner.down", f"{source}.mlp.c_proj", shard_axis=1),
        ]
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        # Causal masks that old checkpoints store as buffers.
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
        head="lm_head.weight",
    )


FAMILY = Family("GPT-2", spec, weights)
