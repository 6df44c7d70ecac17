"""/v1/answer against transformers' question-answering pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from support.answering import reference_answers
from support.pooling_api import MODEL, PoolingApi
from support.text_encoders import MAX_LENGTH, TEXTS

QUESTION = "who lives in Bergen?"
CONTEXT = " ".join([*TEXTS[:5], *TEXTS[:3]])


def expected(answers: PoolingApi, question: str, context: str, **terms: Any) -> list[dict[str, Any]]:
    limits = {"max_seq_len": MAX_LENGTH, "doc_stride": MAX_LENGTH // 2}
    model, tokenizer = answers.checkpoint.model, answers.checkpoint.tokenizer
    return reference_answers(model, tokenizer, question, context, **(limits | terms))


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"top_k": 4, "max_answer_len": 5, "handle_impossible_answer": True},
        {"top_k": 3, "max_seq_len": 30, "doc_stride": 9, "align_to_words": False},
    ],
)
def test_the_values_are_the_pipelines(answers: PoolingApi, terms: dict[str, Any]) -> None:
    body = answers.ask("/v1/answer", model=MODEL, question=QUESTION, context=[CONTEXT, *TEXTS], **terms)
    assert set(body) == {"id", "object", "created", "model", "data", "usage"}
    assert (body["object"], body["model"]) == ("list", MODEL)
    for index, (item, context) in enumerate(zip(body["data"], [CONTEXT, *TEXTS], strict=True)):
        assert set(item) == {"index", "answers"}
        assert item["index"] == index
        wanted = expected(answers, QUESTION, context, **terms)
        assert len(item["answers"]) == len(wanted)
        for found, other in zip(item["answers"], wanted, strict=True):
            assert {**found, "score": 0} == {**other, "score": 0}
            assert found["score"] == pytest.approx(other["score"], rel=1e-4, abs=1e-9)
    # Windows overlap, and each holds the question: more tokens are read than there are.
    assert body["usage"]["total_tokens"] > sum(answers.checkpoint.count(QUESTION, text) for text in [CONTEXT, *TEXTS])
    assert answers.ask("/answer", question=QUESTION, context=[CONTEXT, *TEXTS], **terms)["data"] == body["data"]


def test_many_questions_of_one_text(answers: PoolingApi) -> None:
    questions = [QUESTION, "what is late?"]
    body = answers.ask("/v1/answer", question=questions, context=CONTEXT, top_k=2)
    for item, question in zip(body["data"], questions, strict=True):
        assert [found["answer"] for found in item["answers"]] == [
            other["answer"] for other in expected(answers, question, CONTEXT, top_k=2)
        ]


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        ({"question": "a"}, "context", "missing_required_parameter", "required"),
        ({"question": "", "context": "a"}, "question", "invalid_value", "must not be empty"),
        ({"question": "a", "context": [""]}, "context", "invalid_value", "must not be empty"),
        ({"question": ["a", "b"], "context": ["a", "b", "c"]}, "context", "invalid_value", "2 and 3"),
        ({"question": [1], "context": "a"}, "question", "invalid_type", "list of strings"),
        ({"question": "a", "context": "b", "top_k": 0}, "top_k", "invalid_type", "greater than or equal to 1"),
        ({"question": "a", "context": "b", "max_seq_len": 49}, "max_seq_len", "invalid_value", "at most 48 tokens"),
        (
            {"question": "a", "context": "b", "doc_stride": 48},
            "doc_stride",
            "invalid_value",
            "must be smaller than a window",
        ),
        ({"question": "sea " * 50, "context": "b " * 9}, "question", "context_length_exceeded", "too long"),
        ({"question": "a", "context": "b" * (2**20 + 1)}, "context", "context_length_exceeded", "1048576 characters"),
        ({"question": "a", "context": ["sea " * 50000] * 2}, "context", "context_length_exceeded", "4096"),
        ({"question": "a", "context": ["b", "\u3000"]}, "context", "invalid_value", "context[1]: the context has no"),
    ],
)
def test_what_is_refused(answers: PoolingApi, body: dict[str, Any], param: str, code: str, words: str) -> None:
    error = answers.refused("/v1/answer", **body)
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]
