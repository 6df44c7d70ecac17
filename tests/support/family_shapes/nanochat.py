"""nanochat: norms without weights, rotation the other way round, capped logits."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

SHAPES = {
    "nanochat": FamilyShape("NanoChatForCausalLM", BASE, prompts=(2, 6, 0, 4)),
    "nanochat-biases-uncapped-tied": FamilyShape(
        "NanoChatForCausalLM",
        BASE
        | {
            "head_dim": 12,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        eos=(3, 90),
        prompts=(2, 5, 0, 1),
    ),
}
