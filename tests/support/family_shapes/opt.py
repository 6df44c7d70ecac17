"""OPT: offset learned positions, ReLU; norms before the sublayers, or after them with projected embeddings."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "ffn_dim": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}

SHAPES = {
    "opt": FamilyShape("OPTForCausalLM", BASE, eos_gain=2.2, prompts=(3, 5, 1, 0)),
    "opt-norms-after-projected": FamilyShape(
        "OPTForCausalLM",
        BASE | {"do_layer_norm_before": False, "word_embed_proj_dim": 20},
        eos=(3, 90),
        eos_gain=1.4,
        prompts=(1, 2, 0, 3),
    ),
    "opt-plain-norms-no-biases-projected": FamilyShape(
        "OPTForCausalLM",
        BASE | {"layer_norm_elementwise_affine": False, "enable_bias": False, "word_embed_proj_dim": 20},
        eos_gain=2.6,
        prompts=(4, 13, 3, 0),
    ),
}
