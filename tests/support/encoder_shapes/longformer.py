"""Longformer: all heads; windows of one size and of a size for each layer, narrower and wider than inputs; the tokens
that each head has as global ones."""

from __future__ import annotations

from collections.abc import Sequence

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE as BERT
from support.encoder_shapes.bert import NARROW as NARROW_BERT

SEPARATOR = 2
BASE = BERT | {"type_vocab_size": 1, "pad_token_id": 1, "sep_token_id": SEPARATOR, "attention_window": 16}
NARROW = NARROW_BERT | {
    "type_vocab_size": 2,
    "pad_token_id": 4,
    "sep_token_id": SEPARATOR,
    "hidden_act": "relu",
    "attention_window": [4, 192, 32],
}
SEQUENCE, TOKENS = "LongformerForSequenceClassification", "LongformerForTokenClassification"
ANSWERS = "LongformerForQuestionAnswering"


def first(token_ids: Sequence[int]) -> list[int]:
    """The first token is global."""
    return [1, *[0] * (len(token_ids) - 1)]


def question(token_ids: Sequence[int]) -> list[int]:
    """Those before the first separator are, which need not be one of three, as transformers would have it."""
    end = list(token_ids).index(SEPARATOR) if SEPARATOR in token_ids else 0
    return [1] * end + [0] * (len(token_ids) - end)


SHAPES = {
    "longformer": EncoderShape("LongformerModel", BASE, vocab=29),
    "longformer-windows": EncoderShape("LongformerModel", NARROW, vocab=29, seed=1),
    "longformer-masked": EncoderShape("LongformerForMaskedLM", BASE, seed=2),
    "longformer-masked-untied": EncoderShape("LongformerForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=3),
    "longformer-classes": EncoderShape(SEQUENCE, BASE | {"num_labels": 5}, seed=4, global_tokens=first),
    "longformer-tokens": EncoderShape(TOKENS, NARROW | {"num_labels": 3}, seed=6),
    "longformer-answers": EncoderShape(ANSWERS, BASE, seed=8, global_tokens=question),
}
