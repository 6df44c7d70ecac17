"""Architectures of GGUF files whose layers carry a state: their configs, and transformers' names of the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.gguf.arrangements import AboveOne, Arrangement, ChannelDecays, Decays, Flat, Kernels
from engine.model.gguf.metadata import Metadata
from engine.model.gguf.rope import axes_of

Config = dict[str, Any]
Arranged = dict[str, Callable[[Config], Arrangement]]

# Names of most architectures.
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NETWORK = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PROJECTIONS = ATTENTION | NETWORK | {"ffn_norm": "post_attention_layernorm"}

ALTERNATING = ("qwen35", "qwen35moe")
"""Architectures whose value heads are in llama.cpp's order, see `DeltaRule.alternate`."""

_ATTENDS, _SCANS = "full_attention", "linear_attention"


def _sizes(metadata: Metadata) -> tuple[int, int, int, int, int]:
    """Heads, features of a head, groups, features of a state and taps of the layers with a state. Raises
    UnsupportedModelError if the heads cannot share the features evenly."""
    heads, inner = metadata.count("ssm.time_step_rank"), metadata.count("ssm.inner_size")
    if not heads or inner % heads:
        raise UnsupportedModelError(
            f"{metadata.file.path}: ssm.inner_size {inner} must be a multiple of ssm.time_step_rank {heads}."
        )
    rest = (metadata.count(f"ssm.{name}") for name in ("group_count", "state_size", "conv_kernel"))
    groups, size, taps = rest
    return heads, inner // heads, groups, size, taps


def _scan(metadata: Metadata, first: int) -> Config:
    """The settings of Mamba-2 layers; `first` is the number of one."""
    heads, head_dim, groups, size, taps = _sizes(metadata)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": groups,
        "mamba_d_state": size,
        "mamba_d_conv": taps,
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in metadata.file.tensors,
        "mamba_proj_bias": False,
    }


def granite_hybrid(metadata: Metadata, config: Config) -> Config:
    """Granite 4. Layers without heads of keys are scans."""
    metadata.must_be("rope.scaling.finetuned", False, otherwise="rotary positions beside layers with a state are")
    metadata.count("rope.dimension_count", 0)  # there is no rotation
    heads = [int(count) for count in metadata.each("attention.head_count_kv", config["num_hidden_layers"])]
    kinds = [_ATTENDS if count else _SCANS for count in heads]
    scan = _scan(metadata, kinds.index(_SCANS) if _SCANS in kinds else 0)
    inner, experts = scan["mamba_n_heads"] * scan["mamba_d_head"], metadata.count("expert_count", 0)
    if inner % config["hidden_size"]:
        raise UnsupportedModelError(
            f"{metadata.file.path}: ssm.inner_size {inner} must be a multiple of embedding_length "
            f"{config['hidden_size']}."
        )
    return (
        config
        | scan
        | {
            "num_key_value_heads": max(heads),
            "layer_types": kinds,
            "mamba_expand": inner // config["hidden_size"],
            "position_embedding_type": None,
            "embedding_multiplier": metadata.number("embedding_scale", 1.0),
            "attention_multiplier": metadata.number("attention.scale", config["head_dim"] ** -0.5),
            "residual_multiplier": metadata.number("residual_scale", 1.0),
            "logits_scaling": metadata.number("logit_scale", 1.0),
            "num_local_experts": experts,
            "num_experts_per_tok": metadata.count("expert_used_count", 0),
            "shared_intermediate_size": metadata.count(
                "expert_shared_feed_forward_length", config["intermediate_size"]
            ),
        }
    )


def falcon_h1(metadata: Metadata, config: Config) -> Config:
    """Falcon-H1. The matrices in the file are multiplied by its constants already."""
    metadata.must_be("rope.dimension_count", config["head_dim"], otherwise="a rotation of some features is")
    scan = _scan(metadata, 0)
    return (
        config
        | scan
        | {
            "mamba_d_ssm": scan["mamba_n_heads"] * scan["mamba_d_head"],
            "mamba_rms_norm": "blk.0.ssm_norm.weight" in metadata.file.tensors,
            "mamba_norm_before_gate": False,
        }
    )


