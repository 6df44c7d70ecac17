"""XGLM and BioGPT: scaled embeddings with sinusoidal or learned positions, GELU (arXiv:2112.10668,
arXiv:2210.10341)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, head, norm
from engine.model.families.encoder_decoder import block_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned, SpannedSinusoidal
from engine.model.sinusoidal import fixed_vectors
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

OFFSET = 2  # rows of the position table that no token reads
EPS = 1e-5  # BioGPT's layer_norm_eps has no effect in the reference either


def spec(config: Any) -> ModelSpec:
    xglm = config.model_type == "xglm"
    if xglm:
        _refuse(config)
    width, rows = config.hidden_size, config.max_position_embeddings + OFFSET
    head_dim = even_head_dim(width, config.num_attention_heads)
    norm = Norm("layer", EPS, bias=True)
    block = Block(
        placement=Pre(attention=norm, ffn=norm),
        attention=Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            out_bias=True,
        ),
        ffn=Dense(
            config.ffn_dim if xglm else config.intermediate_size,
            activation(config.activation_function if xglm else config.hidden_act),
            bias=True,
        ),
    )
    decoder = Stack(
        hidden_size=width,
        embedding=Tokens(
            vocab_size=config.vocab_size,
            width=width,
            scale=width**0.5 if config.scale_embedding else 1.0,
            positions=SpannedSinusoidal(rows, OFFSET) if xglm else Learned(rows, OFFSET),
        ),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def _refuse(config: Any) -> None:
    if config.add_cross_attention:
        raise UnsupportedModelError("add_cross_attention must be false: there is no encoder to attend to.")
    if config.pad_token_id is not None and config.pad_token_id >= OFFSET:
        raise UnsupportedModelError(
            f"pad_token_id must be below {OFFSET} for this architecture, got {config.pad_token_id}: the position in "
            "that row of the table would be blank."
        )


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    assert isinstance(model.decoder.embedding, Tokens)
    positions = model.decoder.embedding.positions
    assert positions is not None
    xglm = isinstance(positions, SpannedSinusoidal)
    stem = "model" if xglm else "biogpt"
    rows = f"{stem}.embed_positions.{'weights' if xglm else 'weight'}"
    output = "lm_head" if xglm else "output_projection"
    entries = [
        Entry("decoder.embedding.tokens", (f"{stem}.embed_tokens.weight",), shard_axis=0),
        Entry("decoder.embedding.positions", (rows,), default=fixed_vectors(positions)),
        *norm("decoder.final_norm", f"{stem}.layer_norm", bias=True),
        *head(model, output),
    ]
    for i, block in enumerate(model.decoder.blocks):
        entries += block_weights(f"decoder.blocks.{i}", f"{stem}.layers.{i}", block)
    return WeightTable(tuple(entries), prefix=f"{stem}.", head=f"{output}.weight")


FAMILY = Family(
    name="XGLM and BioGPT",
    architectures=("XGLMForCausalLM", "XGLMModel", "BioGptForCausalLM", "BioGptModel"),
    headless=("XGLMModel", "BioGptModel"),
    brings="scaled embeddings with sinusoidal or offset learned positions, GELU",
    spec=spec,
    weights=weights,
)
