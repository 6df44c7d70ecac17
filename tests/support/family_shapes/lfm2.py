"""LFM2: gated short convolutions with a state, attention in some layers; with experts."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}
EXPERTS = BASE | {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "num_dense_layers": 1}
del EXPERTS["block_auto_adjust_ff_dim"]

SHAPES = {
    "lfm2": FamilyShape("Lfm2ForCausalLM", BASE, prompts=(2, 3, 0, 7)),
    "lfm2-biases-wide-kernel": FamilyShape(
        "Lfm2ForCausalLM",
        BASE
        | {
            "conv_bias": True,
            "conv_L_cache": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 16,
            "tie_word_embeddings": False,
        },
        eos_gain=1.4,
        prompts=(0, 6, 2, 1),
    ),
    "lfm2-moe": FamilyShape("Lfm2MoeForCausalLM", EXPERTS, prompts=(3, 13, 1, 0)),
    "lfm2-moe-dense-first": FamilyShape(
        "Lfm2MoeForCausalLM",
        EXPERTS
        | {
            "num_dense_layers": 2,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 4,
            "norm_topk_prob": False,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
        eos_gain=1.4,
        prompts=(0, 6, 2, 1),
    ),
}
