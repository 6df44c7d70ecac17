"""DeepSeek V2 and V3 and their kin: attention over latents, and many small experts beside those for every token, except
in some layers (arXiv:2405.04434, arXiv:2412.19437)."""

from __future__ import annotations

import math
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    corrected,
    gated_network,
    groups_of,
    linear,
    lm,
    network_counts,
    norm,
    rotary,
    routed,
    tempered,
    tokens,
)
from engine.model.families.decoder import decoder, pairs
from engine.model.families.names import DecoderNames
from engine.model.families.newer_expert_decoders import by_layer
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Corrected, FeedForward, Gated, GroupLimited, Latent, Shared
from engine.model.table import Entry, OfHeads


def _attention(config: Any) -> Attention:
    second = _second(config)
    turned, content = config.qk_rope_head_dim, config.qk_nope_head_dim
    # Mistral 4 gives the share of a whole head that rotates, GLM the share of what may rotate.
    share_of = turned + content if config.model_type == "mistral4" else turned
    return latent_attention(
        config,
        scale=(content + turned) ** -0.5 * _stretched(config) ** 2,
        position=rotary(
            config,
            share_of,
            partial=config.model_type in ("glm4_moe_lite", "mistral4"),
            interleaved=second or bool(getattr(config, "rope_interleave", False)),
            in_float32=second,
        ),
        temperature=tempered(config) if config.model_type == "mistral4" else None,
    )


def latent_attention(config: Any, *, scale: float, **parts: Any) -> Attention:
    """Attention over latents, with a config's sizes and biases. `parts`: further fields of the attention."""
    latent = Latent(
        width=config.kv_lora_rank,
        rotary=config.qk_rope_head_dim,
        content=config.qk_nope_head_dim,
        values=config.v_head_dim,
        norm=Norm("rms", 1e-6),  # the eps of the other norms does not apply
        query_width=config.q_lora_rank,
    )
    return Attention(
        heads=config.num_attention_heads,
        kv_heads=1,
        head_dim=latent.width + latent.rotary,
        scale=scale,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        latent=latent,
        **parts,
    )


def _networks(config: Any) -> list[FeedForward]:
    """The first layers have no experts, or those of `mlp_layer_types`; some models have none at all."""
    if not hasattr(config, "n_routed_experts"):
        return [gated_network(config, bias=getattr(config, "mlp_bias", False))] * config.num_hidden_layers
    if config.model_type == "glm4_moe_lite":
        return by_layer(config, gated_network(config), _experts(config, False, False))
    first = config.first_k_dense_replace or 0
    bias = _second(config) and config.mlp_bias
    networks: list[FeedForward] = [gated_network(config, bias=bias)] * first
    if first < config.num_hidden_layers:
        networks += [_experts(config, _second(config), bias)] * (config.num_hidden_layers - first)
    return networks[: config.num_hidden_layers]


def _second(config: Any) -> bool:
    second: bool = config.model_type == "deepseek_v2"
    return second


def _refuse_others(config: Any) -> None:
    """Raises UnsupportedModelError for settings that the reference does not compute."""
    second = _second(config)
    methods = ("greedy", "group_limited_greedy") if second else ("noaux_tc",)
    scores = "softmax" if second or config.model_type == "mistral4" else "sigmoid"
    heads, turned = config.num_attention_heads, config.qk_rope_head_dim
    expected: list[tuple[str, object, tuple[object, ...]]] = [
        ("num_key_value_heads", config.num_key_value_heads, (heads,)),
        ("head_dim", getattr(config, "head_dim", turned), (turned, turned + config.qk_nope_head_dim)),
        ("scoring_func", getattr(config, "scoring_func", None), (None, scores)),
        ("topk_method", getattr(config, "topk_method", None), methods if second else (None, *methods)),
        ("moe_layer_freq", getattr(config, "moe_layer_freq", 1), (1,)),
    ]
    if second:
        expected.append(("norm_topk_prob", config.norm_topk_prob, (None, False)))
    for name, value, known in expected:
        if value not in known:
            may = " or ".join(repr(one) for one in known if one is not None)
            raise UnsupportedModelError(f"{name} of the config must be {may} for this architecture, got {value!r}.")


