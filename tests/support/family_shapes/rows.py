"""Flint, Kolibri 1, Aria's text model and LFM3."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"num_hidden_layers": 3, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 24, "num_experts": 6}
EXPERTS |= {"num_experts_per_tok": 2}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS = BASE | {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}
FLINT = WINDOWS | EXPERTS | {"mlp_only_layers": [0]}
KOLIBRI = {name: value for name, value in (WINDOWS | EXPERTS).items() if name != "intermediate_size"}
ARIA = DECODER | {"intermediate_size": 24, "moe_num_experts": 5, "moe_topk": 2}
LFM = BASE | {
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL, "conv", SLIDING],
    "sliding_window": 9,
    "conv_L_cache": 5,
}

SHAPES = {
    "flint": FamilyShape("FlintForCausalLM", FLINT, prompts=(0, 2, 4, 3)),
    "flint-odd": FamilyShape(
        "FlintForCausalLM",
        FLINT
        | {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 14,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "attention_bias": True,
            "mlp_only_layers": [],
            "layer_types": [FULL, SLIDING, SLIDING],
        },
        prompts=(8, 16, 1, 0),
    ),
    "kolibri": FamilyShape("Kolibri1ForCausalLM", KOLIBRI, prompts=(0, 2, 11, 1)),
    "kolibri-odd": FamilyShape(
        "Kolibri1ForCausalLM",
        KOLIBRI
        | {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 14,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "layer_types": [SLIDING, SLIDING, FULL],
            "tie_word_embeddings": True,
        },
        prompts=(0, 5, 1, 2),
    ),
    "aria-text": FamilyShape("AriaTextForCausalLM", ARIA, prompts=(0, 4, 1, 3)),
    "aria-text-odd-biases-tied": FamilyShape(
        "AriaTextForCausalLM",
        ARIA
        | {
            "hidden_size": 36,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "moe_num_shared_experts": 3,
            "moe_topk": 3,
            "mlp_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        prompts=(0, 2, 1, 3),
    ),
    "lfm3": FamilyShape("Lfm3ForCausalLM", LFM, prompts=(1, 2, 0, 3)),
    "lfm3-odd-plain": FamilyShape(
        "Lfm3ForCausalLM",
        LFM
        | {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "layer_types": ["conv", SLIDING, FULL, "conv"],
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "conv_bias": True,
            "conv_L_cache": 3,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        prompts=(0, 1, 9, 2),
    ),
}
