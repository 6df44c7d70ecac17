"""T5: pre-norm RMS encoder and decoder, relative position buckets, no score scaling (arXiv:1910.10683)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation
from engine.model.positions import RelativeBuckets
from engine.model.spec import Attention, Block, Dense, Gated, Lm, ModelSpec, Norm, Pre, Stack, Tokens
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    scaled = config.scale_decoder_outputs
    return ModelSpec(
        encoder=_stack(config, config.num_layers, decoder=False),
        decoder=_stack(config, config.num_decoder_layers, decoder=True),
        head=Lm(tied=config.tie_word_embeddings, input_scale=config.d_model**-0.5 if scaled else 1.0),
    )


def _stack(config: Any, layers: int, *, decoder: bool) -> Stack:
    norm = Norm("rms", config.layer_norm_epsilon)
    kind = Gated if config.is_gated_act else Dense
    block = Block(
        placement=Pre(attention=norm, ffn=norm, cross=norm if decoder else None),
        attention=_attention(config, causal=decoder),
        cross=_attention(config, causal=False) if decoder else None,
        ffn=kind(config.d_ff, activation(config.dense_act_fn)),
    )
    return Stack(
        hidden_size=config.d_model,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.d_model),
        blocks=(block,) * layers,
        final_norm=norm,
        # Stored with the first layer, added in every self-attention of the stack.
        shared_bias=RelativeBuckets(
            buckets=config.relative_attention_num_buckets,
            max_distance=config.relative_attention_max_distance,
            bidirectional=not decoder,
        ),
    )


def _attention(config: Any, *, causal: bool) -> Attention:
    return Attention(heads=config.num_heads, kv_heads=config.num_heads, head_dim=config.d_kv, scale=1.0, causal=causal)


FAMILY = Family(
    name="T5", architectures=("T5ForConditionalGeneration",), brings="encoder and decoder, relative buckets", spec=spec
)
