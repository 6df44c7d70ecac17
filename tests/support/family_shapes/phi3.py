"""Phi-3: fused projections, windows, and rotary factors for short and for long contexts."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"original_max_position_embeddings": 128}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.2, 2.0, 3.5, 6.0],
}


def extended(original: int, **changes: Any) -> dict[str, Any]:
    """Settings of a model made for `original` tokens and stretched to 128."""
    # The length beside the parameters is the one that counts.
    parameters = LONG | {"original_max_position_embeddings": 50} | changes
    return BASE | {"original_max_position_embeddings": original, "rope_parameters": parameters}


SHAPES = {
    "phi3": FamilyShape("Phi3ForCausalLM", BASE, eos_gain=1.4, prompts=(7, 8, 0, 1)),
    "phi3-window-partial-rotary-tied": FamilyShape(
        "Phi3ForCausalLM",
        BASE
        | {
            "num_key_value_heads": 4,
            "sliding_window": 9,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
        },
        eos=(3, 90),
        prompts=(2, 4, 0, 1),
    ),
    # transformers chooses by the length so far: here it never passes the original one, and there always has. Between
    # the two it has to be chosen by request: greedy answers and beams stay below, the longest of `lengths` does not.
    "phi3-factors-by-request": FamilyShape(
        "Phi3ForCausalLM", extended(72), max_model_len=128, lengths=(37, 1, 96, 72, 73), prompts=(2, 3, 1, 4)
    ),
    "phi3-long-factors": FamilyShape(
        "Phi3ForCausalLM", extended(8), shortest=9, lengths=(37, 9, 14), prompts=(0, 1, 10, 2)
    ),
    "phi3-long-factors-window-partial-rotary-tied": FamilyShape(
        "Phi3ForCausalLM",
        extended(8, partial_rotary_factor=0.75, short_factor=[1.0, 1.2, 1.5], long_factor=[1.1, 2.5, 5.0])
        | {"sliding_window": 11, "tie_word_embeddings": True},
        shortest=9,
        lengths=(37, 9, 14),
        prompts=(0, 1, 2, 3),
    ),
}
