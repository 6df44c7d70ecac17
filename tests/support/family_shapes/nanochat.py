"""nanochat: norms without weights, rotation the other way round, capped logits."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "nanochat": FamilyShape("NanoChatForCausalLM", DECODER, prompts=(2, 6, 0, 4)),
    "nanochat-biases-uncapped-tied": FamilyShape(
        "NanoChatForCausalLM",
        DECODER
        | {
            "head_dim": 12,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        eos=(3, 90),
        prompts=(2, 5, 0, 1),
    ),
}
