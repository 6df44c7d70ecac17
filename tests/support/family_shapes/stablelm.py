"""StableLM: a quarter of each head rotates; blocks one after the other, and parallel ones."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "stablelm": FamilyShape("StableLmForCausalLM", DECODER, prompts=(0, 1, 2, 3)),
    "stablelm-parallel-biases-tied": FamilyShape(
        "StableLmForCausalLM",
        DECODER
        | {
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
        eos_gain=2.2,
        prompts=(8, 17, 3, 0),
    ),
}
