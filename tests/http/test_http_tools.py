"""POST /v1/chat/completions with tools and reasoning: over a scripted engine, and with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from fake_client import EOS, FakeClient, Step, entry, hf_byte_tokenizer, say
from support.asgi import error, events, request
from support.service import PATIENCE, Service
from tokenizers import AddedToken

from engine import ChoiceDelta, RequestDelta, SamplingParams, TokenInput
from engine.text.processor import Tokenizer
from server.app import create_app
from server.config.settings import ServerSettings

# As Qwen's: what the template says of calls and reasoning tells how answers are read.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{# <tool_call></tool_call> arguments </think> #}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% if thinks %}<think>\n{% endif %}{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {}}}}}
    for name in ("add", "find")
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"x": [1, "é"]}}\n</tool_call>'
FIND = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'


class Api:
    """An app whose model says these texts, one for each answer."""

    def __init__(
        self, *texts: str, template: str = TEMPLATE, finish: str = "stop", marks: Sequence[str] = (), **settings: Any
    ):
        hf = hf_byte_tokenizer()
        hf.chat_template = template
        hf.add_special_tokens({"additional_special_tokens": [AddedToken(mark, special=True) for mark in marks]})
        self.tokenizer = Tokenizer(hf)
        self.finish = finish
        self.texts = texts
        self.client = FakeClient(self.script)
        self.client.info = replace(self.client.info, max_model_len=4000, vocab_size=self.tokenizer.vocab_size)
        self.app = create_app(self.client, self.tokenizer, "org/fake", settings=ServerSettings(**settings))

    def script(self, request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
        spoken = [[*self.tokenizer.encode(self.texts[i % len(self.texts)]), EOS] for i in range(params.n)]
        for step in range(max(map(len, spoken))):
            choices = [
                ChoiceDelta(
                    index=index,
                    token_ids=[ids[step]],
                    logprobs=None if params.logprobs is None else [entry(ids[step], 1)],
                    finish_reason=self.finish if step == len(ids) - 1 else None,  # type: ignore[arg-type]
                    cumulative_logprob=-1.0 if step == len(ids) - 1 else None,
                )
                for index, ids in enumerate(spoken)
                if step < len(ids)
            ]
            last = step == max(map(len, spoken)) - 1
            yield RequestDelta(request_id=request_id, choices=choices, finished=last)

    def chat(self, **body: Any) -> httpx.Response:
        return request(self.app, "POST", "/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS, **body})

    def answer(self, **body: Any) -> dict[str, Any]:
        answer = self.chat(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.chat(stream=True, **body)
        assert answer.status_code == 200, answer.text
        return events(answer.text)


def assemble(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that deltas add up to, as clients do it; ids left out, since each is drawn."""
    message: dict[str, Any] = {"role": deltas[0]["role"], "content": ""}
    for delta in deltas:
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"]
                calls.append({"type": call["type"], "function": {"name": call["function"]["name"], "arguments": ""}})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    found = {**message, "content": message["content"] or ""}
    assert (found.pop("refusal"), found.pop("annotations")) == (None, [])
    if "tool_calls" in found:
        found["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in found["tool_calls"]]
    return found


def test_a_call_has_openais_shape() -> None:
    body = Api(f"{ADD}\n{FIND}").answer()
    (choice,) = body["choices"]
    ids = [call.pop("id") for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": '{"x": [1, "é"]}'}},
                {"type": "function", "function": {"name": "find", "arguments": "{}"}},
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "token_ids": None,
    }


def test_a_call_is_streamed_as_openai_does() -> None:
    events = Api(f"Ok.{ADD}").events()
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Ok."
    first, *others = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    ((call),) = first
    assert call.pop("id")
    assert call == {"index": 0, "type": "function", "function": {"name": "add", "arguments": "{"}}
    assert len(others) > 5, "the arguments come as they are written"
    assert all(set(more) == {"index", "function"} for (more,) in others)
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(
    ("texts", "fields"),
    [
        ([f"{ADD}\n{FIND}"], {}),
        ([f"<think>\nHm.\n</think>\n\nOk.\n{ADD}"], {}),
        (["<think>\nHm.\n</think>\n\nOk.", ADD, "Plain."], {"n": 3}),
        ([f"{ADD}\n{FIND}"], {"parallel_tool_calls": False}),
        (["Hm.\n</think>\nOk."], {"chat_template_kwargs": {"thinks": True}}),
        (["<tool_call> no call", "<think>"], {"n": 2}),
        ([f"Ok. {ADD} And END so on"], {"stop": ["END"]}),
        ([f"<think>a</think>{ADD}"], {"logprobs": True, "top_logprobs": 0}),
        ([f"<think>a</think>é{ADD}"], {"return_token_ids": True}),
        (["<think>Hm.</think>Ok."], {"tools": None}),
        ([f"Ok.{ADD}"], {"tool_choice": "none"}),
    ],
)
def test_a_stream_adds_up_to_the_unstreamed_answer(texts: list[str], fields: dict[str, Any], finish: str) -> None:
    whole = Api(*texts, finish=finish).answer(**fields)
    options = {"include_usage": True}
    events = Api(*texts, finish=finish).events(**fields, stream_options=options)
    pieces = [event["choices"][0] for event in events if event["choices"]]
    for choice in whole["choices"]:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert assemble([piece["delta"] for piece in mine]) == without_ids(choice["message"])
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"] is not None:
            told = [entry for piece in mine if piece["logprobs"] for entry in piece["logprobs"]["content"]]
            assert told == choice["logprobs"]["content"]
            assert len(told) == whole["usage"]["completion_tokens"]
        if choice["token_ids"] is not None:
            assert [token for piece in mine for token in piece.get("token_ids", ())] == choice["token_ids"]
            assert bytes(choice["token_ids"][:-1]).decode() == texts[0]
    assert events[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("text", "fields", "finish", "reason"),
    [
        (ADD, {}, "stop", "tool_calls"),
        (ADD, {"tool_choice": "none"}, "stop", "stop"),
        ("Ok.", {}, "stop", "stop"),
        (ADD, {}, "length", "length"),
        (ADD[:-20], {}, "length", "length"),
        (ADD[:20], {}, "length", "length"),
    ],
)
def test_why_an_answer_ended(text: str, fields: dict[str, Any], finish: str, reason: str) -> None:
    (choice,) = Api(text, finish=finish).answer(**fields)["choices"]
    assert choice["finish_reason"] == reason
    if text == ADD[:20]:
        assert choice["message"]["content"] == text, "no call has begun, so that it is text"
    if text == ADD[:-20]:
        (call,) = choice["message"]["tool_calls"]
        assert '{"x": [1, "é"]}'.startswith(call["function"]["arguments"])


def test_reasoning_has_two_names_and_is_counted() -> None:
    api = Api("<think>\nHm.\n</think>\n\nOk.", marks=("<think>", "</think>"))
    answer = api.answer(tools=None)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Ok.", "Hm.", "Hm.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("\nHm.\n") + 2}
    events = api.events(tools=None, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert events[-1]["usage"] == answer["usage"]
    assert Api("Ok.", marks=("</think>",)).answer()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert "completion_tokens_details" not in Api("Ok.").answer()["usage"], "it takes a token that ends reasoning"


def test_special_tokens_mark_parts_and_others_stay_hidden() -> None:
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|other|>")
    api = Api(f"<think>a<|other|></think>b<|other|>{ADD}", marks=marks)
    message = api.answer()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a", "b")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x": [1, "é"]}'
    shown = api.answer(skip_special_tokens=False)["choices"][0]["message"]
    assert (shown["reasoning"], shown["content"]) == ("a<|other|>", "b<|other|><eos>")
    without = api.answer(tools=None)["choices"][0]["message"]
    assert without["content"].startswith("b\n{"), "marks of calls mean nothing there"


