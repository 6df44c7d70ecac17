"""Arcee: squared ReLU in a plain feed-forward network."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "arcee": FamilyShape("ArceeForCausalLM", DECODER, prompts=(4, 9, 0, 3)),
    "arcee-biases-tied": FamilyShape(
        "ArceeForCausalLM",
        DECODER | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10},
        eos_gain=2.6,
        prompts=(1, 10, 0, 2),
    ),
}
