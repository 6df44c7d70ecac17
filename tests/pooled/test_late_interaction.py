"""Queries and documents of ColBERT: markers, lengths, masks that fill queries up, and punctuation, as its own library
and PyLate read them. The oracle is transformers' model over padded batches (`support.late_interaction`)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.driving import finish
from support.late_interaction import ROWS, Late, Side, pylate, pylate_of, stanford
from support.pooling_api import PoolingApi
from support.text_encoders import TEXTS, TextEncoder, make_text_encoder, wordpiece

from engine import LLM, InvalidRequestError, PoolingParams, TokenInput
from engine.errors import ModelLoadError

MORE = [
    *TEXTS,
    "the sea, the sea! is it [MASK]?",
    "Anna, Bergen; water: 'cold'. (late) *very* <late> & more",
    "?!",
    " ",
]
QUERIES = ["Snow!", "is the old boat late?", MORE[4], "water"]

PYLATE: dict[str, dict[str, Any]] = {
    "defaults": {"query_length": None},
    "attended": {"attend_to_expansion_tokens": True},
    "short": {"query_length": 8, "document_length": 9, "skiplist_words": ["the", ";", "no such word"]},
    "unfilled": {"do_query_expansion": False, "query_length": 11, "skiplist_words": []},
    "unfilled-attended": {"do_query_expansion": False, "attend_to_expansion_tokens": True},
    "unmarked": {"query_prefix": "", "document_prefix": "", "query_length": 14},
    "other-marks": {"query_prefix": "[D] ", "document_prefix": "sea", "query_length": 20},
}
STANFORD: dict[str, dict[str, Any]] = {
    "defaults": {},
    "published": {
        "query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_token": "[Q]", "doc_token": "[D]",
        "doc_maxlen": 40, "query_maxlen": 24, "mask_punctuation": True, "attend_to_mask_tokens": False,
        "similarity": "cosine", "interaction": "colbert", "ncells": None, "dim": 12,
    },
    "attended": {"attend_to_mask_tokens": True, "query_maxlen": 20},
    "short": {"query_maxlen": 7, "doc_maxlen": 8, "mask_punctuation": False, "doc_token_id": "[unused2]"},
    "nested": {"config": {"query_maxlen": 16, "query_token_id": "[unused2]"}},
}  # fmt: skip
ALL = [*(("pylate", name) for name in PYLATE), *(("stanford", name) for name in STANFORD)]


def make(folder: Path, kind: str, name: str) -> Late:
    return pylate(folder, PYLATE[name]) if kind == "pylate" else stanford(folder, STANFORD[name])


def load(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), dtype="float32", device="cpu", show_progress=False, **settings)


def asked(api: PoolingApi, texts: list[str], side: Side, **body: Any) -> list[np.ndarray]:
    items = api.ask("/pooling", input=texts, prompt_name=side, **body)["data"]
    return [np.array(item["data"], dtype=np.float32).reshape(-1, 12) for item in items]


def assert_same(found: list[np.ndarray], wanted: list[torch.Tensor]) -> None:
    assert [len(one) for one in found] == [len(one) for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_vectors_and_scores(kind: str, name: str, tmp_path: Path) -> None:
    late = make(tmp_path / "m", kind, name)
    api = PoolingApi(late.encoder)
    assert_same(asked(api, MORE, "query"), late.vectors(MORE, "query"))
    assert_same(asked(api, MORE, "document"), late.vectors(MORE, "document"))
    wanted = [[late.score(query, text) for text in MORE] for query in QUERIES]
    llm = load(late.path)
    for query, scores in zip(QUERIES, wanted, strict=True):
        assert [output.score for output in llm.score(query, MORE)] == pytest.approx(scores, rel=1e-5, abs=1e-5)
        data = api.ask("/v1/score", text_1=query, text_2=MORE)["data"]
        assert [item["score"] for item in data] == pytest.approx(scores, rel=1e-5, abs=1e-5)
        results = api.ask("/v1/rerank", query=query, documents=MORE)["results"]
        assert {item["index"]: item["relevance_score"] for item in results} == pytest.approx(
            dict(enumerate(scores)), rel=1e-5, abs=1e-5
        )
        texts = api.send("POST", "/rerank", json={"query": query, "texts": MORE, "truncate": True}).json()
        assert {item["index"]: item["score"] for item in texts} == pytest.approx(
            dict(enumerate(scores)), rel=1e-5, abs=1e-5
        )
    pairs = llm.score(QUERIES, MORE[: len(QUERIES)])
    assert [output.score for output in pairs] == pytest.approx([wanted[i][i] for i in range(len(QUERIES))], rel=1e-5)


def test_torch_computes_attention_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.native.available", lambda: False)
    late = make(tmp_path / "m", "pylate", "defaults")
    llm = load(late.path)
    wanted = [late.score(QUERIES[1], text) for text in MORE]
    assert [output.score for output in llm.score(QUERIES[1], MORE)] == pytest.approx(wanted, rel=1e-5)


def test_a_query_does_not_depend_on_others(tmp_path: Path) -> None:
    """In one step with queries of other lengths, and alone, its numbers have the same bits."""
    api = PoolingApi(make(tmp_path / "m", "pylate", "defaults").encoder)
    together = asked(api, MORE, "query")
    assert api.client.engine.stats().num_steps < len(MORE)
    for text, found in zip(MORE, together, strict=True):
        assert np.array_equal(asked(api, [text], "query")[0], found)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("window", [64, 16])
def test_modernbert(window: int, is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its windows reach from masks to the text, or, where that is short, to none of it."""
    if not is_native:
        monkeypatch.setattr("engine.backends.native.available", lambda: False)
    tokenizer = wordpiece(tmp_path / "plain")
    config = transformers.ModernBertConfig(
        vocab_size=ROWS, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=96, local_attention=window, global_attn_every_n_layers=3, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(7)
    model = transformers.ModernBertModel(config).eval()
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else 0.2)
    model.save_pretrained(tmp_path / "plain")
    encoder = TextEncoder(tmp_path / "plain", model, tokenizer)
    late = pylate_of(tmp_path / "m", encoder, {"query_length": 40, "document_length": 60})
    api = PoolingApi(late.encoder)
    assert_same(asked(api, MORE, "query"), late.vectors(MORE, "query"))
    assert_same(asked(api, MORE, "document"), late.vectors(MORE, "document"))


