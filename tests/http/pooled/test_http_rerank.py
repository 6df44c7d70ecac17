"""/v1/rerank: documents in the order of their scores, which are those of /v1/score and of transformers' model."""

from __future__ import annotations

from typing import Any

import pytest
from support.pooling_api import MODEL, PoolingApi
from support.text_encoders import MAX_LENGTH, TEXTS

QUERY, DOCUMENTS = TEXTS[0], TEXTS[1:]


@pytest.fixture(params=["cross", "headless"])
def api(request: pytest.FixtureRequest) -> PoolingApi:
    found: PoolingApi = request.getfixturevalue(request.param)
    return found


def order(body: dict[str, Any]) -> list[int]:
    return [result["index"] for result in body["results"]]


def test_the_shape_and_the_order(cross: PoolingApi) -> None:
    one = cross.checkpoint
    body = cross.ask("/v1/rerank", model=MODEL, query=QUERY, documents=DOCUMENTS)
    assert set(body) == {"id", "object", "created", "model", "results", "usage"}
    assert body["id"].startswith("rerank-")
    assert body["model"] == MODEL
    numbers = [one.logits(QUERY, text)[0].sigmoid().item() for text in DOCUMENTS]
    expected = sorted(range(len(DOCUMENTS)), key=lambda index: -numbers[index])
    assert order(body) == expected != list(range(len(DOCUMENTS)))
    for result in body["results"]:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
        assert result["relevance_score"] == pytest.approx(numbers[result["index"]], rel=1e-4)
    tokens = sum(one.count(QUERY, text) for text in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def test_scores_are_those_of_score(api: PoolingApi) -> None:
    given = {"query": QUERY, "documents": DOCUMENTS}
    scored = api.ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    first = api.ask("/v1/rerank", **given)
    assert {result["index"]: result["relevance_score"] for result in first["results"]} == {
        item["index"]: item["score"] for item in scored["data"]
    }
    found = [result["relevance_score"] for result in first["results"]]
    assert found == sorted(found, reverse=True)
    assert first["usage"] == scored["usage"]
    for path in ("/rerank", "/v2/rerank"):
        assert api.ask(path, **given)["results"] == first["results"]
    plain = api.ask("/v1/rerank", **given, use_activation=False)
    assert order(plain) == order(first)
    own = [result["relevance_score"] for result in plain["results"]]
    assert (own == found) == (api.checkpoint.model.config.architectures == ["BertModel"])


def test_equal_documents_stay_as_they_came(api: PoolingApi) -> None:
    documents = ["water", "Snow!", "water", "Snow!", "water"]
    body = api.ask("/v1/rerank", query=QUERY, documents=documents)
    assert order(body) in ([0, 2, 4, 1, 3], [1, 3, 0, 2, 4])


def test_top_n(api: PoolingApi) -> None:
    whole = api.ask("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    for top_n in (1, 3, len(DOCUMENTS), 99, 0, None):
        body = api.ask("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=top_n)
        assert body["results"] == whole["results"][: top_n or None]
        assert body["usage"] == whole["usage"]


def test_documents_as_objects_and_results_without_texts(cross: PoolingApi) -> None:
    whole = cross.ask("/v1/rerank", query=QUERY, documents=DOCUMENTS)
    mixed = [{"text": text, "source": 7} if number % 2 else text for number, text in enumerate(DOCUMENTS)]
    assert cross.ask("/v1/rerank", query=QUERY, documents=mixed)["results"] == whole["results"]
    short = cross.ask("/v1/rerank", query=QUERY, documents=mixed, return_documents=False)
    assert short["results"] == [
        {"index": result["index"], "relevance_score": result["relevance_score"]} for result in whole["results"]
    ]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"documents": ["a"]}, "query", "required"),
        ({"query": "a"}, "documents", "required"),
        ({"query": "", "documents": ["a"]}, "query", "at least 1 character"),
        ({"query": ["a"], "documents": ["a"]}, "query", "string"),
        ({"query": "a", "documents": "a"}, "documents", "list of strings"),
        ({"query": "a", "documents": []}, "documents", "non-empty"),
        ({"query": "a", "documents": ["b", ""]}, "documents", "item 1"),
        ({"query": "a", "documents": [{"text": ""}]}, "documents", "item 0"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents", "objects"),
        ({"query": "a", "documents": [7]}, "documents", "list of strings"),
        ({"query": "a", "documents": None}, "documents", "list of strings"),
        ({"query": "a", "documents": ["b"] * 2049}, "documents", "2048"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal to 0"),
        ({"query": "a", "documents": ["b"], "top_n": 1.0}, "top_n", "integer"),
        ({"query": "a", "documents": ["b"], "return_documents": "no"}, "return_documents", "boolean"),
        ({"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "max_tokens_per_doc", "equal to 0"),
        ({"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields", "not supported"),
        ({"query": "a", "documents": ["b"], "truncation_side": "left"}, "truncation_side", "not supported"),
    ],
)
def test_what_is_wrong_is_400_and_names_the_field(
    cross: PoolingApi, body: dict[str, Any], param: str, words: str
) -> None:
    error = cross.refused("/v1/rerank", **body)
    assert error["param"] == param
    assert words in error["message"]


def test_too_long_documents(api: PoolingApi) -> None:
    long = " ".join(TEXTS)
    error = api.refused("/v1/rerank", query=QUERY, documents=["water", long])
    assert (error["param"], error["code"]) == ("documents", "context_length_exceeded")
    assert "documents[1]" in error["message"]
    assert f"at most {MAX_LENGTH}" in error["message"]
    body = api.ask("/v1/rerank", query=QUERY, documents=["water", long], truncate_prompt_tokens=-1)
    assert sorted(order(body)) == [0, 1]


def test_texts_that_are_cut_before_they_are_joined(api: PoolingApi) -> None:
    tokenizer, long = api.checkpoint.tokenizer, " ".join(TEXTS)
    body = api.ask(
        "/v2/rerank", query=long, documents=[long, "water"], max_tokens_per_query=4, max_tokens_per_doc=7, top_n=0
    )
    ids = tokenizer(long, add_special_tokens=False).input_ids
    first, second = ids[:4], [ids[:7], tokenizer("water", add_special_tokens=False).input_ids]
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    pairs = [[cls, *first, sep, *other, sep] for other in second]
    alone = [[cls, *text, sep] for text in (first, *second)]
    crosses = api.checkpoint.model.config.architectures != ["BertModel"]
    assert [list(source.token_ids) for source in api.client.sources()] == (pairs if crosses else alone)
    assert {result["document"]["text"] for result in body["results"]} == {long, "water"}
    same = api.ask("/v1/rerank", query="water", documents=["Snow!"], max_tokens_per_doc=0, max_tokens_per_query=4096)
    assert same["results"] == api.ask("/v1/rerank", query="water", documents=["Snow!"])["results"]
    blank = {"query": "water", "documents": ["Snow!", " \n"]}  # a text without tokens is cut to none
    assert api.ask("/v1/rerank", **blank, max_tokens_per_doc=5)["results"] == api.ask("/v1/rerank", **blank)["results"]
