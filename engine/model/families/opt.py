"""OPT: offset learned positions, ReLU; norms before the sublayers or after the sums, projections (arXiv:2205.01068)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, head, linear, norm, qkv
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Post, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

OFFSET = 2  # rows of the position table that no token reads
EPS = 1e-5  # no setting of the config


def spec(config: Any) -> ModelSpec:
    learned = config.layer_norm_elementwise_affine
    norm = Norm("layer", EPS, bias=learned, weight=learned)
    head_dim = config.hidden_size // config.num_attention_heads
    before = config.do_layer_norm_before
    projected = config.word_embed_proj_dim != config.hidden_size
    block = Block(
        placement=Pre(norm, norm) if before else Post(norm, norm),
        attention=Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=config.enable_bias,
            out_bias=config.enable_bias,
        ),
        ffn=Dense(config.ffn_dim, activation(config.activation_function), bias=config.enable_bias),
    )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(
            vocab_size=config.vocab_size,
            width=config.word_embed_proj_dim,
            positions=Learned(config.max_position_embeddings + OFFSET, OFFSET),
            projection=config.hidden_size if projected else None,
        ),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=norm if before and not config._remove_final_layer_norm else None,
        projection=config.word_embed_proj_dim if projected else None,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("model.decoder.embed_tokens.weight",), shard_axis=0),
        Entry("decoder.embedding.positions", ("model.decoder.embed_positions.weight",)),
        *head(model, "lm_head"),
    ]
    if model.decoder.projection is not None:
        entries += linear("decoder.embedding.projection", "model.decoder.project_in", False, 0)
        entries += linear("decoder.projection", "model.decoder.project_out", False, None)
    if model.decoder.final_norm is not None:
        entries += _norm("decoder.final_norm", "model.decoder.final_layer_norm", model.decoder.final_norm)
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"model.decoder.layers.{i}"
        assert isinstance(block.placement, Pre | Post)
        assert block.placement.attention is not None
        assert block.placement.ffn is not None
        where = "before" if isinstance(block.placement, Pre) else "outer"
        bias = block.attention.out_bias
        projections = (f"{source}.self_attn.q_proj", f"{source}.self_attn.k_proj", f"{source}.self_attn.v_proj")
        entries += [
            *_norm(f"{target}.attention.{where}", f"{source}.self_attn_layer_norm", block.placement.attention),
            *qkv(f"{target}.attention.inner.qkv", projections, block.attention),
            *linear(f"{target}.attention.inner.out", f"{source}.self_attn.out_proj", bias, 1),
            *_norm(f"{target}.ffn.{where}", f"{source}.final_layer_norm", block.placement.ffn),
            *linear(f"{target}.ffn.inner.up", f"{source}.fc1", bias, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.fc2", bias, 1),
        ]
    return WeightTable(
        tuple(entries),
        # Checkpoints that were saved without a head begin at "decoder.".
        prefix="model.",
        # A mark of the format that the first checkpoints store as a buffer.
        ignored=(r"model\.decoder\.version",),
        head="lm_head.weight",
    )


def _norm(target: str, source: str, part: Norm) -> list[Entry]:
    return norm(target, source, bias=part.bias, weight=part.weight)


FAMILY = Family(
    name="OPT",
    architectures=("OPTForCausalLM", "OPTModel"),
    headless=("OPTModel",),
    brings="learned positions with an offset, ReLU, norms before or after the sublayers, projected embeddings",
    spec=spec,
    weights=weights,
)
