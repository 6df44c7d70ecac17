"""/v1/classify against transformers' text and token classification pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.pooling_api import MODEL, PoolingApi
from support.text_encoders import LABELS, MAX_LENGTH, TEXTS, make_text_encoder

PAIRS = [{"text": a, "text_pair": b} for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
STRATEGIES = ["none", "simple", "first", "average", "max"]
LONG = " ".join(TEXTS)


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same classes in the same order, with the same scores."""
    assert [item["label"] for item in found] == [item["label"] for item in expected]
    assert [item["score"] for item in found] == pytest.approx([item["score"] for item in expected], rel=1e-4, abs=1e-5)


# ---------------------------------------------------------------- texts


def test_classes_in_vllms_shape(classes: PoolingApi) -> None:
    one = classes.checkpoint
    body = classes.ask("/v1/classify", model=MODEL, input=TEXTS)
    assert set(body) == {"id", "object", "created", "model", "data", "usage"}
    assert body["id"].startswith("classify-")
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert [item["index"] for item in body["data"]] == list(range(len(TEXTS)))
    expected = one.pipeline("text-classification")(TEXTS, top_k=None)
    for item, scores, text in zip(body["data"], expected, TEXTS, strict=True):
        assert set(item) == {"index", "label", "probs", "num_classes", "scores"}
        close(item["scores"], scores)
        assert item["label"] == scores[0]["label"]
        assert item["probs"] == pytest.approx(one.logits(text).softmax(0).tolist(), rel=1e-4)
        assert item["num_classes"] == 4
    assert body["usage"]["prompt_tokens"] == sum(map(one.count, TEXTS))
    assert len({item["label"] for item in body["data"]}) > 1
    assert classes.ask("/classify", input=TEXTS)["data"] == body["data"]
    alone = [classes.ask("/v1/classify", input=text)["data"][0] for text in TEXTS]
    assert [item["label"] for item in alone] == [item["label"] for item in body["data"]]


def test_pairs(classes: PoolingApi) -> None:
    one = classes.checkpoint
    body = classes.ask("/v1/classify", input=PAIRS)
    for item, scores in zip(body["data"], one.pipeline("text-classification")(PAIRS, top_k=None), strict=True):
        close(item["scores"], scores)
    assert body["usage"]["prompt_tokens"] == sum(one.count(pair["text"], pair["text_pair"]) for pair in PAIRS)
    mixed = classes.ask(
        "/v1/classify", input=[PAIRS[2], TEXTS[2], {"text": TEXTS[2]}, {"text": "a", "text_pair": None}]
    )
    assert mixed["data"][0]["label"] == body["data"][2]["label"]
    assert mixed["data"][1]["probs"] == pytest.approx(mixed["data"][2]["probs"], rel=1e-5)
    close(classes.ask("/v1/classify", input=PAIRS[2])["data"][0]["scores"], body["data"][2]["scores"])


def test_token_ids_are_taken_as_they_are(classes: PoolingApi) -> None:
    ids = [classes.checkpoint.tokenizer(text).input_ids for text in TEXTS]
    body = classes.ask("/v1/classify", input=ids)
    texts = classes.ask("/v1/classify", input=TEXTS)
    for item, other in zip(body["data"], texts["data"], strict=True):
        close(item["scores"], other["scores"])
    assert body["usage"] == texts["usage"]
    bare = classes.ask("/v1/classify", input=TEXTS[0], add_special_tokens=False)
    assert bare["data"][0]["probs"] == classes.ask("/v1/classify", input=ids[0][1:-1])["data"][0]["probs"]
    assert bare["data"][0]["probs"] != texts["data"][0]["probs"]
    without = PoolingApi(classes.checkpoint, tokenizer=False)
    close(without.ask("/v1/classify", input=ids[1])["data"][0]["scores"], texts["data"][1]["scores"])
    assert without.refused("/v1/classify", input="a")["code"] == "no_tokenizer"


