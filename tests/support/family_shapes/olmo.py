"""OLMo: norms without weights, clipped projections."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "olmo": FamilyShape("OlmoForCausalLM", DECODER, eos_gain=2.2, prompts=(0, 7, 1, 2)),
    "olmo-clipped-biases-tied": FamilyShape(
        "OlmoForCausalLM",
        DECODER | {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True},
        eos_gain=2.6,
        prompts=(0, 3, 1, 2),
    ),
}
