"""POST /v1/messages over a scripted engine: input, output, events, errors; typed by Anthropic's client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from fake_client import failing, pausing, say
from pydantic import TypeAdapter
from support.conversing import CALL, PARSERS, THOUGHT_AND_CALLS, WEATHER_SCHEMA, Conversing, kinds, read_events, saying
from support.service import PATIENCE, Service

from server.answering.message_events import usage_of
from server.api.message_schemas import MessageObject
from server.api.schemas import CompletionTokensDetails, Usage
from server.door.message_errors import MessageErrors

PATH = "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"name": "weather", "description": "Of a city.", "input_schema": WEATHER_SCHEMA}


def asking(messages: list[Any] = HELLO, **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 50, "messages": messages, **fields}


def strictly(message: dict[str, Any]) -> None:
    """The answer as the document has it: no field more, none less."""
    assert set(message) == set(MessageObject.model_fields)
    TypeAdapter(MessageObject).validate_python(message, strict=True)


# ---------------------------------------------------------------- what comes back


def test_a_message_is_answered() -> None:
    api = Conversing(saying("Hello to you."))
    message = api.post(PATH, asking(system="Be brief.")).json()
    strictly(message)
    assert api.prompts == ["system:Be brief.;user:hi;assistant:"]
    assert message["content"] == [{"type": "text", "text": "Hello to you.", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"] == {
        "input_tokens": len(api.prompts[0]), "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        "output_tokens": len("Hello to you.\0"), "output_tokens_details": None,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "inference_geo": None, "server_tool_use": None, "service_tier": "standard", "speed": None,
    }  # fmt: skip
    assert api.params.max_tokens == 50


def test_why_an_answer_ended() -> None:
    cut = Conversing(saying("Hello", finish="length")).post(PATH, asking()).json()
    assert cut["stop_reason"] == "max_tokens"
    stopped = Conversing(saying("Hello")).post(PATH, asking(stop_sequences=["l"])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "l")
    assert stopped["content"][0]["text"] == "He"
    called = Conversing(saying(CALL), **PARSERS).post(PATH, asking(tools=[TOOL])).json()
    assert called["stop_reason"] == "tool_use"


def test_thinking_and_calls_are_blocks() -> None:
    api = Conversing(saying(THOUGHT_AND_CALLS), **PARSERS)
    message = api.post(PATH, asking(tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})).json()
    strictly(message)
    thought, said, first, second = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "It is about weather.")
    assert (said["type"], said["text"]) == ("text", "Let me look.")
    assert [call["input"] for call in (first, second)] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert api.prompts[0].startswith("tool:weather;think:True;")


def test_events_come_in_order() -> None:
    answer = Conversing(saying(THOUGHT_AND_CALLS), **PARSERS).post(PATH, asking(tools=[TOOL], stream=True))
    events = read_events(answer.text)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds(events) == ["message_start", *(4 * block), "message_delta", "message_stop"]
    started = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert started == ["thinking", "text", "tool_use", "tool_use"]
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2, 3]
    deltas = {data["index"]: data["delta"]["type"] for name, data in events if name == "content_block_delta"}
    assert deltas == {0: "thinking_delta", 1: "text_delta", 2: "input_json_delta", 3: "input_json_delta"}
    strictly(events[0][1]["message"])
    assert events[-2][1]["delta"] == {
        "stop_reason": "tool_use", "stop_sequence": None, "stop_details": None, "container": None,
    }  # fmt: skip
    assert events[-2][1]["usage"]["output_tokens"] == len(THOUGHT_AND_CALLS) + 1


def test_cached_tokens_are_counted_apart() -> None:
    def script(request_id: str, source: Any, params: Any) -> Any:
        deltas = say(request_id, ["ab\0"], params, "stop")
        return [replace(deltas[0], num_cached_tokens=3), *deltas[1:]]

    api = Conversing(script)
    usage = api.post(PATH, asking()).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(api.prompts[0]) - 3, 3)


def test_thinking_tokens_are_counted_where_the_chat_counts_them() -> None:
    details = CompletionTokensDetails(reasoning_tokens=7)
    usage = usage_of(Usage(prompt_tokens=3, completion_tokens=9, completion_tokens_details=details))
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (9, {"thinking_tokens": 7})


def test_silence_is_broken_by_pings() -> None:
    events = Conversing(pausing, stream_keepalive=0.05).events(PATH, asking())
    assert [name for name, _ in events].count("ping") >= 2
    assert events[-1][0] == "message_stop"


# ---------------------------------------------------------------- what goes in


def test_blocks_are_messages() -> None:
    api = Conversing(saying("ok"), **PARSERS)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
                {"type": "text", "text": "e"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "d"},
                {"type": "tool_result", "tool_use_id": "t1", "content": "cold", "is_error": True},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "warm"}],
                    "is_error": False,
                },
                {"type": "text", "text": ""},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be kind."}]
    answer = api.post(PATH, asking(messages, system=system, tools=[TOOL]))
    assert answer.status_code == 200, answer.text
    assert api.prompts == [
        "tool:weather;system:Be kind.;user:a\nb;"
        'assistant:<think>hm</think>c[t1 weather {"city": "Oslo"}][t2 weather {}];assistant:e;'
        "tool:cold(t1);tool:warm(t2);user:d\n;assistant:"
    ]
    assert answer.headers["x-octavo-ignored-fields"] == "messages.is_error"


def test_the_assistant_s_last_message_is_gone_on_from() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    api = Conversing(saying("b"), template=template)
    message = api.post(PATH, asking([*HELLO, {"role": "assistant", "content": "a"}])).json()
    assert api.prompts == ["user:hi;assistant:a"]
    assert message["content"] == [{"type": "text", "text": "b", "citations": None}]


def test_tokens_are_counted_as_they_are_used() -> None:
    fields = {"messages": HELLO, "system": "Be brief.", "tools": [TOOL], "tool_choice": {"type": "auto"}}
    api = Conversing(saying("ok"), **PARSERS)
    used = api.post(PATH, {**fields, "max_tokens": 5}).json()["usage"]["input_tokens"]
    assert api.post(f"{PATH}/count_tokens", fields).json() == {"input_tokens": used}
    assert len(api.client.asked) == 1
    assert api.service.tokenizing.num_prompts == 0


def test_what_changes_nothing_is_named_or_known() -> None:
    api = Conversing(saying("ok"))
    quiet = api.post(PATH, asking(metadata={"user_id": "u"}, service_tier="auto", cache_control={"type": "ephemeral"}))
    assert quiet.status_code == 200
    assert "x-octavo-ignored-fields" not in quiet.headers
    named = api.post(PATH, asking(thinking={"type": "disabled", "budget_tokens": 1}, shape=2))
    assert named.headers["x-octavo-ignored-fields"] == "shape"


def test_what_runs_or_is_seen_elsewhere_is_left_out_and_named() -> None:
    """What Claude Code sends beside its conversation, and what is in a history that began at Anthropic."""
    api = Conversing(saying("ok"), **PARSERS)
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                {"type": "document", "title": "b", "source": {"type": "text", "media_type": "text/plain", "data": "c"}},
                {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
            ],
        },
        {"role": "system", "content": "Be kind."},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
                {
                    "type": "web_search_tool_result",
                    "tool_use_id": "s1",
                    "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "x"}],
                },
                {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "image", "source": {}}, {"type": "tool_reference", "tool_name": "weather"}],
                }
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {"type": "text", "text": "Be brief."}]
    fields = {
        "context_management": {"edits": []}, "mcp_servers": [], "fallbacks": [], "container": None,
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, TOOL], "tool_choice": {"type": "auto"},
    }  # fmt: skip
    answer = api.post(PATH, asking(messages, system=system, **fields))
    assert answer.status_code == 200, answer.text
    note = "[{} was here; this model reads text only.]"
    assert api.prompts == [
        f"tool:weather;system:Be brief.;user:a\n{note.format('An image')}\nb\nc\n{note.format('A document')};"
        'system:Be kind.;assistant:[s1 web_search {"query": "q"}];'
        'tool:[{"type": "web_search_result", "url": "u", "title": "t"}](s1);assistant:d[t1 weather {}];'
        f"tool:{note.format('An image')}\nweather(t1);assistant:"
    ]
    assert answer.headers["x-octavo-ignored-fields"] == (
        "context_management, fallbacks, mcp_servers, messages.document, messages.image, messages.redacted_thinking, "
        "tools.web_search_20250305"
    )
    alone = Conversing(saying("ok"), **PARSERS).post(PATH, asking(**{**fields, "tools": fields["tools"][:1]}))
    assert alone.status_code == 200, "no tool is left, and none has to be called"


def test_a_model_whose_template_knows_no_tools_can_be_made_to_call_them() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    asked = asking(tools=[TOOL], tool_choice={"type": "any"}, system="Be brief.")
    api = Conversing(saying(CALL), template=template)
    (call,) = api.post(PATH, asked).json()["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    assert api.prompts[0].startswith("system:Be brief.\n\nYou can call these functions.")
    assert '"weather"' in api.params.structured_outputs.grammar
    refused = Conversing(saying(CALL), template=template, tool_prompt="off").post(PATH, asked)
    assert (refused.status_code, "does not support tools" in refused.text) == (400, True)


def test_an_answer_gets_the_room_that_is_left() -> None:
    for words, params in ((saying("a"), {}), (saying("a", finish="length"), {"stream": True})):
        api = Conversing(words)
        answer = api.post(PATH, asking(max_tokens=32_000, **params))
        assert answer.status_code == 200
        assert api.params.max_tokens == 4096 - len(api.prompts[0])
    assert '"stop_reason":"model_context_window_exceeded"' in answer.text
    for length in (4096, 100_000):
        said = asking([{"role": "user", "content": "a" * length}])
        refused = Conversing(saying("a")).post(PATH, said)
        message = refused.json()["error"]["message"]
        tokens, limit = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message).groups()  # type: ignore[union-attr]
        assert (refused.status_code, int(limit)) == (400, 4095)
        assert int(tokens) >= length
    del said["max_tokens"]
    assert Conversing(saying("a")).post(f"{PATH}/count_tokens", said).json()["error"]["message"] == message


# ---------------------------------------------------------------- errors


def with_block(block: Any, role: str = "user") -> dict[str, Any]:
    return asking([{"role": role, "content": [block]}])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": HELLO}, "max_tokens is required"), (asking([]), "at least one message"),
        (asking(max_tokens=0), "max_tokens"), (asking(["a"]), "messages[0]"),
        (asking([{"role": "tool", "content": "a"}]), "user, assistant or system, got 'tool'"),
        (asking([{"role": [], "content": "a"}]), "messages[0].role"),
        (asking([{"role": "user", "content": []}]), "messages[0].content"),
        (with_block({"type": "smell"}), "messages[0].content[0].type is 'smell'"),
        (with_block({"type": "redacted_thinking", "data": "x"}, "assistant"), "with content"),
        (with_block({"type": "tool_use", "id": "a", "name": "b", "input": {}}), "not supported here; only text, image"),
        (with_block({"type": "tool_result", "content": "a"}), "messages[0].content[0].tool_use_id"),
        (with_block({"type": "tool_use", "id": "a", "name": "b"}, "assistant"), "content[0].input must be an object"),
        (with_block("a"), "messages[0].content[0] must be an object"), (asking(system=3), "system must be"),
        (
            asking(tools=[{"type": "web_search_20250305"}], tool_choice={"type": "tool", "name": "web_search"}),
            "there are no tools",
        ),
        (asking(tools=[{"name": "a"}]), "tools[0].input_schema"),
        (asking(tools=[{"name": "a b", "input_schema": {}}]), "tools[0].name"),
        (asking(tools=[TOOL], tool_choice={"type": "some"}), "tool_choice.type"),
        (asking(tool_choice={"type": "any"}), "there are no tools"),
        (asking(thinking={"type": "some"}), "thinking.type"),
        (asking(output_config={"format": {"type": "xml"}}), "output_config.format"),
        (asking(n=2), "n is not supported"),
        (asking(temperature=-1.0), "temperature"), (asking(stop_sequences=[""]), "stop"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], words: str) -> None:
    answer = Conversing(saying("ok"), **PARSERS).post(PATH, body)
    assert answer.status_code == 400
    error = answer.json()
    assert set(error) == {"type", "error"}
    assert set(error["error"]) == {"type", "message"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


def test_whatever_refuses_speaks_anthropic_s_way() -> None:
    key = "a-key-of-some-length"
    api = Conversing(saying("ok"), api_key=(key,), max_body_size="64KiB")
    bearer = {"authorization": f"Bearer {key}"}

    async def ask(api: Conversing) -> list[tuple[int, Any]]:
        answers = [
            await api.ask("POST", PATH, asking()),
            await api.ask("POST", PATH, asking(), **{"x-api-key": "wrong"}),
            await api.ask("POST", PATH, asking(system="a" * 70_000), **bearer),
            await api.ask("GET", PATH, **bearer),
            await api.ask("POST", f"{PATH}/batches", {}, **bearer),
            await api.ask("POST", PATH, asking(model="other"), **bearer),
        ]
        return [(answer.status_code, answer.json()["error"]["type"]) for answer in answers]

    assert api.run(ask) == [
        (401, "authentication_error"), (401, "authentication_error"), (413, "request_too_large"),
        (405, "invalid_request_error"), (404, "not_found_error"), (404, "not_found_error"),
    ]  # fmt: skip


def test_other_paths_keep_openai_s_errors() -> None:
    error = Conversing(saying("ok")).post("/v1/messagesx", {}).json()["error"]
    assert set(error) == {"message", "type", "param", "code"}


def test_the_key_may_come_as_x_api_key() -> None:
    key = "a-key-of-some-length"
    api = Conversing(saying("ok"), api_key=(key,))

    async def ask(api: Conversing) -> list[int]:
        both = {"x-api-key": key, "authorization": "Bearer wrong"}
        answers = [await api.ask("POST", PATH, asking(), **headers) for headers in ({"x-api-key": key}, both)]
        return [answer.status_code for answer in answers]

    assert api.run(ask) == [200, 401]


def test_a_failure_ends_a_stream_with_an_event() -> None:
    name, last = Conversing(failing).events(PATH, asking())[-1]
    assert (name, last["error"]["type"]) == ("error", "api_error")
    assert "boom" not in json.dumps(last)


def test_an_answer_that_the_deadline_cut_is_no_answer() -> None:
    def script(request_id: str, source: Any, params: Any) -> Any:
        deltas = say(request_id, ["abc"], params, "abort")
        (choice,) = deltas[-1].choices
        return [*deltas[:-1], replace(deltas[-1], choices=[replace(choice, stop_reason="deadline")])]

    answer = Conversing(script).post(PATH, asking())
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    assert Conversing(script).events(PATH, asking())[-1][1]["error"]["type"] == "timeout_error"


def test_errors_without_a_body_of_ours_stay_as_they_are() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 499, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b""})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(MessageErrors(app)({"type": "http", "path": PATH, "headers": []}, receive, send))
    assert sent[0]["status"] == 499
    assert sent[1]["body"] == b""


# ---------------------------------------------------------------- Anthropic's client


def test_the_client_talks_and_calls() -> None:
    async def talk(api: Conversing) -> tuple[Any, Any, Any]:
        async with api.anthropic() as client:
            options: Any = {"model": "org/fake", "max_tokens": 90, "tools": [TOOL]}
            messages: list[Any] = [{"role": "user", "content": "Weather?"}]
            first = await client.messages.create(messages=messages, **options)
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "mild"}
                for block in first.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
            second = await client.messages.create(messages=messages, **options)
            count = await client.messages.count_tokens(model="org/fake", messages=messages, tools=[TOOL])  # type: ignore[list-item]
            return first, second, count

    api = Conversing(saying(THOUGHT_AND_CALLS, "Mild."), **PARSERS)
    first, second, count = api.run(talk)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert first.content[2].input == {"city": "Oslo"}
    assert second.content[0].text == "Mild."
    assert "assistant:<think>It is about weather.</think>Let me look.[" in api.prompts[1]
    assert api.prompts[1].count("tool:mild(") == 2
    assert count.input_tokens == second.usage.input_tokens


def test_the_client_reads_streams() -> None:
    async def ask(api: Conversing) -> tuple[str, Any]:
        async with (
            api.anthropic() as client,
            client.messages.stream(model="org/fake", max_tokens=90, messages=HELLO, tools=[TOOL]) as stream,  # type: ignore[list-item]
        ):
            text: AsyncIterator[str] = stream.text_stream
            return "".join([piece async for piece in text]), await stream.get_final_message()

    text, message = Conversing(saying(THOUGHT_AND_CALLS), **PARSERS).run(ask)
    assert text == "Let me look."
    assert message.content[0].thinking == "It is about weather."
    assert [block.input for block in message.content[2:]] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert message.stop_reason == "tool_use"


def test_the_client_reads_errors() -> None:
    async def ask(api: Conversing) -> None:
        async with api.anthropic("wrong") as client:
            await client.messages.create(model="org/fake", max_tokens=9, messages=HELLO)

    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        Conversing(saying("ok"), api_key=("a-key-of-some-length",)).run(ask)


@pytest.mark.slow
def test_a_real_service(bundled: Callable[..., Service]) -> None:
    url = bundled().url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        options: Any = {"model": "octavo-demo", "max_tokens": 40, "messages": [{"role": "user", "content": "Hello"}]}
        options["extra_body"] = {"temperature": 0}  # which newer clients do not know
        whole = client.messages.create(**options)
        assert whole.content[0].type == "text"
        assert whole.content[0].text
        assert whole.stop_reason in ("end_turn", "max_tokens")
        with client.messages.stream(**options) as stream:
            said = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert said == whole.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        stopped = client.messages.create(**options, stop_sequences=[said[4:6]])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", said[4:6])
        counted = client.messages.count_tokens(model="octavo-demo", messages=options["messages"])
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert client.messages.create(**{**options, "max_tokens": 5000}).stop_reason != "max_tokens", "it is lowered"
        long = [{"role": "user", "content": "Hello. " * 2000}]
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
            client.messages.create(**{**options, "messages": long})
        (model,) = client.models.list()
        assert client.models.retrieve(model.id) == model
        assert (model.id, model.type, model.created_at.year > 2000) == ("octavo-demo", "model", True)
        with pytest.raises(anthropic.NotFoundError, match="other"):
            client.models.retrieve("other")
