"""DBRX: limited queries, keys and values, experts as feed-forward networks, norms without biases.

The published config gives the rotary base in attn_config, where transformers (5.23) does not look for it; a model that
it was trained with another base for would answer nonsense, so what attn_config says counts.
"""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, head, linear, rotary, routed
from engine.model.normalisation import Norm
from engine.model.positions import Rotary
from engine.model.spec import Attention, Block, Experts, Gated, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Entry, Family, Flattened, Turned, WeightTable

EPS = 1e-5  # no setting of the config
USUAL_THETA = 10_000.0


def spec(config: Any) -> ModelSpec:
    own, ffn = config.attn_config, config.ffn_config
    norm = Norm("layer", EPS)
    head_dim = even_head_dim(config.d_model, config.n_heads)
    power = ffn.moe_normalize_expert_weights
    if power not in (None, 1):
        raise UnsupportedModelError(f"ffn_config.moe_normalize_expert_weights must be 1 or null, got {power}.")
    if others := sorted(set(ffn.ffn_act_fn) - {"name"}):
        raise UnsupportedModelError(f"ffn_config.ffn_act_fn must hold a name alone, but holds {', '.join(others)}.")
    block = Block(
        placement=Pre(attention=norm, ffn=norm),
        attention=Attention(
            heads=config.n_heads,
            kv_heads=own.kv_n_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=_rotary(config, head_dim),
            clip=own.clip_qkv,
        ),
        ffn=routed(
            Gated(ffn.ffn_hidden_size, activation(ffn.ffn_act_fn.get("name", "silu"))),
            count=ffn.moe_num_experts,
            active=ffn.moe_top_k,
            normalize=power is not None,
        ),
    )
    decoder = Stack(
        hidden_size=config.d_model,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.d_model),
        blocks=(block,) * config.n_layers,
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def _rotary(config: Any, head_dim: int) -> Rotary:
    found = rotary(config, head_dim)
    theta = getattr(config.attn_config, "rope_theta", None)
    if theta is None or theta == found.theta:
        return found
    if found.theta != USUAL_THETA or found.scaling is not None:
        raise UnsupportedModelError(
            f"attn_config.rope_theta is {theta}, and rope_parameters has {found.theta}: set only one of them."
        )
    return Rotary(found.dim, theta)


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.wte.weight",), shard_axis=0),
        Entry("decoder.final_norm.weight", ("transformer.norm_f.weight",)),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"transformer.blocks.{i}"
        own, inner, mlp = f"{source}.norm_attn_norm", f"{target}.ffn.inner", f"{source}.ffn.experts.mlp"
        assert isinstance(block.ffn, Experts)
        entries += [
            Entry(f"{target}.attention.before.weight", (f"{own}.norm_1.weight",)),
            *linear(f"{target}.attention.inner.qkv", f"{own}.attn.Wqkv", False, 0),
            *linear(f"{target}.attention.inner.out", f"{own}.attn.out_proj", False, 1),
            Entry(f"{target}.ffn.before.weight", (f"{own}.norm_2.weight",)),
            Entry(f"{inner}.router.weight", (f"{source}.ffn.router.layer.weight",)),
            Entry(f"{inner}.up.weight", (f"{mlp}.w1", f"{mlp}.v1"), Flattened(parts=2), shard_axis=1),
            Entry(f"{inner}.down.weight", (f"{mlp}.w2",), Flattened(Turned()), shard_axis=2),
        ]
    return WeightTable(tuple(entries), prefix="transformer.", head="lm_head.weight")


FAMILY = Family(
    name="DBRX",
    architectures=("DbrxForCausalLM", "DbrxModel"),
    headless=("DbrxModel",),
    brings="MoE, clipped queries, keys and values, norms without biases",
    spec=spec,
    weights=weights,
)
