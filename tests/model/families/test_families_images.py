"""Encoders of images as parts: what configs are made of, and what of them is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import BertConfig, CLIPTextConfig, DeiTConfig, ViTConfig

from engine.errors import UnsupportedModelError
from engine.interface.outputs import SignalInfo
from engine.model.families import build_spec
from engine.model.missing import unsupported
from engine.model.spec import Classifier, FirstStates, ModelSpec, Pool


def test_a_teacher_has_a_head_of_its_own() -> None:
    model = build_spec(DeiTConfig(architectures=["DeiTForImageClassificationWithTeacher"], num_labels=7))
    assert model.head == Classifier(labels=7, pooling=FirstStates(2))
    assert model.signal == SignalInfo("image", (3, 224, 224), 198)
    assert unsupported(model) == []
    texts = build_spec(BertConfig(architectures=["BertModel"]))
    for other in (replace(texts, head=model.head), replace(model, head=replace(model.head, pooling=FirstStates(3)))):
        assert unsupported(other) == ["FirstStates that stand for no learned vectors"]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            ViTConfig(architectures=["ViTModel"], image_size=8),
            "image_size of the config is 8, less than its patch_size",
        ),
        (ViTConfig(architectures=["ViTModel"], image_size=10**6), "image_size .* from 1 to 16384"),
        (
            ViTConfig(architectures=["ViTModel"], patch_size=0),
            "patch_size .* from 1 to 16384, or height and width; got",
        ),
        (ViTConfig(architectures=["ViTModel"], num_attention_heads=7), "768 hidden features, which 7 attention heads"),
        (ViTConfig(architectures=["ViTModel"], hidden_act="swish2"), "activation 'swish2'"),
        (ViTConfig(architectures=["ViTForImageClassification"], num_labels=0), "num_labels of the config is 0"),
        (CLIPTextConfig(architectures=["CLIPTextModel"], eos_token_id=[1, 2]), "eos_token_id of the text's config"),
        (ViTConfig(architectures=["ViTForMaskedImageModeling"]), "'ViTForMaskedImageModeling' is not supported"),
    ],
)
def test_what_is_refused(config: Any, problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        build_spec(config)


def test_twins_that_have_no_module() -> None:
    """Only encoders have twins, and these read signals."""
    texts = build_spec(CLIPTextConfig(architectures=["CLIPTextModel"]))
    assert unsupported(ModelSpec(encoder=texts.encoder, decoder=None, head=Pool(), twin=texts)) == [
        "a twin of other models than encoders, or one that reads no signals"
    ]
    images = build_spec(ViTConfig(architectures=["ViTModel"]))
    found = unsupported(ModelSpec(encoder=None, decoder=images.encoder, head=Pool()))
    assert "a decoder that reads no token ids" in found
