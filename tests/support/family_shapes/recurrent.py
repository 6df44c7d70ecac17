"""Jamba, RecurrentGemma, MiniMax, Kimi Linear: recurrences of other kinds, attention in some layers."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"num_hidden_layers": 4}
STATE, FULL = "linear_attention", "full_attention"
JAMBA = BASE | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 12}
GRIFFIN = BASE | {"attention_window_size": 9, "num_key_value_heads": 1}
MINIMAX = BASE | {
    "intermediate_size": 24,
    "num_local_experts": 4,
    "layer_types": [STATE, FULL, STATE, FULL],
    "block_size": 16,
}
KIMI = BASE | {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "linear_head_dim": 12,
    "linear_num_heads": 3,
    "layer_types": [STATE, FULL, STATE, STATE],
}

SHAPES = {
    "jamba": FamilyShape("JambaForCausalLM", JAMBA, prompts=(0, 1, 2, 3)),
    "jamba-odd-biases-tied": FamilyShape(
        "JambaForCausalLM",
        JAMBA
        | {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "mamba_expand": 3,
            "mamba_d_state": 7,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 5,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attn_layer_offset": 2,
            "expert_layer_offset": 0,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
        prompts=(0, 2, 4, 1),
    ),
    "recurrent-gemma": FamilyShape("RecurrentGemmaForCausalLM", GRIFFIN, prompts=(3, 4, 0, 1)),
    "recurrent-gemma-odd-biases": FamilyShape(
        "RecurrentGemmaForCausalLM",
        GRIFFIN
        | {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "conv1d_width": 3,
            "attention_bias": True,
            "block_types": ["attention", "recurrent"],
            "attention_window_size": 5,
        },
        prompts=(2, 9, 8, 0),
    ),
    "minimax": FamilyShape("MiniMaxForCausalLM", MINIMAX, prompts=(7, 24, 3, 0)),
    "minimax-odd-scaled": FamilyShape(
        "MiniMaxForCausalLM",
        MINIMAX
        | {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "layer_types": [FULL, STATE, STATE, STATE],
            "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 0.7,
            "linear_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.9,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
        prompts=(3, 6, 0, 2),
    ),
    "kimi-linear": FamilyShape("KimiLinearForCausalLM", KIMI, prompts=(1, 6, 0, 2)),
    "kimi-linear-odd-groups": FamilyShape(
        "KimiLinearForCausalLM",
        KIMI
        | {
            "q_lora_rank": 12,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "linear_head_dim": 35,
            "linear_num_heads": 2,
            "linear_conv_kernel_dim": 3,
            "layer_types": [STATE, STATE, FULL, STATE],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
        prompts=(0, 1, 3, 4),
    ),
}
