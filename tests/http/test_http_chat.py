"""POST /v1/chat/completions: over a scripted engine, over real templates, and as a real process."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_client import EOS, FakeClient, Script, Step, entry, hf_byte_tokenizer, say
from support.asgi import error, events, request, until
from support.service import PATIENCE, Service

from engine import FILTERS, ChoiceDelta, InvalidRequestError, RequestDelta, SamplingParams, TokenInput
from engine.text.processor import Tokenizer
from server.answering.prompt import Room
from server.answering.rendering import ChatRenderer
from server.app import create_app
from server.errors import ApiError
from server.workers.pool import WorkerPool, _is_stopped

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT.parent / "shared" / "data" / "chat_templates" / "models" / "templates"
SIMPLE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def echo(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
    """Choice i says the last letter of the last message, and i."""
    deltas = say(request_id, [f"<{chr(source.token_ids[-4])}{index}>" for index in range(params.n)], params)
    deltas[0] = replace(deltas[0], num_cached_tokens=3)
    return deltas


def tokenizer_with(template: str | None) -> Tokenizer:
    hf = hf_byte_tokenizer()
    hf.chat_template = template
    hf.bos_token = "<eos>"
    return Tokenizer(hf)


class Api:
    """An app over a script, called in process."""

    def __init__(self, script: Script = echo, *, template: str | None = SIMPLE, tokenizer: bool = True, **info: Any):
        self.client = FakeClient(script)
        self.client.info = replace(self.client.info, **info)
        self.app = create_app(self.client, tokenizer_with(template) if tokenizer else None, "org/fake")

    def chat(self, **body: Any) -> httpx.Response:
        return request(self.app, "POST", "/v1/chat/completions", json={"messages": HELLO, **body})

    def stream(self, **body: Any) -> list[Any]:
        answer = self.chat(stream=True, **body)
        assert answer.status_code == 200, answer.text
        return events(answer.text)

    def asked(self) -> tuple[str, SamplingParams]:
        ((source, params),) = self.client.asked.values()
        assert source.text is not None
        return source.text, params


# ---------------------------------------------------------------- shapes


def drafted(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
    """Of 3 tokens that each step drafts, one is right."""
    return [replace(d, num_draft_tokens=3, num_accepted_draft_tokens=1) for d in echo(request_id, source, params)]


@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]])
def test_a_prediction_goes_to_the_engine_and_is_counted(content: Any) -> None:
    """In the usage of an answer and of a stream; without a prediction the usage says nothing of drafts."""
    api = Api(drafted)
    answer = api.chat(prediction={"type": "content", "content": content})
    assert "x-octavo-ignored-fields" not in answer.headers
    details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 8}
    assert answer.json()["usage"]["completion_tokens_details"] == details
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert list(api.asked()[1].predicted_token_ids or ()) == list(b"abc")
    events = Api(drafted).stream(
        prediction={"type": "content", "content": content}, stream_options={"include_usage": True}
    )
    assert events[-1]["usage"]["completion_tokens_details"] == details
    plain = Api(drafted)
    assert "completion_tokens_details" not in plain.chat().json()["usage"]
    assert plain.asked()[1].predicted_token_ids is None


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("abc", "prediction"),
        ({"type": "text", "content": "abc"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": ["a", 5]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
    ],
)
def test_a_wrong_prediction_is_named(prediction: Any, param: str) -> None:
    answer = Api().chat(prediction=prediction)
    assert answer.status_code == 400
    assert error(answer)["param"] == param


def test_a_prediction_is_cut_at_the_context_length() -> None:
    api = Api()
    assert api.chat(prediction={"type": "content", "content": "a" * 100}).status_code == 200
    assert len(api.asked()[1].predicted_token_ids or ()) == 64


def test_an_answer_has_openais_shape() -> None:
    body = Api().chat(model="org/fake").json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "org/fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "<i0>", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "system_fingerprint": "octavo-0",
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 4,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def test_a_stream_opens_each_choice_with_its_role() -> None:
    events = Api().stream(n=2)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)
    for index in range(2):
        pieces = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert pieces == [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in (
                {"role": "assistant", "content": ""}, {"content": "<"}, {"content": "i"}, {"content": str(index)}
            )
        ] + [
            {"index": index, "delta": {"content": ">"}, "logprobs": None, "finish_reason": "length",
             "stop_reason": None}
        ]  # fmt: skip


def test_logprobs_with_the_bytes_of_every_token() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        assert params.logprobs == 2
        said = "é".encode()
        unlikely = entry(said[1], 2) | {said[1]: entry(said[1], 1, float("-inf"))[said[1]]}
        unlikely[said[1]] = replace(unlikely[said[1]], rank=9)
        for token, logprobs in ((said[0], entry(said[0], 2)), (said[1], unlikely)):
            choice = ChoiceDelta(index=0, token_ids=[token], logprobs=[logprobs])
            yield RequestDelta(request_id=request_id, choices=[choice])
        last = ChoiceDelta(index=0, token_ids=[EOS], logprobs=[entry(EOS, 1)], finish_reason="stop")
        yield RequestDelta(request_id=request_id, choices=[last], finished=True)

    choice = Api(script).chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    assert choice["message"]["content"] == "é"
    first, second, end = choice["logprobs"]["content"]
    assert first["bytes"] + second["bytes"] == list("é".encode())
    assert first["logprob"] == -0.5
    assert [top["bytes"] for top in first["top_logprobs"]] == [[0xC3], [(0xC3 + 1) % 128]]
    assert second["logprob"] == -9999.0
    assert len(second["top_logprobs"]) == 1, "what was chosen is not among the two most probable"
    assert end["token"] == "<eos>"
    pieces = [event["choices"][0]["logprobs"] for event in Api(script).stream(logprobs=True, top_logprobs=2)]
    assert [item for piece in pieces if piece for item in piece["content"]] == choice["logprobs"]["content"]


def test_logprobs_without_alternatives_and_none() -> None:
    content = Api().chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == ["<", "i", "0", ">"]
    assert all(item["top_logprobs"] == [] for item in content)
    assert Api().chat(logprobs=False).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"stop": "0", "n": 2},
        {"return_token_ids": True, "logprobs": True},
        {"messages": [{"role": "user", "content": "é"}]},
    ],
)
def test_a_stream_adds_up_to_the_unstreamed_answer(fields: dict[str, Any]) -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
        return say(request_id, [f"né☃{index}!" for index in range(params.n)], params)

    body, chunks = Api(script).chat(**fields).json(), Api(script).stream(**fields)
    assert chunks[0].get("prompt_token_ids") == body["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    whole, events = body["choices"], [chunk["choices"][0] for chunk in chunks]
    for choice in whole:
        mine = [event for event in events if event["index"] == choice["index"]]
        assert "".join(event["delta"]["content"] for event in mine) == choice["message"]["content"]
        assert [event["finish_reason"] for event in mine if event["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["token_ids"] is not None:
            assert [token for event in mine for token in event.get("token_ids", ())] == choice["token_ids"]


# ---------------------------------------------------------------- what reaches the engine


def test_messages_are_rendered_by_the_models_template() -> None:
    api = Api()
    text = {"type": "text", "text": "one"}
    answer = api.chat(
        messages=[
            {"role": "system", "content": "be"},
            {"role": "user", "content": [text, {**text, "text": "two"}], "name": "me"},
            {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "audio": None},
            {"role": "user", "content": "end"},
        ]
    )
    assert answer.status_code == 200
    assert api.asked()[0] == "s:be;u:one\ntwo;a:;u:end;a:"


@pytest.mark.parametrize(
    ("template", "role"),
    [(SIMPLE, "s"), (SIMPLE + '{# the "developer" is known #}', "d"), (SIMPLE + "{# by developers #}", "s")],
)
def test_developer_is_system_to_templates_that_do_not_know_it(template: str, role: str) -> None:
    api = Api(template=template)
    api.chat(messages=[{"role": "developer", "content": "x"}])
    assert api.asked()[0] == f"{role}:x;a:"


def test_the_template_writes_the_special_tokens() -> None:
    api = Api(template="{{ eos_token }}{{ messages[0].content }};a:")
    api.chat()
    ((source, _),) = api.client.asked.values()
    assert list(source.token_ids) == [EOS, *b"hi;a:"]


def test_the_default_length_is_what_is_left_of_the_context() -> None:
    api = Api()
    api.chat()
    assert api.asked()[1].max_tokens == 64 - 7


@pytest.mark.parametrize(
    ("fields", "info", "max_tokens"),
    [
        ({"max_tokens": 5}, {}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {}, 6),
        ({"max_completion_tokens": None, "max_tokens": 5}, {}, 5),
        ({}, {"default_max_new_tokens": 9}, None),
        ({}, {"default_max_length": 20}, None),
        ({}, {"default_max_length": 7}, 57),
        ({}, {"first_context_len": 14}, 8),  # 14 tokens are computed, the last of the answer not
        ({}, {"first_context_len": 13}, 57),  # more than half of it: a long text
        ({"max_tokens": 30}, {"first_context_len": 14}, 30),
        ({"n": 3}, {}, 3 * 16 - 7),  # pages for each
        ({"n": 3}, {"full_requests": 3.1}, 57),  # a sliding window: each keeps few of them
        ({"n": 5}, {}, 2 * 16 - 7),  # ten pages of sixteen tokens for five answers
    ],
)
def test_max_tokens(fields: dict[str, Any], info: dict[str, Any], max_tokens: int | None) -> None:
    api = Api(**info)
    assert api.chat(**fields).status_code == 200
    assert api.asked()[1].max_tokens == max_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abcd", "logprobs": 4}),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 4}),
    ],
)
def test_every_sampling_field_reaches_the_engine(path: str, body: dict[str, Any]) -> None:
    fields = {
        **{column.name: 3 if column.allowed.integer else 0.5 for column in FILTERS if column.allowed},
        "max_tokens": 9, "min_tokens": 2, "seed": 7, "n": 2, "xtc_threshold": 0.2,
        "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3, "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ["\n", "é"],
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"5": 1.5},
        "stop": ["zz"], "stop_token_ids": [4], "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": True, "prompt_logprobs": 1, "num_beams": 1,
        "length_penalty": 0.8,
        "early_stopping": "never", "no_repeat_ngram_size": 2, "min_length": 1, "suppress_tokens": [1],
        "begin_suppress_tokens": [2], "forced_bos_token_id": 3, "forced_eos_token_id": 6,
        "bad_words_ids": [[4, 5], [6]], "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 3,
        "renormalize_logits": True, "decoder_start_token_id": 7, "stream_beams": True,
        "allowed_token_ids": [8, 9, 8], "logprob_token_ids": [9, 3],
    }  # fmt: skip
    # `bad_words` become ids, and prompts are cut, before the engine is asked.
    elsewhere = {"structured_outputs", "constraint", "timestamps", "bad_words", "truncate_prompt_tokens", "detokenize"}
    elsewhere |= {"reasoning_budget", "predicted_token_ids"}  # test_http_reasoning_budget.py; from `prediction`
    assert {*fields, "logprobs", *elsewhere} == set(SamplingParams.__dataclass_fields__)
    api = Api()
    assert request(api.app, "POST", path, json=fields | body).status_code == 200
    assert api.asked()[1] == SamplingParams(**(fields | {"logit_bias": {5: 1.5}, "logprobs": 4}))


def test_fields_that_ask_for_nothing_are_accepted_and_unknown_ones_reported() -> None:
    answer = Api().chat(
        tools=[], tool_choice="none", functions=None, response_format={"type": "text"}, modalities=["text"], user="me",
        parallel_tool_calls=True, frobnicate=1,
    )  # fmt: skip
    assert answer.status_code == 200
    assert answer.headers["x-octavo-ignored-fields"] == "frobnicate"


# ---------------------------------------------------------------- errors

PART = {"type": "image_url", "image_url": {"url": "http://x"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def nested(depth: int) -> dict[str, Any]:
    return {"x": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "function", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [*HELLO, {"role": "tool", "content": "hi"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [*HELLO, {"role": "tool", "content": "hi", "tool_call_id": "x" * 257}]},
            "messages[1].tool_call_id",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "", "reasoning": 5}]}, "messages[1].reasoning"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{**HELLO[0], "name": 5}]}, "messages[0].name"),
        ({"messages": [{**HELLO[0], "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{**HELLO[0], "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        *[
            ({"messages": [{"role": "assistant", "tool_calls": calls}]}, f"messages[0].tool_calls{field}")
            for calls, field in (
                ({"id": "a"}, ""),
                ([CALL] * 129, ""),
                ([CALL, 5], "[1]"),
                ([{**CALL, "type": "custom"}], "[0].type"),
                ([{**CALL, "id": 5}], "[0].id"),
                ([{**CALL, "function": "f"}], "[0]"),
                ([{**CALL, "function": {"name": "a b", "arguments": ""}}], "[0].function.name"),
                ([{**CALL, "function": {"name": "f", "arguments": {}}}], "[0].function.arguments"),
            )
        ],
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{**TOOL, "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{**TOOL, "function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
        ({"tools": [{**TOOL, "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": nested(33)}}]}, "tools"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"x": [0] * 16384}}}]}, "tools"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"x": 2**64}}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"x{index}": 1 for index in range(65)}}, "chat_template_kwargs"),
        ({"reasoning_effort": "x" * 257}, "reasoning_effort"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"echo": "yes"}, "echo"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 2**31 - 1}, "n"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"num_beams": 2, "temperature": 0.7}, "temperature"),
    ],
)
def test_what_is_wrong_is_400_and_names_the_field(fields: dict[str, Any], param: str) -> None:
    api = Api()
    problem = error(api.chat(**{"stream": True, **fields}))
    assert problem["param"] == param
    assert param in problem["message"]
    assert len(problem["message"]) < 400
    assert not api.client.asked


def test_the_type_of_an_unsupported_part_is_named() -> None:
    assert "'image_url'" in error(Api().chat(messages=[{"role": "user", "content": [PART]}]))["message"]


def test_without_a_template_or_a_tokenizer_there_is_no_chat() -> None:
    for api, lacks in ((Api(template=None), "chat template"), (Api(tokenizer=False), "tokenizer")):
        refused = error(api.chat())
        assert refused["code"] == "unsupported_endpoint"
        assert lacks in refused["message"]
        assert "/v1/completions" in refused["message"]


SHOWING = (
    "{{ tools | tojson }}|{{ documents | tojson }}|{{ mood }}|{{ reasoning_effort }}|"
    "{% for m in messages %}{{ m | tojson }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def shown_to_template(template: str = SHOWING, **fields: Any) -> list[str]:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
        return say(request_id, ["ok"], params)

    api = Api(script, template=template, max_model_len=20_000)
    answer = api.chat(**fields)
    assert answer.status_code == 200, answer.text
    return api.asked()[0].split("|")


def test_the_template_gets_what_the_body_says_besides() -> None:
    function = {"name": "f", "description": "does", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}
    tools, documents, mood, effort, messages = shown_to_template(
        tools=[{"type": "function", "function": {**function, "strict": False}}],
        documents=[{"title": "t", "text": "x"}],
        chat_template_kwargs={"mood": {"of": [1, None, "é"]}},
        reasoning_effort="low",
    )
    assert json.loads(tools) == [{"type": "function", "function": function}]
    assert list(json.loads(tools)[0]["function"]["parameters"]["properties"]) == ["z", "a"], "in their order"
    assert json.loads(documents) == [{"title": "t", "text": "x"}]
    assert mood == "{'of': [1, None, 'é']}"
    assert effort == "low"
    assert messages == '{"role": "user", "content": "hi"}a:'


def test_without_the_fields_the_template_gets_none() -> None:
    assert shown_to_template() == ["null", "null", "", "", '{"role": "user", "content": "hi"}a:']


def test_tools_that_are_not_to_be_called_are_not_shown() -> None:
    assert shown_to_template(tools=[TOOL], tool_choice="none")[0] == "null"


def test_calls_and_their_results_in_the_history() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
    text = shown_to_template(
        "{% for m in messages %}{{ m | tojson }}|{% endfor %}",
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}], "reasoning": "why"},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "2"}]},
        ],
    )
    said, result, _ = text
    message = json.loads(said)
    assert message["tool_calls"] == [{**call, "function": {"name": "f", "arguments": {"x": [1, "é"]}}}]
    assert (message["content"], message["reasoning_content"]) == ("", "why")
    assert json.loads(result) == {"role": "tool", "content": "2", "tool_call_id": "call_1"}


ARGUMENTS = (
    "{{% for m in messages %}}{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{}{{% endfor %}}{{% endfor %}}"
)


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "[" * 9999, "5"])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    (text,) = shown_to_template(
        ARGUMENTS.format("{{ c.function.arguments | tojson }}"), messages=[{"role": "assistant", "tool_calls": [call]}]
    )
    assert json.loads(text) == (arguments or {})


def test_a_template_that_wants_arguments_as_text_gets_that() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": '{"x": 1}'}}
    (text,) = shown_to_template(
        ARGUMENTS.format("{{ '<' + c.function.arguments + '>' }}"),
        messages=[{"role": "assistant", "tool_calls": [call]}],
    )
    assert text == '<{"x": 1}>'


def test_the_last_message_can_be_continued() -> None:
    said = [*HELLO, {"role": "assistant", "content": "Well"}]
    for fields, text in (
        ({}, "u:hi;a:Well;a:"),
        ({"add_generation_prompt": False}, "u:hi;a:Well;"),
        ({"continue_final_message": True}, "u:hi;a:Well"),
    ):
        assert shown_to_template(SIMPLE, messages=said, **fields) == [text]


@pytest.mark.parametrize(
    ("said", "fields", "role", "content"),
    [
        ("assistant", {"continue_final_message": True, "echo": True}, "assistant", "Well<l0>"),
        ("assistant", {"echo": True}, "assistant", "Well<l0>"),
        ("assistant", {"continue_final_message": True}, "assistant", "<l0>"),
        ("user", {"echo": True}, "assistant", "<l0>"),
        ("user", {"echo": True, "add_generation_prompt": False}, "user", "Well<l0>"),
    ],
)
def test_echo(said: str, fields: dict[str, Any], role: str, content: str) -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
        return say(request_id, [f"<l{index}>" for index in range(params.n)], params)

    messages = [{"role": said, "content": "Well"}]
    choices = Api(script).chat(messages=messages, n=2, **fields).json()["choices"]
    assert choices[0]["message"] == {"role": role, "content": content, "refusal": None, "annotations": []}
    events = [event["choices"][0] for event in Api(script).stream(messages=messages, n=2, **fields)]
    for choice in choices:
        deltas = [event["delta"] for event in events if event["index"] == choice["index"]]
        assert deltas[0]["role"] == role
        assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]


def test_a_template_may_refuse() -> None:
    problem = error(Api(template="{{ raise_exception('no system role') }}").chat())
    assert "no system role" in problem["message"]
    assert problem["param"] == "messages"


@pytest.mark.parametrize(
    ("param", "fields", "public"),
    [
        ("prompt", {}, "messages"),
        ("max_tokens", {"max_tokens": 5}, "max_tokens"),
        ("max_tokens", {"max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_the_engines_refusals_name_what_the_client_sent(param: str, fields: dict[str, Any], public: str) -> None:
    refusal = InvalidRequestError("too long", param=param, code="context_length_exceeded")
    for stream in (False, True):
        problem = error(Api(lambda *_: [refusal]).chat(stream=stream, **fields))
        assert (problem["param"], problem["code"]) == (public, "context_length_exceeded")


# ---------------------------------------------------------------- templates

ENDLESS = "".join(f"{{% for {name} in range(99999) %}}" for name in "ijk") + "{% endfor %}" * 3


ROOM = Room(64, "messages")


def workers_of(pool: WorkerPool) -> list[int]:
    """The processes that the pool's forker has made, and that have not ended."""
    assert pool._forker is not None
    found = subprocess.run(["pgrep", "-P", str(pool._forker.pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


async def test_a_runaway_template_is_stopped_and_holds_up_no_other(pool: WorkerPool) -> None:
    endless, simple = tokenizer_with(ENDLESS), tokenizer_with(SIMPLE)
    renderer = ChatRenderer(time_limit=600, workers=pool)
    assert (await renderer.prompt(simple, HELLO, ROOM)).text == "u:hi;a:"
    runaway = asyncio.create_task(renderer.prompt(endless, HELLO, ROOM))
    await asyncio.sleep(0.1)
    assert (await renderer.prompt(simple, HELLO, ROOM)).text == "u:hi;a:"
    assert not runaway.done()
    await until(lambda: len(workers_of(pool)) == 2)
    runaway.cancel()  # as a client that leaves does
    await asyncio.gather(runaway, return_exceptions=True)
    await until(lambda: len(workers_of(pool)) == 1)
    with pytest.raises(ApiError, match=r"more than 0\.2 seconds"):
        await ChatRenderer(time_limit=0.2, workers=pool).prompt(endless, HELLO, ROOM)
    await until(lambda: len(workers_of(pool)) == 0)
    assert (await renderer.prompt(simple, HELLO, ROOM)).text == "u:hi;a:"


# One call into C, which no thread of the same process could be stopped in; and two ways to take gigabytes.
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        "{% set ns = namespace(a='x' * 2**20) %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% for i in range(60) %}{{ 'x' * 2**24 }}{% endfor %}",
    ],
)
@pytest.mark.slow
async def test_a_template_that_takes_gigabytes_takes_them_elsewhere(template: str, pool: WorkerPool) -> None:
    renderer = ChatRenderer(workers=pool)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ApiError) as caught:
        await renderer.prompt(tokenizer_with(template), HELLO, ROOM)
    assert caught.value.code == "chat_template_memory"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 64 * 1024  # KiB
    assert (await renderer.prompt(tokenizer_with(SIMPLE), HELLO, ROOM)).text == "u:hi;a:"


