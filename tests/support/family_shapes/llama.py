"""LLaMA: grouped heads, biases, scaled rotary positions, tied and untied heads."""

import json
from pathlib import Path

from support.family_shape import DECODER, FamilyShape

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
# transformers stretches to the longest sequence so far, but not below the length that the model was made for.
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 8.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.2, 2.0, 3.5, 6.0],
    "original_max_position_embeddings": 12,
}


def older(folder: Path) -> None:
    """Write the config as it was before `rope_parameters`, and as most published ones are."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    file.write_text(json.dumps(config | {"rope_scaling": scaling}), encoding="utf-8")


SHAPES = {
    "llama": FamilyShape("LlamaForCausalLM", DECODER, prompts=(0, 2, 1, 5)),
    "llama-biases-own-head-dim-tied": FamilyShape(
        "LlamaForCausalLM",
        DECODER | {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "tie_word_embeddings": True},
        prompts=(10, 47, 3, 7),
        eos_gain=2.2,
    ),
    "llama-linear": FamilyShape(
        "LlamaForCausalLM",
        DECODER | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
        prompts=(0, 1, 5, 2),
    ),
    "llama-yarn": FamilyShape("LlamaForCausalLM", DECODER | {"rope_parameters": YARN}, prompts=(0, 2, 1, 3)),
    "llama-dynamic": FamilyShape(
        "LlamaForCausalLM",
        DECODER | {"max_position_embeddings": 12, "rope_parameters": DYNAMIC},
        shortest=13,
        lengths=(96, 13, 14),
        prompts=(0, 1, 2, 3),
    ),
    "llama-dynamic-by-request": FamilyShape(
        "LlamaForCausalLM",
        DECODER | {"max_position_embeddings": 72, "rope_parameters": DYNAMIC},
        max_model_len=128,
        lengths=(128, 73, 14, 71),
        prompts=(0, 1, 2, 3),
    ),
    "llama-longrope": FamilyShape(
        "LlamaForCausalLM",
        DECODER | {"rope_parameters": LONG},
        shortest=13,
        lengths=(37, 13, 14),
        finish=older,
        prompts=(0, 3, 1, 2),
    ),
}
