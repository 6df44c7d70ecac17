"""Decoders like LLaMA: rows with the differences of each family, in its parts and in the names of its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    attention,
    dense,
    dense_network,
    gated_network,
    layer_window,
    layer_windows,
    linear,
    lm,
    rms,
    rms_in_float32,
    rotary,
    routed,
    sliding_window,
    tempered,
    tokens,
    windowed,
    with_head,
)
from engine.model.families.decoder import decoder, pairs
from engine.model.families.names import DecoderNames, decoder_table
from engine.model.normalisation import Norm
from engine.model.spec import (
    AfterRotation,
    AfterSublayer,
    Attention,
    Dense,
    EachHead,
    FeedForward,
    Gated,
    ModelSpec,
    Parallel,
    PerHead,
    Placement,
    Pre,
    Sandwich,
    WholeProjection,
    Xielu,
)
from engine.model.table import Affine, Entry, Joined, Same, Swapped, Transform, WeightTable

UP_DOWN = ("mlp.up_proj", "mlp.down_proj")
SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _mistral(c: Any) -> list[Attention]:
    # transformers treats a Mistral config with layer_types as a Ministral's.
    by_layer = c.model_type in ("ministral", "cwm")
    windows = layer_windows(c) if by_layer else [sliding_window(c.sliding_window)] * c.num_hidden_layers
    return windowed(c, windows, position=rotary(c), temperature=tempered(c) if c.model_type == "ministral3" else None)


def _smollm3(c: Any) -> list[Attention]:
    """Every few layers, one has no positions."""
    if len(c.no_rope_layers) < c.num_hidden_layers:
        raise UnsupportedModelError(
            "no_rope_layers of the config must have one entry for each of num_hidden_layers "
            f"{c.num_hidden_layers}, but has {len(c.no_rope_layers)}."
        )
    windows = layer_windows(c) if c.use_sliding_window else [None] * c.num_hidden_layers
    return [
        attention(c, position=rotary(c) if rotates else None, sees=window, bias=c.attention_bias)
        for rotates, window in zip(c.no_rope_layers, windows, strict=False)
    ]


def _ernie(c: Any) -> Attention:
    helium = c.model_type == "helium"
    features = c.num_attention_heads * c.head_dim
    if helium and features != c.hidden_size:
        raise UnsupportedModelError(
            f"num_attention_heads times head_dim must be hidden_size {c.hidden_size} for Helium, got {features}."
        )
    # PaddleOCR-VL's language part turns pairs of halves.
    position = rotary(c, interleaved=c.model_type != "paddleocr_vl_text", in_float32=not helium)
    qkv_bias, out_bias = (c.attention_bias, False) if helium else (c.use_bias, c.use_bias)
    return attention(c, position=position, qkv_bias=qkv_bias, out_bias=out_bias)


def exaone4(c: Any) -> list[Attention]:
    """Layers with a window have rotary positions. If there are such layers, the others have none."""
    return [
        attention(
            c,
            position=rotary(c) if window or c.sliding_window is None else None,
            sees=window,
            qk_norm=PerHead(rms(c)),
        )
        for window in layer_windows(c)
    ]


def _command_r(c: Any) -> list[Attention]:
    """In R7B and A (`cohere2`), most layers have windows, and the others have no positions."""
    second = c.model_type == "cohere2"
    return [
        attention(
            c,
            position=rotary(c, interleaved=True, in_float32=True) if window or not second else None,
            sees=window,
            qk_norm=EachHead(Norm("layer", c.layer_norm_eps)) if getattr(c, "use_qk_norm", False) else None,
            bias=c.attention_bias,
        )
        for window in (layer_windows(c) if second else [None] * c.num_hidden_layers)
    ]


def _olmo2(c: Any) -> list[Attention]:
    """In OLMo 3 most layers have windows; FlexOlmo's have experts, see `_olmo2_network`."""
    layer_types = c.layer_types if c.model_type == "olmo3" else ["full_attention"] * c.num_hidden_layers
    return [
        attention(
            c,
            position=rotary(c, layer_type=layer_type, in_float32=True),
            sees=layer_window(c, layer_type),
            qk_norm=WholeProjection(rms_in_float32(c)),
            bias=c.attention_bias,
        )
        for layer_type in layer_types
    ]


