"""BigBird: all heads; blocks of several sizes, of which long inputs have many and short ones too few; whole inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine import TokenInput
from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE as BERT
from support.encoder_shapes.bert import NARROW as NARROW_BERT

SEPARATOR = 6
# 330 positions are a multiple of both sizes, since transformers has positions for whole blocks alone. Of the inputs,
# that of 113 tokens is just too long to be seen whole with the one, that of 64 just short enough with the other.
BASE = BERT | {"block_size": 10, "num_random_blocks": 3, "sep_token_id": SEPARATOR}
NARROW = NARROW_BERT | {
    "block_size": 6,
    "num_random_blocks": 3,
    "sep_token_id": SEPARATOR,
    "use_bias": False,
    "rescale_embeddings": True,
    "hidden_act": "relu",
    "type_vocab_size": 3,
}
FULL = BASE | {"attention_type": "original_full"}
SEQUENCE, TOKENS = "BigBirdForSequenceClassification", "BigBirdForTokenClassification"
ANSWERS = "BigBirdForQuestionAnswering"


def anew(model: Any, input: TokenInput) -> Mapping[str, Tensor]:
    """transformers stays with the attention that a short input made it take; an input begins as the config says."""
    model.base_model.set_attention_type(model.config.attention_type)
    return {}


def asked(model: Any, input: TokenInput) -> Mapping[str, Tensor]:
    """The segments that transformers gives a question and its text, which are given to its encoder alone, too. Its
    model would hide the numbers of the question's tokens, as if it had one token."""
    more = dict(anew(model, input))
    ids = list(input.token_ids)
    if input.token_type_ids is None:
        end = ids.index(SEPARATOR) if SEPARATOR in ids else 0
        more["token_type_ids"] = torch.tensor([[int(at > end) for at in range(len(ids))]])
    if model is not model.base_model:
        more["question_lengths"] = torch.tensor([[1]])
    return more


SHAPES = {
    "big-bird": EncoderShape("BigBirdModel", BASE, prepare=anew),
    "big-bird-full": EncoderShape("BigBirdModel", FULL | {"use_bias": False}, seed=1),
    "big-bird-masked": EncoderShape("BigBirdForMaskedLM", BASE, seed=2, prepare=anew),
    "big-bird-masked-untied": EncoderShape(
        "BigBirdForMaskedLM", NARROW | {"tie_word_embeddings": False, "num_random_blocks": 2}, seed=3, prepare=anew
    ),
    "big-bird-pretraining": EncoderShape("BigBirdForPreTraining", NARROW, seed=4, prepare=anew),
    "big-bird-classes": EncoderShape(SEQUENCE, BASE | {"num_labels": 5}, seed=5, prepare=anew),
    "big-bird-tokens": EncoderShape(TOKENS, NARROW | {"num_labels": 3, "num_random_blocks": 1}, seed=7, prepare=anew),
    "big-bird-answers": EncoderShape(ANSWERS, BASE, seed=9, prepare=asked),
}
