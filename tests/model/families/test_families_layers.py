"""Families of the last year: what each layer is made of, and the settings that are refused."""

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
from engine.model.positions import Rotary, ShareScaling, Temperature
from engine.model.spec import GroupLimited, ModelSpec, NormedSum, OutputGate, Shared, SparselyGated

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9,
}  # fmt: skip
TEMPERED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def described(architecture: str, **settings: Any) -> ModelSpec:
    kind = getattr(transformers, architecture).config_class
    return families.describe(published(kind(architectures=[architecture], **settings)))


def test_the_last_layers_of_gemma_4_read_keys_of_the_last_layer_of_their_kind_that_has_some() -> None:
    stack = decoder(described("Gemma4ForCausalLM", **SMALL, num_kv_shared_layers=2, global_head_dim=16))
    assert [block.attention.reads for block in stack.blocks] == [None, None, 0, 1]
    assert [block.attention.head_dim for block in stack.blocks] == [8, 16, 8, 16]
    position = stack.blocks[1].attention.position
    assert isinstance(position, Rotary)
    assert position.scaling == ShareScaling(turning=2)


def test_gemma_4_with_experts() -> None:
    settings = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    stack = decoder(described("Gemma4ForCausalLM", **SMALL, **settings, **experts))
    assert [block.attention.one_for_both for block in stack.blocks] == [False, True, False, True]
    assert [block.attention.kv_heads for block in stack.blocks] == [2, 1, 2, 1]
    assert all(isinstance(block.ffn, NormedSum) for block in stack.blocks)
    assert stack.layer_vectors is None


def test_gates_of_gemma_3n_stay_shut_below_a_quantile() -> None:
    shares = {"activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0], "num_kv_shared_layers": 0}
    stack = decoder(described("Gemma3nForCausalLM", **SMALL, **shares))
    first, second, *others = (block.ffn for block in stack.blocks)
    assert isinstance(first, SparselyGated)
    assert isinstance(second, SparselyGated)
    assert first.cutoff == pytest.approx(1.6448536)
    assert second.cutoff == pytest.approx(0.0)
    assert not any(isinstance(ffn, SparselyGated) for ffn in others)


def test_queries_of_mistrals_grow() -> None:
    settings = {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = described("Ministral3ForCausalLM", rope_parameters=TEMPERED | settings)
    assert decoder(model).blocks[0].attention.temperature == Temperature(0.1, 16.0, first=0)
    latent = decoder(described("Mistral4ForCausalLM", n_group=4, topk_group=2, num_hidden_layers=1)).blocks[0]
    assert latent.attention.temperature is not None
    assert isinstance(latent.ffn, Shared)
    assert latent.ffn.routed.routing == GroupLimited(4, 2, leaders=2)


def test_gates_of_heads() -> None:
    assert decoder(described("AfmoeForCausalLM")).blocks[0].attention.gate == OutputGate()
    assert decoder(described("LagunaForCausalLM")).blocks[0].attention.gate == OutputGate("softplus", per_head=True)


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
