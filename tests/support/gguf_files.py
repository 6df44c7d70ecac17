"""Tiny GGUF files, written by the `gguf` library as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.family_shape import FamilyShape, build_reference

Change = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """An architecture.

    Attributes:
        name: llama.cpp's.
        shape: of the model in transformers.
        write: metadata of its own.
        there, back: what the converter does to a tensor, and undoes, by a part of transformers' name.
        transformers: it reads such files itself.
    """

    name: str
    shape: FamilyShape
    write: Callable[[Any, Any], None] = lambda writer, config: None
    there: Mapping[str, Change] = field(default_factory=dict)
    back: Mapping[str, Change] = field(default_factory=dict)
    transformers: bool = True


def interleaved(heads: str) -> Change:
    """Rows of a head: the first of the one half, the first of the other, and so on."""

    def change(config: Any, tensor: Tensor) -> Tensor:
        count = getattr(config, heads)
        half = tensor.shape[0] // count // 2
        order = [head * 2 * half + part * half + row for head in range(count) for row in range(half) for part in (0, 1)]
        return tensor[order]

    return change


def parted(heads: str) -> Change:
    """The opposite."""

    def change(config: Any, tensor: Tensor) -> Tensor:
        order = interleaved(heads)(config, torch.arange(tensor.shape[0]))
        return tensor[torch.argsort(order)]

    return change


def write_file(path: Path, kind: Kind, *, formats: Sequence[str] = ("Q8_0",), tokenizer: Mapping[str, Any] = {}) -> Any:
    """A file of this kind; gives the model of transformers with the numbers that the file holds.

    Args:
        formats: of matrices, in turn; what has other rows than blocks is float16 or float32.
        tokenizer: more metadata, by whole names.
    """
    model = build_reference(kind.shape)
    held = write_numbers(path, kind, model.config, model.state_dict(), formats=formats, tokenizer=tokenizer)
    missing = model.load_state_dict(_unstacked(held, model.state_dict()), strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    assert not missing.unexpected_keys
    model.tie_weights()
    return model


def write_numbers(
    path: Path,
    kind: Kind,
    config: Any,
    state: Mapping[str, Tensor],
    *,
    formats: Sequence[str],
    tokenizer: Mapping[str, Any],
) -> dict[str, Tensor]:
    """A file of this kind with the tensors of a model of transformers; gives the numbers that the file holds."""
    import gguf

    config.allow_global_per_layer_attribute_access = True  # where layers differ
    writer = gguf.GGUFWriter(str(path), kind.name)
    settings = {"num_hidden_layers": writer.add_block_count, "max_position_embeddings": writer.add_context_length,
                "hidden_size": writer.add_embedding_length, "intermediate_size": writer.add_feed_forward_length,
                "num_attention_heads": writer.add_head_count, "rms_norm_eps": writer.add_layer_norm_rms_eps,
                "layer_norm_eps": writer.add_layer_norm_eps, "layer_norm_epsilon": writer.add_layer_norm_eps,
                "num_key_value_heads": writer.add_head_count_kv, "vocab_size": writer.add_vocab_size}  # fmt: skip
    for name, add in settings.items():
        if isinstance(value := getattr(config, name, None), int | float) or (value and name == "intermediate_size"):
            add(value)
    writer.add_name("tiny")
    kind.write(writer, config)
    for name, value in tokenizer.items():
        put(writer, name, value)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name), config.num_hidden_layers
    )
    held: dict[str, Tensor] = {}
    stored = _stacked(state)
    for number, (name, tensor) in enumerate(stored.items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        pieces = []
        for ending, piece in _pieces(name, tensor, config, fused=kind.name == "gemma4"):
            lies = changed(kind.there, config, name, piece).contiguous()
            wide = lies.dim() > 1 and lies.shape[-1] > 1
            format = gguf.GGMLQuantizationType[formats[number % len(formats)] if wide else "F32"]
            if lies.shape[-1] % gguf.GGML_QUANT_SIZES[format][0]:
                format = gguf.GGMLQuantizationType.F16
            data = gguf.quantize(lies.numpy(), format)
            writer.add_tensor(tensor_name(names, name, ending), data, raw_dtype=format)
            read = torch.from_numpy(np.array(gguf.dequantize(data, format))).view(lies.shape)
            pieces.append(changed(kind.back, config, name, read))
        held[name] = torch.cat(pieces, dim=-2) if len(pieces) > 1 else pieces[0]
        if name.endswith("in_proj_qkvz.weight"):
            held[name] = held[name][torch.argsort(_by_kind(config))]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def put(writer: Any, name: str, value: Any) -> None:
    """Metadata of any kind."""
    adders = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    adders.get(type(value), writer.add_array)(name, value)


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norms that heads have of their own, as one matrix."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        stem, norms, _ = name.partition(".norms.")
        if re.search(r"altup_\w*projections\.\d", name):
            stem, norms = name.rsplit(".", 2)[0], ".norms."
        found.setdefault(f"{stem}.weight" if norms else name, []).append(tensor)
    return {name: torch.stack(rows) if len(rows) > 1 else rows[0] for name, rows in found.items()}


def _unstacked(tensors: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """The opposite, for a model with tensors of these names."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if name not in names and f"{stem}.0.weight" in names:
            found |= {f"{stem}.{place}.weight": matrix for place, matrix in enumerate(tensor)}
            continue
        apart = name not in names and f"{stem}.norms.0.weight" in names
        found |= {f"{stem}.norms.{head}.weight": row for head, row in enumerate(tensor)} if apart else {name: tensor}
    return found


