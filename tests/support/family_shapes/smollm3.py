"""SmolLM3: layers without positions, which may have windows; biases; untied heads."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"num_hidden_layers": 3, "no_rope_layer_interval": 2}

SHAPES = {
    "smollm3": FamilyShape("SmolLM3ForCausalLM", BASE, eos_gain=2.2, prompts=(1, 2, 0, 3)),
    "smollm3-windows-biases-untied": FamilyShape(
        "SmolLM3ForCausalLM",
        BASE
        | {
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        eos=(3, 90),
        eos_gain=1.4,
        prompts=(1, 2, 0, 5),
    ),
}
