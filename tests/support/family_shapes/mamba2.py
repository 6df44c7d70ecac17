"""Granite 4, Bamba, Falcon-H1, Nemotron-H: Mamba-2's selective scan, attention in some layers or beside it."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_expand": 2,
}
# Heads that share B and C, features in more than one piece of the kernel, biases, another convolution.
ODD = BASE | {
    "hidden_size": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_n_heads": 6,
    "mamba_d_head": 36,
    "mamba_expand": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 21,
    "mamba_d_conv": 3,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
    "attention_bias": True,
    "tie_word_embeddings": True,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
    "shared_intermediate_size": 40,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
LATE = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
FALCON = {
    "mamba_d_ssm": 64,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "key_multiplier": 0.6,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 0.8, 1.1, 1.2, 0.7],
    "mlp_multipliers": [1.3, 0.8],
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "num_hidden_layers": 2,
}
NEMOTRON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    # transformers raises the steps of a prompt to this, and not those of the tokens after it.
    "time_step_min": 1e-30,
}

SHAPES = {
    "granite4": FamilyShape(
        "GraniteMoeHybridForCausalLM", BASE | GRANITE | {"num_local_experts": 0}, prompts=(1, 18, 0, 2)
    ),
    "granite4-odd-rotary-tied": FamilyShape(
        "GraniteMoeHybridForCausalLM",
        ODD | GRANITE | LATE | {"num_local_experts": 0, "position_embedding_type": "rope"},
        eos_gain=4.0,
        prompts=(0, 5, 1, 2),
    ),
    "granite4-moe": FamilyShape(
        "GraniteMoeHybridForCausalLM",
        BASE | GRANITE | {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
        prompts=(0, 1, 2, 3),
    ),
    "bamba": FamilyShape("BambaForCausalLM", BASE | {"attn_layer_indices": [1, 3]}, prompts=(2, 6, 0, 3)),
    "bamba-odd-biases-tied": FamilyShape(
        "BambaForCausalLM", ODD | {"attn_layer_indices": [2], "mlp_bias": True}, seed=1, prompts=(0, 2, 4, 1)
    ),
    "falcon-h1": FamilyShape("FalconH1ForCausalLM", BASE | FALCON, prompts=(2, 3, 1, 0)),
    "falcon-h1-odd-normed": FamilyShape(
        "FalconH1ForCausalLM",
        ODD
        | FALCON
        | {
            "mamba_d_ssm": 216,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "mlp_bias": True,
        },
        eos_gain=2.6,
        prompts=(2, 20, 0, 1),
    ),
    "falcon-h1-norm-first": FamilyShape(
        "FalconH1ForCausalLM",
        BASE | FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 2},
        prompts=(1, 3, 0, 2),
    ),
    "nemotron-h": FamilyShape("NemotronHForCausalLM", NEMOTRON, prompts=(4, 11, 1, 0)),
    "nemotron-h-moe-odd": FamilyShape(
        "NemotronHForCausalLM",
        NEMOTRON
        | {
            "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "mamba_num_heads": 6,
            "mamba_head_dim": 35,
            "n_groups": 3,
            "ssm_state_size": 21,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "use_bias": True,
            "mlp_bias": True,
        },
        seed=1,
        eos_gain=1.4,
        prompts=(0, 1, 9, 2),
    ),
}
