"""MPT: ALiBi, no biases, queries, keys and values clipped.

The reference pays no heed to expansion_ratio, alibi_bias_max and logit_scale.
"""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}

SHAPES = {
    "mpt": FamilyShape("MptForCausalLM", BASE, prompts=(1, 6, 0, 2)),
    "mpt-odd-heads-clipped": FamilyShape(
        "MptForCausalLM",
        BASE
        | {
            "d_model": 36,
            "n_heads": 6,
            "expansion_ratio": 2,
            "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.5, "alibi_bias_max": 4},
        },
        eos=(3, 90),
        eos_gain=2.2,
        prompts=(7, 14, 8, 0),
    ),
}
