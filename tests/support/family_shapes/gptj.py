"""GPT-J: parallel blocks with one norm, neighbouring dimensions rotated in a part of each head, a head with bias."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}

SHAPES = {
    "gptj": FamilyShape("GPTJForCausalLM", BASE, prompts=(2, 16, 0, 1)),
    "gptj-odd-heads": FamilyShape(
        "GPTJForCausalLM",
        BASE | {"n_embd": 36, "n_head": 3, "rotary_dim": 6, "n_inner": 44, "activation_function": "relu"},
        eos=(3, 90),
        seed=1,
        eos_gain=2.6,
        prompts=(1, 2, 0, 3),
    ),
    "gptj-all-rotated-tied": FamilyShape(
        "GPTJForCausalLM", BASE | {"rotary_dim": 8, "tie_word_embeddings": True}, prompts=(6, 7, 0, 1)
    ),
}
