"""Classifiers over decoders: every family in transformers has them, and each is one matrix over the hidden states.

In a classifier over an encoder-decoder model, both stacks read the text, and two layers read its last state
(`RepeatedInput`)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.interface.outputs import RepeatedInput
from engine.model.families.common import linear
from engine.model.families.encoder_only import first_token_weights
from engine.model.spec import Classifier, Head, Lm
from engine.model.table import WeightTable

_TEXTS, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
_NAMES = ("score", "classifier")  # name of the matrix


def base_model(name: str) -> str | None:
    """The headless model that a classifier of this name uses: LlamaModel for LlamaForTokenClassification.

    None for other architectures.
    """
    for suffix in (_TEXTS, _TOKENS):
        if name.endswith(suffix):
            return name.removesuffix(suffix) + "Model"
    return None


def classifier(config: Any, name: str) -> Classifier:
    """The head of a decoder's classifier of this name.

    The class is computed from the last token that is not pad_token_id. The reference skips all tokens with that id,
    even if they belong to the text, such as a closing EOS if EOS is also the padding. Checkpoints were trained that
    way, so Octavo does the same, although it pads nothing.
    """
    if name.endswith(_TEXTS):
        return Classifier(labels=config.num_labels, pooling="last", bias=False, padding_id=config.pad_token_id)
    return Classifier(labels=config.num_labels, pooling=None, bias=getattr(config, "token_classification_bias", True))


def joint_classifier(config: Any) -> Classifier:
    """The head of a classifier over encoder and decoder."""
    return Classifier(labels=config.num_labels, pooling="last", activation="tanh")


def repeats_after_start(config: Any) -> RepeatedInput:
    """The decoder reads the input after its start token. Raises UnsupportedModelError if the config does not name that
    token."""
    start = getattr(config, "decoder_start_token_id", None)
    if not isinstance(start, int):
        raise UnsupportedModelError(
            "decoder_start_token_id of the config must be the id of the token with which the decoder begins, got "
            f"{start!r}."
        )
    return RepeatedInput(start, _end(config))


def repeats_after_last(config: Any) -> RepeatedInput:
    """The decoder reads the input after its last token, which names the language."""
    return RepeatedInput(None, _end(config))


def _end(config: Any) -> int:
    end: Any = config.eos_token_id
    if not isinstance(end, int):
        raise UnsupportedModelError(
            f"eos_token_id of the config must be the id of one token, whose vector is classified; got {end!r}."
        )
    return end


def with_joint_head(table: WeightTable) -> WeightTable:
    """The weights of an encoder-decoder model for its classifier."""
    entries = (entry for entry in table.entries if not entry.target.startswith("head."))
    found = first_token_weights("classification_head.dense", "classification_head.out_proj")
    return replace(
        table,
        entries=(*entries, *found),
        ignored=(*table.ignored, r"lm_head\.weight", r"final_logits_bias"),
        # Some families store the parts of both stacks under one name.
        renamed=((r"^transformer\.", ""), *table.renamed),
        head=None,
    )


def with_head(table: WeightTable, head: Head) -> WeightTable:
    """The weights of a decoder for a model with another head than a language model's, or without one.

    Heads in a checkpoint that the model does not use are left unused.
    """
    if isinstance(head, Lm):
        return table
    others = [] if table.head is None else [table.head.removesuffix(".weight")]
    if isinstance(head, Classifier):
        # Older classes have another name for it; a parameter with two entries uses the one that is stored.
        forms = [entry for name in _NAMES for entry in linear("head.output", name, head.bias)]
        table = replace(table, entries=(*table.entries, *forms))
    else:
        others += _NAMES
    ignored = [rf"{re.escape(name)}\.(weight|bias)" for name in others]
    return replace(table, ignored=(*table.ignored, *ignored))
