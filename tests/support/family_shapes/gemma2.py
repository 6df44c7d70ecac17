"""Gemma 2: windows in every other layer, norms on both sides, capped scores, scaled embeddings."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "query_pre_attn_scalar": 10,
    "sliding_window": 9,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 9.0,
}

SHAPES = {
    "gemma2": FamilyShape("Gemma2ForCausalLM", BASE, prompts=(5, 58, 26, 0), eos_gain=2.2),
    "gemma2-one-kv-head-no-caps-untied": FamilyShape(
        "Gemma2ForCausalLM",
        BASE
        | {
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
        eos=(3, 150),
        prompts=(1, 9, 2, 0),
        eos_gain=1.4,
    ),
}
