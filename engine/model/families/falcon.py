"""Falcon: queries that share keys and values, sublayers side by side, rotary positions or rounded ALiBi.

arXiv:2311.16867.
"""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.alibi import slopes
from engine.model.families.common import activation, even_head_dim, head, linear, norm, rotary
from engine.model.normalisation import Norm
from engine.model.positions import RoundedSlopes
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Parallel, Placement, Pre, Stack, Tokens
from engine.model.table import Entry, Family, Interleaved, WeightTable


def spec(config: Any) -> ModelSpec:
    heads, bias = config.num_attention_heads, bool(config.bias)
    head_dim = even_head_dim(config.hidden_size, heads)
    scale = head_dim**-0.5
    block = Block(
        placement=_placement(config),
        attention=Attention(
            heads=heads,
            kv_heads=_kv_heads(config),
            head_dim=head_dim,
            scale=scale,
            # The bias is scaled like the scores.
            position=RoundedSlopes(slopes(heads), scale) if config.alibi else rotary(config, head_dim),
            qkv_bias=bias,
            out_bias=bias,
        ),
        ffn=Dense(config.ffn_hidden_size, activation(config.activation), bias=bias),
    )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=_norm(config),
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def _norm(config: Any) -> Norm:
    return Norm("layer", config.layer_norm_epsilon, bias=True)


def _kv_heads(config: Any) -> int:
    heads, kv_heads = config.num_attention_heads, config.num_kv_heads
    if config.new_decoder_architecture:
        if not kv_heads or heads % kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}."
            )
        return int(kv_heads)
    if config.multi_query:
        return 1
    if kv_heads != heads:
        raise UnsupportedModelError(
            f"num_kv_heads is {kv_heads} and num_attention_heads {heads}: without multi_query and "
            "new_decoder_architecture they must be equal."
        )
    return int(heads)


def _placement(config: Any) -> Placement:
    norm, norms = _norm(config), config.num_ln_in_parallel_attn
    if not config.new_decoder_architecture:
        if not config.parallel_attn:
            return Pre(attention=norm, ffn=norm)
        if norms == 2:
            raise UnsupportedModelError("num_ln_in_parallel_attn may be 2 only with new_decoder_architecture.")
        return Parallel((norm,))
    if not config.parallel_attn:
        raise UnsupportedModelError("parallel_attn must be true with new_decoder_architecture, but is false.")
    if norms not in (None, 1, 2):
        raise UnsupportedModelError(f"num_ln_in_parallel_attn must be 1 or 2, got {norms}.")
    return Parallel((norm,) if norms == 1 else (norm, norm))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.word_embeddings.weight",), shard_axis=0),
        *norm("decoder.final_norm", "transformer.ln_f", bias=True),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        part = block.attention
        fused = Interleaved(part.kv_heads, part.heads // part.kv_heads, part.head_dim)
        bias = part.out_bias
        entries += [
            *_norms(block.placement, target, source),
            *linear(f"{target}.attention.inner.qkv", f"{source}.self_attention.query_key_value", bias, 0, fused),
            *linear(f"{target}.attention.inner.out", f"{source}.self_attention.dense", bias, 1),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.dense_h_to_4h", bias, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.dense_4h_to_h", bias, 1),
        ]
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        # Frequencies that old checkpoints store as buffers.
        ignored=(r"transformer\.(h\.\d+\.self_attention\.)?(maybe_rotary|rotary_emb)\.inv_freq",),
        head="lm_head.weight",
    )


def _norms(placement: Placement, target: str, source: str) -> list[Entry]:
    match placement:
        case Parallel((_,)):
            names = {"attention": "input_layernorm"}
        case Parallel():
            names = {"attention": "ln_attn", "ffn": "ln_mlp"}
        case _:
            names = {"attention": "input_layernorm", "ffn": "post_attention_layernorm"}
    return [
        entry
        for ours, theirs in names.items()
        for entry in norm(f"{target}.{ours}.before", f"{source}.{theirs}", bias=True)
    ]


FAMILY = Family(
    name="Falcon",
    architectures=("FalconForCausalLM", "FalconModel"),
    headless=("FalconModel",),
    brings="multi-query attention, parallel blocks with one or two norms, scaled ALiBi",
    spec=spec,
    weights=weights,
)
