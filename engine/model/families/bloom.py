"""BLOOM: ALiBi, a norm after the embedding, tanh GELU (arXiv:2211.05100)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.alibi import slopes
from engine.model.families.common import even_head_dim, head, linear, norm
from engine.model.normalisation import Norm
from engine.model.positions import Slopes
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, NormedResidual, Pre, Stack, Tokens
from engine.model.table import Entry, Family, Interleaved, WeightTable

# What the published models were trained with; only some of their configs say so.
TRAINED_LENGTH = 2048


def spec(config: Any) -> ModelSpec:
    _refuse(config)
    norm = Norm("layer", config.layer_norm_epsilon, bias=True)
    width, heads = config.hidden_size, config.num_attention_heads
    head_dim = even_head_dim(width, heads)
    block = Block(
        placement=NormedResidual(norm, norm) if config.apply_residual_connection_post_layernorm else Pre(norm, norm),
        attention=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=Slopes(slopes(heads)),
            qkv_bias=True,
            out_bias=True,
        ),
        ffn=Dense(4 * width, "gelu_tanh", bias=True),
    )
    decoder = Stack(
        hidden_size=width,
        embedding=Tokens(vocab_size=config.vocab_size, width=width, norm=norm),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=norm,
    )
    return ModelSpec(
        encoder=None,
        decoder=decoder,
        head=Lm(tied=config.tie_word_embeddings),
        context_length=getattr(config, "seq_length", None) or TRAINED_LENGTH,
    )


def _refuse(config: Any) -> None:
    if config.slow_but_exact and config.pretraining_tp > 1:
        # The reference then leaves out the biases of the output projections, which no model was trained without.
        raise UnsupportedModelError(
            f"slow_but_exact with pretraining_tp {config.pretraining_tp} is not implemented. Set slow_but_exact to "
            "false: it was meant to change no more than rounding."
        )


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.word_embeddings.weight",), shard_axis=0),
        *norm("decoder.embedding.norm", "transformer.word_embeddings_layernorm", bias=True),
        *norm("decoder.final_norm", "transformer.ln_f", bias=True),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        place = "first" if isinstance(block.placement, NormedResidual) else "before"
        fused = Interleaved(block.attention.heads, 1, block.attention.head_dim)
        entries += [
            *norm(f"{target}.attention.{place}", f"{source}.input_layernorm", bias=True),
            *linear(f"{target}.attention.inner.qkv", f"{source}.self_attention.query_key_value", True, 0, fused),
            *linear(f"{target}.attention.inner.out", f"{source}.self_attention.dense", True, 1),
            *norm(f"{target}.ffn.{place}", f"{source}.post_attention_layernorm", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.dense_h_to_4h", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.dense_4h_to_h", True, 1),
        ]
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        # Causal masks that old checkpoints store as buffers.
        ignored=(r"transformer\.h\.\d+\.self_attention\.scale_mask_softmax\.causal_mask",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="BLOOM",
    architectures=("BloomForCausalLM", "BloomModel"),
    headless=("BloomModel",),
    brings="ALiBi, normalised embeddings",
    spec=spec,
    weights=weights,
)