def _pieces(name: str, tensor: Tensor, config: Any, *, fused: bool) -> Iterator[tuple[str, Tensor]]:
    """Experts' gates and ups are stored apart, unless they are `fused`."""
    if name.endswith("gate_up_proj") and fused:
        yield "ffn_gate_up_exps", tensor
    elif name.endswith("gate_up_proj"):
        half = tensor.shape[1] // 2
        yield "ffn_gate_exps", tensor[:, :half]
        yield "ffn_up_exps", tensor[:, half:]
    elif name.endswith("shared_mlp.input_linear.weight"):
        half, ending = len(tensor) // 2, "_shexp" if config.num_local_experts else ""
        yield f"ffn_gate{ending}", tensor[:half]
        yield f"ffn_up{ending}", tensor[half:]
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        yield "ffn_down", tensor
    elif name.endswith("in_proj_qkvz.weight"):
        first = len(tensor) - config.linear_num_value_heads * config.linear_value_head_dim
        yield "attn_qkv", tensor[_by_kind(config)[:first]]
        yield "attn_gate", tensor[_by_kind(config)[first:]]
    else:
        yield "", tensor


def _by_kind(config: Any) -> Tensor:
    """The rows of Qwen3-Next's queries, keys, values and gates, where each kind is together."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    rows = torch.arange(keys * 2 * (size + values)).view(keys, -1)
    return torch.cat([part.flatten() for part in rows.split([size, size, values, values], dim=1)])


def changed(changes: Mapping[str, Change], config: Any, name: str, tensor: Tensor) -> Tensor:
    for part, change in changes.items():
        if part in name:
            return change(config, tensor)
    return tensor


def tensor_name(names: Any, name: str, ending: str) -> str:
    layer = next((part for part in name.split(".") if part.isdigit()), None)
    if ending:
        return f"blk.{layer}.{ending}.weight"
    if name.endswith(("experts.down_proj",)):
        return f"blk.{layer}.ffn_down_exps.weight"
    if name.endswith(("router.scale", "per_expert_scale")):
        return f"blk.{layer}.{'ffn_gate_inp' if name.endswith('router.scale') else 'ffn_down_exps'}.scale"
    for end, stored in _ENDINGS.items():
        if name.endswith(end):
            return f"blk.{layer}.{stored}"
    if ".mixer." in name or ".norm_f." in name or name.endswith((f"{layer}.norm.weight", "embeddings.weight")):
        name = name.replace("model.", "backbone.", 1)
    stem, _, last = name.rpartition(".")
    if last == "expert_bias":
        stem, last = name, "bias"
    elif last not in ("weight", "bias"):
        stem, last = name, "weight"
    if name.endswith(_UNENDED) and (whole := names.get_name(name)) is not None:
        return str(whole)
    found = names.get_name(stem)
    assert found is not None, name
    return f"{found}.{last}"


_UNENDED = (".A_log", ".D", ".pre_ff_layernorm.weight")
"""llama.cpp writes these without an ending, the last one only in some architectures."""
_ENDINGS = {
    "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", ".D": "ssm_d", "e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight", "mixer.experts.up_proj": "ffn_up_exps.weight",
}  # fmt: skip
_ROWS = {"q_proj": interleaved("num_attention_heads"), "k_proj": interleaved("num_key_value_heads")}
_BACK = {"q_proj": parted("num_attention_heads"), "k_proj": parted("num_key_value_heads")}
_LIFTED: dict[str, Change] = {"norm": lambda config, tensor: tensor + 1}
_LOWERED: dict[str, Change] = {"norm": lambda config, tensor: tensor - 1}
_TURN: dict[str, Change] = {
    f"{name}.weight": lambda config, tensor: tensor.t() for name in ("c_attn", "c_proj", "c_fc")
}
_FLAT: dict[str, Change] = {"shared_expert_gate": lambda config, tensor: tensor[0]}
_ROW: dict[str, Change] = {"shared_expert_gate": lambda config, tensor: tensor[None]}
_TAPS: dict[str, Change] = {"conv.conv": lambda config, tensor: tensor.squeeze(1)}
_UNTAPS: dict[str, Change] = {"conv.conv": lambda config, tensor: tensor.unsqueeze(1)}
_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip


def _shape(architecture: str, **settings: Any) -> FamilyShape:
    return FamilyShape(architecture, _SIZES | settings)


def _theta(writer: Any, config: Any) -> None:
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _head_dim(writer: Any, config: Any) -> None:
    _theta(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)


def _scaling(kind: str) -> Any:
    import gguf

    return gguf.RopeScalingType(kind)


def _global_factor(config: Any) -> float | None:
    factor: float | None = (config.rope_parameters.get("full_attention") or {}).get("factor")
    return factor


def _llama(writer: Any, config: Any) -> None:
    _theta(writer, config)
    settings = config.rope_parameters
    if settings["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama_3_divisors(config))
    elif settings["rope_type"] != "default":
        writer.add_rope_scaling_type(_scaling(settings["rope_type"]))
        writer.add_rope_scaling_factor(settings["factor"])
        if "original_max_position_embeddings" in settings:
            writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)


def _llama_3_divisors(config: Any) -> Any:
    """What transformers makes of the frequencies, as what they are divided by."""
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 16, 2).double() / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (plain / scaled.double()).float().numpy()


def _mixtral(writer: Any, config: Any) -> None:
    _llama(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _experts(writer: Any, config: Any) -> None:
    (_head_dim if config.model_type == "qwen3_moe" else _theta)(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _gemma(writer: Any, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type != "gemma":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    if (factor := _global_factor(config)) is not None:
        writer.add_rope_scaling_type(_scaling("linear"))
        writer.add_rope_scaling_factor(factor)


def _gemma_layers(writer: Any, config: Any) -> None:
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3n_text":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        normal = torch.distributions.normal.Normal(0, 1)
        shares = torch.tensor(config.activation_sparsity_pattern)
        writer.add_activation_sparsity_scale([normal.icdf(share).item() for share in shares])
        return
    own = config.to_dict()["per_layer_config"]
    wide = next(iter(own.values()))["head_dim"]
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(config.head_dim)
    heads = [own.get(str(i), {}).get("num_key_value_heads", config.num_key_value_heads) for i in range(len(windowed))]
    if len(set(heads)) > 1:
        writer.add_head_count_kv(heads)
    turning = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * wide / 2)
    factors = [1.0] * turning + [1e30] * (wide // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    if config.use_double_wide_mlp:
        first = len(windowed) - config.num_kv_shared_layers
        writer.add_feed_forward_length(
            [config.intermediate_size * (1 if layer < first else 2) for layer in range(len(windowed))]
        )
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _gemma_embedding(writer: Any, config: Any) -> None:
    import gguf

    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.to_dict()["sliding_window"])  # as the config has it, not as the class reads it
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    for name, matrix in dense_matrices(config).items():
        writer.add_dense_features_dims(name, matrix.shape[1], matrix.shape[0])
        writer.add_tensor(f"{name}.weight", matrix.numpy())


def dense_matrices(config: Any) -> dict[str, Tensor]:
    """What EmbeddingGemma multiplies pooled states with."""
    generator, hidden = torch.Generator().manual_seed(5), config.hidden_size
    shapes = {"dense_2": (96, hidden), "dense_3": (hidden, 96)}
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def _mistral_3(writer: Any, config: Any) -> None:
    _head_dim(writer, config)
    writer.add_rope_dimension_count(config.head_dim)
    settings = config.rope_parameters
    if settings["rope_type"] == "yarn":
        writer.add_rope_scaling_type(_scaling("yarn"))
        writer.add_rope_scaling_factor(settings["factor"])
        writer.add_rope_scaling_orig_ctx_len(settings["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(settings["mscale_all_dim"])
        writer.add_attn_temperature_scale(settings["llama_4_scaling_beta"])


def _phi_3(writer: Any, config: Any) -> None:
    _theta(writer, config)
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * config.hidden_size // config.num_attention_heads))
    writer.add_sliding_window(config.sliding_window or 0)
    settings = config.rope_parameters
    if settings["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_tensor("rope_factors_long.weight", np.array(settings["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(settings["short_factor"], dtype=np.float32))


def _command_r(writer: Any, config: Any) -> None:
    _theta(writer, config)
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(_scaling("none"))


def _stablelm(writer: Any, config: Any) -> None:
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * config.hidden_size // config.num_attention_heads))
    writer.add_parallel_residual(True)  # whatever blocks are, as the converter has it


def _gpt_2(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(4 * config.hidden_size)


def _lfm2(writer: Any, config: Any) -> None:
    _theta(writer, config)
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.kv_data[-1].pop(f"{writer.arch}.attention.head_count_kv")
    writer.add_head_count_kv(heads)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.model_type == "lfm2_moe":
        import gguf

        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    writer.kv_data[-1].pop(f"{writer.arch}.feed_forward_length")
    writer.add_feed_forward_length(-(-int(2 * config.intermediate_size / 3) // 32) * 32)


def _set(writer: Any, name: str, value: Any) -> None:
    """Metadata in place of some that is there."""
    writer.kv_data[-1].pop(f"{writer.arch}.{name}", None)
    put(writer, f"{writer.arch}.{name}", value)


def _sizes(writer: Any, heads: int, inner: int, groups: int, size: int, taps: int) -> None:
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_state_size(size)
    writer.add_ssm_conv_kernel(taps)


def _scan(writer: Any, config: Any) -> None:
    inner = config.mamba_n_heads * config.mamba_d_head
    _sizes(writer, config.mamba_n_heads, inner, config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv)


def _granite_hybrid(writer: Any, config: Any) -> None:
    _scan(writer, config)
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    _set(writer, "attention.head_count_kv", heads)
    writer.add_rope_scaling_finetuned(False)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    _set(writer, "attention.scale", config.attention_multiplier)
    _set(writer, "embedding_scale", config.embedding_multiplier)
    _set(writer, "residual_scale", config.residual_multiplier)
    _set(writer, "logit_scale", config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def _falcon_h1(writer: Any, config: Any) -> None:
    _theta(writer, config)
    _scan(writer, config)


def _falcon_multiplied(power: float) -> dict[str, Change]:
    """The converter multiplies matrices by the constants of the config."""
    factors = {
        "down_proj": lambda c: c.mlp_multipliers[1], "gate_proj": lambda c: c.mlp_multipliers[0],
        "k_proj": lambda c: c.key_multiplier * c.attention_in_multiplier, "q_proj": lambda c: c.attention_in_multiplier,
        "v_proj": lambda c: c.attention_in_multiplier, "o_proj": lambda c: c.attention_out_multiplier,
        "out_proj": lambda c: c.ssm_out_multiplier, "lm_head": lambda c: c.lm_head_multiplier,
        "embed_tokens": lambda c: c.embedding_multiplier,
    }  # fmt: skip
    found: dict[str, Change] = {"mamba.in_proj": lambda config, tensor: tensor * _entering(config) ** power}
    for name, factor in factors.items():
        found[name] = lambda config, tensor, factor=factor: tensor * factor(config) ** power
    return found


def _entering(config: Any) -> Tensor:
    """The factor of each row of a scan's matrix."""
    inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    counts = torch.tensor([inner, inner, shared, shared, config.mamba_n_heads])
    factors = torch.tensor(config.ssm_multipliers) * config.ssm_in_multiplier
    return factors.repeat_interleave(counts)[:, None]