def test_convolutions_cannot_leave_masks_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.ConvBertConfig(
        vocab_size=ROWS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        embedding_size=32, max_position_embeddings=64, conv_kernel_size=3,
    )  # fmt: skip
    tokenizer, model = wordpiece(tmp_path / "plain"), transformers.ConvBertModel(config).eval()
    model.save_pretrained(tmp_path / "plain")
    encoder = TextEncoder(tmp_path / "plain", model, tokenizer)
    late = pylate_of(tmp_path / "m", encoder, {})
    with caplog.at_level(logging.WARNING):
        llm = load(late.path)
    assert "a query is not padded with masks" in caplog.text
    ids = tokenizer("water").input_ids
    (found,) = llm.score("water", "water")
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in ("[Q] ", "[D] ")]
    assert found.prompt_token_ids == [t for mark in marks for t in (ids[0], mark, *ids[1:])]
    late = pylate_of(tmp_path / "n", encoder, {"attend_to_expansion_tokens": True})
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        llm = load(late.path)
    assert "filled up" not in caplog.text
    assert [x.score for x in llm.score("water", TEXTS)] == pytest.approx(
        [late.score("water", text) for text in TEXTS], rel=1e-4
    )


def test_requests_cut_further(tmp_path: Path) -> None:
    """What a request asks for is the length of the whole input, masks included."""
    late, other = (make(tmp_path / name, "pylate", name) for name in ("defaults", "short"))
    api = PoolingApi(late.encoder)
    long = " ".join(["boats on the river, and one bird"] * 30)
    assert [len(one) for one in asked(api, ["water", long], "query", truncate_prompt_tokens=8)] == [8, 8]
    wanted = other.vectors(["water", long], "query")
    assert_same(asked(api, ["water", long], "query", truncate_prompt_tokens=8), wanted)
    body = api.ask("/v1/score", text_1="water", text_2=long, truncate_prompt_tokens=8)
    assert body["usage"]["prompt_tokens"] == 16
    assert api.ask("/v1/score", text_1="water", text_2=long)["usage"]["prompt_tokens"] == 32 + 48
    error = api.refused("/v1/score", text_1="water", text_2="a", truncate_prompt_tokens=2)
    assert "adds 3 special tokens" in error["message"]


def test_texts_without_a_side_are_read_as_they_are(tmp_path: Path) -> None:
    late = make(tmp_path / "m", "stanford", "published")
    api, tokenizer = PoolingApi(late.encoder), late.encoder.tokenizer
    data = api.ask("/pooling", input=MORE)["data"]
    for text, item in zip(MORE, data, strict=True):
        assert_same([np.array(item["data"], dtype=np.float32)], [late.plain(tokenizer(text).input_ids)])
    ids = tokenizer("the sea, the sea").input_ids
    mixed = api.ask("/pooling", input=["water", ids], prompt_name="query")["data"]
    assert [len(item["data"]) for item in mixed] == [24, len(ids)]
    found = api.send("POST", "/embed_all", json={"inputs": ["water"], "prompt_name": "document"}).json()
    assert_same([np.array(found[0], dtype=np.float32)], late.vectors(["water"], "document"))


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    """But for documents' punctuation, which does not count."""
    late = make(tmp_path / "m", "pylate", "defaults")
    llm, tokenizer = load(late.path), late.encoder.tokenizer
    query, document = (tokenizer(text).input_ids for text in ("old boats", "the sea, the sea!"))
    (found,) = llm.score([query], [document])
    assert found.prompt_token_ids == query + document
    skipped = {*tokenizer.convert_tokens_to_ids([",", "!"])}
    kept = late.plain(document)[[token not in skipped for token in document]]
    assert found.score == pytest.approx(float((late.plain(query) @ kept.T).max(1).values.sum()), rel=1e-5)
    (found,) = llm.score("old boats", "the sea, the sea!")
    assert len(found.prompt_token_ids) == 32 + len(document) + 1
    assert found.prompt_token_ids[31] == tokenizer.mask_token_id


