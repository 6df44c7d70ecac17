"""GLM-4.5 and dots.llm1: corrected scores of experts, in one group and in several; a dense layer first, windows."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}

SHAPES = {
    "glm4-moe": FamilyShape("Glm4MoeForCausalLM", BASE, prompts=(0, 2, 4, 1)),
    "glm4-moe-groups-norms-biases-tied": FamilyShape(
        "Glm4MoeForCausalLM",
        BASE
        | {
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "first_k_dense_replace": 0,
        },
        eos=(3, 90),
        seed=1,
        prompts=(0, 1, 2, 4),
    ),
    "dots1": FamilyShape(
        "Dots1ForCausalLM",
        BASE | {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
        prompts=(2, 4, 0, 1),
    ),
    "dots1-windows-groups-biases-tied": FamilyShape(
        "Dots1ForCausalLM",
        BASE
        | {
            "n_group": 2,
            "topk_group": 1,
            "attention_bias": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
        },
        prompts=(0, 1, 3, 2),
    ),
}
