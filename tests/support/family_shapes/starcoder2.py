"""StarCoder2: layer norms, rotary positions, a window in all layers."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "starcoder2": FamilyShape("Starcoder2ForCausalLM", DECODER, eos_gain=3.2, seed=1, prompts=(1, 8, 6, 0)),
    "starcoder2-window-no-biases-untied": FamilyShape(
        "Starcoder2ForCausalLM",
        DECODER | {"sliding_window": 8, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "relu"},
        eos=(3, 90),
        prompts=(5, 14, 1, 0),
    ),
}
