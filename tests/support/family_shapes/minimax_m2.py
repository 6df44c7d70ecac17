"""MiniMax-M2: corrected scores of experts, half of each head rotates, norms of whole projections."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
}

SHAPES = {
    "minimax-m2": FamilyShape(
        "MiniMaxM2ForCausalLM", BASE | {"intermediate_size": 24, "rotary_dim": 6}, prompts=(8, 34, 4, 2)
    ),
    "minimax-m2-tied": FamilyShape(
        "MiniMaxM2ForCausalLM",
        BASE | {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
        eos=(3, 90),
        prompts=(1, 4, 0, 2),
    ),
}
