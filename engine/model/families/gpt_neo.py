"""GPT-Neo: GPT-2's blocks with scores that are not scaled, and layers that see a window only."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, head, linear, norm, qkv, sliding_window
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    norm = Norm("layer", config.layer_norm_epsilon, bias=True)
    heads, width = config.num_heads, config.hidden_size
    kinds = config.attention_layers
    if others := sorted(set(kinds) - {"global", "local"}):
        raise UnsupportedModelError(f"attention_types of the config holds {others[0]!r}; implemented: global, local.")
    if len(kinds) != config.num_layers:
        raise UnsupportedModelError(
            f"attention_types of the config must name num_layers {config.num_layers} layers, but names {len(kinds)}."
        )
    blocks = tuple(
        Block(
            placement=Pre(attention=norm, ffn=norm),
            attention=Attention(
                heads=heads,
                kv_heads=heads,
                head_dim=even_head_dim(width, heads),
                scale=1.0,
                window=sliding_window(config.window_size) if kind == "local" else None,
                out_bias=True,
            ),
            ffn=Dense(
                4 * width if config.intermediate_size is None else config.intermediate_size,
                activation(config.activation_function),
                bias=True,
            ),
        )
        for kind in kinds
    )
    decoder = Stack(
        hidden_size=width,
        embedding=Tokens(vocab_size=config.vocab_size, width=width, positions=Learned(config.max_position_embeddings)),
        blocks=blocks,
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
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        own = f"{source}.attn.attention"
        entries += [
            *norm(f"{target}.attention.before", f"{source}.ln_1", bias=True),
            *qkv(f"{target}.attention.inner.qkv", (f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj"), block.attention),
            *linear(f"{target}.attention.inner.out", f"{own}.out_proj", True, 1),
            *norm(f"{target}.ffn.before", f"{source}.ln_2", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.c_fc", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.c_proj", True, 1),
        ]
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        # Causal masks that old checkpoints store as buffers.
        ignored=(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="GPT-Neo",
    architectures=("GPTNeoForCausalLM", "GPTNeoModel"),
    headless=("GPTNeoModel",),
    brings="learned positions, sliding windows in some layers, unscaled attention scores",
    spec=spec,
    weights=weights,
)
