"""GPT-NeoX: parallel blocks with two norms, or sequential ones; rotary positions in a part of each head."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}

SHAPES = {
    "gpt-neox": FamilyShape("GPTNeoXForCausalLM", BASE, prompts=(0, 1, 2, 3)),
    "gpt-neox-sequential-no-attention-bias-tied": FamilyShape(
        "GPTNeoXForCausalLM",
        BASE
        | {
            "num_attention_heads": 4,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5},
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
        eos=(3, 90),
        eos_gain=4.0,
        prompts=(7, 11, 1, 0),
    ),
}