def _olmo2_network(c: Any) -> FeedForward:
    network = gated_network(c)
    if c.model_type != "flex_olmo":
        return network
    return routed(network, count=c.num_experts, active=c.num_experts_per_tok, normalize=c.norm_topk_prob)


def _gemma_norm(c: Any) -> Norm:
    return Norm("rms", c.rms_norm_eps, unit_offset=True)


def _causal_alone(c: Any, family: str) -> None:
    # Gemma 2 in `transformers` masks later tokens despite this setting, but not with every kernel.
    if getattr(c, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            f"use_bidirectional_attention of the config must be false for {family}, for which bidirectional attention "
            f"is not defined; got {c.use_bidirectional_attention}."
        )


def _gemma(c: Any) -> Attention | list[Attention]:
    """VaultGemma has Gemma 2's windows and caps."""
    if c.model_type == "vaultgemma":
        return _capped(c, layer_windows(c))
    return attention(c, position=rotary(c), bias=c.attention_bias)


def _capped(c: Any, windows: list[Window | None]) -> list[Attention]:
    return windowed(
        c,
        windows,
        scale=c.query_pre_attn_scalar**-0.5,
        position=rotary(c),
        bias=c.attention_bias,
        softcap=c.attn_logit_softcapping,
    )


def _gemma_weights(model: ModelSpec) -> WeightTable:
    table = decoder_table(model, DecoderNames())
    # VaultGemma's name of the second norm.
    others = (
        replace(entry, sources=tuple(n.replace("post_attention", "pre_feedforward") for n in entry.sources))
        for entry in table.entries
        if entry.target.endswith(".ffn.before.weight")
    )
    return replace(table, entries=(*table.entries, *others))


def _gemma3(c: Any) -> list[Attention]:
    """A rotary base for each kind of layer."""
    if c.attn_logit_softcapping is not None:
        # The reference reads the setting and does not cap anything; the meaning in such a checkpoint is unclear.
        raise UnsupportedModelError(
            "attn_logit_softcapping of the config must be null for Gemma 3, which normalises queries and keys "
            f"instead; got {c.attn_logit_softcapping}."
        )
    causal = not c.use_bidirectional_attention
    return [
        attention(
            c,
            scale=c.query_pre_attn_scalar**-0.5,
            position=rotary(c, layer_type=layer_type),
            causal=causal,
            sees=layer_window(c, layer_type, causal=causal),
            qk_norm=PerHead(_gemma_norm(c)),
            bias=c.attention_bias,
        )
        for layer_type in c.layer_types
    ]


def _nanochat_norm(c: Any) -> Norm:
    return Norm("rms", c.rms_norm_eps, weight=False)


def _other_way_round(part: Attention) -> Transform:
    """With the halves of each head's queries and keys swapped, a rotation goes the other way."""
    heads = (part.heads, part.kv_heads, part.kv_heads)
    return Joined(tuple(n * part.head_dim for n in heads), (Swapped(part.heads), Swapped(part.kv_heads), Same()))


def _glm_norms(placement: Placement) -> tuple[str, ...]:
    names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return names if isinstance(placement, Sandwich) else names[::2]


def _xielu_weights(target: str, source: str, part: FeedForward) -> list[Entry]:
    if not isinstance(part, Xielu):
        assert isinstance(part, Dense)
        return dense(target, source, part, UP_DOWN)
    return [
        *linear(f"{target}.up", f"{source}.mlp.up_proj", part.bias),
        *linear(f"{target}.down", f"{source}.mlp.down_proj", part.bias),
        Entry(f"{target}.positive", (f"{source}.mlp.act_fn.alpha_p",)),
        Entry(f"{target}.negative", (f"{source}.mlp.act_fn.alpha_n",)),
        # These are only constants.
        Entry(f"{target}.linear", (f"{source}.mlp.act_fn.beta",), default=0.5),
        Entry(f"{target}.least", (f"{source}.mlp.act_fn.eps",), default=-1e-6),
    ]


