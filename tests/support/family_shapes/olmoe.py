"""OLMoE: experts whose weights are as they are, or made to sum to 1; norms of whole projections."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}

SHAPES = {
    "olmoe": FamilyShape("OlmoeForCausalLM", BASE, prompts=(10, 20, 2, 0)),
    "olmoe-normalised-biases-tied": FamilyShape(
        "OlmoeForCausalLM",
        BASE
        | {
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        eos=(3, 90),
        prompts=(6, 13, 1, 0),
    ),
}
