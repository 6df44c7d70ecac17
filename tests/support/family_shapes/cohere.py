"""Command R: parallel gated blocks, scaled logits; with windows, layers without them have no positions."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"logit_scale": 0.6}

SHAPES = {
    "cohere": FamilyShape("CohereForCausalLM", BASE, eos_gain=2.2, prompts=(7, 29, 5, 0)),
    "cohere-biases-untied": FamilyShape(
        "CohereForCausalLM",
        BASE
        | {
            "use_qk_norm": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "logit_scale": 1.3,
        },
        eos=(3, 90),
        prompts=(0, 1, 4, 2),
    ),
    "cohere2": FamilyShape(
        "Cohere2ForCausalLM", BASE | {"num_hidden_layers": 4, "sliding_window": 9}, eos_gain=2.2, prompts=(3, 8, 2, 0)
    ),
    "cohere2-biases-other-layers": FamilyShape(
        "Cohere2ForCausalLM",
        BASE
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 6,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        eos_gain=1.4,
        prompts=(6, 10, 0, 1),
    ),
}