FAMILIES = (
    # Pre-norm RMS blocks, rotary positions, grouped-query attention, gated SiLU (arXiv:2302.13971).
    decoder(
        "LLaMA",
        pairs("Llama"),
        "rotary positions with every RoPE scaling, grouped-query attention, gated SiLU, RMS norms",
        attention=lambda c: attention(c, position=rotary(c), bias=c.attention_bias),
        ffn=lambda c: gated_network(c, bias=c.mlp_bias),
    ),
    decoder(
        "Seed-OSS",
        pairs("SeedOss"),
        "optional biases for queries, keys and values, and for the attention output",
        attention=lambda c: attention(c, position=rotary(c), qkv_bias=c.attention_bias, out_bias=c.attention_out_bias),
        ffn=lambda c: gated_network(c, bias=c.mlp_bias),
    ),
    # Also Qwen2.5 (arXiv:2407.10671).
    decoder(
        "Qwen2",
        pairs("Qwen2"),
        "biases only for queries, keys and values; optional sliding windows in the upper layers",
        attention=lambda c: windowed(c, layer_windows(c), position=rotary(c), qkv_bias=True),
    ),
    # arXiv:2505.09388
    decoder(
        "Qwen3",
        pairs("Qwen3"),
        "QK norms per head",
        attention=lambda c: windowed(
            c, layer_windows(c), position=rotary(c), qk_norm=PerHead(rms(c)), bias=c.attention_bias
        ),
    ),
    # arXiv:2310.06825
    decoder(
        "Mistral, Ministral and CWM",
        pairs("Mistral", "Ministral", "Ministral3", "Cwm"),
        "sliding windows in all layers or in some; Ministral 3: queries scaled by position",
        attention=_mistral,
        ffn=lambda c: gated_network(c, bias=c.model_type == "cwm" and c.mlp_bias),
    ),
    decoder(
        "SmolLM3",
        pairs("SmolLM3"),
        "layers without positions between the others",
        attention=_smollm3,
        ffn=lambda c: gated_network(c, bias=c.mlp_bias),
    ),
    # AFM; squared ReLU: arXiv:2109.08668.
    decoder(
        "Arcee and Jais 2",
        pairs("Arcee", "Jais2"),
        "plain feed-forward network with squared ReLU; Jais 2: layer norms",
        attention=lambda c: attention(c, position=rotary(c), bias=c.attention_bias),
        ffn=lambda c: dense_network(c, bias=c.mlp_bias),
        norm=lambda c: Norm("layer", c.layer_norm_eps, bias=True) if c.model_type == "jais2" else rms(c),
        names=DecoderNames(ffn=UP_DOWN),
    ),
    decoder(
        "ERNIE 4.5 and Helium",
        pairs("Ernie4_5", "Helium"),
        "LLaMA's blocks with interleaved rotary positions",
        attention=_ernie,
        ffn=lambda c: gated_network(c, bias=c.mlp_bias if c.model_type == "helium" else c.use_bias),
        norm=lambda c: Norm("rms", c.rms_norm_eps, in_float32=c.model_type == "helium"),
    ),
    # arXiv:2402.00838. The eps is not a setting of the config.
    decoder(
        "OLMo",
        pairs("Olmo"),
        "norms without weights, clipped projections",
        attention=lambda c: attention(c, position=rotary(c, in_float32=True), bias=c.attention_bias, clip=c.clip_qkv),
        norm=lambda c: Norm("layer", 1e-5, weight=False),
    ),
    # arXiv:2501.00656
    decoder(
        "OLMo 2 and 3, FlexOlmo",
        pairs("Olmo2", "Olmo3", "FlexOlmo"),
        "norms after the sublayers, QK norms over the whole projection; FlexOlmo: MoE",
        attention=_olmo2,
        ffn=_olmo2_network,
        norm=rms_in_float32,
        placement=lambda c, norm: AfterSublayer(norm, norm),
        names=DecoderNames(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    ),
    # arXiv:2507.11407
    decoder(
        "EXAONE 4",
        pairs("Exaone4"),
        "norms after the sublayers, QK norms per head, layers without positions",
        attention=exaone4,
        placement=lambda c, norm: AfterSublayer(norm, norm),
        names=DecoderNames(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    ),
    # Also Phi-4 (arXiv:2404.14219).
    decoder(
        "Phi-3",
        pairs("Phi3"),
        "fused projections, partial rotary positions, longrope",
        attention=lambda c: attention(c, position=rotary(c, partial=True), sees=sliding_window(c.sliding_window)),
        names=DecoderNames(qkv="self_attn.qkv_proj", ffn=("mlp.gate_up_proj", "mlp.down_proj")),
    ),
    # arXiv:2402.16819. The reference also adds 1 to norms in the weights' own format.
    decoder(
        "Nemotron",
        pairs("Nemotron"),
        "layer norms stored as deviations from 1, squared ReLU, partial rotary positions",
        attention=lambda c: attention(c, position=rotary(c, partial=True), bias=c.attention_bias),
        ffn=lambda c: dense_network(c, bias=c.mlp_bias),
        norm=lambda c: Norm("layer", c.norm_eps, bias=True),
        names=DecoderNames(ffn=UP_DOWN, norm_weight=Affine(offset=1.0)),
    ),
    # arXiv:2504.00698
    decoder(
        "Command R",
        pairs("Cohere", "Cohere2"),
        "parallel gated blocks, scaled logits; full-attention layers without positions",
        attention=_command_r,
        norm=lambda c: Norm("layer", c.layer_norm_eps),
        placement=lambda c, norm: Parallel((norm,)),
        head=lambda c: lm(c, logit_scale=1.0 if c.logit_scale is None else c.logit_scale),
    ),
    # arXiv:2402.19173
    decoder(
        "StarCoder2",
        pairs("Starcoder2"),
        "rotary positions with layer norms and a plain feed-forward network",
        attention=lambda c: attention(c, position=rotary(c), sees=sliding_window(c.sliding_window), bias=c.use_bias),
        ffn=lambda c: dense_network(c, bias=c.use_bias),
        norm=lambda c: Norm("layer", c.norm_epsilon, bias=True),
        names=DecoderNames(ffn=("mlp.c_fc", "mlp.c_proj")),
    ),
    # arXiv:2403.08295; VaultGemma: arXiv:2510.15001.
    decoder(
        "Gemma",
        pairs("Gemma", "VaultGemma"),
        "norms with weights around 0, scaled embeddings; VaultGemma: Gemma 2's windows and soft caps",
        attention=_gemma,
        ffn=lambda c: Gated(
            c.intermediate_size,
            activation(c.hidden_activation if c.model_type == "vaultgemma" else c.hidden_act),
        ),
        norm=_gemma_norm,
        embedding=lambda c: tokens(c, scale=c.hidden_size**0.5),
        head=lambda c: lm(c, softcap=c.final_logit_softcapping if c.model_type == "vaultgemma" else None),
        refuse=lambda c: _causal_alone(c, "Gemma"),
        weights=_gemma_weights,
    ),
    # arXiv:2408.00118
    decoder(
        "Gemma 2",
        pairs("Gemma2"),
        "alternating sliding windows, sandwich norms, soft caps, scaled embeddings",
        attention=lambda c: _capped(c, [layer_window(c, layer_type) for layer_type in c.layer_types]),
        ffn=lambda c: Gated(c.intermediate_size, activation(c.hidden_activation)),
        norm=_gemma_norm,
        placement=lambda c, norm: Sandwich(norm, norm, norm, norm),
        embedding=lambda c: tokens(c, scale=c.hidden_size**0.5),
        head=lambda c: lm(c, softcap=c.final_logit_softcapping),
        refuse=lambda c: _causal_alone(c, "Gemma 2"),
        names=DecoderNames(norms=SANDWICH),
    ),
    # arXiv:2503.19786
    decoder(
        "Gemma 3 text",
        ("Gemma3ForCausalLM", "Gemma3TextModel"),
        "two rotary bases, QK norms per head, sliding windows in most layers",
        attention=_gemma3,
        ffn=lambda c: Gated(c.intermediate_size, activation(c.hidden_activation)),
        norm=_gemma_norm,
        placement=lambda c, norm: Sandwich(norm, norm, norm, norm),
        embedding=lambda c: tokens(c, scale=c.hidden_size**0.5),
        head=lambda c: lm(c, softcap=c.final_logit_softcapping),
        names=DecoderNames(norms=SANDWICH),
    ),
    # Rotation in the other direction, and norms of queries and keys after it.
    decoder(
        "nanochat",
        pairs("NanoChat"),
        "norms without weights, also for embeddings, queries and keys; capped logits",
        attention=lambda c: attention(
            c, position=rotary(c), qk_norm=AfterRotation(_nanochat_norm(c)), bias=c.attention_bias
        ),
        ffn=lambda c: dense_network(c, bias=False),
        norm=_nanochat_norm,
        embedding=lambda c: tokens(c, norm=_nanochat_norm(c)),
        head=lambda c: lm(c, softcap=c.final_logit_softcapping),
        names=DecoderNames(qkv_form=_other_way_round, ffn=("mlp.fc1", "mlp.fc2")),
    ),
    # Norms before each sublayer (`glm`), or before and after (arXiv:2406.12793).
    decoder(
        "GLM-4",
        pairs("Glm", "Glm4"),
        "partial and interleaved rotary positions, sandwich norms",
        attention=lambda c: attention(
            c,
            position=rotary(c, partial=True, interleaved=True),
            qkv_bias=c.model_type != "glm_ocr_text" and c.attention_bias,
        ),
        placement=lambda c, norm: Pre(norm, norm) if c.model_type == "glm" else Sandwich(norm, norm, norm, norm),
        names=DecoderNames(norms=_glm_norms, ffn=("mlp.gate_up_proj", "mlp.down_proj"), guesses=True),
    ),
    # arXiv:2509.14233
    decoder(
        "Apertus",
        pairs("Apertus"),
        "plain feed-forward network with xIELU (learned slopes), QK norms",
        attention=lambda c: attention(c, position=rotary(c), qk_norm=PerHead(rms(c)), bias=c.attention_bias),
        ffn=lambda c: Xielu(c.intermediate_size) if c.hidden_act == "xielu" else dense_network(c, bias=False),
        names=DecoderNames(norms=("attention_layernorm", "feedforward_layernorm"), ffn=_xielu_weights),
    ),
    # arXiv:2402.17834
    decoder(
        "StableLM",
        pairs("StableLm"),
        "partial rotary positions, layer norms, optional parallel blocks",
        attention=lambda c: attention(
            c,
            head_dim=c.hidden_size // c.num_attention_heads,
            position=rotary(c, c.hidden_size // c.num_attention_heads, partial=True),
            qkv_bias=c.use_qkv_bias,
            qk_norm=EachHead(Norm("layer", c.layer_norm_eps)) if c.qk_layernorm else None,
        ),
        norm=lambda c: Norm("layer", c.layer_norm_eps, bias=True),
        placement=lambda c, norm: Parallel((norm,)) if c.use_parallel_residual else Pre(norm, norm),
        names=DecoderNames(
            qk_norm="self_attn.{}_layernorm.norms.{head}",
            unread=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        ),
    ),
    # arXiv:2306.11644
    decoder(
        "Phi",
        pairs("Phi"),
        "parallel blocks with one norm, partial rotary positions, a bias in the head",
        attention=lambda c: attention(
            c,
            position=rotary(c, partial=True),
            qk_norm=PerHead(Norm("layer", c.layer_norm_eps, bias=True)) if c.qk_layernorm else None,
            bias=True,
        ),
        ffn=dense_network,
        norm=lambda c: Norm("layer", c.layer_norm_eps, bias=True),
        placement=lambda c, norm: Parallel((norm,)),
        head=lambda c: lm(c, bias=with_head(c)),
        names=DecoderNames(
            final_norm="final_layernorm",
            out="self_attn.dense",
            qk_norm="self_attn.{}_layernorm",
            ffn=("mlp.fc1", "mlp.fc2"),
            unread=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        ),
    ),
)