def test_the_length_that_was_tokenised_last_is_none(tmp_path: Path) -> None:
    """PyLate leaves the one of queries or documents in the settings of the transformer, and never heeds it."""
    late = pylate(tmp_path / "m", {"document_length": 40}, limits={"max_seq_length": 7})
    llm = load(late.path)
    assert llm.engine.info.max_model_len == 48
    (found,) = llm.score(QUERIES[1], MORE[4])
    assert found.score == pytest.approx(late.score(QUERIES[1], MORE[4]), rel=1e-5)


def test_prompts_stand_behind_markers(tmp_path: Path) -> None:
    settings = {"prompts": {"query": "the old ", "document": "", "other": "sea "}, "query_length": 20}
    late = pylate(tmp_path / "m", settings)
    api = PoolingApi(late.encoder)
    assert_same(asked(api, ["boat"], "query"), late.vectors(["the old boat"], "query"))
    scores = [item["score"] for item in api.ask("/v1/score", text_1="boat", text_2=TEXTS)["data"]]
    assert scores == pytest.approx([late.score("the old boat", text) for text in TEXTS], rel=1e-5)
    (item,) = api.ask("/pooling", input=["boat"], prompt_name="other")["data"]
    ids = late.encoder.tokenizer("sea boat").input_ids
    assert_same([np.array(item["data"], dtype=np.float32)], [late.plain(ids)])


# ---------------------------------------------------------------- what is refused, and what is said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"query_token_id": 7}, "query_token_id and doc_token_id must be tokens"),
        ({"doc_maxlen": 0}, "doc_maxlen must be a whole number of tokens, got 0"),
        ({"query_maxlen": "32"}, "query_maxlen must be a whole number of tokens, got '32'"),
        (
            {"doc_token_id": "[unused7]"},
            r"marks each document with the token '\[unused7\]', which its tokenizer does not",
        ),
    ],
)
def test_metadata_that_is_damaged(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    late = stanford(tmp_path / "m", settings)
    with pytest.raises(ModelLoadError, match=message):
        load(late.path)


def test_what_the_log_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="octavo.model"):
        load(make(tmp_path / "heeded", "stanford", "published").path)
        load(make(tmp_path / "pylate", "pylate", "defaults").path)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING, logger="octavo.model"):
        load(stanford(tmp_path / "l2", {"similarity": "l2"}).path)
        load(stanford(tmp_path / "none").path)
    assert "similarity is l2, which Octavo ignores" in caplog.text
    assert "artifact.metadata is missing" in caplog.text


def test_other_tasks_are_no_part_of_it(tmp_path: Path) -> None:
    masked = make_text_encoder("masked", tmp_path / "plain", vocab_size=ROWS)
    late = pylate_of(tmp_path / "m", TextEncoder(masked.path, masked.model.bert, masked.tokenizer), {})
    api = PoolingApi(late.encoder)
    (item,) = api.ask("/pooling", task=["token_embed"], input=["water"], prompt_name="query")["data"]
    assert_same([np.array(item["data"]["token_embed"], dtype=np.float32)], late.vectors(["water"], "query"))
    several = {"task": ["token_embed", "sparse_embed"], "input": ["water"]}
    assert api.refused("/pooling", **several, prompt_name="query")["param"] == "prompt_name"
    assert set(api.ask("/pooling", **several)["data"][0]["data"]) == {"token_embed", "sparse_embed"}


def test_all_tokens_may_be_left_out(tmp_path: Path) -> None:
    engine = load(make(tmp_path / "m", "pylate", "defaults").path).engine
    for name, left_out in (("none", [0, 1, 2]), ("middle", [1]), ("all", [])):
        engine.add_request(name, [5, 6, 7], PoolingParams(task="token_embed", left_out=left_out))
    shapes = {name: output.pooled.shape for name, output in finish(engine).items() if output.pooled is not None}
    assert shapes == {"none": (0, 12), "middle": (2, 12), "all": (3, 12)}


def test_attended_is_for_such_models_alone(tmp_path: Path) -> None:
    filled, unfilled = (load(make(tmp_path / name, "pylate", name).path) for name in ("defaults", "unfilled"))
    params = PoolingParams(task="token_embed", attended=2, left_out=[0, 1])
    filled.engine.add_request("a", TokenInput([5, 6, 7, 8]), params)
    with pytest.raises(InvalidRequestError, match="attended is only for token_embed"):
        unfilled.engine.add_request("a", TokenInput([5, 6, 7, 8]), params)
    with pytest.raises(InvalidRequestError, match="left_out must be below the 4 tokens"):
        filled.engine.add_request("b", [5, 6, 7, 8], PoolingParams(task="token_embed", left_out=[4]))
    with pytest.raises(InvalidRequestError, match="attended"):
        PoolingParams(task="token_embed", attended=0)
