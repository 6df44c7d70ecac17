"""Falcon: one key and value head for all, or grouped; parallel blocks with one or two norms; scaled ALiBi.

The reference keeps its "sdpa" attention here, whatever else is asked of it once it is made. Its "eager" one adds
ALiBi twice (as of 5.23); without ALiBi both agree.
"""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GROUPED = BASE | {"new_decoder_architecture": True, "num_kv_heads": 2}
ALIBI = BASE | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}

SHAPES = {
    "falcon": FamilyShape("FalconForCausalLM", BASE, seed=1, eos_gain=4.0, prompts=(4, 8, 0, 1)),
    "falcon-grouped": FamilyShape(
        "FalconForCausalLM",
        GROUPED | {"ffn_hidden_size": 56},
        eos=(3, 90),
        seed=2,
        eos_gain=2.6,
        prompts=(11, 18, 6, 0),
    ),
    "falcon-grouped-one-norm-biases": FamilyShape(
        "FalconForCausalLM",
        GROUPED | {"num_ln_in_parallel_attn": 1, "bias": True, "tie_word_embeddings": False},
        eos_gain=3.2,
        prompts=(6, 47, 0, 1),
    ),
    "falcon-alibi": FamilyShape("FalconForCausalLM", ALIBI, eos_gain=2.2, prompts=(0, 12, 8, 1)),
    "falcon-alibi-odd-heads-parallel-one-kv": FamilyShape(
        "FalconForCausalLM",
        ALIBI | {"hidden_size": 48, "num_attention_heads": 6, "multi_query": True, "parallel_attn": True},
        prompts=(9, 10, 6, 0),
    ),
}