def _jamba(writer: Any, config: Any) -> None:
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    _set(writer, "attention.head_count_kv", heads)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def _nemotron_h(writer: Any, config: Any) -> None:
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    inner = config.mamba_num_heads * config.mamba_head_dim
    _sizes(writer, config.mamba_num_heads, inner, config.n_groups, config.ssm_state_size, config.conv_kernel)
    kinds, experts = config.layers_block_type, "moe" in config.layers_block_type
    width = config.moe_intermediate_size if experts else config.intermediate_size
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds]
    _set(writer, "attention.head_count_kv", heads)
    _set(writer, "feed_forward_length", [width if kind in ("mlp", "moe") else 0 for kind in kinds])
    writer.add_rope_scaling_finetuned(False)
    if experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)


def _delta(writer: Any, config: Any) -> None:
    _head_dim(writer, config)
    inner = config.linear_num_value_heads * config.linear_value_head_dim
    sizes = (config.linear_num_key_heads, config.linear_key_head_dim, config.linear_conv_kernel_dim)
    _sizes(writer, config.linear_num_value_heads, inner, *sizes)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if config.model_type.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([2, 1, 1, 0])
    if [kind == "full_attention" for kind in config.layer_types] == [False, True]:
        writer.add_full_attention_interval(2)
    else:
        _set(writer, "attention.recurrent_layers", [kind == "linear_attention" for kind in config.layer_types])
    if getattr(config, "num_experts", 0):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _alternating(back: bool) -> dict[str, Change]:
    """Value heads of Qwen3.5 alternate between key heads, where transformers has those of a key head together."""

    def order(config: Any, size: int, first: int = 0) -> Tensor:
        keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
        rows = torch.arange(heads * size).view(keys, heads // keys, size).transpose(0, 1).flatten()
        rows = torch.argsort(rows) if back else rows
        return torch.cat([torch.arange(first), first + rows])

    def rows(config: Any, tensor: Tensor) -> Tensor:
        return tensor[order(config, config.linear_value_head_dim)]

    def later_rows(config: Any, tensor: Tensor) -> Tensor:
        first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return tensor[order(config, config.linear_value_head_dim, first)]

    def numbers(config: Any, tensor: Tensor) -> Tensor:
        return tensor[order(config, 1)]

    def columns(config: Any, tensor: Tensor) -> Tensor:
        return tensor[:, order(config, config.linear_value_head_dim)]

    return {
        "in_proj_qkv": later_rows, "in_proj_z": rows, "in_proj_b": numbers, "in_proj_a": numbers, "dt_bias": numbers,
        "A_log": lambda config, tensor: (
            (-numbers(config, tensor)).log() if back else -numbers(config, tensor).exp()
        ),
        "conv1d": lambda config, tensor: (
            later_rows(config, tensor)[:, None] if back else later_rows(config, tensor).squeeze(1)
        ),
        "out_proj": columns,
    }  # fmt: skip


def _phi_2(writer: Any, config: Any) -> None:
    _theta(writer, config)
    share = config.rope_parameters["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(share * config.hidden_size // config.num_attention_heads))


def _rope(kind: str, factor: float, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, "factor": factor, **settings}


_TWO_BASES = {
    "full_attention": _rope("linear", 8.0, rope_theta=1_000_000.0),
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_LAYERS: dict[str, Any] = {
    "head_dim": 32, "sliding_window": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 32,
}  # fmt: skip
_SCANNED: dict[str, Change] = {
    "A_log": lambda config, tensor: -tensor.exp()[:, None],
    "conv1d.weight": lambda config, tensor: tensor.squeeze(1),
    **{f"{name}.D": lambda config, tensor: tensor[:, None] for name in ("mamba", "mixer")},
    "mamba.norm": lambda config, tensor: tensor.view(config.mamba_n_groups, -1),
    "mixer.norm": lambda config, tensor: tensor.view(config.n_groups, -1),
}
_UNSCANNED: dict[str, Change] = {
    "A_log": lambda config, tensor: (-tensor).log().flatten(),
    "conv1d.weight": lambda config, tensor: tensor.unsqueeze(1),
    **{name: lambda config, tensor: tensor.flatten() for name in ("mamba.D", "mixer.D", "mamba.norm", "mixer.norm")},
}
_CHANNELS: dict[str, Change] = {
    "A_log": lambda config, tensor: -tensor.exp(), "conv1d.weight": lambda config, tensor: tensor.squeeze(1),
}  # fmt: skip
_UNCHANNELS: dict[str, Change] = {
    "A_log": lambda config, tensor: (-tensor).log(), "conv1d.weight": lambda config, tensor: tensor.unsqueeze(1),
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2,
}  # fmt: skip
_GRANITE: dict[str, Any] = _MAMBA | {
    "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 96, "num_local_experts": 0,
    "embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 1.5,
}  # fmt: skip
_FALCON: dict[str, Any] = _MAMBA | {
    "mamba_d_ssm": 128, "attention_in_multiplier": 0.5, "attention_out_multiplier": 2.0, "key_multiplier": 0.5,
    "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.5, 1.0, 2.0, 0.5, 0.5],
    "mlp_multipliers": [2.0, 0.5], "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "head_dim": 32,
    "time_step_min": 1e-30, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_ALONE: dict[str, Change] = {
    "A_log": lambda config, tensor: -tensor.exp(), "conv1d": lambda config, tensor: tensor.squeeze(1),
}  # fmt: skip
_BESIDE: dict[str, Change] = {
    "A_log": lambda config, tensor: (-tensor).log(), "conv1d": lambda config, tensor: tensor.unsqueeze(1),
}  # fmt: skip
_DELTA_NORMS: dict[str, Change] = {"linear_attn.norm": lambda config, tensor: tensor}
_ALTERNATING = _alternating(False) | _DELTA_NORMS | _LIFTED
_TOGETHER = _alternating(True) | _DELTA_NORMS | _LOWERED
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EMBEDDING = Kind(
    "gemma-embedding",
    _shape(
        "Gemma3ForCausalLM",
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=16,
        num_hidden_layers=7,
        use_bidirectional_attention=True,
    ),
    _gemma_embedding,
    _LIFTED,
    _LOWERED,
    transformers=False,
)
KINDS: dict[str, Kind] = {
    "llama": Kind("llama", _shape("LlamaForCausalLM"), _llama, _ROWS, _BACK),
    "llama-biases": Kind("llama", _shape("LlamaForCausalLM", attention_bias=True, tie_word_embeddings=True), _llama,
                         _ROWS, _BACK),
    "llama-3.1": Kind("llama", _shape("LlamaForCausalLM", rope_parameters=_rope("llama3", 8.0, low_freq_factor=1.0,
                      high_freq_factor=4.0, original_max_position_embeddings=32)), _llama, _ROWS, _BACK),
    "llama-linear": Kind("llama", _shape("LlamaForCausalLM", rope_parameters=_rope("linear", 4.0)), _llama, _ROWS,
                         _BACK),
    "mixtral": Kind("llama", _shape("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2), _mixtral, _ROWS,
                    _BACK, transformers=False),
    "qwen2": Kind("qwen2", _shape("Qwen2ForCausalLM"), _theta),
    "qwen2-yarn": Kind("qwen2", _shape("Qwen2ForCausalLM", rope_parameters=_rope("yarn", 3.0,
                       original_max_position_embeddings=32)), _llama),
    "qwen2moe": Kind("qwen2moe", _shape("Qwen2MoeForCausalLM", shared_expert_intermediate_size=64, **_MOE), _experts,
                     _FLAT, _ROW),
    "qwen3": Kind("qwen3", _shape("Qwen3ForCausalLM", head_dim=32), _head_dim),
    "qwen3moe": Kind("qwen3moe", _shape("Qwen3MoeForCausalLM", head_dim=32, norm_topk_prob=True, **_MOE), _experts),
    "gemma": Kind("gemma", _shape("GemmaForCausalLM", head_dim=32), _gemma, _LIFTED, _LOWERED, transformers=False),
    "gemma2": Kind("gemma2", _shape("Gemma2ForCausalLM", head_dim=32, query_pre_attn_scalar=32, sliding_window=16),
                   _gemma, _LIFTED, _LOWERED),
    "gemma3": Kind("gemma3", _shape("Gemma3ForCausalLM", head_dim=32, query_pre_attn_scalar=32, sliding_window=16,
                                    num_hidden_layers=7, rope_parameters=_TWO_BASES), _gemma, _LIFTED, _LOWERED),
    "gemma3n": Kind("gemma3n", _shape("Gemma3nForCausalLM", laurel_rank=32, **_LAYERS | {
        "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0]}), _gemma_layers, transformers=False),
    "gemma4": Kind("gemma4", _shape("Gemma4ForCausalLM", global_head_dim=64, use_double_wide_mlp=True, **_LAYERS),
                   _gemma_layers, transformers=False),
    "gemma4-experts": Kind("gemma4", _shape("Gemma4ForCausalLM", global_head_dim=64, num_global_key_value_heads=1,
        attention_k_eq_v=True, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32,
        **_LAYERS | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}), _gemma_layers, transformers=False),
    "mistral3": Kind("mistral3", _shape("Ministral3ForCausalLM", head_dim=32, rope_parameters=_rope("yarn", 3.0,
        original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
        llama_4_scaling_beta=0.3)), _mistral_3, _ROWS, _BACK, transformers=False),
    "phi2": Kind("phi2", _shape("PhiForCausalLM", num_key_value_heads=4), _phi_2, transformers=False),
    "phi3": Kind("phi3", _shape("Phi3ForCausalLM", sliding_window=16), _phi_3),
    "phi3-longrope": Kind("phi3", _shape("Phi3ForCausalLM", original_max_position_embeddings=32, rope_parameters={
        "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 3.5, 4.0]}), _phi_3),
    "command-r": Kind("command-r", _shape("CohereForCausalLM", logit_scale=0.6), _command_r, transformers=False),
    "command-r-plus": Kind("command-r", _shape("CohereForCausalLM", logit_scale=0.6, use_qk_norm=True), _command_r,
                           transformers=False),
    "stablelm": Kind("stablelm", _shape("StableLmForCausalLM", use_qkv_bias=True), _stablelm, transformers=False),
    "stablelm-12b": Kind("stablelm", _shape("StableLmForCausalLM", use_parallel_residual=True, qk_layernorm=True),
                         _stablelm, transformers=False),
    "lfm2": Kind("lfm2", _shape("Lfm2ForCausalLM", layer_types=["conv", "full_attention"], block_multiple_of=32,
                                block_ffn_dim_multiplier=1.0), _lfm2, _TAPS, _UNTAPS, transformers=False),
    "lfm2moe": Kind("lfm2moe", _shape("Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"], num_dense_layers=1,
                                      **_MOE), _lfm2, _TAPS, _UNTAPS, transformers=False),
    "granitehybrid": Kind("granitehybrid", _shape("GraniteMoeHybridForCausalLM", **_GRANITE), _granite_hybrid,
                          _ROWS | _SCANNED, _BACK | _UNSCANNED, transformers=False),
    "granitehybrid-experts": Kind("granitehybrid", _shape("GraniteMoeHybridForCausalLM", **_GRANITE | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}), _granite_hybrid, _ROWS | _SCANNED,
        _BACK | _UNSCANNED, transformers=False),
    "falcon-h1": Kind("falcon-h1", _shape("FalconH1ForCausalLM", **_FALCON), _falcon_h1,
                      _falcon_multiplied(1.0) | _SCANNED, _falcon_multiplied(-1.0) | _UNSCANNED, transformers=False),
    "falcon-h1-normed": Kind("falcon-h1", _shape("FalconH1ForCausalLM", mamba_rms_norm=True,
        mamba_norm_before_gate=False, **_FALCON), _falcon_h1, _falcon_multiplied(1.0) | _SCANNED,
        _falcon_multiplied(-1.0) | _UNSCANNED, transformers=False),
    "jamba": Kind("jamba", _shape("JambaForCausalLM", num_hidden_layers=4, attn_layer_period=3, attn_layer_offset=1,
        num_experts=4, mamba_d_state=32), _jamba, _CHANNELS, _UNCHANNELS, transformers=False),
    "jamba-dense": Kind("jamba", _shape("JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, num_experts=1,
        num_experts_per_tok=1, tie_word_embeddings=True), _jamba, _CHANNELS, _UNCHANNELS, transformers=False),
    "nemotron_h": Kind("nemotron_h", _shape("NemotronHForCausalLM", **_NEMOTRON), _nemotron_h, _SCANNED, _UNSCANNED,
                       transformers=False),
    "nemotron_h_moe": Kind("nemotron_h_moe", _shape("NemotronHForCausalLM", **_NEMOTRON | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64, "n_routed_experts": 4, "routed_scaling_factor": 1.5}), _nemotron_h,
        _SCANNED, _UNSCANNED, transformers=False),
    "qwen35": Kind("qwen35", _shape("Qwen3_5ForCausalLM", **_DELTA), _delta, _ALTERNATING, _TOGETHER,
                   transformers=False),
    "qwen35moe": Kind("qwen35moe", _shape("Qwen3_5MoeForCausalLM", shared_expert_intermediate_size=64, **_DELTA | _MOE),
                      _delta, _FLAT | _ALTERNATING, _ROW | _TOGETHER, transformers=False),
    "qwen3next": Kind("qwen3next", _shape("Qwen3NextForCausalLM", shared_expert_intermediate_size=64,
        **_DELTA | _MOE | {"layer_types": ["full_attention", "linear_attention"]}), _delta,
        _FLAT | _ALONE | _DELTA_NORMS | _LIFTED, _ROW | _BESIDE | _DELTA_NORMS | _LOWERED, transformers=False),
    "gpt2": Kind("gpt2", FamilyShape("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 96}),
                 _gpt_2, _TURN, _TURN),
}  # fmt: skip


@contextmanager
def library(folder: Path) -> Iterator[Any]:
    """The `gguf` library, importable meanwhile."""
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}: make test installs it")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield pytest.importorskip("gguf")
