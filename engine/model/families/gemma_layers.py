"""Gemma 3n and 4 as text models: layers read separate vectors for each token, and the last ones read the keys and
values of earlier layers. In Gemma 3n the stream has several versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from engine.configs.published import PublishedConfig, published
from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    PROJECTIONS,
    activation,
    attention,
    experts,
    fused_experts,
    gated,
    layer_kinds,
    layer_window,
    linear,
    lm,
    norm,
    qkv,
    rms_in_float32,
    rotary,
    routed,
    tokens,
)
from engine.model.families.decoder import decoder
from engine.model.families.decoders import SANDWICH
from engine.model.families.names import DecoderNames, decoder_table
from engine.model.normalisation import Norm
from engine.model.spec import (
    Attention,
    FeedForward,
    Gated,
    LayerInput,
    LayerVectors,
    LowRank,
    ModelSpec,
    NormedSum,
    PerHead,
    Rescaled,
    Sandwich,
    SparselyGated,
    Versions,
)
from engine.model.table import Affine, Entry, Family, Same, Stacked, WeightTable

_PER_LAYER = {"head_dim", "num_key_value_heads"}


def _value_norm(c: Any) -> Norm:
    return Norm("rms", c.rms_norm_eps, weight=False)


def _read_layers(c: Any) -> list[int | None]:
    """The layer whose keys and values each layer reads, the last one of its kind that has some; None: its own.
    transformers refuses configs in which a kind of layers has none to read."""
    first = c.num_hidden_layers - (c.num_kv_shared_layers or 0)
    last = {kind: i for i, kind in enumerate(c.layer_types[:first])}
    return [None if i < first else last[kind] for i, kind in enumerate(c.layer_types)]


def _of_layer(c: Any, layer: int) -> dict[str, int]:
    """The head sizes and numbers of KV heads that may differ between layers."""
    own = (getattr(c, "layer_overrides", None) or {}).get(str(layer), {})
    return {
        "head_dim": own.get("head_dim", c.head_dim),
        "kv_heads": own.get("num_key_value_heads", c.num_key_value_heads),
    }


def _attentions(c: Any) -> list[Attention]:
    """A rotary base for each kind of layer; Gemma 4's global layers may have wider heads, whose keys are values."""
    fourth = c.model_type != "gemma3n_text"
    found: list[Attention] = []
    for layer, (kind, reads) in enumerate(zip(c.layer_types, _read_layers(c), strict=True)):
        own = _of_layer(c, layer)
        found.append(
            attention(
                c,
                scale=1.0,
                position=rotary(c, own["head_dim"], layer_type=kind, shares=True),
                sees=layer_window(c, kind),
                qk_norm=PerHead(rms_in_float32(c)),
                value_norm=_value_norm(c),
                one_for_both=fourth and c.attention_k_eq_v and kind == "full_attention" and reads is None,
                reads=reads,
                bias=c.attention_bias,
                **own,
            )
        )
    return found


def _refuse(c: Any) -> None:
    if getattr(c, "use_bidirectional_attention", None) not in (None, "vision"):
        raise UnsupportedModelError(
            "use_bidirectional_attention of the config must be null or 'vision', got "
            f"{c.use_bidirectional_attention!r}."
        )
    overrides = (getattr(c, "layer_overrides", None) or {}).values()
    if others := sorted({name for own in overrides for name in own} - _PER_LAYER):
        raise UnsupportedModelError(
            f"per_layer_config of the config may set head_dim and num_key_value_heads, but sets {', '.join(others)}."
        )
    layer_kinds(c)


# ---------------------------------------------------------------- Gemma 3n


def _third_networks(c: Any) -> list[FeedForward]:
    act = activation(c.hidden_activation)
    widths, shares, layers = c.intermediate_size, c.activation_sparsity_pattern, c.num_hidden_layers
    widths = widths if isinstance(widths, list | tuple) else [widths] * layers
    shares = shares if isinstance(shares, list | tuple) else [shares] * layers
    if len(widths) != layers or len(shares) != layers or not all(0 <= share < 1 for share in shares):
        raise UnsupportedModelError(
            "intermediate_size and activation_sparsity_pattern of the config must have one entry for each of "
            f"num_hidden_layers {layers}, the second from 0 to below 1; got {widths} and {shares}."
        )
    # The share of a normal distribution below the cutoff, in deviations from the mean.
    return [
        SparselyGated(width, act, NormalDist().inv_cdf(share)) if share else Gated(width, act)
        for width, share in zip(widths, shares, strict=True)
    ]