def test_parsers_can_be_named_or_switched_off() -> None:
    written = f"<think>a</think>{ADD}"
    message = Api(written, tool_call_parser="none", reasoning_parser="none").answer()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": written, "refusal": None, "annotations": []}
    message = Api(written, tool_call_parser="none").answer()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a", ADD)
    other = '[TOOL_CALLS]add[ARGS]{"x": 1}'
    message = Api(other, tool_call_parser="mistral").answer()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}


def test_where_nothing_is_parsed_all_stays_as_it_was() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}{# tools #}"
    api = Api(ADD, template=plain)
    body = api.answer()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ADD, "refusal": None, "annotations": []}
    assert set(body["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    assert all(set(event["choices"][0]["delta"]) <= {"role", "content"} for event in api.events())


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "find"}}
JSON_OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"tool_choice": "required"}, "start: reasoning? calls"),
        ({"tool_choice": NAMED}, "start: reasoning? calls"),
        ({"tool_choice": "required", "chat_template_kwargs": {"thinks": True}}, "start: thought calls"),
        ({"tools": STRICT}, "start: reasoning? marked* TEXT"),
        ({}, None),
        ({"tools": STRICT, "tool_choice": "none"}, None),
    ],
)
def test_the_engine_is_told_which_calls_an_answer_must_hold(fields: dict[str, Any], start: str | None) -> None:
    pytest.importorskip("llguidance")
    api = Api(FIND)
    api.answer(**fields)
    ((_, params),) = api.client.asked.values()
    if start is None:
        assert params.structured_outputs is None
        return
    assert params.structured_outputs is not None
    assert params.structured_outputs.grammar.splitlines()[0] == start
    assert ('"add"' in params.structured_outputs.grammar) == (fields.get("tool_choice") != NAMED)


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({}, "start: reasoning? (calls | @answer)"),
        ({"tools": STRICT}, "start: reasoning? (calls | @answer)"),
        ({"tools": None}, "start: reasoning? @answer"),
        ({"tool_choice": "none"}, "start: reasoning? @answer"),
        ({"chat_template_kwargs": {"thinks": True}}, "start: thought (calls | @answer)"),
        ({"tools": None, "chat_template_kwargs": {"thinks": True}}, "start: thought @answer"),
    ],
)
def test_a_form_is_that_of_the_text_alone(fields: dict[str, Any], start: str) -> None:
    pytest.importorskip("llguidance")
    api = Api("{}")
    api.answer(**fields, **JSON_OBJECT)
    ((_, params),) = api.client.asked.values()
    assert params.structured_outputs is not None
    assert params.structured_outputs.json_object
    assert params.structured_outputs.around is not None
    assert params.structured_outputs.around.splitlines()[0] == start


