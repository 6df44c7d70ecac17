"""Qwen3-MoE: experts whose weights are made to sum to 1, or not; layers without experts between them, windows."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}

SHAPES = {
    "qwen3-moe": FamilyShape("Qwen3MoeForCausalLM", BASE | {"num_hidden_layers": 2}, prompts=(0, 2, 1, 3)),
    "qwen3-moe-one-dense-layer-window": FamilyShape(
        "Qwen3MoeForCausalLM",
        BASE | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 8},
        prompts=(3, 5, 0, 2),
    ),
}
