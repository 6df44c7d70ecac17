"""XGLM and BioGPT: scaled embeddings with sinusoidal positions, or learned ones."""

from typing import Any

from support.family_shape import FamilyShape

XGLM: dict[str, Any] = {
    "d_model": 32,
    "ffn_dim": 56,
    "num_layers": 2,
    "attention_heads": 4,
    "max_position_embeddings": 128,
}
BIOGPT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}

SHAPES = {
    "xglm": FamilyShape("XGLMForCausalLM", XGLM, prompts=(3, 4, 0, 1)),
    "xglm-odd-unscaled-untied": FamilyShape(
        "XGLMForCausalLM",
        XGLM
        | {"d_model": 33, "attention_heads": 3, "activation_function": "relu"}
        | {"scale_embedding": False, "tie_word_embeddings": False},
        eos=(3, 90),
        prompts=(7, 12, 0, 2),
    ),
    "biogpt": FamilyShape("BioGptForCausalLM", BIOGPT, seed=1, eos_gain=2.6, prompts=(3, 8, 0, 1)),
    "biogpt-unscaled-untied": FamilyShape(
        "BioGptForCausalLM",
        BIOGPT | {"scale_embedding": False, "tie_word_embeddings": False, "hidden_act": "relu"},
        eos=(3, 90),
        prompts=(0, 1, 9, 2),
    ),
}
