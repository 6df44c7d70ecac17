"""GPT-J, GPT-NeoX, OPT and Phi: refused settings, and checkpoints in the forms in which they are published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import restore
from support.families import FAMILY_SHAPES, FamilyShape, make_family_checkpoint
from support.family_shape import run
from support.pages import Pages, close, load, scattered_tables
from support.published import GPT_J_6B, GPT_NEOX_20B, OPT_125M, PHI_2, Read
from torch import Tensor

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model import checkpoint


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GPT_J_6B, {"rotary_dim": 0}, "rotary_dim must be .* from 2 to the 256 features of a head, got 0"),
        (GPT_J_6B, {"rotary_dim": 63}, "rotary_dim .* even .* got 63"),
        (GPT_J_6B, {"rotary_dim": 258}, "rotary_dim .* got 258"),
        (GPT_J_6B, {"activation_function": "mish"}, "activation 'mish'"),
        (GPT_J_6B, {"is_causal": False}, "is_causal"),
        (
            GPT_NEOX_20B,
            {"rotary_pct": 0.33},
            "even number of features, from 2 to the 96 .*partial_rotary_factor 0.33 gives 31",
        ),
        (GPT_NEOX_20B, {"rotary_pct": 0.0}, "even number of features.*gives 0"),
        (GPT_NEOX_20B, {"head_dim": 64}, "head_dim must be .* 96 .* got 64"),
        (GPT_NEOX_20B, {"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope_type 'proportional'"),
        (GPT_NEOX_20B, {"is_causal": False}, "is_causal"),
        (GPT_NEOX_20B, {"per_layer_config": {"0": {"intermediate_size": 64}}}, "per_layer_config"),
        (OPT_125M, {"activation_function": "mish"}, "activation 'mish'"),
        (OPT_125M, {"is_causal": False}, "is_causal"),
        (PHI_2, {"partial_rotary_factor": 0.39}, "even number of features.* 80 .*gives 31"),
        (PHI_2, {"hidden_act": "mish"}, "activation 'mish'"),
        (PHI_2, {"is_causal": False}, "is_causal"),
    ],
)
def test_what_no_part_expresses_is_refused(
    read: Read, config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(config, **changes)


Tensors = dict[str, Tensor]


def without(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {name.removeprefix(prefix): tensor for name, tensor in held.items()}


def buffers(layers: str, **shapes: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    """Adds buffers of two layers; dots stand as double underscores."""

    def change(held: Tensors) -> Tensors:
        named = {name.replace("__", "."): shape for name, shape in shapes.items()}
        return held | {f"{layers}.{i}.{name}": torch.ones(shape) for i in range(2) for name, shape in named.items()}

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    def change(held: Tensors) -> Tensors:
        assert any(old in name for name in held)
        return {name.replace(old, new): tensor for name, tensor in held.items()}

    return change


def with_head_copied(embedding: str) -> Callable[[Tensors], Tensors]:
    return lambda held: held | {"lm_head.weight": held[embedding].clone()}


PUBLISHED: list[tuple[str, str, list[Callable[[Tensors], Tensors]]]] = [
    ("gptj masks", "gptj", [buffers("transformer.h", attn__bias=(1, 1, 8, 8), attn__masked_bias=())]),
    (
        "gpt-neox buffers",
        "gpt-neox",
        [
            buffers(
                "gpt_neox.layers",
                attention__bias=(1, 1, 8, 8),
                attention__masked_bias=(),
                attention__rotary_emb__inv_freq=(2,),
            ),
        ],
    ),
    # It is saved as embed_out.weight, the published name, although the model calls it lm_head.weight.
    ("gpt-neox new name of the head", "gpt-neox", [renamed("embed_out.", "lm_head.")]),
    (
        "opt without a head",
        "opt-norms-after-projected",
        [without("model."), lambda held: held | {"decoder.version": torch.tensor([3.0])}],
    ),
    ("opt with its tied head", "opt", [with_head_copied("model.decoder.embed_tokens.weight")]),
    ("phi frequencies", "phi", [buffers("model.layers", self_attn__rotary_emb__inv_freq=(2,))]),
]


@pytest.mark.parametrize(("shape", "changes"), [case[1:] for case in PUBLISHED], ids=[case[0] for case in PUBLISHED])
def test_published_forms_load(shape: str, changes: list[Callable[[Tensors], Tensors]], tmp_path: Path) -> None:
    """Names without prefix, older names, buffers of old checkpoints: all the same weights."""
    made = make_family_checkpoint(FAMILY_SHAPES[shape], tmp_path)
    expected = load(made.path).state_dict()
    for change in changes:
        restore(made.path, change)
    found = load(made.path).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_head_under_both_names_is_refused(tmp_path: Path) -> None:
    path = make_family_checkpoint(FAMILY_SHAPES["gpt-neox"], tmp_path).path
    restore(path, lambda held: held | {"lm_head.weight": held["embed_out.weight"].clone()})
    with pytest.raises(
        ModelLoadError,
        match=r"lm_head\.weight twice: as (lm_head|embed_out)\.weight and as (lm_head|embed_out)\.weight",
    ):
        load(path)


@pytest.mark.parametrize("name", ["gptj-all-rotated-tied", "gpt-neox-sequential-no-attention-bias-tied", "opt", "phi"])
def test_headless_checkpoints_answer_as_the_reference_does(name: str, tmp_path: Path) -> None:
    """Logits by the embedding's table alone: a head's bias is not stored, and is zero in the reference, too."""
    shape: FamilyShape = FAMILY_SHAPES[name]
    made = make_family_checkpoint(shape, tmp_path / "whole")
    base = made.model.base_model
    base.config.tie_word_embeddings = True
    path = tmp_path / "headless"
    base.save_pretrained(path)
    assert checkpoint.read_config(path).architectures == [type(base).__name__]
    reference = getattr(transformers, shape.architecture).from_pretrained(path, attn_implementation="eager").eval()
    prompt = made.ragged()[0]
    model = load(path)
    (hidden,) = Pages(model, scattered_tables([len(prompt)])).step([prompt])
    close(model.logits(hidden), run(reference, prompt).logits[0])


def test_opt_without_a_final_norm_equals_the_reference(tmp_path: Path) -> None:
    """Fine-tuned from the first release, which had none."""
    shape = FAMILY_SHAPES["opt"]
    made = make_family_checkpoint(
        replace(shape, settings={**shape.settings, "_remove_final_layer_norm": True}), tmp_path
    )
    assert made.model.model.decoder.final_layer_norm is None
    prompt = made.ragged()[0]
    model = load(made.path)
    (hidden,) = Pages(model, scattered_tables([len(prompt)])).step([prompt])
    close(hidden, made.hidden(prompt)[0])
    close(model.logits(hidden), run(made.model, prompt).logits[0])
