"""Every family of encoders through `LLM` with a tokenizer of its kind, against transformers' pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.encoder_text import (
    CORPUS,
    LABELS,
    bert_config,
    deberta,
    modernbert,
    roberta,
    save_model,
    wordpiece,
    xlmr,
)

from engine import LLM
from engine.pooled import AGGREGATIONS

TEXTS = [CORPUS[0], CORPUS[3], "Ada Ada 😀 in unbelievable London!", "boats", "été à London\n\nCharles"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BEHIND_PADDING = {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1, **SHAPE}


def _distilbert(hf: Any, **settings: Any) -> Any:
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
    return transformers.DistilBertConfig(vocab_size=len(hf), **shape, **settings)


def _modernbert(hf: Any, **settings: Any) -> Any:
    shape = {**SHAPE, "num_hidden_layers": 4, "max_position_embeddings": 64, "local_attention": 8}
    special = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 3}
    return transformers.ModernBertConfig(vocab_size=len(hf), **shape, **special, **settings)


def _deberta(hf: Any, **settings: Any) -> Any:
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}
    shared = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 2}
    shape = {"max_position_embeddings": 64, **SHAPE, **relative, **shared}
    return transformers.DebertaV2Config(vocab_size=len(hf), **shape, **settings)


# family -> how transformers' classes begin, the tokenizer, the config
FAMILIES: dict[str, tuple[str, Callable[[], Any], Callable[..., Any]]] = {
    "bert": ("Bert", wordpiece, bert_config),
    "roberta": (
        "Roberta",
        roberta,
        lambda hf, **k: transformers.RobertaConfig(vocab_size=len(hf), **BEHIND_PADDING, **k),
    ),
    "xlm-roberta": (
        "XLMRoberta",
        xlmr,
        lambda hf, **k: transformers.XLMRobertaConfig(vocab_size=len(hf), **BEHIND_PADDING, **k),
    ),
    "distilbert": ("DistilBert", wordpiece, _distilbert),
    "deberta-v2": ("DebertaV2", deberta, _deberta),
    "modernbert": ("ModernBert", modernbert, _modernbert),
}


@pytest.fixture(params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., tuple[LLM, Any, Any]]:
    """Makes a family's model with a head: ours, transformers', and the tokenizer as it is loaded from the folder."""
    name, tokenizer, config = FAMILIES[request.param]

    def make(head: str, **settings: Any) -> tuple[LLM, Any, Any]:
        hf = tokenizer()
        kind = getattr(transformers, name + head)
        folder = tmp_path / f"{head}{len(settings)}"
        model = save_model(kind, config(hf, **settings), hf, folder)
        llm = LLM(str(folder), device="cpu", dtype="float32", show_progress=False)
        return llm, model, transformers.AutoTokenizer.from_pretrained(folder)

    return make


def test_masks(made: Any) -> None:
    llm, model, hf = made("ForMaskedLM")
    pipe = transformers.pipeline("fill-mask", model=model, tokenizer=hf)
    mask = hf.mask_token
    for text in (f"Ada {mask} to London", f"{mask} boats,{mask} walked 😀 {mask}."):
        expected = pipe(text)
        expected = [expected] if isinstance(expected[0], dict) else expected
        found = llm.fill_mask(text)[0].masks
        assert len(found) == len(expected) == text.count(mask)
        for mine, theirs in zip(found, expected, strict=True):
            assert [(m.token_id, m.token, m.sequence) for m in mine] == [
                (t["token"], t["token_str"], t["sequence"]) for t in theirs
            ]
            assert [m.score for m in mine] == pytest.approx([t["score"] for t in theirs], abs=3e-5)
    llm.close()


@pytest.mark.parametrize("labels", [1, 3])
def test_classes_and_scores_of_pairs(labels: int, made: Any) -> None:
    llm, model, hf = made("ForSequenceClassification", num_labels=labels)
    pairs = [(TEXTS[0], "boats"), ("boats", TEXTS[1]), ("London 😀", "")]
    for pair, answer in zip(pairs, llm.classify(pairs, use_activation=False), strict=True):
        given = hf(*([text] for text in pair), return_tensors="pt")
        with torch.no_grad():
            logits = model(**given).logits[0]
        assert answer.prompt_token_ids == given["input_ids"][0].tolist()
        assert answer.probs == pytest.approx(logits.tolist(), abs=1e-4 * max(float(logits.abs().max()), 1.0))
        if labels == 1:
            assert llm.score(*pair)[0].score == pytest.approx(float(torch.sigmoid(logits[0])), abs=3e-5)
    llm.close()


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_spans(made: Any) -> None:
    llm, model, hf = made("ForTokenClassification", id2label=LABELS)
    pipe = transformers.pipeline("token-classification", model=model, tokenizer=hf)
    total = 0
    for aggregation in AGGREGATIONS:
        key = "entity" if aggregation == "none" else "entity_group"
        for text, answer in zip(TEXTS, llm.classify(TEXTS, aggregation=aggregation), strict=True):
            expected = pipe(text, aggregation_strategy=aggregation)
            assert [(s.label, s.start, s.end) for s in answer.spans] == [
                (e[key], e["start"], e["end"]) for e in expected
            ]
            assert [s.score for s in answer.spans] == pytest.approx([float(e["score"]) for e in expected], abs=3e-5)
            total += len(expected)
    assert total > 30
    llm.close()
