"""BLOOM: ALiBi, a norm after the embedding, query, key and value interleaved by head."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"hidden_size": 32, "n_layer": 2, "n_head": 4}

SHAPES = {
    "bloom": FamilyShape("BloomForCausalLM", BASE, eos_gain=2.2, prompts=(7, 13, 0, 1)),
    "bloom-odd-heads-untied": FamilyShape(
        "BloomForCausalLM",
        BASE | {"hidden_size": 36, "n_head": 6, "n_layer": 3, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
        eos=(3, 90),
        prompts=(6, 20, 0, 1),
    ),
    "bloom-residuals-after-norms": FamilyShape(
        "BloomForCausalLM", BASE | {"apply_residual_connection_post_layernorm": True}, prompts=(0, 3, 1, 2)
    ),
}
