"""Families of the last year: the settings and parts that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers
from support.published import decoder

from engine.configs.published import published
from engine.errors import UnsupportedModelError
from engine.model import families
from engine.model.missing import unsupported
from engine.model.spec import ModelSpec

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9,
}  # fmt: skip
TEMPERED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def described(architecture: str, **settings: Any) -> ModelSpec:
    kind = getattr(transformers, architecture).config_class
    return families.describe(published(kind(architectures=[architecture], **settings)))


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("Ministral3ForCausalLM", {"rope_parameters": TEMPERED}, "llama_4_scaling_beta"),
        ("LagunaForCausalLM", {"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping of the config must"),
        ("LagunaForCausalLM", {"gating": "odd"}, "gating of the config must be true, per-head or per-element"),
        ("Cohere2MoeForCausalLM", {"expert_selection_fn": "sigmoid"}, "expert_selection_fn of the config must be"),
        ("Cohere2MoeForCausalLM", {"num_shared_experts": 1}, "shared_expert_combination_strategy of the config must"),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [1e4]}, "layer_rope_theta of the config must have one entry"),
        ("Gemma3nForCausalLM", SMALL | {"altup_active_idx": 4, "num_kv_shared_layers": 0}, "altup_active_idx of the"),
        ("Gemma4ForCausalLM", SMALL | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention of the"),
        (
            "Gemma4ForCausalLM",
            SMALL | {"per_layer_config": {0: {"intermediate_size": 8}}},
            "per_layer_config of the config may set head_dim and num_key_value_heads, but sets intermediate_size",
        ),
    ],
)
def test_refused_settings(architecture: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        described(architecture, **settings)


def test_parts_that_nothing_computes() -> None:
    model = described("Gemma4ForCausalLM", **SMALL, num_kv_shared_layers=2)
    stack = decoder(model)
    assert unsupported(model) == []
    first, *others = stack.blocks
    reading = replace(first, attention=replace(first.attention, reads=0))
    early = replace(model, decoder=replace(stack, blocks=(stack.blocks[0], reading, *others)))
    assert "layers that read keys of others before some that have their own" in unsupported(early)
    other = replace(stack.blocks[-1], attention=replace(stack.blocks[-1].attention, kv_heads=1))
    shaped = replace(model, decoder=replace(stack, blocks=(*stack.blocks[:-1], other)))
    assert unsupported(shaped) == ["keys of another shape than those of the layer that reads them"]
    without = replace(model, decoder=replace(stack, layer_vectors=None))
    assert unsupported(without) == ["layers that read vectors which the stack does not make"]
