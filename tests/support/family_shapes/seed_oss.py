"""Seed-OSS: biases of attention's projections, each by a setting."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"head_dim": 10}

SHAPES = {
    "seed-oss": FamilyShape("SeedOssForCausalLM", BASE, prompts=(2, 3, 0, 1)),
    "seed-oss-other-biases-tied": FamilyShape(
        "SeedOssForCausalLM",
        BASE | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        eos_gain=2.2,
        prompts=(1, 4, 0, 2),
    ),
}
