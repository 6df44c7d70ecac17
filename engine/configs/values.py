"""Checks the numbers of a config.json before anything is built from them.

`transformers` makes lists with as many items as a config has layers, and parts are built from its numbers before a
weight is read. So this module finds invalid numbers by name, for any family.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError

_MOST_BYTES = 16 << 20  # maximum bytes of a config.json; published ones have some KiB

_LAYERS = (1, 10_000)
_HEADS = (1, 1 << 16)
_FEATURES = (1, 1 << 24)
_IDS = (1, 1 << 27)
_TOKENS = (1, 1 << 24)
_FROM_ZERO = (0, 1 << 24)
_LARGEST = 1e18

COUNTS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
         "num_encoder_layers", "num_decoder_layers", "num_hidden_groups",
         "num_feedforward_networks"), _LAYERS,
    ),
    "inner_group_num": (1, 100),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "head_ratio",
         "num_groups", "attention_heads", "num_global_key_value_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads"), _HEADS,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "n_routed_experts", "n_shared_experts",
         "moe_num_experts", "moe_num_shared_experts", "moe_k", "moe_top_k", "n_group", "topk_group",
         "num_shared_experts", "num_dense_layers", "top_k_experts"), (0, 1 << 16)),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "hidden_dim", "word_embed_proj_dim", "embedding_size",
         "input_embedding_size", "output_embedding_size", "d_kv", "head_dim", "d_ff", "intermediate_size", "ffn_dim",
         "n_inner", "dff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "moe_intermediate_size", "emb_dim",
         "intra_bottleneck_size", "shared_expert_intermediate_size", "expansion_ratio",
         "pooler_hidden_size", "relative_attention_num_buckets", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
         "qk_nope_head_dim", "v_head_dim", "intermediate_size_mlp", "projection_dim", "projection_size",
         "num_mel_bins", "num_buckets", "global_head_dim", "laurel_rank", "prefix_dense_intermediate_size"),
         _FEATURES,
    ),
    "num_channels": (1, 1 << 10),
    "num_rnn_layers": (0, 100),
    "max_width": (1, 1 << 7),
    "max_len": (1, 1 << 13),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size",
         "vocab_size_per_layer_input"), _IDS),
    "altup_num_inputs": (1, 1 << 6),
    **dict.fromkeys(
        ("max_position_embeddings", "max_source_positions", "max_target_positions", "n_positions", "n_ctx",
         "max_seq_len", "original_max_position_embeddings", "max_encoder_position_embeddings",
         "max_decoder_position_embeddings", "max_2d_position_embeddings", "global_block_size", "block_size",
         "num_global_tokens", "ngram",
         "global_attn_every_n_layers", "_sliding_window_pattern", "no_rope_layer_interval", "interleave_moe_layer_step",
         "attention_chunk_size"), _TOKENS,
    ),
    **dict.fromkeys(("relative_attention_max_distance", "relative_max_distance"), (1, 1 << 16)),
    **dict.fromkeys(("position_buckets", "max_relative_positions", "moe_layer_end_index"), (-1, 1 << 16)),
    **dict.fromkeys(
        ("type_vocab_size", "task_type_vocab_size", "max_window_layers", "decoder_sparse_step", "conv_kernel_size",
         "rotary_dim", "sliding_window_pattern", "first_k_dense_replace", "moe_layer_start_index", "moe_layer_interval",
         "shared_intermediate_size", "local_radius", "num_random_blocks", "num_kv_shared_layers",
         "hidden_size_per_layer_input"), _FROM_ZERO,
    ),
}  # fmt: skip
"""Integers, and the range of each."""

NUMBERS: dict[str, str] = {
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "attn_logit_softcapping",
         "final_logit_softcapping", "query_pre_attn_scalar", "rope_theta", "rotary_emb_base", "global_rope_theta",
         "local_rope_theta", "rope_local_base_freq", "embedding_multiplier", "attention_multiplier",
         "residual_multiplier", "logits_scaling", "logit_scale", "floor_scale"), "above 0",
    ),
    **dict.fromkeys(
        ("clip_qkv", "rotary_pct", "partial_rotary_factor", "router_jitter_noise", "moe_norm_min", "swiglu_alpha",
         "swiglu_limit", "routed_scaling_factor", "attn_scale"), "of at least 0",
    ),
}  # fmt: skip
"""Numbers that need not be integers, and the minimum of each."""

SWITCHES = ("share_att_key",)
"""True or false."""

_NAMES_OF_OTHERS = ("id2label", "label2id", "task_specific_params")  # objects with their own keys

# A layer needs a head, and a head a feature: without these, nothing can be built. All others may be null, which means a
# default.
_NEEDED = frozenset(
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"}
    | {"num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"}
    | {"num_encoder_layers", "num_decoder_layers", "num_encoder_attention_heads", "num_decoder_attention_heads"}
    | {"ngram", "num_buckets", "relative_max_distance"}
    | {"attention_heads", "dff", "src_vocab_size", "tgt_vocab_size"}
    | {"max_encoder_position_embeddings", "max_decoder_position_embeddings", "max_2d_position_embeddings"}
    | {"local_radius", "global_block_size", "num_random_blocks", "num_global_tokens"}
    | {"hidden_size", "n_embd", "d_model", "dim", "vocab_size", "d_kv", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"}
    | {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"}
    | {"moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"}
    | {"kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"}
    | {"moe_num_experts", "moe_k", "moe_layer_start_index", "moe_layer_end_index", "num_experts_per_tok"}
    | {"routed_scaling_factor", "router_jitter_noise", "moe_norm_min", "swiglu_alpha", "swiglu_limit"}
    | {"num_rnn_layers", "max_width", "max_len"}
    | {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
)


def read_values(file: Path) -> dict[str, Any]:
    """The content of a config.json. Raises ModelLoadError if the file cannot be read, or is not a JSON object."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ModelLoadError(f"{file} cannot be read: it has more than {_MOST_BYTES} bytes.")
        values = json.loads(file.read_text(encoding="utf-8"))
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{file} cannot be read: it contains a {type(values).__name__}, not an object.")
    return values


