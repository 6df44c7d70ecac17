"""EXAONE 4: norms after the sublayers and per head; full layers without positions beside windows, or with them."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"num_hidden_layers": 4}

SHAPES = {
    "exaone4": FamilyShape("Exaone4ForCausalLM", BASE | {"sliding_window": 9}, prompts=(3, 4, 0, 1)),
    "exaone4-no-windows-tied": FamilyShape(
        "Exaone4ForCausalLM",
        BASE
        | {
            "num_hidden_layers": 2,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
        },
        eos_gain=3.2,
        prompts=(2, 44, 5, 0),
    ),
}
