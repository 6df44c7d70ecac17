"""Nomic BERT, Jina v3 and GTE: all heads; one segment, two and three; activations; tied and untied output matrices."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE, NARROW

OTHER = NARROW | {"hidden_act": "relu", "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}

SHAPES = {
    f"{name.lower()}-{number}": EncoderShape(f"{name}{kind}", settings, seed=number)
    for name in ("NomicBert", "JinaEmbeddingsV3", "Gte")
    for number, (kind, settings) in enumerate(
        [
            ("Model", BASE),
            ("Model", OTHER | {"type_vocab_size": 3}),
            ("ForMaskedLM", BASE | {"type_vocab_size": 2}),
            ("ForMaskedLM", OTHER | {"tie_word_embeddings": False}),
            ("ForSequenceClassification", BASE | {"num_labels": 5}),
            ("ForSequenceClassification", OTHER | {"num_labels": 1}),
            ("ForTokenClassification", BASE | {"num_labels": 5}),
        ]
    )
} | {
    "jina-answers": EncoderShape("JinaEmbeddingsV3ForQuestionAnswering", BASE, seed=8),
}