def check_values(file: Path, values: Mapping[str, Any], *, known: bool) -> None:
    """Refuse impossible numbers and other unusable values. `known`: whether the architecture is supported; for others,
    only too large values are refused here. Raises ModelLoadError: names the field, its value and the allowed range."""
    named = values.get("architectures")
    if not (named is None or (isinstance(named, list) and all(isinstance(name, str) for name in named))):
        raise ModelLoadError(f"{file}: architectures must be a list of names, got {_shown(named)}.")
    for holder, name, value in _fields(values):
        if _excused(name, value, holder):
            continue
        if name in COUNTS:
            low, high = COUNTS[name]
            whole = isinstance(value, int) and not isinstance(value, bool)
            good = low <= value <= high if whole else value is None and name not in _NEEDED
            if not good and (known or (whole and value > high)):
                raise ModelLoadError(f"{file}: {name} must be an integer from {low} to {high}, got {_shown(value)}.")
        elif name == "quantization_config" and not isinstance(value, Mapping | None):
            raise ModelLoadError(
                f'{file}: {name} must be an object that describes the format of the weights, such as {{"quant_method": '
                f'"awq", "bits": 4, "group_size": '
                f"128}}, got {_shown(value)}. Remove it if the weights are not quantized."
            )
        elif name in SWITCHES and known and not isinstance(value, bool | None):
            raise ModelLoadError(f"{file}: {name} must be true or false, got {_shown(value)}.")
        elif name in NUMBERS and known and not (value is None and name not in _NEEDED):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            # NaN is neither.
            if not (number and 0 <= value <= _LARGEST and (value > 0 or NUMBERS[name] != "above 0")):
                raise ModelLoadError(
                    f"{file}: {name} must be a number {NUMBERS[name]}, and at most {_LARGEST:g}, got {_shown(value)}."
                )


def _excused(name: str, value: Any, holder: Mapping[str, Any]) -> bool:
    """Whether a setting may have a value that is forbidden for most families, given the settings beside it."""
    match name:
        case "rms_norm_eps":
            return value is None and holder.get("layer_norm_eps") is not None
        case "moe_intermediate_size":
            return value is None and holder.get("enable_moe_block") is False
        case "num_heads" | "num_groups" if "depths" in holder and isinstance(
            value, list
        ):  # one for each stage of an encoder
            low, high = COUNTS[name]
            return all(type(each) is int and low <= each <= high for each in value)
        case "intermediate_size" if holder.get("model_type") == "gemma3n_text" and isinstance(value, list):
            low, high = COUNTS[name]
            return all(type(each) is int and low <= each <= high for each in value)
    return False


def _fields(values: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """All names with their values and the object that holds them. The values come from JSON, so nesting is
    finite."""
    left: list[Any] = [values]
    while left:
        found = left.pop()
        if isinstance(found, Mapping):
            yield from ((found, name, value) for name, value in found.items())
            left += (value for name, value in found.items() if name not in _NAMES_OF_OTHERS)
        elif isinstance(found, list):
            left += found


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."
