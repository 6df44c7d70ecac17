"""ERNIE 4.5 with experts: corrected probabilities, layers without experts, biases."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"moe_intermediate_size": 24, "num_hidden_layers": 3, "moe_num_experts": 6, "moe_k": 3}

SHAPES = {
    "ernie4-5-moe": FamilyShape("Ernie4_5_MoeForCausalLM", BASE, prompts=(1, 2, 0, 4)),
    "ernie4-5-moe-some-layers-biases-untied": FamilyShape(
        "Ernie4_5_MoeForCausalLM",
        BASE
        | {
            "num_hidden_layers": 5,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 1,
            "use_bias": True,
            "tie_word_embeddings": False,
        },
        eos=(3, 90),
        prompts=(1, 2, 0, 3),
    ),
    "ernie4-5-moe-none-shared": FamilyShape(
        "Ernie4_5_MoeForCausalLM",
        BASE | {"num_hidden_layers": 2, "moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_norm_min": 0.5},
        prompts=(3, 10, 1, 0),
    ),
}