def _third(c: Any, model: ModelSpec) -> ModelSpec:
    stack, own = model.trunk, rms_in_float32(c)
    count, active = c.altup_num_inputs, c.altup_active_idx
    if not 0 <= active < count:
        raise UnsupportedModelError(
            f"altup_active_idx of the config must be from 0 to altup_num_inputs {count} less 1, got {active}."
        )
    given = LayerInput(c.hidden_size_per_layer_input, activation(c.hidden_activation), own)
    path = LowRank(c.laurel_rank, own)
    made = replace(
        stack,
        blocks=tuple(replace(block, input=given, low_rank=path) for block in stack.blocks),
        layer_vectors=_layer_vectors(c),
        versions=Versions(count=count, active=active, norm=own, scaled=c.altup_correct_scale),
    )
    return replace(model, decoder=made)


def _layer_vectors(c: Any) -> LayerVectors:
    return LayerVectors(
        vocab_size=c.vocab_size_per_layer_input, width=c.hidden_size_per_layer_input, norm=rms_in_float32(c)
    )


# ---------------------------------------------------------------- Gemma 4


def _fourth_networks(c: Any) -> list[FeedForward]:
    act, own = activation(c.hidden_activation), rms_in_float32(c)

    def network(reads: int | None) -> FeedForward:
        wide = 2 if c.use_double_wide_mlp and reads is not None else 1
        always = Gated(c.intermediate_size * wide, act)
        if not getattr(c, "enable_moe_block", False):
            return always
        chosen = routed(
            Gated(c.moe_intermediate_size, act),
            count=c.num_experts or 0,
            active=c.top_k_experts or 0,
            routing=Rescaled(),
        )
        return NormedSum(always, chosen, own)

    return [network(reads) for reads in _read_layers(c)]


def _fourth(c: Any, model: ModelSpec) -> ModelSpec:
    stack = model.trunk
    width = getattr(c, "hidden_size_per_layer_input", 0)
    given = LayerInput(width, activation(c.hidden_activation), rms_in_float32(c)) if width else None
    blocks = tuple(replace(block, input=given, factor=True) for block in stack.blocks)
    return replace(model, decoder=replace(stack, blocks=blocks, layer_vectors=_layer_vectors(c) if width else None))


# ---------------------------------------------------------------- weights

_PLAIN = DecoderNames(norms=SANDWICH, attention=lambda target, source, part: _attention_weights(target, source, part))


def _attention_weights(target: str, source: str, part: Attention) -> list[Entry]:
    stored = f"{source}.self_attn"
    out = linear(f"{target}.out", f"{stored}.o_proj", part.out_bias)
    if part.reads is not None:
        return [
            *linear(f"{target}.queries", f"{stored}.q_proj", part.qkv_bias),
            *norm(f"{target}.qk_norm.queries", f"{stored}.q_norm", bias=False),
            *out,
        ]
    values = "k_proj" if part.one_for_both else "v_proj"
    names = (f"{stored}.q_proj", f"{stored}.k_proj", f"{stored}.{values}")
    norms = (("queries", "q_norm"), ("keys", "k_norm"))
    return [
        *qkv(f"{target}.qkv", names, part),
        *(e for ours, theirs in norms for e in norm(f"{target}.qk_norm.{ours}", f"{stored}.{theirs}", bias=False)),
        *out,
    ]


def _network_weights(hidden_size: int) -> Callable[[str, str, FeedForward], list[Entry]]:
    def table(target: str, source: str, part: FeedForward) -> list[Entry]:
        if isinstance(part, SparselyGated):
            return gated(target, f"{source}.mlp", Gated(part.width, part.activation))
        if isinstance(part, Gated):
            return gated(target, f"{source}.mlp", part)
        assert isinstance(part, NormedSum)
        norms = {
            "before": "pre_feedforward_layernorm_2",
            "first": "post_feedforward_layernorm_1",
            "second": "post_feedforward_layernorm_2",
        }
        stored, router = f"{source}.experts", f"{source}.router"
        each = range(part.routed.count)
        fused = tuple(f"{stored}.{i}.gate_up_proj.weight" for i in each)
        return [
            *gated(f"{target}.always", f"{source}.mlp", part.always),
            *fused_experts(f"{target}.routed", stored, f"{router}.proj"),
            Entry(f"{target}.routed.up.weight", fused, Stacked(Same(), part.routed.count)),
            *experts(f"{target}.routed", stored, part.routed, PROJECTIONS, f"{router}.proj"),
            Entry(f"{target}.routed.factors", (f"{router}.per_expert_scale",)),
            Entry(f"{target}.judged.weight", (f"{router}.scale",), Affine(hidden_size**-0.5)),
            *(e for ours, theirs in norms.items() for e in norm(f"{target}.{ours}", f"{source}.{theirs}", bias=False)),
        ]

    return table


