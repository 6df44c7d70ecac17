"""The reasoning budget by every name, as the engine is asked for it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_client import hf_byte_tokenizer
from support.conversing import TEMPLATE, Conversing, saying

from engine.text.processor import Tokenizer


def reasoning(**settings: Any) -> Conversing:
    """An app whose model ends its reasoning with a token."""
    api = Conversing(saying("<think>Hm.</think>Yes."), reasoning_parser="think", **settings)
    hf = hf_byte_tokenizer()
    hf.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    hf.chat_template = TEMPLATE
    api._tokenizer = Tokenizer(hf)
    api.start()
    return api


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"reasoning_budget": 5}), ("/v1/chat/completions", {"thinking_token_budget": 5}),
     ("/v1/chat/completions", {"thinking_budget": 5}), ("/v1/responses", {"thinking_budget_tokens": 5}),
     ("/v1/messages", {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}})],
)  # fmt: skip
def test_a_reasoning_budget_is_asked_of_the_engine(path: str, body: dict[str, Any]) -> None:
    api = reasoning(reasoning_budget=9)
    key = "input" if path == "/v1/responses" else "messages"
    for more, wanted in ((body, 5), ({"max_tokens": 9} if path == "/v1/messages" else {}, 9)):
        answer = api.post(path, {key: [{"role": "user", "content": "hi"}], **more})
        assert answer.status_code == 200, answer.text
        assert "x-octavo-ignored-fields" not in answer.headers
        asked = api.params.reasoning_budget
        assert (asked.tokens, asked.open, asked.close, asked.begun) == (wanted, (257,), 258, False)
        assert bytes(asked.last_words).decode() == "\n\nThat is enough thinking; I answer now.\n"


@pytest.mark.parametrize("more", [{"reasoning_budget": 5}, {}])
def test_a_reasoning_budget_in_two_halves(more: dict[str, Any]) -> None:
    api = reasoning(reasoning_budget=9)
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "max_tokens": 20, **more}
    assert api.post("/v1/chat/completions", body).status_code == 200
    whole = api.params
    half = api.post("/v1/chat/completions/render", body).json()
    answer = api.post("/inference/v1/generate", half)
    assert answer.status_code == 200, answer.text
    assert "x-octavo-ignored-fields" not in answer.headers
    assert api.params == whole
    assert whole.reasoning_budget.tokens == more.get("reasoning_budget", 9)


def test_a_reasoning_budget_that_begins_inside() -> None:
    api = reasoning(reasoning_budget=0)
    message = {"role": "assistant", "content": "<think>We"}
    api.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}, message], "continue_final_message": True,
         "add_generation_prompt": False},
    )  # fmt: skip
    assert api.params.reasoning_budget.begun


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_reasoning_budget_without_a_mark_is_named(path: str) -> None:
    api = Conversing(saying("Yes."), reasoning_budget=9)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    more = {"thinking": {"type": "enabled", "budget_tokens": 5}} if "messages" in path else {"reasoning_budget": 5}
    answer = api.post(path, {**body, **more})
    name = "thinking.budget_tokens" if "messages" in path else "reasoning_budget"
    assert answer.headers["x-octavo-ignored-fields"] == name
    assert api.params.reasoning_budget is None


@pytest.mark.parametrize(
    ("more", "param"),
    [({"num_beams": 2}, "reasoning_budget"), ({"allowed_token_ids": [65]}, "allowed_token_ids"),
     ({"constraint": {"catalogue": "titles"}}, "constraint")],
)  # fmt: skip
def test_the_default_budget_skips_what_cannot_have_one(more: dict[str, Any], param: str) -> None:
    api = reasoning(reasoning_budget=9)
    body = {"messages": [{"role": "user", "content": "hi"}], **more}
    refused = api.post("/v1/chat/completions", {**body, "reasoning_budget": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert api.post("/v1/chat/completions", body).status_code == 200
    assert api.params.reasoning_budget is None


@pytest.mark.parametrize(("value", "where"), [(-2, "reasoning_budget"), ("5", "thinking_budget")])
def test_a_reasoning_budget_that_is_none_is_refused(value: Any, where: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], where: value}
    refused = reasoning().post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, where)