def test_the_heads_own_numbers_and_the_best_few(classes: PoolingApi) -> None:
    one = classes.checkpoint
    for name in ("use_activation", "activation"):
        body = classes.ask("/v1/classify", input=TEXTS, top_k=2, **{name: False})
        for item, text in zip(body["data"], TEXTS, strict=True):
            assert item["probs"] == pytest.approx(one.logits(text).tolist(), rel=1e-4, abs=1e-5)
            assert [found["score"] for found in item["scores"]] == sorted(item["probs"], reverse=True)[:2]
    assert len(classes.ask("/v1/classify", input="a", top_k=99)["data"][0]["scores"]) == 4


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("classes", "multi_label_classification"),
        ("classes", "regression"),
        ("classes", "single_label_classification"),
        ("cross", "regression"),
        ("cross", None),
    ],
)
def test_scores_follow_the_kind_of_problem(kind: str, problem: str | None, tmp_path: Path) -> None:
    api = PoolingApi(make_text_encoder(kind, tmp_path, problem_type=problem))
    body = api.ask("/v1/classify", input=TEXTS)
    expected = api.checkpoint.pipeline("text-classification")(TEXTS, top_k=None)
    for item, scores in zip(body["data"], expected, strict=True):
        close(item["scores"], scores)
        assert item["num_classes"] == len(LABELS[kind])