def _weights(model: ModelSpec) -> WeightTable:
    stack = model.trunk
    names = replace(_PLAIN, ffn=_network_weights(stack.hidden_size), qk_norm="")
    # Layers that read the keys of others may have unused matrices for keys.
    unread = tuple(
        rf"layers\.{i}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
        for i, block in enumerate(stack.blocks)
        if block.attention.reads is not None
    )
    table = decoder_table(model, replace(names, unread=(*names.unread, *unread)))
    entries = list(table.entries)
    if stack.layer_vectors is not None:
        entries += [
            Entry("decoder.layer_vectors.table", ("model.embed_tokens_per_layer.weight",)),
            *linear("decoder.layer_vectors.projection", "model.per_layer_model_projection", False),
            *norm("decoder.layer_vectors.norm", "model.per_layer_projection_norm", bias=False),
        ]
    if stack.versions is not None:
        for i in range(stack.versions.count - 1):
            entries += linear(f"decoder.versions.enter.{i}", f"model.altup_projections.{i}", False)
            entries += linear(f"decoder.versions.leave.{i}", f"model.altup_unembed_projections.{i}", False)
    for i, block in enumerate(stack.blocks):
        target, source = f"decoder.blocks.{i}", f"model.layers.{i}"
        if block.input is not None:
            entries += linear(f"{target}.input.gate", f"{source}.per_layer_input_gate", False)
            entries += linear(f"{target}.input.projection", f"{source}.per_layer_projection", False)
            entries += norm(f"{target}.input.norm", f"{source}.post_per_layer_input_norm", bias=False)
        if block.low_rank is not None:
            entries += linear(f"{target}.low_rank.left", f"{source}.laurel.linear_left", False)
            entries += linear(f"{target}.low_rank.right", f"{source}.laurel.linear_right", False)
            entries += norm(f"{target}.low_rank.norm", f"{source}.laurel.post_laurel_norm", bias=False)
        if block.factor:
            entries.append(Entry(f"{target}.factor", (f"{source}.layer_scalar",), default=1.0))
        if stack.versions is not None:
            own = f"{source}.altup"
            entries += norm(f"{target}.versions.norm", f"{own}.router_norm", bias=False)
            entries.append(Entry(f"{target}.versions.router", (f"{own}.modality_router.weight",)))
            entries.append(Entry(f"{target}.versions.predictions", (f"{own}.prediction_coefs.weight",)))
            entries.append(Entry(f"{target}.versions.corrections", (f"{own}.correction_coefs.weight",)))
            entries.append(Entry(f"{target}.versions.scale", (f"{own}.correct_output_scale",)))
    return replace(table, entries=tuple(entries))


def _family(
    name: str,
    architectures: tuple[str, ...],
    brings: str,
    ffn: Callable[[Any], FeedForward | list[FeedForward]],
    whole: Callable[[Any, ModelSpec], ModelSpec],
) -> Family:
    base = decoder(
        name,
        architectures,
        brings,
        attention=_attentions,
        ffn=ffn,
        norm=rms_in_float32,
        placement=lambda c, norm: Sandwich(norm, norm, norm, norm),
        embedding=lambda c: tokens(c, scale=c.hidden_size**0.5),
        head=lambda c: lm(c, softcap=c.final_logit_softcapping),
        refuse=_refuse,
        weights=_weights,
    )

    def spec(config: Any) -> ModelSpec:
        # transformers' own class does not say what layers may have separately.
        plain = config if isinstance(config, PublishedConfig) else published(config)
        return whole(plain, base.spec(plain))

    return replace(base, spec=spec)


FAMILIES = (
    _family(
        "Gemma 3n",
        ("Gemma3nForCausalLM", "Gemma3nTextModel"),
        "several versions of the stream (AltUp), low-rank paths, vectors per layer and token, shared keys and values",
        _third_networks,
        _third,
    ),
    _family(
        "Gemma 4",
        ("Gemma4ForCausalLM", "Gemma4TextModel", "Gemma4UnifiedForCausalLM", "Gemma4UnifiedTextModel"),
        "normed values, wider global heads, vectors per layer and token, shared keys and values, MoE beside a network",
        _fourth_networks,
        _fourth,
    ),
)
