"""POST /v1/responses over a scripted engine: input, output, events, refusals; typed by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from fake_client import failing, say
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem
from pydantic import TypeAdapter
from support.asgi import Call
from support.conversing import (
    CALL,
    PARSERS,
    THOUGHT_AND_CALLS,
    WEATHER_SCHEMA,
    Conversing,
    kinds,
    read_events,
    saying,
)

from server.api.response_schemas import ResponseObject

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": WEATHER_SCHEMA, "strict": None}
NO_PARSERS = {"tool_call_parser": "none", "reasoning_parser": "none"}
LOGPROBS = "message.output_text.logprobs"


def strictly(response: dict[str, Any]) -> ResponseObject:
    """The answer as the document has it: no field more, none less."""
    assert set(response) == set(ResponseObject.model_fields)
    return TypeAdapter(ResponseObject).validate_python(response, strict=True)


# ---------------------------------------------------------------- what comes back


def test_a_text_is_answered() -> None:
    api = Conversing(saying("Hello to you."))
    answer = api.post(PATH, {"input": "hi", "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me"})
    assert answer.status_code == 200, answer.text
    response = answer.json()
    strictly(response)
    assert api.prompts == ["system:Be brief.;user:hi;assistant:"]
    (item,) = response["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello to you.", "annotations": [], "logprobs": []}]
    assert (item["role"], item["status"], response["status"]) == ("assistant", "completed", "completed")
    assert response["id"].startswith("resp_")
    assert len(response["id"]) == len("resp_") + 32
    assert (response["instructions"], response["metadata"], response["user"]) == ("Be brief.", {"a": "b"}, "me")
    assert response["store"] is False
    assert response["usage"]["input_tokens"] == len(api.prompts[0])
    assert response["usage"]["output_tokens"] == len("Hello to you.\0")


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    response = Conversing(saying("Hello", finish="length")).post(PATH, {"input": "hi", "max_output_tokens": 5}).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None
    events = Conversing(saying("Hello", finish="length")).events(PATH, {"input": "hi", "max_output_tokens": 5})
    assert events[-1][0] == "response.incomplete"
    strictly(events[-1][1]["response"])


def test_nothing_said_is_an_empty_message() -> None:
    response = Conversing(saying("")).post(PATH, {"input": "hi"}).json()
    assert [part["text"] for part in response["output"][0]["content"]] == [""]
    events = Conversing(saying("")).events(PATH, {"input": "hi"})
    assert "response.output_text.done" in kinds(events)


def test_there_is_no_compaction_and_clients_read_that_as_not_found() -> None:
    answer = Conversing(saying("ok")).post(f"{PATH}/compact", {"model": "org/fake", "input": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unsupported_endpoint")


def test_events_come_in_order() -> None:
    events = Conversing(saying("Hello")).events(PATH, {"input": "hi", "metadata": {"a": "b"}})
    assert kinds(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert "".join(data["delta"] for name, data in events if name.endswith("text.delta")) == "Hello"
    for name, data in events:
        if "response" in data:
            assert strictly(data["response"]).metadata == {"a": "b"}, name
    ids = {data.get("item_id") or data["item"]["id"] for _, data in events if "item_id" in data or "item" in data}
    assert ids == {events[-1][1]["response"]["output"][0]["id"]}


def without_ids(value: Any) -> Any:
    """The same without what differs from answer to answer."""
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(item) for name, item in value.items() if name not in changing}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", ["Hello", THOUGHT_AND_CALLS, CALL, "<think>Hm", "<think>a</think>b", f"{CALL}c", ""])
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_ends_with_the_answer(text: str, finish: str, logprobs: bool) -> None:
    if finish == "length" and not text:
        return  # there is no such end
    body: dict[str, Any] = {"input": "hi", "tools": [TOOL]}
    parsers: dict[str, Any] = PARSERS
    if logprobs:  # of text alone
        body, parsers = {"input": "hi", "include": [LOGPROBS], "top_logprobs": 2}, NO_PARSERS
    whole = Conversing(saying(text, finish=finish), **parsers).post(PATH, body).json()
    events = Conversing(saying(text, finish=finish), **parsers).events(PATH, body)
    assert without_ids(events[-1][1]["response"]) == without_ids(whole)
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == events[-1][1]["response"]["output"]
    assert [data["output_index"] for name, data in events if name == "response.output_item.added"] == [
        *range(len(done))
    ]
    for index, item in enumerate(done):
        deltas = [data for _, data in events if "delta" in data and data["output_index"] == index]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(data["delta"] for data in deltas) == said
        if item["type"] == "message":
            assert [entry for data in deltas for entry in data["logprobs"]] == item["content"][0]["logprobs"]


def test_reasoning_and_calls_are_items() -> None:
    api = Conversing(saying(THOUGHT_AND_CALLS), **PARSERS)
    response = api.post(PATH, {"input": "Weather?", "tools": [TOOL], "reasoning": {"effort": "low"}}).json()
    strictly(response)
    thought, said, first, second = response["output"]
    assert api.prompts == ["tool:weather;effort:low;user:Weather?;assistant:"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "It is about weather."}]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert said["content"][0]["text"] == "Let me look."
    assert [first["name"], second["name"]] == ["weather", "weather"]
    assert [json.loads(call["arguments"])["city"] for call in (first, second)] == ["Oslo", "Rome"]
    assert len({first["call_id"], second["call_id"], first["id"], second["id"]}) == 4
    assert response["status"] == "completed"
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["tools"] == [{**TOOL, "description": None}]


def test_events_of_reasoning_and_calls() -> None:
    events = Conversing(saying(THOUGHT_AND_CALLS), **PARSERS).events(PATH, {"input": "hi", "tools": [TOOL]})
    by_item: dict[int, list[str]] = {}
    for name, data in events:
        if "output_index" in data:
            names = by_item.setdefault(data["output_index"], [])
            if not names or names[-1] != name:
                names.append(name)
    short = {index: [name.removeprefix("response.") for name in names] for index, names in by_item.items()}
    added, done = ["output_item.added"], ["output_item.done"]
    part = (["content_part.added"], ["content_part.done"])
    assert short[0] == [*added, *part[0], "reasoning_text.delta", "reasoning_text.done", *part[1], *done]
    assert short[1] == [*added, *part[0], "output_text.delta", "output_text.done", *part[1], *done]
    for index in (2, 3):
        assert short[index] == [*added, "function_call_arguments.delta", "function_call_arguments.done", *done]


def test_log_probabilities() -> None:
    body = {"input": "hi", "include": [LOGPROBS], "top_logprobs": 2}
    api = Conversing(saying("Hey"), **NO_PARSERS)
    (item,) = api.post(PATH, body).json()["output"]
    logprobs = item["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["H", "e", "y", "\0"]
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    assert api.params.logprobs == 2


# ---------------------------------------------------------------- what goes in


def test_items_are_messages() -> None:
    api = Conversing(saying("ok"))
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "warm"}]},
        {"type": "message", "role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    assert api.post(PATH, {"input": items}).status_code == 200
    assert api.prompts == [
        'system:Be kind.;user:a\nb;assistant:<think>hm</think>c[c1 weather {"city": "Oslo"}][c2 weather {}];'
        "tool:cold(c1);tool:warm(c2);assistant:d;user:e;assistant:"
    ]


def test_an_answer_goes_back_as_it_came() -> None:
    api = Conversing(saying(THOUGHT_AND_CALLS, "Fine."), **PARSERS)

    async def talk(api: Conversing) -> str:
        items: list[Any] = [{"role": "user", "content": "Weather?"}]
        first = (await api.ask("POST", PATH, {"input": items, "tools": [TOOL]})).json()
        items += first["output"]
        for item in first["output"]:
            if item["type"] == "function_call":
                items.append({"type": "function_call_output", "call_id": item["call_id"], "output": "mild"})
        second = (await api.ask("POST", PATH, {"input": items, "tools": [TOOL]})).json()
        return str(second["output"][0]["content"][0]["text"])

    assert api.run(talk) == "Fine."
    assert "assistant:<think>It is about weather.</think>Let me look.[" in api.prompts[1]
    assert api.prompts[1].count("tool:mild(") == 2


def test_sampling_fields_are_the_engine_s_own() -> None:
    api = Conversing(saying("ok"))
    body = {"input": "hi", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 4, "max_output_tokens": 7}
    response = api.post(PATH, {**body, "stop": ["x"], "cache_salt": "s", "request_timeout": 50}).json()
    params = api.params
    assert (params.temperature, params.top_p, params.top_k, params.seed, params.max_tokens) == (0.5, 0.9, 3, 4, 7)
    assert params.stop == ["x"]
    assert (response["temperature"], response["top_p"], response["max_output_tokens"]) == (0.5, 0.9, 7)
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.0, 0.0)
    plain = Conversing(saying("ok")).post(PATH, {"input": "hi"}).json()
    assert (plain["temperature"], plain["top_p"]) == (1.0, 1.0)


def test_effort_none_asks_the_template_for_no_thinking() -> None:
    api = Conversing(saying("ok"))
    api.post(PATH, {"input": "hi", "reasoning": {"effort": "none", "summary": "auto"}})
    assert api.prompts == ["effort:none;think:False;user:hi;assistant:"]


@pytest.mark.parametrize(
    "field",
    [
        {"store": True}, {"background": False}, {"truncation": "disabled"}, {"service_tier": "auto"},
        {"safety_identifier": "x"}, {"prompt_cache_key": "k"}, {"max_tool_calls": 3},
        {"include": ["reasoning.encrypted_content"]}, {"text": {"format": {"type": "text"}}}, {"tools": []},
        {"tool_choice": "none"}, {"previous_response_id": None}, {"metadata": None}, {"conversation": None},
        {"reasoning": {"summary": "detailed"}}, {"tools": [], "tool_choice": "auto"}, {"client_metadata": {"a": "b"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_clients_send_by_themselves_is_taken(field: dict[str, Any]) -> None:
    answer = Conversing(saying("ok")).post(PATH, {"input": "hi", **field})
    assert answer.status_code == 200, answer.text
    assert "x-octavo-ignored-fields" not in answer.headers


def test_hints_that_change_nothing_are_named() -> None:
    hints = {"text": {"verbosity": "low"}, "shape": 1, "truncation": "auto", "context_management": []}
    answer = Conversing(saying("ok")).post(PATH, {"input": "hi", **hints})
    assert answer.headers["x-octavo-ignored-fields"] == "context_management, shape, text.verbosity, truncation"


# ---------------------------------------------------------------- tools of other kinds than functions

AGENTS = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [{**TOOL, "name": "close"}]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}

ALLOWED = {"type": "allowed_tools", "tools": [{"type": "function", "name": "weather"}, {"type": "mcp"}]}


def many(namespaces: int, functions: int) -> list[Any]:
    inner = [{"type": "function", "name": f"f{index}"} for index in range(functions)]
    return [{"type": "namespace", "name": f"n{index}", "tools": inner} for index in range(namespaces)]


def calling(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_in_namespaces_are_called_by_their_own_names() -> None:
    api = Conversing(saying(calling("agents__close", city="Oslo")), **PARSERS)
    more = {"type": "additional_tools", "role": "developer", "tools": [PATCH, {"type": "web_search"}]}
    history = [
        {"role": "user", "content": "hi"},
        more,
        {"type": "function_call", "call_id": "c1", "name": "close", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "no"},
    ]
    answer = api.post(PATH, {"input": history, "tools": [AGENTS, TOOL]})
    response = answer.json()
    strictly(response)
    assert api.prompts == [
        "tool:agents__close;tool:weather;tool:apply_patch;user:hi;assistant:[c1 agents__close {}];tool:no(c1);"
        "assistant:"
    ]
    (call,) = response["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "close")
    assert [tool["type"] for tool in response["tools"]] == ["namespace", "function"]
    assert answer.headers["x-octavo-ignored-fields"] == "tools.web_search"
    assert api.post(PATH, {"input": "hi", "tools": many(2, 65)}).status_code == 200, (
        "more than a chat request may bring"
    )
    long = {**AGENTS, "name": "n" * 64}
    api = Conversing(saying("ok"), **PARSERS)
    assert api.post(PATH, {"input": "hi", "tools": [long]}).status_code == 200
    assert api.prompts[0].startswith(f"tool:{'n' * 57}__close;"), "a name of 64 characters"


@pytest.mark.parametrize("written", [calling("apply_patch", input='a\n"b"'), calling("apply_patch", patch="a")])
def test_a_custom_tool_takes_text(written: str) -> None:
    text = 'a\n"b"' if "input" in written else '{"patch": "a"}'
    history = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    api = Conversing(saying(written), **PARSERS)
    body = {"input": history, "tools": [PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    response = strictly(api.post(PATH, body).json())
    (call,) = response.output
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", text)  # type: ignore[typeddict-item]
    assert '[c1 apply_patch {"input": "x"}];tool:done(c1);' in api.prompts[0]
    events = Conversing(saying(written), **PARSERS).events(PATH, body)
    said = {name: data for name, data in events if "custom_tool_call_input" in name}
    assert said["response.custom_tool_call_input.delta"]["delta"] == text
    assert said["response.custom_tool_call_input.done"]["input"] == text
    assert without_ids(events[-1][1]["response"]["output"]) == without_ids([call])


@pytest.mark.parametrize("parser", ["hermes", "qwen3_xml", "gemma4"])
def test_a_format_that_cannot_be_enforced_is_named(parser: str) -> None:
    format_ = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    tools = [{"type": "custom", "name": "letters", "format": format_}]
    api = Conversing(saying("ok"), tool_call_parser=parser)
    answer = api.post(PATH, {"input": "hi", "tools": tools})
    assert answer.status_code == 200, answer.text
    named = None if parser == "hermes" else "tools.letters.format"
    assert answer.headers.get("x-octavo-ignored-fields") == named


def test_allowed_tools_are_the_only_ones_that_can_be_called() -> None:
    for mode in ("auto", "required"):
        api = Conversing(saying(CALL), **PARSERS)
        body = {"input": "hi", "tools": [TOOL, PATCH], "tool_choice": {**ALLOWED, "mode": mode}}
        assert api.post(PATH, body).status_code == 200
        assert api.prompts == ["tool:weather;tool:apply_patch;user:hi;assistant:"], "the template sees all of them"
        grammar = api.params.structured_outputs.grammar
        assert '"weather"' in grammar
        assert '"apply_patch"' not in grammar


def test_what_ran_elsewhere_is_a_call_with_its_result() -> None:
    api = Conversing(saying("ok"), **PARSERS)
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image", "image_url": "u"}]},
        {"type": "web_search_call", "id": "w1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "local_shell_call", "id": "x", "call_id": "l1", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "l1", "output": "a.py"},
        {"type": "shell_call", "call_id": "s1", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "s1", "output": [{"stdout": "/"}]},
        {"type": "apply_patch_call", "call_id": "p1", "operation": {"type": "delete_file"}},
        {"type": "apply_patch_call_output", "call_id": "p1", "status": "failed"},
        {"type": "mcp_call", "id": "m1", "name": "n", "server_label": "s", "arguments": "{}", "output": "yes"},
        {"type": "reasoning", "encrypted_content": "x", "summary": []},
        {"type": "reasoning", "encrypted_content": "x", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "image_generation_call", "id": "i1", "status": "completed", "result": "AAAA"},
    ]
    answer = api.post(PATH, {"input": history})
    assert answer.status_code == 200, answer.text
    assert api.prompts == [
        "user:hi\n[An image was here; this model reads text only.];"
        'assistant:[w1 web_search {"action": {"type": "search", "query": "q"}}];tool:completed(w1);'
        'assistant:[l1 local_shell {"action": {"command": ["ls"]}}];tool:a.py(l1);'
        'assistant:[s1 shell {"action": {"commands": ["pwd"]}}];tool:[{"stdout": "/"}](s1);'
        'assistant:[p1 apply_patch {"operation": {"type": "delete_file"}}];tool:failed(p1);'
        'assistant:[m1 mcp {"name": "n", "server_label": "s", "arguments": "{}"}];tool:yes(m1);'
        "assistant:<think>hm</think>;assistant:"
    ]
    assert answer.headers["x-octavo-ignored-fields"] == (
        "input.encrypted_content, input.image_generation_call, input.input_image"
    )


# ---------------------------------------------------------------- what is refused


def with_item(item: Any) -> dict[str, Any]:
    return {"input": [item]}


@pytest.mark.parametrize("kind", ["web_search", "mcp"])
def test_tools_that_would_run_here_are_left_out_and_cannot_be_forced(kind: str) -> None:
    for tools in ([{"type": kind}], [{"type": kind}, TOOL]):
        api = Conversing(saying("ok"), **PARSERS)
        answer = api.post(PATH, {"input": "hi", "tools": tools, "tool_choice": "auto"})
        assert answer.headers["x-octavo-ignored-fields"] == f"tools.{kind}"
        assert [tool["type"] for tool in answer.json()["tools"]] == ["function"] * (len(tools) - 1)
        assert api.prompts == ["tool:weather;" * (len(tools) - 1) + "user:hi;assistant:"]
    forced = Conversing(saying("ok")).post(PATH, {"input": "hi", "tools": tools, "tool_choice": {"type": kind}})
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tool_choice.type")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": 3}, "input"),
        (with_item("a"), "input[0]"), (with_item({"role": "tool", "content": "a"}), "input[0].role"),
        (with_item({"role": "user"}), "input[0].content"),
        (with_item({"role": "user", "content": []}), "input[0].content"),
        (with_item({"role": "user", "content": [{"type": "smell"}]}), "input[0].content[0].type"),
        (with_item({"role": "user", "content": [{"type": "input_text"}]}), "input[0].content[0].text"),
        (with_item({"type": "image_generation_call"}), "input"),
        (with_item({"type": "shell_call"}), "input[0].id"),
        (with_item({"type": "additional_tools", "tools": "all"}), "input[0].tools"),
        (with_item({"type": "custom_tool_call", "call_id": "c", "name": "a"}), "input[0].input"),
        (with_item({"type": "item_reference", "id": "msg_1"}), "input[0].type"),
        (with_item({"type": "function_call", "call_id": "c", "name": "a b", "arguments": ""}), "input[0].name"),
        (with_item({"type": "function_call", "name": "a", "arguments": ""}), "input[0].call_id"),
        (with_item({"type": "function_call_output", "call_id": "", "output": "a"}), "input[0].call_id"),
        (with_item({"type": "function_call_output", "call_id": "c"}), "input[0].output"),
        (with_item({"role": "user", "content": "a", "id": "a b"}), "input[0].id"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"), ({"input": "a", "truncation": "half"}, "truncation"),
        ({"input": "a", "conversation": "c"}, "conversation"), ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "a", "max_tokens": 3}, "max_tokens"), ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "temperature": -1}, "temperature"), ({"input": "a", "stream_options": {}}, "stream_options"),
        ({"input": "a", "include": ["x"]}, "include"), ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata"), ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata"),
        ({"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": "a", "reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"input": "a", "reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "a", "tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"role": "user", "content": "a"}] * 8192, "instructions": "b"}, "input"),
        ({"input": [{"type": "web_search_call", "id": "w"}] * 4500}, "input"),
        ({"input": "a", "tools": many(4, 129)}, "tools"),
        ({"input": "a", "tools": [{}]}, "tools[0]"),
        ({"input": "a", "tools": [TOOL, TOOL]}, "tools"),
        ({"input": "a", "tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]}, "tools[0].format"),
        ({"input": "a", "tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {**ALLOWED, "mode": "some"}}, "tool_choice.allowed_tools"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0]"),
        ({"input": "a", "tools": [{"type": "function", "name": "a", "parameters": 1}]}, "tools[0].parameters"),
        ({"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"input": "a", "tools": [TOOL], "include": [LOGPROBS]}, "include"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    api = Conversing(saying("ok"), **PARSERS)
    answer = api.post(PATH, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert not api.client.asked


def test_a_failure_ends_a_stream_with_an_event() -> None:
    events = Conversing(failing).events(PATH, {"input": "hi"})
    name, last = events[-1]
    assert name == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "boom" not in json.dumps(last)
    assert last["response"]["output"][0]["content"][0]["text"] == "ab"
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))


def test_the_deadline_fails_what_has_begun() -> None:
    def cut(request_id: str, source: Any, params: Any) -> Any:
        deltas = say(request_id, ["abc"], params, "abort")
        (choice,) = deltas[-1].choices
        deltas[-1] = replace(deltas[-1], choices=[replace(choice, stop_reason="deadline")])
        return deltas

    response = Conversing(cut).post(PATH, {"input": "hi"}).json()
    assert (response["status"], response["incomplete_details"]) == ("failed", None)
    assert "time limit passed" in response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete"


def test_input_tokens_are_those_of_the_prompt() -> None:
    """Whatever makes the prompt longer counts: instructions, tools, items."""
    items = [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []}]
    body: dict[str, Any] = {
        "input": items,
        "instructions": "Be brief.",
        "tools": [TOOL],
        "reasoning": {"effort": "low"},
    }

    async def count(api: Conversing) -> tuple[int, Any, Any]:
        async with api.openai() as client:
            counted = await client.responses.input_tokens.count(model="org/fake", **body)
        answered = (await api.ask("POST", PATH, body)).json()
        return counted.input_tokens, answered, await api.ask("POST", f"{PATH}/input_tokens", {"input": []})

    counted, answered, refused = Conversing(saying("ok"), **PARSERS).run(count)
    assert counted == answered["usage"]["input_tokens"] > 0
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


# ---------------------------------------------------------------- ending a stream


def test_a_stream_can_be_cancelled() -> None:
    gate = asyncio.Event()

    def script(request_id: str, source: Any, params: Any) -> Any:
        return [*say(request_id, ["abcdef"], params)[:3], gate, *say(request_id, ["abcdef"], params)[3:]]

    async def cancel(api: Conversing) -> tuple[Any, Any, Any, list[tuple[str, Any]]]:
        call = Call(api.app, PATH, {"input": "hi", "stream": True}, headers=[(b"host", b"localhost")])
        while call.text.count("output_text.delta\n") < 3:
            await asyncio.sleep(0.001)
        id_ = read_events(call.text)[0][1]["response"]["id"]
        other = await api.ask("POST", f"{PATH}/resp_other/cancel")
        cancelled = await api.ask("POST", f"{PATH}/{id_}/cancel")
        await call.wait_end()
        again = await api.ask("POST", f"{PATH}/{id_}/cancel")
        return other, cancelled, again, read_events(call.text)

    api = Conversing(script)
    other, cancelled, again, events = api.run(cancel)
    assert (other.status_code, again.status_code) == (404, 404)
    strictly(cancelled.json())
    assert cancelled.json()["status"] == "cancelled"
    assert cancelled.json()["output"][0]["content"][0]["text"] == "abc"
    name, last = events[-1]
    assert (name, last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert last["response"]["output"][0]["content"][0]["text"] == "abc"
    assert len(api.client.cut_short) == 1
    assert not api.service.running_responses
    assert api.service.admission.num_prompts == 0


# ---------------------------------------------------------------- OpenAI's client


def test_the_client_reads_answers() -> None:
    async def ask(api: Conversing) -> Any:
        async with api.openai() as client:
            return await client.responses.create(model="org/fake", input="Weather?", tools=[TOOL])  # type: ignore[list-item]

    response = Conversing(saying(THOUGHT_AND_CALLS), **PARSERS).run(ask)
    assert response.output_text == "Let me look."
    thought, _, call, _ = response.output
    assert isinstance(thought, ResponseReasoningItem)
    assert thought.content is not None
    assert thought.content[0].text == "It is about weather."
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments) == {"city": "Oslo"}
    assert response.usage.input_tokens > 0


def test_the_client_reads_streams() -> None:
    async def ask(api: Conversing) -> Any:
        async with (
            api.openai() as client,
            client.responses.stream(model="org/fake", input="Weather?", tools=[TOOL]) as stream,  # type: ignore[list-item]
        ):
            snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
            return snapshots, await stream.get_final_response()

    snapshots, response = Conversing(saying(THOUGHT_AND_CALLS), **PARSERS).run(ask)
    assert snapshots[-1] == response.output_text == "Let me look."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]


def test_the_client_reads_errors() -> None:
    async def ask(api: Conversing) -> None:
        async with api.openai() as client:
            await client.responses.create(model="org/fake", input="hi", background=True)

    with pytest.raises(openai.BadRequestError, match="--response-store") as refused:
        Conversing(saying("ok")).run(ask)
    assert (refused.value.param, refused.value.code) == ("background", "unsupported_parameter")
