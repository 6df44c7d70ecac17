"""GPT-2: pre-norm layer-norm blocks, learned positions, multi-head attention, GELU, tied head."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, head, linear, norm
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Conv1d, Entry, Family, WeightTable


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


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.wte.weight",), shard_axis=0),
        Entry("decoder.embedding.positions", ("transformer.wpe.weight",)),
        *norm("decoder.final_norm", "transformer.ln_f", bias=True),
        *head(model, "lm_head"),
    ]
    for i in range(len(model.decoder.blocks)):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        entries += [
            *norm(f"{target}.attention.before", f"{source}.ln_1", bias=True),
            *linear(f"{target}.attention.inner.qkv", f"{source}.attn.c_attn", True, 0, Conv1d()),
            *linear(f"{target}.attention.inner.out", f"{source}.attn.c_proj", True, 1, Conv1d()),
            *norm(f"{target}.ffn.before", f"{source}.ln_2", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.c_fc", True, 0, Conv1d()),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.c_proj", True, 1, Conv1d()),
        ]
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        # Causal masks that old checkpoints store as buffers.
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="GPT-2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    headless=("GPT2Model",),
    brings="learned positions, layer norms, GELU",
    spec=spec,
    weights=weights,
)
