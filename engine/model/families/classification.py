"""Classifiers over decoders: in transformers every family has them, and all are one matrix over the hidden states."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from engine.model.families.common import linear
from engine.model.spec import Classifier, Head, Lm
from engine.model.table import WeightTable

_TEXTS, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_NAMES = ("score", "classifier")  # of the matrix


def base_model(name: str) -> str | None:
    """The model without a head that a classifier of this name reads: LlamaModel for LlamaForTokenClassification.

    None for architectures that are no classifiers.
    """
    for suffix in (_TEXTS, _TOKENS):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + "Model"
    return None


def classifier(config: Any, name: str) -> Classifier:
    """The head of a decoder's classifier of this name.

    A text's class is read off its last token that is not pad_token_id. The reference looks for it to tell a padded
    batch from its texts, and so passes over such tokens where they belong to the text, too: a closing EOS, where
    that is what pads. A checkpoint was trained that way, hence there is no other choice here, although nothing is
    padded.
    """
    if name.endswith(_TEXTS):
        return Classifier(labels=config.num_labels, pooling="last", bias=False, padding_id=config.pad_token_id)
    return Classifier(labels=config.num_labels, pooling=None, bias=getattr(config, "token_classification_bias", True))


def with_head(table: WeightTable, head: Head) -> WeightTable:
    """A decoder's table for a model with another head than a language model's, or none.

    Heads that a checkpoint holds and the model does not ask for are left unused.
    """
    if isinstance(head, Lm):
        return table
    others = [] if table.head is None else [table.head.removesuffix(".weight")]
    if isinstance(head, Classifier):
        # Older classes have another name for it; a parameter with two entries takes the one that is stored.
        forms = [entry for name in _NAMES for entry in linear("head.output", name, head.bias, 0)]
        table = replace(table, entries=(*table.entries, *forms))
    else:
        others += _NAMES
    ignored = [rf"{re.escape(name)}\.(weight|bias)" for name in others]
    return replace(table, ignored=(*table.ignored, *ignored))
