"""Scores, entities and masks of models whose tokenizers differ from BERT's: no segments, `<mask>`, bytes, Unigram, and
of families whose layers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.encoder_text import CORPUS, LABELS, roberta, save_model, xlmr
from support.pooling_api import PoolingApi
from support.text_encoders import TextEncoder

TOKENIZERS = {"roberta": roberta, "xlm-roberta": xlmr, "albert": xlmr, "esm": roberta}
NAMES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "albert": "Albert", "esm": "Esm"}


def make(kind: str, head: str, folder: Path, **settings: Any) -> PoolingApi:
    tokenizer = TOKENIZERS[kind]()
    name = NAMES[kind]
    if kind == "albert":
        settings |= {"embedding_size": 20, "num_hidden_groups": 1}
    if kind == "esm":  # several masks in an input scale it
        settings |= {
            "token_dropout": True,
            "mask_token_id": tokenizer.mask_token_id,
            "position_embedding_type": "rotary",
        }
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, **settings,
    )  # fmt: skip
    model = save_model(getattr(transformers, f"{name}For{head}"), config, tokenizer, folder)
    return PoolingApi(TextEncoder(folder, model, transformers.AutoTokenizer.from_pretrained(folder)))


@pytest.fixture(params=TOKENIZERS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_pairs_without_segments(kind: str, tmp_path: Path) -> None:
    api = make(kind, "SequenceClassification", tmp_path, num_labels=1)
    body = api.ask("/v1/rerank", query=CORPUS[0], documents=CORPUS[1:])
    for result in body["results"]:
        number = api.checkpoint.logits(CORPUS[0], CORPUS[1:][result["index"]])[0]
        assert result["relevance_score"] == pytest.approx(torch.sigmoid(number).item(), rel=1e-4, abs=1e-6)
    assert body["usage"]["prompt_tokens"] == sum(api.checkpoint.count(CORPUS[0], text) for text in CORPUS[1:])


def test_masks(kind: str, tmp_path: Path) -> None:
    api = make(kind, "MaskedLM", tmp_path)
    texts = [
        text.replace(" ", " <mask> ", count).replace("<mask>  ", "<mask> ") for count, text in enumerate(CORPUS, 1)
    ]
    reference = api.checkpoint.pipeline("fill-mask")
    for item, text in zip(api.ask("/v1/fill-mask", input=texts)["data"], texts, strict=True):
        expected = reference(text)
        rows = [expected] if isinstance(expected[0], dict) else expected
        assert len(item["masks"]) == len(rows) == text.count("<mask>")
        for found, row in zip(item["masks"], rows, strict=True):
            assert [(one["token"], one["token_str"], one["sequence"]) for one in found] == [
                (one["token"], one["token_str"], one["sequence"]) for one in row
            ]
            assert [one["score"] for one in found] == pytest.approx([one["score"] for one in row], rel=1e-4)
    error = api.refused("/v1/fill-mask", input="in [MASK] about the engine")
    assert error["code"] == "no_mask_token"
    assert "<mask>" in error["message"]


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_entities(kind: str, aggregation: str, tmp_path: Path) -> None:
    api = make(kind, "TokenClassification", tmp_path, id2label=LABELS, num_labels=len(LABELS))
    reference = api.checkpoint.pipeline("token-classification", aggregation_strategy=aggregation)
    data = api.ask("/v1/classify", input=CORPUS, aggregation=aggregation)["data"]
    for item, text in zip(data, CORPUS, strict=True):
        expected = [
            (found.get("entity_group", found.get("entity")), found["start"], found["end"]) for found in reference(text)
        ]
        assert [(found["label"], found["start"], found["end"]) for found in item["entities"]] == expected
        assert all(found["text"] == text[found["start"] : found["end"]] for found in item["entities"])
    assert len({found["label"] for item in data for found in item["entities"]}) > 1