def test_too_long_inputs(classes: PoolingApi) -> None:
    one = classes.checkpoint
    count = one.count(LONG)
    error = classes.refused("/v1/classify", input=["a", LONG])
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "input[1]" in error["message"]
    assert f"{count} tokens" in error["message"]
    assert f"at most {MAX_LENGTH}" in error["message"]
    for asked, length in ((-1, MAX_LENGTH), (9, 9)):
        item = classes.ask("/v1/classify", input=LONG, truncate_prompt_tokens=asked)["data"][0]
        expected = one.logits(LONG, truncation=True, max_length=length).softmax(0).tolist()
        assert item["probs"] == pytest.approx(expected, rel=1e-4)
    ids = one.tokenizer(LONG).input_ids
    assert classes.refused("/v1/classify", input=ids)["code"] == "context_length_exceeded"
    body = classes.ask("/v1/classify", input=ids, truncate_prompt_tokens=9)
    assert list(classes.client.sources()[0].token_ids) == ids[:9]
    assert body["usage"]["prompt_tokens"] == 9


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": None}, "input", "must be a string"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "none empty"),
        ({"input": [[]]}, "input", "none empty"),
        ({"input": ["a", ""]}, "input", "item 1"),
        ({"input": ["a", [1]]}, "input", "must be a string"),
        ({"input": [1, "a"]}, "input", "must be a string"),
        ({"input": 7}, "input", "must be a string"),
        ({"input": [True]}, "input", "must be a string"),
        ({"input": [-1]}, "input", "from 0 to 163"),
        ({"input": [[3], [164]]}, "input", "from 0 to 163"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": {"text": ""}}, "input", "must not be empty"),
        ({"input": {"text": "a", "text_pair": ""}}, "input", "text_pair"),
        ({"input": {"text_pair": "a"}}, "input", "must be a string"),
        ({"input": {"text": "a", "pair": "b"}}, "input", "text_pair"),
        ({"input": [["a", "b"]]}, "input", "text_pair"),
        ({"input": "a", "top_k": 0}, "top_k", "greater than or equal to 1"),
        ({"input": "a", "top_k": True}, "top_k", "integer"),
        ({"input": "a", "use_activation": "no"}, "use_activation", "boolean"),
        ({"input": "a", "use_activation": True, "activation": False}, "activation", "contradict"),
        ({"input": "a", "aggregation": "simple"}, "aggregation", "classifies texts"),
        ({"input": "a", "aggregation_strategy": "none"}, "aggregation_strategy", "classifies texts"),
        ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "2"),
        ({"input": "a", "truncate_prompt_tokens": 49}, "truncate_prompt_tokens", "48"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "not supported"),
    ],
)
def test_what_is_wrong_is_400_and_names_the_field(
    classes: PoolingApi, body: dict[str, Any], param: str, words: str
) -> None:
    error = classes.refused("/v1/classify", **body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
def test_entities_are_those_of_the_pipeline(tokens: PoolingApi, strategy: str | None) -> None:
    body = tokens.ask("/v1/classify", input=TEXTS, aggregation=strategy)
    reference = tokens.checkpoint.pipeline("token-classification", aggregation_strategy=strategy or "simple")
    total = 0
    for index, (item, text, expected) in enumerate(zip(body["data"], TEXTS, reference(TEXTS), strict=True)):
        assert item["index"] == index
        assert set(item) == {"index", "entities"}
        total += len(item["entities"])
        assert [(found["label"], found["start"], found["end"]) for found in item["entities"]] == [
            (found.get("entity_group", found.get("entity")), found["start"], found["end"]) for found in expected
        ]
        assert [found["score"] for found in item["entities"]] == pytest.approx(
            [float(found["score"]) for found in expected], rel=1e-4
        )
        assert [found["text"] for found in item["entities"]] == [
            text[found["start"] : found["end"]] for found in expected
        ]
    labels = {found["label"] for item in body["data"] for found in item["entities"]}
    if strategy == "none":
        assert labels <= set(LABELS["tokens"]) - {"O"}
        assert len(labels) > 2
    else:
        assert labels == {"PER", "LOC"}
    assert total < sum(map(tokens.checkpoint.count, TEXTS)) - 2 * len(TEXTS)  # some are outside, or joined
    same = tokens.ask("/v1/classify", input=TEXTS, aggregation_strategy=strategy)
    assert same["data"] == body["data"]


def test_places_in_token_ids_are_those_of_tokens(tokens: PoolingApi) -> None:
    one = tokens.checkpoint
    for text in TEXTS:
        read = one.tokenizer(text, return_offsets_mapping=True)
        for aggregation in ("none", "simple", None):
            by_text = tokens.ask("/v1/classify", input=text, aggregation=aggregation)["data"][0]["entities"]
            by_ids = tokens.ask("/v1/classify", input=read.input_ids, aggregation=aggregation)["data"][0]["entities"]
            places = [
                (read.offset_mapping[found["start"]][0], read.offset_mapping[found["end"] - 1][1]) for found in by_ids
            ]
            assert places == [(found["start"], found["end"]) for found in by_text]
            assert [found["label"] for found in by_ids] == [found["label"] for found in by_text]
            for found in by_ids:
                assert found["text"] == one.tokenizer.decode(read.input_ids[found["start"] : found["end"]])
    without = PoolingApi(one, tokenizer=False).ask("/v1/classify", input=one.tokenizer(TEXTS[3]).input_ids[1:-1])
    assert {found["text"] for found in without["data"][0]["entities"]} == {""}


def test_what_token_classifiers_refuse(tokens: PoolingApi) -> None:
    for body, param, words in (
        ({"input": PAIRS[0]}, "input", "text_pair"),
        ({"input": "a", "top_k": 1}, "top_k", "classifies tokens"),
        ({"input": "a", "aggregation": "last"}, "aggregation", "'simple'"),
        ({"input": "a", "aggregation": "none", "aggregation_strategy": "max"}, "aggregation_strategy", "contradict"),
        ({"input": [[5, 6]], "aggregation": "first"}, "aggregation", "token ids"),
    ):
        error = tokens.refused("/v1/classify", **body)
        assert error["param"] == param
        assert words in error["message"]


def test_entities_of_a_text_that_is_cut(tokens: PoolingApi) -> None:
    cut = tokens.ask("/v1/classify", input=LONG, truncate_prompt_tokens=12, aggregation="none")
    entities = cut["data"][0]["entities"]
    read = tokens.checkpoint.tokenizer(LONG, truncation=True, max_length=12, return_offsets_mapping=True)
    offsets = read.offset_mapping
    numbers = tokens.checkpoint.logits(LONG, truncation=True, max_length=12).argmax(-1).tolist()[1:-1]
    expected = [
        (LABELS["tokens"][label], *offset) for label, offset in zip(numbers, offsets[1:-1], strict=True) if label
    ]
    assert [(found["label"], found["start"], found["end"]) for found in entities] == expected
    assert cut["usage"]["prompt_tokens"] == 12
