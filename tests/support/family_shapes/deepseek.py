"""DeepSeek V2 and V3: latents of queries and without, experts in groups and not, yarn with mscale, biases."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 60,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

SHAPES = {
    "deepseek-v2": FamilyShape(
        "DeepseekV2ForCausalLM",
        BASE | {"topk_method": "greedy", "q_lora_rank": None, "routed_scaling_factor": 1.7, "rope_parameters": YARN},
        prompts=(1, 2, 0, 3),
    ),
    "deepseek-v2-groups-biases": FamilyShape(
        "DeepseekV2ForCausalLM",
        BASE
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "attention_bias": True,
            "mlp_bias": True,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
        prompts=(1, 2, 0, 8),
    ),
    "deepseek-v3": FamilyShape(
        "DeepseekV3ForCausalLM",
        BASE | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "rope_parameters": YARN},
        prompts=(0, 3, 1, 2),
    ),
    # As Moonlight has it: no groups, and queries of the hidden state.
    "deepseek-v3-ungrouped-halves-biases": FamilyShape(
        "DeepseekV3ForCausalLM",
        BASE
        | {
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.8,
            "rope_interleave": False,
            "attention_bias": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
        },
        seed=1,
        prompts=(0, 5, 1, 2),
    ),
}