def test_where_calls_must_be_no_form_is_asked_for() -> None:
    pytest.importorskip("llguidance")
    api = Api(FIND)
    api.answer(tool_choice="required", **JSON_OBJECT)
    ((_, params),) = api.client.asked.values()
    assert params.structured_outputs is not None
    assert (params.structured_outputs.kind, params.structured_outputs.around) == ("grammar", None)


@pytest.mark.parametrize(
    "form",
    [JSON_OBJECT, {"grammar": 'root ::= "a"'}, {"guided_choice": ["a"]}, {"structured_outputs": {"regex": "a"}}],
    ids=str,
)
def test_a_form_without_a_text_is_named(form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    api = Api(FIND)
    (name,) = form
    for choice in ("required", {"type": "function", "function": {"name": TOOLS[0]["function"]["name"]}}):
        assert api.chat(tool_choice=choice, **form).headers["x-octavo-ignored-fields"] == name
    assert "x-octavo-ignored-fields" not in api.chat(**form).headers


@pytest.mark.parametrize("parsers", [{"reasoning_parser": "none"}, {"tool_call_parser": "none"}])
def test_a_form_is_that_of_all_of_the_answer_where_nothing_is_told_apart(parsers: dict[str, str]) -> None:
    pytest.importorskip("llguidance")
    api = Api("{}", **parsers)
    api.answer(tools=None, **JSON_OBJECT)
    ((_, params),) = api.client.asked.values()
    assert params.structured_outputs is not None
    assert (params.structured_outputs.around is None) == ("reasoning_parser" in parsers)


ODD_SCHEMA = {"type": "object", "properties": {"a-b": {}}}
ODD = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": ODD_SCHEMA}}]


@pytest.mark.parametrize(
    ("settings", "fields", "param", "says"),
    [
        ({"tool_call_parser": "none"}, {}, "tool_choice", "--tool-call-parser"),
        ({"tool_call_parser": "gemma4"}, {"tools": ODD}, "tool_choice", 'an argument named "a-b" cannot be enforced'),
        (
            {"tool_call_parser": "gemma4"},
            {"tools": ODD, "tool_choice": "auto", **JSON_OBJECT},
            "tools",
            "Send only one of them",
        ),
        ({}, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]}, "tools", "type"),
    ],
)
def test_what_cannot_be_enforced_is_400(
    settings: dict[str, Any], fields: dict[str, Any], param: str, says: str
) -> None:
    pytest.importorskip("llguidance")
    api = Api(ADD, **settings)
    for stream in (False, True):
        problem = error(api.chat(**{"tool_choice": "required", "stream": stream, **fields}))
        assert problem["param"] == param
        assert re.search(says, problem["message"]), problem["message"]
    assert not api.client.asked


