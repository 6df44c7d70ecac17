"""GPT, the first: learned positions, a norm after each sum, none at the end (Radford et al. 2018)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import even_head_dim, head, linear, norm
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Activation, Attention, Block, Dense, Lm, ModelSpec, Post, Stack, Tokens
from engine.model.table import Conv1d, Entry, Family, WeightTable

# What `afn` may be; gelu is the approximation by tanh.
ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "swish": "silu"}


def spec(config: Any) -> ModelSpec:
    if config.afn not in ACTIVATIONS:
        raise UnsupportedModelError(f"afn of the config must be one of {', '.join(ACTIVATIONS)}; got {config.afn!r}.")
    norm = Norm("layer", config.layer_norm_epsilon, bias=True)
    head_dim = even_head_dim(config.n_embd, config.n_head)
    block = Block(
        placement=Post(attention=norm, ffn=norm),
        attention=Attention(
            heads=config.n_head,
            kv_heads=config.n_head,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=True,
            out_bias=True,
        ),
        ffn=Dense(4 * config.n_embd, ACTIVATIONS[config.afn], bias=True),
    )
    decoder = Stack(
        hidden_size=config.n_embd,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.n_embd, positions=Learned(config.n_positions)),
        blocks=(block,) * config.n_layer,
        final_norm=None,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.tokens_embed.weight",), shard_axis=0),
        Entry("decoder.embedding.positions", ("transformer.positions_embed.weight",)),
        *head(model, "lm_head"),
    ]
    for i in range(len(model.decoder.blocks)):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        entries += [
            *linear(f"{target}.attention.inner.qkv", f"{source}.attn.c_attn", True, 0, Conv1d()),
            *linear(f"{target}.attention.inner.out", f"{source}.attn.c_proj", True, 1, Conv1d()),
            *norm(f"{target}.attention.outer", f"{source}.ln_1", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.c_fc", True, 0, Conv1d()),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.c_proj", True, 1, Conv1d()),
            *norm(f"{target}.ffn.outer", f"{source}.ln_2", bias=True),
        ]
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        # Causal masks and positions that old checkpoints store as buffers.
        ignored=(r"transformer\.h\.\d+\.attn\.bias", r"transformer\.position_ids"),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="GPT",
    architectures=("OpenAIGPTLMHeadModel", "OpenAIGPTModel"),
    headless=("OpenAIGPTModel",),
    brings="learned positions, norms after the residual",
    spec=spec,
    weights=weights,
)
