"""CodeGen: GPT-J's blocks, queries, values and keys stored together."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128, "rotary_dim": 4}

SHAPES = {
    "codegen": FamilyShape("CodeGenForCausalLM", BASE, prompts=(2, 6, 0, 1)),
    "codegen-eight-heads-tied": FamilyShape(
        "CodeGenForCausalLM",
        BASE
        | {"n_embd": 48, "n_head": 8, "rotary_dim": 6, "n_inner": 44, "activation_function": "relu"}
        | {"tie_word_embeddings": True},
        eos=(3, 90),
        eos_gain=2.6,
        prompts=(11, 12, 4, 0),
    ),
}
