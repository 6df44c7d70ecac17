"""vLLM's /render and /inference/v1/generate: a request in two halves gives the answer of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_http_decisions import api, ask
from test_http_terms import COMPLETIONS, Api, error

from server.api.generate_schemas import GenerateRequest

__all__ = ["api"]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GENERATE = "/inference/v1/generate"
HOW: dict[str, Any] = {"max_tokens": 6, "temperature": 0.7, "seed": 5, "logprobs": 2, "stop": ["zz"]}


def generate(api: Api, rendered: dict[str, Any], **more: Any) -> Any:
    return ask(api, GENERATE, **{**rendered, **more})


def test_completions_in_two_halves(api: Api) -> None:
    prompts = ["the house of", "pages"]
    whole = ask(api, COMPLETIONS, prompt=prompts, **HOW, return_token_ids=True, return_tokens_as_token_ids=True)
    halves = ask(api, f"{COMPLETIONS}/render", prompt=prompts, **HOW, cache_salt="a", priority=3)
    assert [half["cache_salt"] for half in halves] == ["a", "a"]
    assert halves[0]["priority"] == 3
    assert halves[0]["sampling_params"] == HOW
    for half, choice in zip(halves, whole["choices"], strict=True):
        assert half["token_ids"] == choice["prompt_token_ids"]
        body = generate(api, half, output_mode="text", return_token_ids=True)
        (made,) = body["choices"]
        assert (made["token_ids"], made["text"]) == (choice["token_ids"], choice["text"])
        assert made["finish_reason"] == choice["finish_reason"]
        assert body["request_id"] == half["request_id"]
        assert body["prompt_token_ids"] == half["token_ids"]
        assert [entry["logprob"] for entry in made["logprobs"]["content"]] == choice["logprobs"]["token_logprobs"]
        assert [entry["token_id"] for entry in made["logprobs"]["content"]] == made["token_ids"]
        assert all(len(entry["top_logprobs"]) >= 2 for entry in made["logprobs"]["content"])
        assert body["usage"]["completion_tokens"] == len(made["token_ids"])


def test_chat_in_two_halves(api: Api) -> None:
    asked = {
        "messages": [{"role": "user", "content": "ab"}],
        "temperature": 0,
        "max_tokens": 5,
        "guided_regex": "[a-f]+",
    }
    whole = ask(api, CHAT, **asked, return_token_ids=True)
    half = ask(api, f"{CHAT}/render", **asked)
    assert half["sampling_params"]["structured_outputs"] == {"regex": "[a-f]+"}
    (made,) = generate(api, half)["choices"]
    assert "text" not in made
    assert made["token_ids"] == whole["choices"][0]["token_ids"]


def test_completions_without_max_tokens_keep_their_default(api: Api) -> None:
    how = {"temperature": 0, "ignore_eos": True}
    whole = ask(api, COMPLETIONS, prompt=[5, 6], **how, return_token_ids=True)
    (half,) = ask(api, f"{COMPLETIONS}/render", prompt=[5, 6], **how, request_timeout=60)
    assert (half["sampling_params"]["max_tokens"], half["request_timeout"]) == (16, 60)
    assert generate(api, half)["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("more", [{"suffix": "b"}, {"best_of": 3}, {"echo": True}])
def test_what_render_refuses(api: Api, more: dict[str, Any]) -> None:
    (name,) = more
    assert error(api.post(f"{COMPLETIONS}/render", prompt="a", **more), 400)["param"] == name


def test_messages_are_rendered_as_they_are_answered(api: Api) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief.", "max_tokens": 9}
    half = ask(api, f"{MESSAGES}/render", **body, temperature=0)
    assert half["request_id"].startswith("msg_")
    assert half["sampling_params"]["max_tokens"] == 9
    assert (
        len(half["token_ids"])
        == ask(api, f"{MESSAGES}/count_tokens", messages=body["messages"], system=body["system"])["input_tokens"]
    )
    whole = ask(api, MESSAGES, **body, temperature=0)
    made = generate(api, half, output_mode="text")
    assert made["choices"][0]["text"] == whole["content"][0]["text"]
    refused = json.loads(api.post(f"{MESSAGES}/render", **{**body, "max_tokens": 0}).text)
    assert (refused["type"], "max_tokens" in refused["error"]["message"]) == ("error", True)


def test_responses_are_rendered_as_they_are_answered(api: Api) -> None:
    body: dict[str, Any] = {"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9}
    half = ask(api, f"{RESPONSES}/render", **body, temperature=0, store=True)
    assert (half["request_id"][:5], half["sampling_params"]["max_tokens"]) == ("resp_", 9)
    assert len(half["token_ids"]) == ask(api, f"{RESPONSES}/input_tokens", **body)["input_tokens"]
    whole = ask(api, RESPONSES, **body, temperature=0)
    made = generate(api, half, output_mode="text")
    assert made["choices"][0]["text"] == whole["output"][0]["content"][0]["text"]


def test_render_names_what_it_leaves_out(api: Api) -> None:
    call = api.post(f"{COMPLETIONS}/render", prompt="a", return_tokens_as_token_ids=True, timings=True)
    assert call.headers["x-octavo-ignored-fields"] == "return_tokens_as_token_ids, timings"


def test_a_stream_of_tokens(api: Api) -> None:
    params = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    whole = ask(api, GENERATE, token_ids=[5, 6], sampling_params=params)
    options = {"include_usage": True}
    call = api.post(GENERATE, token_ids=[5, 6], sampling_params=params, stream=True, stream_options=options)
    lines = [line.removeprefix("data: ") for line in call.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_without_max_tokens_the_context_is_the_limit(api: Api) -> None:
    body = ask(api, GENERATE, token_ids=[5, 6], sampling_params={"temperature": 0, "ignore_eos": True})
    most = api.client.info.max_model_len
    assert len(body["choices"][0]["token_ids"]) == most - 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [1] * 5000}, "token_ids"),
        ({"token_ids": [1], "sampling_params": {"top_p": 3}}, "top_p"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": "x"}}, "sampling_params"),
        ({"token_ids": [1], "sampling_params": {"reasoning_budget": 5}}, "sampling_params"),
        (
            {"token_ids": [1], "sampling_params": {"reasoning_budget": {"tokens": 5, "open": [1], "close": 10**6}}},
            "sampling_params.reasoning_budget",
        ),
        (
            {"token_ids": [1], "sampling_params": {"reasoning_budget": {"tokens": 5, "open": [1] * 2000, "close": 1}}},
            "sampling_params",
        ),
        ({"token_ids": [1], "features": {}}, "features"),
        ({"token_ids": [1], "output_mode": "derender"}, "output_mode"),
    ],
)
def test_what_is_refused(api: Api, body: dict[str, Any], param: str) -> None:
    assert error(api.post(GENERATE, **body), 400)["param"] == param


def test_unknown_sampling_parameters_are_named(api: Api) -> None:
    call = api.post(GENERATE, token_ids=[5], sampling_params={"max_tokens": 1, "output_kind": 2})
    assert call.headers["x-octavo-ignored-fields"] == "sampling_params.output_kind"


def test_sampling_parameters_without_effect_are_named(api: Api) -> None:
    inner = {"max_tokens": 1, "stream": True, "timings": True, "return_token_ids": False}
    call = api.post(GENERATE, token_ids=[5], sampling_params=inner)
    assert call.headers["x-octavo-ignored-fields"] == "sampling_params.stream, sampling_params.timings"
    assert json.loads(call.text)["choices"]


def test_terms_may_be_among_the_sampling_parameters() -> None:
    inner = {"cache_salt": "a", "priority": 3, "request_timeout": 5}
    body = GenerateRequest.model_validate({"token_ids": [5], "sampling_params": inner, "priority": 0})
    asked = body.asked()
    assert (asked.cache_salt, asked.priority, asked.request_timeout) == ("a", 0, 5)
    assert body.ignored_fields() == []


def test_logprobs_of_the_prompt(api: Api) -> None:
    how = {"prompt_logprobs": 1, "max_tokens": 2, "temperature": 0}
    (choice,) = ask(api, COMPLETIONS, prompt=[5, 6, 7], **how)["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert ask(api, GENERATE, token_ids=[5, 6, 7], sampling_params=how)["prompt_logprobs"] == choice["prompt_logprobs"]
    assert "prompt_logprobs" not in ask(api, GENERATE, token_ids=[5], sampling_params={"max_tokens": 1})