def test_a_request_with_tools_lets_the_engine_prepare_for_grammars() -> None:
    api = Api("Ok.")
    api.answer(tools=None)
    assert api.client.num_warmed == 0
    api.answer()
    assert api.client.num_warmed == 1


@pytest.mark.parametrize(
    "settings", [{"tool_call_parser": "none"}, {"tool_call_parser": "deepseek_v32", "marks": ["｜DSML｜"]}]
)
def test_strict_functions_may_be_called_where_nothing_can_be_enforced(settings: dict[str, Any]) -> None:
    api = Api("Ok.", **settings)
    assert api.answer(tools=STRICT)["choices"][0]["message"]["content"] == "Ok."
    ((_, params),) = api.client.asked.values()
    assert params.structured_outputs is None


def script_of(*answers: str) -> tuple[Api, list[str]]:
    """An app that gives these answers one after the other, and the prompts that it was given."""
    api, prompts = Api(""), []

    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
        prompts.append(source.text)
        return say(request_id, [answers[len(prompts) - 1]], params, "stop")

    api.client.script = script
    return api, prompts  # type: ignore[return-value]


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_calls_functions_until_there_is_an_answer(stream: bool) -> None:
    api, prompts = script_of(f"<think>Hm.</think>{ADD}\n{FIND} ", "It is 2. ")  # of the last sign only that it ended
    messages: list[Any] = [*HELLO]

    async def run() -> str:
        transport = httpx.ASGITransport(api.app)
        http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client:
            while True:
                options: Any = {"model": "org/fake", "messages": messages, "tools": TOOLS}
                if stream:
                    async with client.chat.completions.stream(**options) as events:
                        async for _ in events:
                            pass
                    completion: Any = await events.get_final_completion()
                else:
                    completion = await client.chat.completions.create(**options)
                message = completion.choices[0].message
                if not message.tool_calls:
                    assert completion.choices[0].finish_reason == "stop"
                    return str(message.content)
                assert completion.choices[0].finish_reason == "tool_calls"
                messages.append(message)
                for call in message.tool_calls:
                    result = f"{call.function.name} of {json.loads(call.function.arguments)}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    assert asyncio.run(asyncio.wait_for(run(), 20)) == "It is 2."
    assert prompts[1].endswith(
        'assistant:{"name": "add", "arguments": {"x": [1, "é"]}}{"name": "find", "arguments": {}};'
        "tool:add of {'x': [1, 'é']};tool:find of {};a:"
    )


# ---------------------------------------------------------------- the bundled model


@pytest.fixture
def client(bundled: Callable[..., Service]) -> Iterator[openai.OpenAI]:
    """Of `octavo serve` with the bundled model."""
    with openai.OpenAI(base_url=f"{bundled().url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def one_text(name: str, parameter: str) -> Any:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


DEMO_TOOLS = [one_text("calculate", "expression"), one_text("look_up", "name")]


@pytest.mark.parametrize(
    ("asked", "name", "arguments", "result", "answer"),
    [
        ("What is 12 * 34?", "calculate", {"expression": "12 * 34"}, "408", "12 * 34 = 408."),
        ("Who is Zorblax?", "look_up", {"name": "Zorblax"}, "Zorblax is a sailor.", "Zorblax is a sailor."),
    ],
)
def test_the_bundled_model_calls_functions(
    client: openai.OpenAI, asked: str, name: str, arguments: dict[str, str], result: str, answer: str
) -> None:
    options: Any = {"model": "octavo-demo", "tools": DEMO_TOOLS, "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": asked}]
    with client.chat.completions.stream(**options, messages=messages) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    last = client.chat.completions.create(**options, messages=messages).choices[0]
    assert (last.finish_reason, last.message.content) == ("stop", answer)


def test_the_bundled_model_calls_nothing_where_nothing_is_needed(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What is a KV cache?"}]
    options: Any = {"model": "octavo-demo", "temperature": 0, "messages": asked}
    answers = [client.chat.completions.create(**options, **tools) for tools in ({}, {"tools": DEMO_TOOLS})]
    for answer in answers:
        assert answer.choices[0].finish_reason == "stop"
        assert "cache" in (answer.choices[0].message.content or "").lower()
