"""Every answer and every event of a stream against the types of OpenAI's and Anthropic's clients, without leniency."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import InputTokenCountResponse, Response, ResponseStreamEvent
from support.client_types import problems
from support.conversing import PARSERS, THOUGHT_AND_CALLS, WEATHER_SCHEMA, Conversing, saying

HELLO = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": WEATHER_SCHEMA}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": WEATHER_SCHEMA}
VERSION = {"anthropic-version": "2023-06-01"}


def unknown(*paths: str) -> set[tuple[str, str]]:
    return {("unknown", path) for path in paths}


# The fields that OpenAI's types lack: those of vLLM, and those that Open Responses' document requires.
CHOICES = unknown(*(f".choices[].{name}" for name in ("stop_reason", "token_ids")))
CHAT = CHOICES | unknown(".prompt_token_ids", ".prompt_logprobs", ".choices[].message.reasoning")
CHAT |= unknown(".choices[].message.reasoning_content")
CHUNKS = unknown(".choices[].delta.reasoning", ".choices[].delta.reasoning_content", ".choices[].stop_reason")
COMPLETIONS = CHOICES | unknown(".choices[].prompt_token_ids", ".choices[].prompt_logprobs")
# OpenAI sends null, too, before the last piece of a completion, which its type does not allow.
PIECES = COMPLETIONS | {("wrong", ".choices[].finish_reason")}
RESPONSES = unknown(".store", ".presence_penalty", ".frequency_penalty", ".output[].status")
# The client of the major version before has the name, and requires it.
EVENTS = unknown(*(f".response{path}" for _, path in RESPONSES), ".name", ".item.status")


def read(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(answer: Any) -> list[Any]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


CHAT_BODY = {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}], "logprobs": True}
RESPONSE_BODY = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}
CUSTOM_BODY = {"input": "hi", "tools": [{"type": "custom", "name": "weather"}]}
BODIES = [
    ("chat/completions", CHAT_BODY, ChatCompletion, ChatCompletionChunk, CHAT, CHUNKS),
    ("completions", {"prompt": "hi", "logprobs": 2}, Completion, Completion, COMPLETIONS, PIECES),
    ("responses", RESPONSE_BODY, Response, ResponseStreamEvent, RESPONSES, EVENTS),
    ("responses", CUSTOM_BODY, Response, ResponseStreamEvent, RESPONSES, EVENTS),
    ("messages", {"messages": HELLO, "tools": [TOOL]}, Message, RawMessageStreamEvent, set(), set()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "finish"), [(THOUGHT_AND_CALLS, "stop"), ("Hello", "length")])
@pytest.mark.parametrize(
    ("route", "body", "kind", "event", "more", "more_in_events"),
    BODIES,
    ids=[f"{b[0]}{n}" for n, b in enumerate(BODIES)],
)
def test_answers_and_events_are_what_the_client_expects(
    route: str, body: Any, kind: Any, event: Any, more: Any, more_in_events: Any, text: str, finish: str
) -> None:
    every = route == "messages"  # Anthropic's document requires all fields
    length = "max_output_tokens" if route == "responses" else "max_tokens"
    api, asked = Conversing(saying(text, finish=finish), **PARSERS), {**body, length: 300}
    whole = read(api.post(f"/v1/{route}", asked))
    assert set(problems(whole, kind, every=every)) <= more
    events = streamed(api.post(f"/v1/{route}", {**asked, "stream": True}))
    assert len(events) > 4
    assert {one for data in events for one in problems(data, event, every=every)} <= more_in_events


def test_what_lists_and_counts_is_what_the_client_expects() -> None:
    async def ask(api: Conversing) -> list[Any]:
        return [
            read(await api.ask("GET", "/v1/models"))["data"][0],
            read(await api.ask("GET", "/v1/models", None, **VERSION))["data"][0],
            read(await api.ask("POST", "/v1/messages/count_tokens", {"messages": HELLO})),
            read(await api.ask("POST", "/v1/responses/input_tokens", {"input": "hi"})),
        ]

    model, anthropics, counted, tokens = Conversing(saying("ok")).run(ask)
    assert {kind for kind, _ in problems(model, Model)} == {"unknown"}, "vLLM's fields, and ours"
    assert not list(problems(anthropics, ModelInfo, every=True))
    assert not list(problems(counted, MessageTokensCount, every=True))
    assert not list(problems(tokens, InputTokenCountResponse, every=True))


def test_differences_are_found() -> None:
    whole = read(Conversing(saying("Hello")).post("/v1/messages", {"messages": HELLO, "max_tokens": 9}))
    del whole["usage"]["service_tier"]
    assert list(problems(whole, Message, every=True)) == [("missing", ".usage.service_tier")]
    assert list(problems(whole, Message)) == []
    whole |= {"id": 3, "more": None, "stop_reason": "tired", "content": [{"type": "text", "text": None}]}
    assert set(problems(whole, Message)) == {
        ("unknown", ".more"), ("wrong", ".id"), ("wrong", ".stop_reason"), ("wrong", ".content[].text"),
    }  # fmt: skip
