"""Qwen2-MoE: beside the experts a network that every token goes to; layers without experts, windows in some."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}

SHAPES = {
    "qwen2-moe": FamilyShape("Qwen2MoeForCausalLM", BASE, prompts=(1, 3, 0, 2)),
    "qwen2-moe-windows-one-dense-layer-tied": FamilyShape(
        "Qwen2MoeForCausalLM",
        BASE
        | {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        eos=(3, 90),
        prompts=(1, 2, 0, 3),
    ),
}
