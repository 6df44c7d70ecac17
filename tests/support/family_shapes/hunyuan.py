"""Hunyuan: norms of queries and keys after rotation, a stretched base, biases; with experts."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"head_dim": 8}
STRETCHED = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0}

SHAPES = {
    "hunyuan": FamilyShape("HunYuanDenseV1ForCausalLM", BASE, eos_gain=1.4, prompts=(0, 1, 2, 3)),
    "hunyuan-alpha-biases-tied": FamilyShape(
        "HunYuanDenseV1ForCausalLM",
        BASE | {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": STRETCHED},
        eos_gain=2.2,
        prompts=(1, 6, 0, 2),
    ),
    "hunyuan-moe": FamilyShape(
        "HunYuanMoEV1ForCausalLM", BASE | {"num_experts": 5, "moe_topk": 2}, prompts=(0, 1, 5, 2)
    ),
    "hunyuan-moe-by-layer-alpha": FamilyShape(
        "HunYuanMoEV1ForCausalLM",
        BASE
        | {
            "head_dim": 12,
            "num_experts": 4,
            "moe_topk": [3, 1],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": STRETCHED,
        },
        eos=(3, 90),
        prompts=(0, 2, 1, 3),
    ),
}
