"""Nemotron: layer norms stored as deviations from 1, a part of each head rotates, squared ReLU."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "nemotron": FamilyShape("NemotronForCausalLM", DECODER, eos_gain=4.0, prompts=(2, 6, 0, 1)),
    "nemotron-biases-tied": FamilyShape(
        "NemotronForCausalLM",
        DECODER
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
        eos_gain=2.2,
        prompts=(3, 4, 0, 5),
    ),
}
