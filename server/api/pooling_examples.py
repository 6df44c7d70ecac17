"""Bodies that the documentation shows of endpoints that score, classify and fill masks; each works as it stands on a
model that the endpoint is for (fill-mask: whose mask token is BERT's)."""

from __future__ import annotations

from typing import Any

_QUERY = "How many leaves does a sheet folded three times have?"
_DOCUMENTS = [
    "A folio is a sheet that is folded once.",
    "A sheet folded three times makes an octavo: eight leaves, sixteen pages.",
    "The harbour lies north of the town.",
]

SCORE: dict[str, Any] = {
    "one_to_many": {"summary": "One text with several", "value": {"text_1": _QUERY, "text_2": _DOCUMENTS}},
    "pairs": {
        "summary": "Pair by pair",
        "value": {"text_1": ["A cat sat.", "It rains."], "text_2": ["There sat a cat.", "The sun is out."]},
    },
    "queries": {
        "summary": "Newer names, and the head's own numbers",
        "value": {"queries": _QUERY, "documents": _DOCUMENTS, "use_activation": False},
    },
}
RERANK: dict[str, Any] = {
    "simple": {"summary": "The two best", "value": {"query": _QUERY, "documents": _DOCUMENTS, "top_n": 2}},
    "objects": {
        "summary": "Documents as objects, results without texts",
        "value": {"query": _QUERY, "documents": [{"text": text} for text in _DOCUMENTS], "return_documents": False},
    },
}
CLASSIFY: dict[str, Any] = {
    "simple": {"summary": "Two texts", "value": {"input": ["What a fine day!", "The train was late again."]}},
    "pair": {
        "summary": "Two texts that are read together",
        "value": {"input": {"text": "A cat sat on the mat.", "text_pair": "An animal was sitting."}},
    },
    "entities": {
        "summary": "Models that classify tokens: entities",
        "value": {"input": "Anna Bergen lives in Oslo."},
    },
}
FILL_MASK: dict[str, Any] = {
    "simple": {"summary": "One mask", "value": {"input": "Paris is the [MASK] of France.", "top_k": 3}},
    "several": {"summary": "Several masks", "value": {"input": ["The [MASK] sat on the [MASK].", "It is [MASK]."]}},
}