def _stretched(config: Any) -> float:
    """The factor of both queries and keys, by `mscale_all_dim` of a scaling of rotary frequencies."""
    settings: dict[str, Any] = config.rope_parameters or {}
    weight: Any = settings.get("mscale_all_dim")
    if settings.get("rope_type", "default") == "default" or not weight:
        return 1.0
    factor: Any = settings.get("factor")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in (weight, factor)):
        raise UnsupportedModelError(
            "mscale_all_dim in the config's rope_parameters must be a number, and factor one beside it; got "
            f"{weight!r} and {factor!r}."
        )
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _experts(config: Any, second: bool, bias: bool) -> FeedForward:
    (count, shared), act = network_counts(config), activation(config.hidden_act)
    routing: GroupLimited | Corrected
    if config.model_type == "mistral4":
        groups, opened = groups_of(config, count, leaders=2)
        routing = GroupLimited(groups, opened, scale=config.routed_scaling_factor, leaders=2)
    elif not second:
        routing = corrected(config, count)
    elif config.topk_method == "greedy":
        routing = GroupLimited(scale=config.routed_scaling_factor)
    else:
        routing = GroupLimited(*groups_of(config, count, leaders=1), scale=config.routed_scaling_factor)
    experts = routed(
        Gated(config.moe_intermediate_size, act),
        count=count,
        active=config.num_experts_per_tok or 0,
        normalize=not second and bool(config.norm_topk_prob),
        routing=routing,
    )
    return Shared(experts, Gated(config.moe_intermediate_size * shared, act, bias))


def latent_weights(target: str, layer: str, part: Attention) -> list[Entry]:
    latent = part.latent
    assert latent is not None
    source, queries = f"{layer}.self_attn", "q_proj"
    entries: list[Entry] = []
    if latent.query_width is not None:
        queries = "q_b_proj"
        entries += linear(f"{target}.query_latent", f"{source}.q_a_proj", part.qkv_bias)
        entries += norm(f"{target}.query_norm", f"{source}.q_a_layernorm", bias=False)
    rows, expanding = latent.content + latent.values, (f"{source}.kv_b_proj.weight",)
    return [
        *entries,
        *linear(f"{target}.queries", f"{source}.{queries}", False),
        *linear(f"{target}.latent", f"{source}.kv_a_proj_with_mqa", part.qkv_bias),
        *norm(f"{target}.latent_norm", f"{source}.kv_a_layernorm", bias=False),
        Entry(f"{target}.keys.weight", expanding, OfHeads(rows, 0, axis=2)),
        Entry(f"{target}.values.weight", expanding, OfHeads(rows, latent.content)),
        *linear(f"{target}.out", f"{source}.o_proj", part.out_bias),
    ]


NAMES = DecoderNames(attention=latent_weights, guesses=True)

FAMILIES = (
    decoder(
        "DeepSeek V2 and V3",
        pairs("DeepseekV2", "DeepseekV3"),
        "latent attention (MLA) with one cached vector per token, MoE with expert groups",
        attention=_attention,
        ffn=_networks,
        refuse=_refuse_others,
        names=NAMES,
    ),
    decoder(
        "GLM-4.7 Flash, Mistral 4 and Youtu",
        pairs("Glm4MoeLite", "Mistral4", "Youtu"),
        "DeepSeek's latent attention; MoE, in groups or not, or none; Mistral 4: queries scaled by position",
        attention=_attention,
        ffn=_networks,
        refuse=_refuse_others,
        names=NAMES,
    ),
    decoder(
        "MiniCPM3",
        pairs("MiniCPM3"),
        "latent attention, scaled embeddings, residuals and logits",
        attention=_attention,
        ffn=_networks,
        embedding=lambda c: tokens(c, scale=c.scale_emb),
        residual_scale=lambda c: c.scale_depth / math.sqrt(c.num_hidden_layers),
        head=lambda c: lm(c, logit_scale=1 / c.logits_scaling),
        refuse=_refuse_others,
        names=NAMES,
    ),
)
