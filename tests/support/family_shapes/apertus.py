"""Apertus: xIELU with slopes of each layer's own, norms of queries and keys, llama3 scaling by default."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "apertus": FamilyShape("ApertusForCausalLM", DECODER, prompts=(1, 2, 0, 6)),
    "apertus-biases-tied-own-heads": FamilyShape(
        "ApertusForCausalLM",
        DECODER
        | {
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        eos=(3, 90),
        prompts=(0, 10, 1, 2),
    ),
}
