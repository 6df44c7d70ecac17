"""gpt-oss: sinks, windows in every second layer, clamped experts with biases; stretched positions or plain ones."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "intermediate_size": 24,
    "head_dim": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "swiglu_limit": 1.5,
}

SHAPES = {
    "gpt-oss": FamilyShape("GptOssForCausalLM", BASE, eos_gain=2.2, prompts=(9, 11, 4, 0)),
    "gpt-oss-plain-positions-no-biases-tied": FamilyShape(
        "GptOssForCausalLM",
        BASE
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "attention_bias": False,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "swiglu_alpha": 1.2,
            "swiglu_limit": 7.0,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
        prompts=(6, 12, 3, 0),
    ),
}
