"""Classifiers of transformers over the decoders of the family shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from support.family_shape import FamilyCheckpoint, FamilyShape, fill_randomly, run

LABELS = 3
PAD = 5  # an id that prompts hold, too
_MAPPINGS: Mapping[str, Any] = {
    "classify": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "token_classify": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}


def classifier_of(model: FamilyCheckpoint, task: str) -> type | None:
    """The class of transformers for this task over the model's decoder; None if there is none."""
    mapping, config_class = _MAPPINGS[task], type(model.model.config)
    found: type | None = mapping.get(config_class, None)
    return found


def make_classifier(shape: FamilyShape, model_class: Any, folder: Path, **settings: Any) -> FamilyCheckpoint:
    """A checkpoint of this class with random weights, in the shape's configuration."""
    config = model_class.config_class(vocab_size=shape.vocab, **shape.settings)
    config.pad_token_id, config.num_labels = PAD, LABELS
    for name, value in settings.items():
        setattr(config, name, value)
    model = model_class(config)
    model.set_attn_implementation("eager")
    fill_randomly(model.eval(), shape.seed)
    run(model, [1] * shape.max_model_len)
    model.save_pretrained(folder)
    return FamilyCheckpoint(shape, folder, model)


def logits(model: FamilyCheckpoint, prompt: list[int]) -> Tensor:
    """[1, labels], or [tokens, labels] of a classifier of tokens."""
    found: Tensor = run(model.model, prompt).logits
    return found.reshape(-1, LABELS)


def padded(prompts: list[list[int]]) -> list[list[int]]:
    """The prompts, one whose end is padding for more than a chunk, one that is padding in the middle, and one that
    is nothing else."""
    longest = max(prompts, key=len)
    ended = longest[:-17] + [PAD] * 17
    begun = [PAD] * 9 + longest[:5] + [PAD]
    return [*prompts, ended, begun, [PAD] * 11]
