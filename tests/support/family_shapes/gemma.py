"""Gemma: norms with weights around 0, a scaled embedding; VaultGemma's windows and caps."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"head_dim": 10}

SHAPES = {
    "gemma": FamilyShape("GemmaForCausalLM", BASE, eos_gain=2.2, prompts=(4, 9, 10, 0)),
    "gemma-one-kv-head-biases-untied": FamilyShape(
        "GemmaForCausalLM",
        BASE | {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu"},
        eos=(3, 90),
        prompts=(1, 2, 0, 3),
    ),
    "vaultgemma": FamilyShape(
        "VaultGemmaForCausalLM",
        BASE
        | {
            "num_hidden_layers": 3,
            "sliding_window": 9,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 9.0,
        },
        eos_gain=3.2,
        prompts=(4, 5, 9, 0),
    ),
    "vaultgemma-no-caps": FamilyShape(
        "VaultGemmaForCausalLM",
        BASE
        | {
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
        eos_gain=3.2,
        prompts=(3, 8, 0, 1),
    ),
}
