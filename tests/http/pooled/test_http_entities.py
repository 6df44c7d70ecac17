"""/v1/entities against GLiNER's definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.encoder_text import CORPUS
from support.entities import GlinerFolder, make_gliner
from support.pooling_api import MODEL, PoolingApi

from server.config.settings import ServerSettings

LABELS = ["person", "city", "engine part"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> GlinerFolder:
    return make_gliner(tmp_path_factory.mktemp("entities"))


@pytest.fixture(scope="module")
def api(reference: GlinerFolder) -> PoolingApi:
    return PoolingApi(reference)


@pytest.mark.parametrize("terms", [{}, {"threshold": 0.2, "flat_ner": False, "multi_label": True, "stride": None}])
def test_the_values_are_the_definitions(api: PoolingApi, reference: GlinerFolder, terms: dict[str, Any]) -> None:
    texts = [*CORPUS, " "]
    body = api.ask("/v1/entities", model=MODEL, input=texts, labels=LABELS, **terms)
    assert set(body) == {"id", "object", "created", "model", "data", "usage"}
    assert (body["object"], body["model"]) == ("list", MODEL)
    asked = {name: value for name, value in terms.items() if name != "stride"}
    for index, (item, text) in enumerate(zip(body["data"], texts, strict=True)):
        assert set(item) == {"index", "entities"}
        assert item["index"] == index
        wanted = reference.entities(text, LABELS, **asked)
        assert [{**found, "score": 0} for found in item["entities"]] == [{**other, "score": 0} for other in wanted]
        for found, other in zip(item["entities"], wanted, strict=True):
            assert found["score"] == pytest.approx(other["score"], abs=1e-4)
    assert sum(len(item["entities"]) for item in body["data"]) > 10
    read = sum(len(reference.read(text, LABELS)[0]) for text in texts if text.strip())
    assert body["usage"]["total_tokens"] == read
    (alone,) = api.ask("/entities", input=CORPUS[1], labels=LABELS, **terms)["data"]
    assert alone["entities"] == body["data"][1]["entities"]


def test_a_long_text_takes_several_windows(api: PoolingApi, reference: GlinerFolder) -> None:
    text = " ".join(CORPUS)
    ids, _, words = reference.read(text, LABELS)
    body = api.ask("/v1/entities", input=text, labels=LABELS, stride=15)
    assert len(words) > 40  # max_len of the model
    assert body["usage"]["total_tokens"] > len(ids)
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in body["data"][0]["entities"])


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        ({"input": "a"}, "labels", "missing_required_parameter", "required"),
        ({"labels": ["a"]}, "input", "missing_required_parameter", "required"),
        ({"input": "a", "labels": []}, "labels", "invalid_type", "at least 1 item"),
        ({"input": "a", "labels": [""]}, "labels", "invalid_type", "at least 1 character"),
        ({"input": "a", "labels": [" "]}, "labels", "invalid_value", "not blank"),
        ({"input": "a", "labels": ["a"] * 1001}, "labels", "invalid_value", "at most 1000 labels, got 1001"),
        ({"input": ["a", ""], "labels": ["a"]}, "input", "invalid_value", "item 1 is"),
        ({"input": [[1]], "labels": ["a"]}, "input", "invalid_type", "list of strings"),
        ({"input": "a", "labels": ["a"], "threshold": 2}, "threshold", "invalid_type", "less than or equal to 1"),
        ({"input": "a" * (2**20 + 1), "labels": ["a"]}, "input", "context_length_exceeded", "1048576 characters"),
        (
            {"input": "a " * 50, "labels": ["a"], "stride": 40},
            "labels",
            "context_length_exceeded",
            "tokens (max_model_len) for the text. They hold 40",
        ),
        (
            {"input": ["a", "a " * 4200], "labels": ["a"], "stride": 39},
            "input",
            "context_length_exceeded",
            "input[1]: the text",
        ),
        ({"input": "a " * 50, "labels": ["sea " * 99]}, "labels", "context_length_exceeded", "leave 0 of 160 tokens"),
    ],
)
def test_what_is_refused(api: PoolingApi, body: dict[str, Any], param: str, code: str, words: str) -> None:
    error = api.refused("/v1/entities", **body)
    assert words in error["message"]
    assert (error["param"], error["code"]) == (param, code)


def test_scores_of_more_than_an_answer_may_take(reference: GlinerFolder) -> None:
    api = PoolingApi(reference)
    settings = ServerSettings(allowed_hosts=("testserver",), max_answer_size="1KiB")
    api.app.state.service = replace(api.app.state.service, settings=settings)
    answer = api.post("/v1/entities", input=CORPUS[1], labels=LABELS, threshold=0)
    assert answer.status_code == 400
    assert "The scores of tokens need more than 1024 bytes" in answer.json()["error"]["message"]
