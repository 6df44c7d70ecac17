"""CTRL: scaled embeddings with sinusoidal positions, pre-norm blocks, ReLU, a head with a bias (arXiv:1909.05858)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import even_head_dim, head, linear, norm, qkv
from engine.model.normalisation import Norm
from engine.model.positions import Sinusoidal
from engine.model.sinusoidal import fill_sinusoids
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

EPS = 1e-6  # of all norms but the last; no setting of the config


def spec(config: Any) -> ModelSpec:
    norm = Norm("layer", EPS, bias=True)
    width = config.n_embd
    head_dim = even_head_dim(width, config.n_head)
    block = Block(
        placement=Pre(attention=norm, ffn=norm),
        attention=Attention(
            heads=config.n_head,
            kv_heads=config.n_head,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            out_bias=True,
        ),
        ffn=Dense(config.dff, "relu", bias=True),
    )
    decoder = Stack(
        hidden_size=width,
        embedding=Tokens(
            vocab_size=config.vocab_size, width=width, scale=width**0.5, positions=Sinusoidal(config.n_positions)
        ),
        blocks=(block,) * config.n_layer,
        final_norm=Norm("layer", config.layer_norm_epsilon, bias=True),
    )
    # The bias belongs to the head, which the headless model does not store.
    bias = config.architectures[0] == "CTRLLMHeadModel"
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings, bias=bias))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.w.weight",), shard_axis=0),
        Entry("decoder.embedding.positions", ("transformer.pos_encoding",), default=fill_sinusoids),
        *norm("decoder.final_norm", "transformer.layernorm", bias=True),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        own = f"{source}.multi_head_attention"
        entries += [
            *norm(f"{target}.attention.before", f"{source}.layernorm1", bias=True),
            *qkv(f"{target}.attention.inner.qkv", (f"{own}.Wq", f"{own}.Wk", f"{own}.Wv"), block.attention),
            *linear(f"{target}.attention.inner.out", f"{own}.dense", True, 1),
            *norm(f"{target}.ffn.before", f"{source}.layernorm2", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{source}.ffn.0", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.ffn.2", True, 1),
        ]
    return WeightTable(tuple(entries), prefix="transformer.", head="lm_head.weight")


FAMILY = Family(
    name="CTRL",
    architectures=("CTRLLMHeadModel", "CTRLModel"),
    headless=("CTRLModel",),
    brings="scaled embeddings with sinusoidal positions, ReLU, a bias in the head",
    spec=spec,
    weights=weights,
)