def nemotron_h(metadata: Metadata, config: Config) -> Config:
    """Nemotron-H, with experts or without. A layer with heads of keys is attention, one with a width a network."""
    blocks, guesses = config["num_hidden_layers"], metadata.count("nextn_predict_layers", 0)
    heads = [int(count) for count in metadata.each("attention.head_count_kv", blocks)][: blocks - guesses]
    widths = [int(width) for width in metadata.each("feed_forward_length", blocks)][: blocks - guesses]
    experts = metadata.count("expert_count", 0)
    network = "moe" if experts else "mlp"
    kinds = [_ATTENDS if kv else network if width else _SCANS for kv, width in zip(heads, widths, strict=True)]
    if len(others := sorted({width for width in widths if width})) > 1:
        raise UnsupportedModelError(
            f"{metadata.file.path}: feed_forward_length is {others[0]} in one layer and {others[1]} in another; "
            "supported in GGUF files of Nemotron-H: one width. Use the checkpoint in safetensors."
        )
    for name in ("rope.dimension_count", "rope.freq_base", "attention.layer_norm_epsilon"):
        metadata.number(name, 0.0)  # there is no rotation, and no other norm
    count, head_dim, groups, size, taps = _sizes(metadata)
    first, tensors = kinds.index(_SCANS) if _SCANS in kinds else 0, metadata.file.tensors
    config |= {
        "num_hidden_layers": blocks - guesses,
        "num_nextn_predict_layers": guesses,
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": count,
        "mamba_head_dim": head_dim,
        "n_groups": groups,
        "ssm_state_size": size,
        "conv_kernel": taps,
        "use_conv_bias": f"blk.{first}.ssm_conv1d.bias" in tensors,
        "use_bias": f"blk.{first}.ssm_in.bias" in tensors,
        "mlp_bias": any(name.endswith(("ffn_up.bias", "ffn_up_shexp.bias")) for name in tensors),
        "tie_word_embeddings": False,
    }
    if not experts:
        return config
    sigmoid = 2
    metadata.must_be("expert_gating_func", sigmoid, otherwise="other scores of experts are")
    metadata.must_be("expert_shared_count", 1, otherwise="several networks beside experts are")
    return config | {
        "n_routed_experts": experts,
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length", max(widths)),
        "moe_shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.count("moe_latent_size", 0) or None,
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.count("expert_group_count", 1),
        "topk_group": metadata.count("expert_group_used_count", 1),
    }


def jamba(metadata: Metadata, config: Config) -> Config:
    """Jamba. Layers without heads of keys are scans; those with a router have experts."""
    layers, hidden, tensors = config["num_hidden_layers"], config["hidden_size"], metadata.file.tensors
    heads = [int(count) for count in metadata.each("attention.head_count_kv", layers)]
    inner, experts = metadata.count("ssm.inner_size"), metadata.count("expert_count", 0)
    if inner % hidden:
        raise UnsupportedModelError(
            f"{metadata.file.path}: ssm.inner_size {inner} must be a multiple of embedding_length {hidden}."
        )
    if len(others := sorted({count for count in heads if count})) > 1:
        raise UnsupportedModelError(
            f"{metadata.file.path}: layers of Jamba have one number of heads of keys or none, but one has {others[0]} "
            f"and another {others[1]}."
        )
    attends = [layer for layer, count in enumerate(heads) if count]
    chooses = [layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in tensors]
    config |= {"num_key_value_heads": max(heads), "num_experts": experts if chooses else 1}
    config |= _every(metadata, "attn_layer", attends, layers) | _every(metadata, "expert_layer", chooses, layers)
    first = heads.index(0) if 0 in heads else 0
    return config | {
        "num_experts_per_tok": metadata.count("expert_used_count", 0),
        "mamba_expand": inner // hidden,
        "mamba_d_state": metadata.count("ssm.state_size"),
        "mamba_d_conv": metadata.count("ssm.conv_kernel"),
        "mamba_dt_rank": metadata.count("ssm.time_step_rank"),
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in tensors,
        "mamba_proj_bias": f"blk.{first}.ssm_in.bias" in tensors,
    }