def test_a_text_that_is_far_too_long_stays_in_the_worker(pool: WorkerPool) -> None:
    tokenizer = tokenizer_with("{{ messages[0].content * 60000 }}")
    with pytest.raises(ApiError, match=r"300000 characters, more than the 262144 that can make ") as caught:
        asyncio.run(ChatRenderer(workers=pool).prompt(tokenizer, [{"role": "user", "content": "hello"}], ROOM))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.slow
async def test_a_worker_that_was_killed_while_idle_is_not_missed(pool: WorkerPool) -> None:
    renderer, simple = ChatRenderer(workers=pool), tokenizer_with(SIMPLE)
    await renderer.prompt(simple, HELLO, ROOM)
    (pid,) = workers_of(pool)
    os.kill(pid, signal.SIGKILL)
    assert (await renderer.prompt(simple, HELLO, ROOM)).text == "u:hi;a:"
    assert pool._forker is not None
    pool._forker.kill()
    pool._forker.wait()
    (pid,) = [worker._pid for worker in pool._idle]
    os.kill(pid, signal.SIGKILL)
    assert (await renderer.prompt(simple, HELLO, ROOM)).text == "u:hi;a:"


async def test_a_stopped_worker_is_replaced_and_no_fault_of_the_client(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is idle is not missed. One that is stopped in a job costs that request a 503."""
    renderer, simple = ChatRenderer(workers=pool), tokenizer_with(SIMPLE)
    await renderer.prompt(simple, HELLO, ROOM)
    assert pool._forker is not None
    for pid in (pool._idle[0]._pid, pool._forker.pid):
        os.kill(pid, signal.SIGSTOP)
        await until(functools.partial(_is_stopped, pid))
    assert (await renderer.prompt(simple, HELLO, ROOM)).text == "u:hi;a:"
    monkeypatch.setattr("server.workers.pool._PATIENCE", 0.5)
    (pid,) = [worker._pid for worker in pool._idle]
    endless = ChatRenderer(time_limit=2.0, workers=pool).prompt(tokenizer_with(ENDLESS), HELLO, ROOM)
    late = asyncio.create_task(endless)
    await until(lambda: not pool._idle)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ApiError) as caught:
        await late
    assert (caught.value.status_code, caught.value.code) == (503, "worker_stuck")
    monkeypatch.undo()
    assert (await renderer.prompt(simple, HELLO, ROOM)).text == "u:hi;a:"


def test_workers_get_no_secrets(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "sesame")
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    asyncio.run(ChatRenderer(workers=pool).prompt(tokenizer_with(SIMPLE), HELLO, ROOM))
    assert pool._forker is not None
    for pid in (pool._forker.pid, *workers_of(pool)):
        assert b"sesame" not in Path(f"/proc/{pid}/environ").read_bytes()


CONVERSATION = [
    {"role": "user", "content": "What is an octavo?"},
    {"role": "assistant", "content": "A sheet folded thrice."},
    {"role": "user", "content": [{"type": "text", "text": "And a quarto?"}]},
]
# Made for conversations with tools only: without, they fail in transformers, too.
NEED_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
}


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
@pytest.mark.slow
def test_real_templates_serve_a_conversation() -> None:
    refused = set()
    for path in sorted(TEMPLATES.glob("*.jinja")):
        api = Api(template=path.read_text(), max_model_len=100_000)
        answer = api.chat(messages=CONVERSATION)
        if answer.status_code != 200:
            assert error(answer)["code"] == "invalid_messages"
            refused.add(path.stem)
            continue
        text, _ = api.asked()
        for said in ("What is an octavo?", "A sheet folded thrice.", "And a quarto?"):
            assert said in text, path.stem
    assert refused <= NEED_TOOLS


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("meta-llama-Llama-3.1-8B-Instruct", "<|start_header_id|>system<|end_header_id|>"),
        ("Qwen-Qwen2.5-7B-Instruct", "<|im_start|>system\n"),
        ("Reka-Edge", ""),
        ("openai-gpt-oss-120b", "<|start|>developer<|message|>"),
    ],
)
def test_real_templates_with_instructions_of_the_developer(name: str, opening: str) -> None:
    api = Api(template=(TEMPLATES / f"{name}.jinja").read_text(), max_model_len=100_000)
    assert api.chat(messages=[{"role": "developer", "content": "Be brief."}, *HELLO]).status_code == 200
    text, _ = api.asked()
    assert opening in text
    assert "Be brief." in text


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="no chat templates beside the checkout")
def test_a_real_template_that_knows_no_system_role_shows_it_as_the_user_s() -> None:
    api = Api(template=(TEMPLATES / "google-gemma-2-2b-it.jinja").read_text())
    assert api.chat(messages=[{"role": "system", "content": "x"}, *HELLO]).status_code == 200
    assert api.asked()[0] == "<eos><start_of_turn>user\nx\n\nhi<end_of_turn>\n<start_of_turn>model\n"


# ---------------------------------------------------------------- the real process


@pytest.fixture
def client(bundled: Callable[..., Service]) -> Iterator[openai.OpenAI]:
    """Of `octavo serve` with the bundled model."""
    with openai.OpenAI(base_url=f"{bundled().url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.mark.slow
def test_openai_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    options: Any = {"model": "octavo-demo", "messages": messages, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert whole.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == whole.usage.completion_tokens <= 12
    for item in choice.logprobs.content:
        assert item.top_logprobs[0].token == item.token, "greedy takes the most probable"
        assert len(item.top_logprobs) == 2
        assert item.logprob <= 0
    said = b"".join(bytes(item.bytes or ()) for item in choice.logprobs.content)
    assert said.decode().startswith(choice.message.content)

    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    # What was answered can be sent back as it came.
    again = client.chat.completions.create(
        model="octavo-demo", max_tokens=4, messages=[*messages, choice.message, {"role": "user", "content": "And?"}]
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens


def test_beams_and_several_answers(client: openai.OpenAI) -> None:
    options: Any = {"model": "octavo-demo", "messages": HELLO, "max_tokens": 8}
    beams = client.chat.completions.create(**options, n=2, extra_body={"num_beams": 3})
    assert len({choice.message.content for choice in beams.choices}) == 2
    first, second = (client.chat.completions.create(**options, n=3, seed=5) for _ in range(2))
    assert [choice.message.content for choice in first.choices] == [choice.message.content for choice in second.choices]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**options, temperature=0.5, extra_body={"num_beams": 3})
    assert refused.value.param == "temperature"


def test_without_max_tokens_the_answer_may_fill_the_context(client: openai.OpenAI) -> None:
    options: Any = {"model": "octavo-demo", "messages": HELLO, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(**options)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"
    lowered = client.chat.completions.with_raw_response.create(**options, max_completion_tokens=16_384)
    assert lowered.headers["X-Octavo-Ignored-Fields"] == "max_completion_tokens"
    assert lowered.parse().choices == answer.choices
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="octavo-demo", messages=[{"role": "user", "content": "word " * 600}])
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
