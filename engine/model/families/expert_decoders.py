"""Decoders with experts as feed-forward networks, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    attention,
    corrected,
    experts,
    fused_experts,
    gated,
    gated_network,
    layer_windows,
    linear,
    lm,
    multi_head,
    network_counts,
    rms,
    rms_in_float32,
    rotary,
    routed,
    sliding_window,
    tokens,
    windowed,
)
from engine.model.families.decoder import decoder, pairs
from engine.model.families.names import DecoderNames, ExpertNames, network_weights
from engine.model.normalisation import Norm
from engine.model.positions import LongScaling, Rotary, YarnScaling
from engine.model.spec import (
    AfterRotation,
    Attention,
    Clamped,
    Corrected,
    Experts,
    FeedForward,
    Gated,
    Opened,
    PerHead,
    Placement,
    Pre,
    Sandwich,
    Shared,
    Sinks,
    SparseMixer,
    WholeProjection,
)
from engine.model.table import Alternating, Entry, Flattened, Row, Same, Transform, Turned

MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate",
    each="block_sparse_moe.experts",
    matrices=("w1", "w3", "w2"),
    fused_router="mlp.gate",
)


def _phimoe(c: Any) -> Attention:
    if c.num_experts_per_tok != 2:
        raise UnsupportedModelError(
            f"num_experts_per_tok of the config must be 2 for Phi-3.5-MoE, got {c.num_experts_per_tok}."
        )
    return attention(c, position=_phimoe_position(c), sees=sliding_window(c.sliding_window), bias=c.attention_bias)


def _phimoe_position(c: Any) -> Rotary:
    """The rotary positions of Phi-3.5-MoE. If they are scaled, rotated features are multiplied by a setting of this
    family."""
    part = rotary(c)
    if part.scaling is None:
        return part
    settings = c.rope_parameters
    short, long = settings.get("short_mscale"), settings.get("long_mscale")
    if not isinstance(short, int | float) or short != long or not isinstance(part.scaling, LongScaling | YarnScaling):
        raise UnsupportedModelError(
            "rope_parameters of a Phi-3.5-MoE config must be of rope_type longrope or yarn, with short_mscale and "
            f"long_mscale the same number; got {settings.get('rope_type')!r}, {short!r} and {long!r}."
        )
    return replace(part, scaling=replace(part.scaling, attention_factor=float(short)))


def _olmoe_refusals(c: Any) -> None:
    if c.clip_qkv is not None:
        raise UnsupportedModelError(
            "clip_qkv of the config must be null for OLMoE, which would clip after the norms of queries and keys; got "
            f"{c.clip_qkv}."
        )


# ---------------------------------------------------------------- Granite


def _granite_attention(c: Any) -> list[Attention]:
    """The attention of each layer. Some models have windows and sinks, and a rotary base for each layer; 0 means no
    positions."""
    parts: dict[str, Any] = {"scale": c.attention_multiplier, "bias": c.attention_bias}
    usual = rotary(c)
    if not c.model_type.endswith("_swa"):
        return [attention(c, position=usual, **parts)] * c.num_hidden_layers
    if len(c.layer_rope_theta) != c.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_rope_theta of the config must have one entry for each of num_hidden_layers {c.num_hidden_layers}, "
            f"but has {len(c.layer_rope_theta)}."
        )
    positions = [replace(usual, theta=float(theta)) if theta else None for theta in c.layer_rope_theta]
    return [
        attention(c, position=position, sees=window, sinks=Sinks(), **parts)
        for position, window in zip(positions, layer_windows(c), strict=True)
    ]


def _granite(c: Any) -> FeedForward:
    ffn: FeedForward = gated_network(c, bias=getattr(c, "mlp_bias", False))
    if c.model_type in ("granitemoe", "granitemoeshared", "granitemoe_swa"):
        ffn = routed(gated_network(c), count=c.num_local_experts, active=c.num_experts_per_tok)
    if shared := getattr(c, "shared_intermediate_size", 0):
        assert isinstance(ffn, Experts)
        ffn = Shared(ffn, Gated(shared, activation(c.hidden_act)))
    return ffn


def granite_shared(target: str, source: str, part: object) -> list[Entry]:
    """Entries of the network for every token. GGUF files store the gates and the gated part separately."""
    assert isinstance(part, Gated)
    stored = f"{source}.shared_mlp"
    return [
        *linear(f"{target}.gate_up", f"{stored}.input_linear", False),
        *gated(target, stored, part)[:1],
        *linear(f"{target}.down", f"{stored}.output_linear", False),
    ]


def granite_weights(target: str, source: str, part: FeedForward) -> list[Entry]:
    if isinstance(part, Shared):
        return [
            *granite_weights(f"{target}.routed", source, part.routed),
            *granite_shared(f"{target}.always", source, part.always),
        ]
    if not isinstance(part, Experts):
        return network_weights(target, source, part, DecoderNames())
    stored = f"{source}.block_sparse_moe"
    return [
        Entry(f"{target}.router.weight", (f"{stored}.router.layer.weight",)),
        Entry(f"{target}.up.weight", (f"{stored}.input_linear.weight",)),
        Entry(f"{target}.down.weight", (f"{stored}.output_linear.weight",)),
        *fused_experts(target, f"{stored}.experts", f"{stored}.router"),
        *experts(target, f"{stored}.experts", part, ("w1", "w3", "w2"), f"{stored}.router"),  # of GGUF files
    ]


def _hyperclova_norms(placement: Placement) -> tuple[str, ...]:
    names = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return names if isinstance(placement, Sandwich) else names[::2]


# ---------------------------------------------------------------- Hunyuan


def _hunyuan_position(c: Any) -> Rotary:
    """A dynamic scaling has a fixed `alpha` here, which only changes the base."""
    settings, head_dim = c.rope_parameters, c.head_dim or c.hidden_size // c.num_attention_heads
    alpha = settings.get("alpha") if settings.get("rope_type") == "dynamic" else None
    if not alpha:
        return rotary(c)
    return Rotary(head_dim, settings["rope_theta"] * alpha ** (head_dim / (head_dim - 2)))


def _hunyuan(c: Any) -> FeedForward | list[FeedForward]:
    network, layers = gated_network(c), c.num_hidden_layers
    if c.model_type != "hunyuan_v1_moe":
        return network
    active = c.moe_topk if isinstance(c.moe_topk, list) else [c.moe_topk] * layers
    if len(active) != layers:
        raise UnsupportedModelError(
            f"moe_topk of the config must have one entry for each of num_hidden_layers {layers}, but has {len(active)}."
        )
    return [Shared(routed(network, count=c.num_experts, active=own), network) for own in active]


# ---------------------------------------------------------------- experts in some layers


def _qwen_moe(c: Any) -> list[Attention]:
    older = c.model_type == "qwen2_moe"
    # Qwen3's config sets it to None if use_sliding_window is false; all its layers are the same.
    windows = layer_windows(c) if older else [sliding_window(c.sliding_window)] * c.num_hidden_layers
    return windowed(
        c,
        windows,
        position=rotary(c),
        qk_norm=None if older else PerHead(rms(c)),
        qkv_bias=c.qkv_bias if older else c.attention_bias,
        out_bias=False if older else c.attention_bias,
    )


def _qwen_networks(c: Any) -> list[FeedForward]:
    """Experts in every decoder_sparse_step-th layer, unless mlp_only_layers lists it.

    Qwen2's layers also have a network for every token, weighted by a gate.
    """
    every, act = c.decoder_sparse_step, activation(c.hidden_act)
    if every < 1:
        raise UnsupportedModelError(f"decoder_sparse_step of the config must be at least 1, got {every}.")

    def network(layer: int) -> FeedForward:
        if layer in c.mlp_only_layers or c.num_experts <= 0 or (layer + 1) % every:
            return gated_network(c)
        ffn = routed(
            Gated(c.moe_intermediate_size, act),
            count=c.num_experts,
            active=c.num_experts_per_tok,
            normalize=c.norm_topk_prob,
        )
        if c.model_type != "qwen2_moe":
            return ffn
        return Shared(ffn, Opened(Gated(c.shared_expert_intermediate_size, act)))

    return [network(layer) for layer in range(c.num_hidden_layers)]


def _glm4_moe(c: Any) -> list[Attention]:
    if c.model_type == "solar_open":
        position = rotary(c, partial=True)
        return windowed(c, [None] * c.num_hidden_layers, position=position, qkv_bias=c.attention_bias)
    dots = c.model_type == "dots1"
    return windowed(
        c,
        layer_windows(c) if dots else [None] * c.num_hidden_layers,
        position=rotary(c, partial=not dots),
        qk_norm=PerHead(rms(c)) if dots or c.use_qk_norm else None,
        qkv_bias=c.attention_bias,
        out_bias=dots and c.attention_bias,
    )


def _glm4_networks(c: Any) -> list[FeedForward]:
    """The first layers have no experts."""
    first = min(getattr(c, "first_k_dense_replace", None) or 0, c.num_hidden_layers)
    networks: list[FeedForward] = [gated_network(c)] * first if first else []
    if first == c.num_hidden_layers:
        return networks
    count, shared = network_counts(c)
    expert = Gated(c.moe_intermediate_size, activation(c.hidden_act))
    chosen = routed(
        expert,
        count=count,
        active=c.num_experts_per_tok or 0,
        normalize=c.norm_topk_prob,
        routing=corrected(c, count),
    )
    always = Gated(c.moe_intermediate_size * shared, activation(c.hidden_act))
    return networks + [Shared(chosen, always)] * (c.num_hidden_layers - first)


def _ernie_networks(c: Any) -> list[FeedForward]:
    """Experts in every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index."""
    every, act = c.moe_layer_interval, activation(c.hidden_act)
    if not every or every < 1:
        raise UnsupportedModelError(f"moe_layer_interval of the config must be at least 1, got {every}.")

    def network(layer: int) -> FeedForward:
        if not c.moe_layer_start_index <= layer <= c.moe_layer_end_index or (layer + 1) % every:
            return gated_network(c, bias=c.use_bias)
        width, shared = c.moe_intermediate_size, c.moe_num_shared_experts
        chosen = routed(
            Gated(width, act),
            count=c.moe_num_experts,
            active=c.moe_k,
            routing=Corrected("softmax", least=c.moe_norm_min),
        )
        return Shared(chosen, Gated(width * shared, act, bias=c.use_bias)) if shared else chosen

    return [network(layer) for layer in range(c.num_hidden_layers)]


# ---------------------------------------------------------------- gpt-oss


def _gpt_oss(c: Any) -> Experts:
    if c.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act of the config must be 'silu' for gpt-oss, got {c.hidden_act!r}.")
    return routed(
        # transformers before 5.18 does not name the factor.
        Clamped(c.intermediate_size, c.swiglu_limit, getattr(c, "swiglu_alpha", 1.702), bias=True),
        count=c.num_local_experts,
        active=c.num_experts_per_tok,
        router_bias=True,
    )


def _gpt_oss_weights(target: str, source: str, _part: FeedForward) -> list[Entry]:
    stored = f"{source}.mlp.experts"
    # Gates and their counterparts alternate; blocks of MXFP4 contain rows of outputs, plain matrices rows of inputs.
    forms: list[tuple[str, str, Transform]] = [("up", "gate_up_proj", Alternating()), ("down", "down_proj", Same())]
    entries = linear(f"{target}.router", f"{source}.mlp.router", True)
    for ours, theirs, how in forms:
        entries += [
            Entry(f"{target}.{ours}.weight", (f"{stored}.{theirs}",), Turned(how)),
            Entry(f"{target}.{ours}.weight", (f"{stored}.{theirs}_blocks",), how),
            Entry(f"{target}.{ours}.bias", (f"{stored}.{theirs}_bias",), how),
        ]
    return entries


# ---------------------------------------------------------------- DBRX


def _dbrx(c: Any) -> Attention:
    return multi_head(
        c, kv_heads=c.attn_config.kv_n_heads, position=_dbrx_position(c), bias=False, clip=c.attn_config.clip_qkv
    )


def _dbrx_position(c: Any) -> Rotary:
    """The rotary base of attn_config applies if there is one.

    Published configs have it there, where transformers (5.23) does not look; a model that was trained with another base
    would answer nonsense.
    """
    found = rotary(c)
    theta = getattr(c.attn_config, "rope_theta", None)
    if theta is None or theta == found.theta:
        return found
    if found.theta != 10_000.0 or found.scaling is not None:
        raise UnsupportedModelError(
            f"attn_config.rope_theta is {theta}, and rope_parameters has {found.theta}: set only one of them."
        )
    return Rotary(found.dim, theta)


def _dbrx_refusals(c: Any) -> None:
    own = c.ffn_config
    if own.moe_normalize_expert_weights not in (None, 1):
        raise UnsupportedModelError(
            f"ffn_config.moe_normalize_expert_weights must be 1 or null, got {own.moe_normalize_expert_weights}."
        )
    if others := sorted(set(own.ffn_act_fn) - {"name"}):
        raise UnsupportedModelError(
            f"ffn_config.ffn_act_fn must contain only a name, but also contains {', '.join(others)}."
        )


def _dbrx_experts(c: Any) -> Experts:
    own = c.ffn_config
    return routed(
        Gated(own.ffn_hidden_size, activation(own.ffn_act_fn.get("name", "silu"))),
        count=own.moe_num_experts,
        active=own.moe_top_k,
        normalize=own.moe_normalize_expert_weights is not None,
    )


def _dbrx_weights(target: str, source: str, _part: FeedForward) -> list[Entry]:
    mlp = f"{source}.ffn.experts.mlp"
    return [
        Entry(f"{target}.router.weight", (f"{source}.ffn.router.layer.weight",)),
        Entry(f"{target}.up.weight", (f"{mlp}.w1", f"{mlp}.v1"), Flattened(parts=2)),
        Entry(f"{target}.down.weight", (f"{mlp}.w2",), Flattened(Turned())),
    ]


FAMILIES = (
    # LLaMA's blocks with experts (arXiv:2401.04088).
    decoder(
        "Mixtral",
        pairs("Mixtral"),
        "MoE with top-k routing",
        attention=lambda c: attention(c, position=rotary(c), sees=sliding_window(c.sliding_window)),
        ffn=lambda c: routed(gated_network(c), count=c.num_local_experts, active=c.num_experts_per_tok),
        names=DecoderNames(experts=MIXTRAL),
    ),
    decoder(
        "MiniMax-M2",
        pairs("MiniMaxM2"),
        "QK norms over the whole projection, partial rotary positions, MoE with corrected scores",
        attention=lambda c: attention(c, position=rotary(c, partial=True), qk_norm=WholeProjection(rms(c))),
        ffn=lambda c: routed(
            gated_network(c), count=c.num_local_experts, active=c.num_experts_per_tok, routing=Corrected()
        ),
        names=DecoderNames(
            experts=replace(
                MIXTRAL,
                corrections=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
            )
        ),
    ),
    # Two experts per token, chosen one after the other (arXiv:2404.14219).
    decoder(
        "Phi-3.5-MoE",
        (*pairs("Phimoe"), "PhiMoEForCausalLM"),
        "MoE with SparseMixer routing, layer norms",
        attention=_phimoe,
        ffn=lambda c: routed(
            gated_network(c),
            count=c.num_local_experts,
            active=2,
            normalize=False,
            routing=SparseMixer(2 * c.router_jitter_noise),
        ),
        norm=lambda c: Norm("layer", c.rms_norm_eps, bias=True),
        head=lambda c: lm(c, bias=c.lm_head_bias),
        names=DecoderNames(experts=replace(MIXTRAL, fused_router="mlp.router")),
    ),
    # arXiv:2409.02060
    decoder(
        "OLMoE",
        pairs("Olmoe"),
        "MoE with many small experts, QK norms over the whole projection",
        attention=lambda c: attention(c, position=rotary(c), qk_norm=WholeProjection(rms(c)), bias=c.attention_bias),
        ffn=lambda c: routed(
            gated_network(c), count=c.num_experts, active=c.num_experts_per_tok, normalize=c.norm_topk_prob
        ),
        refuse=_olmoe_refusals,
    ),
    # LLaMA's or Mixtral's blocks with constant factors.
    decoder(
        "Granite and GraniteMoE",
        pairs("Granite", "GraniteMoe", "GraniteMoeShared", "GraniteSWA", "GraniteMoeSWA"),
        "scaled embeddings, scores, residuals and logits; MoE with optional shared experts; SWA: windows and sinks",
        attention=_granite_attention,
        ffn=_granite,
        embedding=lambda c: tokens(c, scale=c.embedding_multiplier),
        residual_scale=lambda c: c.residual_multiplier,
        head=lambda c: lm(c, logit_scale=1 / c.logits_scaling),
        names=DecoderNames(ffn=granite_weights),
    ),
    # Granite's constants, which multiply logits here, and norms after the sublayers, too.
    decoder(
        "HyperCLOVA X",
        pairs("HyperCLOVAX"),
        "scaled embeddings, scores, residuals and logits, norms before and after the sublayers",
        attention=lambda c: attention(c, scale=c.attention_multiplier, position=rotary(c), bias=c.attention_bias),
        ffn=lambda c: gated_network(c, bias=c.mlp_bias),
        placement=lambda c, norm: Sandwich(norm, norm, norm, norm) if c.use_post_norm else Pre(norm, norm),
        embedding=lambda c: tokens(c, scale=c.embedding_multiplier),
        residual_scale=lambda c: c.residual_multiplier,
        head=lambda c: lm(c, logit_scale=c.logits_scaling),
        names=DecoderNames(norms=_hyperclova_norms),
    ),
    # arXiv:2411.02265
    decoder(
        "Hunyuan",
        pairs("HunYuanDenseV1", "HunYuanMoEV1"),
        "QK norms after rotation; MoE with a shared expert",
        attention=lambda c: attention(
            c, position=_hunyuan_position(c), qk_norm=AfterRotation(rms(c)), bias=c.attention_bias
        ),
        ffn=_hunyuan,
        names=DecoderNames(
            qk_norm="self_attn.{word}_layernorm",
            experts=ExpertNames(router="mlp.gate.wg", always="mlp.shared_mlp"),
        ),
    ),
    # arXiv:2407.10671, arXiv:2505.09388
    decoder(
        "Qwen2-MoE and Qwen3-MoE",
        pairs("Qwen2Moe", "Qwen3Moe"),
        "MoE with many small experts and an optional shared expert, dense layers in between, QK norms per head",
        attention=_qwen_moe,
        ffn=_qwen_networks,
        names=DecoderNames(experts=ExpertNames(always="mlp.shared_expert")),
    ),
    # arXiv:2508.06471, arXiv:2506.05767
    decoder(
        "GLM-4.5, dots.llm1 and Solar Open",
        pairs("Glm4Moe", "Dots1", "SolarOpen"),
        "MoE routed by corrected sigmoid scores, in groups, with a shared expert",
        attention=_glm4_moe,
        ffn=_glm4_networks,
        names=DecoderNames(guesses=True),
    ),
    # Layers that predict later tokens (mtp) are unread in transformers too.
    decoder(
        "ERNIE 4.5 with experts",
        pairs("Ernie4_5_Moe"),
        "MoE in some layers, routed by corrected probabilities, with a shared expert",
        attention=lambda c: attention(c, position=rotary(c, interleaved=True, in_float32=True), bias=c.use_bias),
        ffn=_ernie_networks,
        head=lambda c: lm(c, bias=c.use_bias),
        names=DecoderNames(
            experts=ExpertNames(
                corrections=(
                    "mlp.moe_statics.e_score_correction_bias",
                    "mlp.gate.moe_statics.e_score_correction_bias",
                ),
                correction_form=Row(),
            ),
            unread=(*DecoderNames().unread, "mtp_.*"),
        ),
    ),
    # arXiv:2508.10925
    decoder(
        "gpt-oss",
        pairs("GptOss"),
        "attention sinks, MoE with biases and clamped gates, windows in some layers, MXFP4",
        attention=lambda c: windowed(c, layer_windows(c), position=rotary(c), bias=c.attention_bias, sinks=Sinks()),
        ffn=_gpt_oss,
        norm=rms_in_float32,
        names=DecoderNames(ffn=_gpt_oss_weights),
        reads_mxfp4=True,
    ),
    # The eps is not a setting of the config.
    decoder(
        "DBRX",
        pairs("Dbrx"),
        "MoE, clipped queries, keys and values, norms without biases",
        attention=_dbrx,
        ffn=_dbrx_experts,
        norm=lambda c: Norm("layer", 1e-5),
        refuse=_dbrx_refusals,
        names=DecoderNames(
            stem="transformer",
            tokens="wte",
            final_norm="norm_f",
            layers="blocks",
            qkv="norm_attn_norm.attn.Wqkv",
            out="norm_attn_norm.attn.out_proj",
            norms=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"),
            ffn=_dbrx_weights,
            unread=(),
        ),
    ),
)