def _every(metadata: Metadata, name: str, found: list[int], layers: int) -> Config:
    """The period and the offset of some layers. Raises UnsupportedModelError if there are none."""
    offset = found[0] if found else layers
    period = found[1] - offset if len(found) > 1 else layers + 1
    if offset >= period or found != [layer for layer in range(layers) if layer % period == offset]:
        raise UnsupportedModelError(
            f"{metadata.file.path}: the layers {', '.join(map(str, found))} are not those of any {name}_period and "
            f"{name}_offset, as Jamba's must be. Use the checkpoint in safetensors."
        )
    return {f"{name}_period": period, f"{name}_offset": offset}


def delta_rule(metadata: Metadata, config: Config) -> Config:
    """Qwen3.5 and Qwen3-Next. The last layers of a file may guess later tokens; they are not read."""
    guesses = metadata.count("nextn_predict_layers", 0)
    blocks = config["num_hidden_layers"]
    layers = blocks - guesses
    every = metadata.count("full_attention_interval", 4)
    usual = [(layer + 1) % every != 0 for layer in range(layers)] if every else [True] * layers
    states = usual
    if metadata.has("attention.recurrent_layers"):
        states = [bool(each) for each in metadata.each("attention.recurrent_layers", blocks)][:layers]
    config["rope_parameters"] |= axes_of(metadata)
    heads, value_dim, groups, key_dim, taps = _sizes(metadata)
    config["rope_parameters"]["partial_rotary_factor"] = (
        metadata.count("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    )
    config |= {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": guesses,
        "layer_types": [_SCANS if state else _ATTENDS for state in states],
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": taps,
        "linear_value_heads_alternate": metadata.architecture in ALTERNATING,
    }
    if experts := metadata.count("expert_count", 0):
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": metadata.count("expert_used_count"),
            "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
            "shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _names_of_scan(name: str) -> dict[str, str]:
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }


SCANNED: Arranged = {
    "ssm_conv1d.weight": lambda config: Kernels(),
    "ssm_a": lambda config: Decays(),
    "ssm_d": lambda config: Flat(),
    "ssm_norm": lambda config: Flat(),
}
GRANITE = (
    _names_of_scan("mamba")
    | PROJECTIONS
    | {
        "ffn_gate": "shared_mlp.gate_proj",
        "ffn_up": "shared_mlp.up_proj",
        "ffn_down": "shared_mlp.output_linear",
        "ffn_gate_shexp": "shared_mlp.gate_proj",
        "ffn_up_shexp": "shared_mlp.up_proj",
        "ffn_down_shexp": "shared_mlp.output_linear",
        "ffn_gate_inp": "block_sparse_moe.router",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    }
)
FALCON = (
    _names_of_scan("mamba")
    | ATTENTION
    | {
        "ffn_norm": "pre_ff_layernorm.weight",  # llama.cpp omits the end of this name
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    }
)
JAMBA = ATTENTION | {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_out": "mamba.out_proj",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
    "ffn_up_exps": "feed_forward.experts.{}.up_proj",
    "ffn_down_exps": "feed_forward.experts.{}.down_proj",
}
CHANNEL_SCANNED: Arranged = {"ssm_conv1d.weight": lambda config: Kernels(), "ssm_a": lambda config: ChannelDecays()}
PRE_FF_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
NEMOTRON = _names_of_scan("mixer") | {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
NEMOTRON_OUTER = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
DELTA = (
    ATTENTION
    | HEAD_NORMS
    | NETWORK
    | {
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
CORRECTED: Arranged = {
    "ssm_conv1d.weight": lambda config: Kernels(),
    "ssm_a": lambda config: Decays(),
    **{
        name: lambda config: AboveOne()
        for name in ("output_norm", "attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")
    },
}
