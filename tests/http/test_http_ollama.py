"""Ollama's endpoints over a scripted engine: input, answers, streams, refusals; read by Ollama's own types where its
client is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FEATURES, FakeClient, hf_byte_tokenizer, pausing, pool
from support.conversing import CALL, PARSERS, THOUGHT_AND_CALLS, WEATHER_SCHEMA, Conversing, saying

from engine import PoolingParams
from engine.text.processor import Tokenizer
from server.answering.ollama_facts import _ENCODING, _SIZE, _found, read_files
from server.answering.ollama_input import tagged
from server.api.ollama_schemas import seconds_of
from server.app import create_app
from server.config.settings import ServerSettings

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER_SCHEMA}}
NUMBERS = {
    "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration",
}  # fmt: skip
IGNORED = "x-octavo-ignored-fields"


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": "org/fake", "messages": HELLO, **fields}


def lines(api: Conversing, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a stream."""
    answer = api.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text[:-1].split("\n")]


def refusal(api: Conversing, path: str, body: dict[str, Any], status: int = 400) -> str:
    """The error's message."""
    answer = api.post(path, body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    message = answer.json()["error"]
    assert isinstance(message, str)
    return message


# ---------------------------------------------------------------- chat


def test_a_chat_is_answered_whole() -> None:
    api = Conversing(saying("Hello to you."))
    messages = [{"role": "System", "content": "Be brief."}, *HELLO]
    answer = api.post(CHAT, asking(messages=messages, stream=False, options={"num_predict": 50})).json()
    assert api.prompts == ["system:Be brief.;user:hi;assistant:"]
    assert api.params.max_tokens == 50
    assert set(answer) == {"model", "created_at", "message", "done", "done_reason", *NUMBERS}
    assert answer["model"] == "org/fake"
    assert answer["created_at"].endswith("Z")
    assert answer["message"] == {"role": "assistant", "content": "Hello to you."}
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    assert answer["prompt_eval_count"] == len(api.prompts[0])
    assert answer["eval_count"] == len("Hello to you.\0")
    assert all(isinstance(answer[name], int) for name in NUMBERS)
    assert answer["total_duration"] > 0


def test_a_chat_is_streamed_unless_it_is_told_not_to() -> None:
    found = lines(Conversing(saying("Hello")), CHAT, asking())
    *parts, last = found
    assert "".join(part["message"]["content"] for part in parts) == "Hello"
    assert all(set(part) == {"model", "created_at", "message", "done"} and part["done"] is False for part in parts)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], set(last) >= NUMBERS) == (True, "stop", True)


def test_an_answer_that_was_cut_says_so() -> None:
    assert lines(Conversing(saying("Hello", finish="length")), CHAT, asking())[-1]["done_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_thinking_and_calls_have_fields(stream: bool) -> None:
    api = Conversing(saying(THOUGHT_AND_CALLS), **PARSERS)
    body = asking(tools=[TOOL], think=True, stream=stream)
    found = lines(api, CHAT, body) if stream else [api.post(CHAT, body).json()]
    messages = [line["message"] for line in found]
    assert "".join(message.get("thinking", "") for message in messages) == "It is about weather."
    assert "".join(message["content"] for message in messages).strip() == "Let me look."
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": index, "name": "weather", "arguments": {"city": city}} for index, city in enumerate(("Oslo", "Rome"))
    ]
    assert len({call["id"] for call in calls}) == 2
    assert found[-1]["done_reason"] == "stop"
    assert api.prompts[0].startswith("tool:weather;think:True;")


def test_results_of_calls_find_their_call() -> None:
    calls = [{"function": {"name": name, "arguments": {"city": "Oslo"}}} for name in ("weather", "time")]
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "rain"},
    ]
    api = Conversing(saying("It rains."), **PARSERS)
    assert api.post(CHAT, asking(messages=messages, tools=[TOOL], stream=False)).status_code == 200
    wanted = 'assistant:[call_1_0 weather {"city": "Oslo"}][call_1_1 time {"city": "Oslo"}];'
    assert f"{wanted}tool:noon(call_1_1);tool:rain(call_1_0);" in api.prompts[0]


def test_a_level_of_thinking_is_an_effort() -> None:
    api = Conversing(saying("Hello"), **PARSERS)
    api.post(CHAT, asking(think="low"))
    assert api.prompts[0].startswith("effort:low;think:True;")
    api = Conversing(saying("Hello"), template="{{ messages[0].content }}")
    answer = api.post(CHAT, asking(think=True, stream=False))
    assert answer.headers[IGNORED] == "think", "no format of reasoning is known for this model"


def test_logprobs_come_with_the_text() -> None:
    body = asking(logprobs=True, top_logprobs=2, options={"temperature": 0})
    whole = Conversing(saying("Hey")).post(CHAT, {**body, "stream": False}).json()["logprobs"]
    streamed = [entry for line in lines(Conversing(saying("Hey")), CHAT, body) for entry in line.get("logprobs", ())]
    assert [entry["token"] for entry in whole][:3] == ["H", "e", "y"]
    assert streamed == whole
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in whole)


def test_logprobs_do_not_tear_a_call() -> None:
    found = lines(Conversing(saying(CALL), **PARSERS), CHAT, asking(tools=[TOOL], logprobs=True))
    (call,) = [call for line in found for call in line.get("message", {}).get("tool_calls", ())]
    assert call["function"]["arguments"] == {"city": "Oslo"}
    assert len([entry for line in found for entry in line.get("logprobs", ())]) == len(CALL) + 1


def test_a_last_message_of_the_assistant_is_continued() -> None:
    api = Conversing(saying("lo"))
    api.post(CHAT, asking(messages=[*HELLO, {"role": "assistant", "content": "Hel"}], stream=False))
    assert api.prompts[0].endswith("assistant:Hel")


def test_silence_is_broken_by_lines_without_text() -> None:
    found = lines(Conversing(pausing, stream_keepalive=0.05), CHAT, asking())
    assert [line["message"]["content"] for line in found].count("") >= 3
    assert all("message" in line for line in found)


def test_a_stream_that_fails_ends_with_an_error() -> None:
    found = lines(Conversing(saying("ab", finish="abort")), CHAT, asking())
    assert set(found[-1]) == {"error"}
    assert not any(line.get("done") for line in found)


# ---------------------------------------------------------------- options


def test_options_are_sampling_parameters() -> None:
    api = Conversing(saying("Hello"))
    options = {
        "temperature": 1, "top_k": 20.0, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.7, "seed": 42, "stop": ["x"],
        "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0, "num_predict": 9,
        "num_batch": 2, "num_gpu": 1, "num_thread": 8, "num_ctx": 1024, "mirostat": 0, "mirostat_tau": 5.0,
    }  # fmt: skip
    answer = api.post(CHAT, asking(stream=False, options=options))
    params = api.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (1, 20, 0.9, 0.1, 0.7)
    assert (params.seed, params.stop, params.repetition_penalty, params.max_tokens) == (42, ["x"], 1.2, 9)
    assert (params.presence_penalty, params.frequency_penalty) == (1.5, 1.0)
    assert IGNORED not in answer.headers


def test_options_without_effect_are_named() -> None:
    api = Conversing(saying("Hello"))
    options = {"mirostat": 2, "mirostat_tau": 4.0, "num_ctx": 10**6, "num_keep": 4, "num_predict": -1, "seed": -1}
    answer = api.post(CHAT, asking(stream=False, options=options, keep_alive="10m"))
    named = ("mirostat", "mirostat_tau", "num_ctx", "num_keep")
    assert answer.headers[IGNORED] == ", ".join(f"options.{name}" for name in named)
    assert api.params.seed is None
    assert api.params.max_tokens > 1000, "the answer may fill the context"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature must be a number, got 'hot'."),
        ({"options": {"top_k": 1.5}}, "options.top_k must be an integer, got 1.5."),
        ({"options": {"top_p": 7}}, "options.top_p must be "),
        ({"options": {"stop": [1]}}, "options.stop must be a string or a list of strings, got [1]."),
        ({"options": {"num_ctx": "big"}}, "options.num_ctx must be a number, got 'big'."),
        ({"format": "yaml"}, 'format: must be "json" or a JSON schema'),
        ({"format": {"type": "no-type"}}, "the JSON schema cannot be used"),
        ({"keep_alive": "soon"}, "keep_alive: must be a number of seconds or a duration"),
        ({"think": "deeply"}, "think: "),
        ({"messages": [{"role": "user", "content": "a", "images": ["aa"]}]}, "messages[0].images is not supported"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content must be a string"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role must be one of"),
        ({"messages": ["a"]}, "messages[0] must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "messages[0].tool_calls[0] must be"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    assert refusal(Conversing(saying("a")), CHAT, asking(**fields)).startswith(message)


def test_a_format_is_enforced() -> None:
    api = Conversing(saying("{}"))
    assert api.post(CHAT, asking(format="json", stream=False)).status_code == 200
    assert api.params.structured_outputs.json_object is True
    assert api.post(CHAT, asking(format=WEATHER_SCHEMA, stream=False)).status_code == 200
    assert json.loads(api.params.structured_outputs.json) == WEATHER_SCHEMA
    assert api.post(CHAT, asking(format="", stream=False)).status_code == 200
    assert api.params.structured_outputs is None


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0),
        (30, 30),
        (-1, float("inf")),
        ("5m", 300),
        ("1h30m", 5400),
        ("0", 0),
        ("-1m", float("inf")),
        ("1.5s", 1.5),
    ],
)
def test_durations(given: Any, seconds: float) -> None:
    assert seconds_of(given) == seconds


# ---------------------------------------------------------------- generate


def test_a_prompt_becomes_a_conversation() -> None:
    api = Conversing(saying("Blue."))
    body = {"model": "org/fake", "prompt": "Why?", "system": "Be brief.", "stream": False}
    answer = api.post(GENERATE, body).json()
    assert api.prompts == ["system:Be brief.;user:Why?;assistant:"]
    assert (answer["response"], answer["done_reason"]) == ("Blue.", "stop")
    assert answer["context"] == [ord(sign) for sign in api.prompts[0] + "Blue.\0"]
    *parts, last = lines(Conversing(saying("Blue.")), GENERATE, {**body, "stream": True})
    assert "".join(part["response"] for part in parts) == "Blue."
    assert last["context"] == answer["context"]


def test_a_context_is_continued() -> None:
    api = Conversing(saying("Blue."))
    first = api.post(GENERATE, {"prompt": "Why?", "stream": False}).json()["context"]
    again = api.post(GENERATE, {"prompt": "And?", "context": first, "stream": False}).json()
    (source, _) = list(api.client.asked.values())[-1]
    assert list(source.token_ids) == [*first, *map(ord, "user:And?;assistant:")]
    assert again["context"][: len(first)] == first
    message = refusal(api, GENERATE, {"prompt": "And?", "context": [10**6]})
    assert message.startswith("context: token ids must be from 0 to")


def test_a_raw_prompt_is_not_changed() -> None:
    api = Conversing(saying("there"))
    answer = api.post(GENERATE, {"prompt": "Hello ", "raw": True, "stream": False, "logprobs": True}).json()
    assert api.prompts == ["Hello "]
    assert (answer["response"], "context" in answer) == ("there", False)
    assert [entry["token"] for entry in answer["logprobs"]][:5] == list("there")
    assert api.params.max_tokens > 1000
    *parts, last = lines(Conversing(saying("there")), GENERATE, {"prompt": "Hello ", "raw": True})
    assert "".join(part["response"] for part in parts) == "there"
    assert last["eval_count"] == len("there\0")


def test_a_model_without_a_template_completes() -> None:
    api = Conversing(saying("there"), template=None)
    answer = api.post(GENERATE, {"prompt": "Hello ", "system": "Be brief.", "stream": False})
    assert api.prompts == ["Hello "]
    assert answer.headers[IGNORED] == "system"
    assert refusal(api, CHAT, asking()).startswith("org/fake cannot serve /v1/chat/completions")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"images": ["aa"]}, "images is not supported"),
        ({"raw": True, "system": "a"}, "system cannot be used with raw"),
        ({"raw": True, "context": [1]}, "context cannot be used with raw"),
        ({"suffix": "end"}, "org/fake cannot fill in the middle of a text"),
        ({"raw": True, "options": {"stop": ["a"] * 17}}, "options.stop may have at most 16 strings"),
    ],
)
def test_what_generate_refuses(fields: dict[str, Any], message: str) -> None:
    assert refusal(Conversing(saying("a")), GENERATE, {"prompt": "a", **fields}).startswith(message)


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, {"messages": []}), (CHAT, {}), (GENERATE, {"prompt": ""}), (GENERATE, {})]
)
def test_a_request_without_a_prompt_loads_the_model(path: str, fields: dict[str, Any]) -> None:
    api = Conversing(saying("a"))
    answer = api.post(path, {"model": "org/fake", **fields})
    assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")
    unloaded = api.post(path, {"model": "org/fake", "keep_alive": 0, **fields})
    assert (unloaded.json()["done_reason"], unloaded.headers[IGNORED]) == ("unload", "keep_alive")
    assert not api.client.asked


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", ["org/fake", "org/fake:latest", "ORG/Fake:latest", None, "default"])
def test_names_of_the_model(name: str | None) -> None:
    body = {"messages": HELLO, "stream": False, **({} if name is None else {"model": name})}
    answer = Conversing(saying("a")).post(CHAT, body)
    assert (answer.status_code, answer.json()["model"]) == (200, name or "org/fake")


def test_other_names_are_not_found() -> None:
    api = Conversing(saying("a"))
    for name in ("llama3.2", "org/fake:8b", "org"):
        assert "does not exist" in refusal(api, CHAT, asking(model=name), 404)
    assert [tagged(name) for name in ("a", "a:b", "h:1/a")] == ["a:latest", "a:b", "h:1/a:latest"]


async def ask_about(api: Conversing) -> dict[str, Any]:
    """The answers that an Open WebUI asks for when it starts."""
    found = {path: (await api.ask("GET", f"/api/{path}")).json() for path in ("version", "tags", "ps")}
    found["show"] = (await api.ask("POST", "/api/show", {"model": "org/fake"})).json()
    return found


def test_what_is_said_of_the_model() -> None:
    api = Conversing(saying("a"), **PARSERS)
    found = api.run(ask_about)
    assert found["version"]["version"].split(".")[:2] == ["0", "13"]
    (listed,), (running,) = found["tags"]["models"], found["ps"]["models"]
    assert listed["name"] == listed["model"] == running["name"] == "org/fake:latest"
    assert listed["digest"] == running["digest"]
    assert len(listed["digest"]) == 64
    assert running["context_length"] == 4096
    shown = found["show"]
    assert shown["capabilities"] == listed["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["model.context_length"] == 4096
    assert shown["template"] == api.service.tokenizer.chat_template


def test_facts_of_files(tmp_path: Path) -> None:
    header = {"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(60))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    facts = read_files(str(tmp_path), None)
    assert (facts.parameters, facts.size) == (15, 8 + len(text) + 60)
    assert facts.config == {"model_type": "llama"}
    names = ("SmolLM2-135M-Instruct.Q4_1", "Qwen3-0.6B-Q8_0", "Mixtral-8x7B-v0.1-KQ2", "a-bf16")
    assert [_found(_SIZE, name) for name in names] == ["135M", "0.6B", "8X7B", ""]
    assert [_found(_ENCODING, name) for name in names] == ["Q4_1", "Q8_0", "", "BF16"]


def test_pull_succeeds_for_what_is_served() -> None:
    api = Conversing(saying("a"))
    assert lines(api, "/api/pull", {"model": "org/fake"})[-1] == {"status": "success"}
    assert api.post("/api/pull", {"name": "org/fake:latest", "stream": False}).json() == {"status": "success"}
    message = refusal(api, "/api/pull", {"model": "llama3.2"}, 404)
    assert (
        message == "The model 'llama3.2' is not served, and this server does not download models. It serves 'org/fake'."
    )
    assert refusal(api, "/api/show", {}) == "model is required."


async def refused_by_name(api: Conversing) -> list[tuple[int, dict[str, Any]]]:
    asked = [("POST", "create"), ("POST", "push"), ("POST", "copy"), ("DELETE", "delete"), ("POST", "blobs/sha256:0")]
    answers = [await api.ask(method, f"/api/{path}", {"model": "a"}) for method, path in asked]
    answers += [await api.ask("GET", "/api/blobs/sha256:0"), await api.ask("GET", "/api/nowhere")]
    head = await api.ask("HEAD", "/api/blobs/sha256:0")
    assert (head.status_code, head.content) == (404, b"")
    return [(answer.status_code, answer.json()) for answer in answers]


def test_what_stores_models_is_refused_by_name() -> None:
    found = Conversing(saying("a")).run(refused_by_name)
    assert [status for status, _ in found] == [400, 400, 400, 400, 400, 404, 404]
    assert all(set(body) == {"error"} for _, body in found)
    assert [body["error"].partition("cannot ")[2].split()[0] for _, body in found[:5]] == [
        "create", "push", "copy", "delete", "receive",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_curl_calls_json_a_form(kind: str) -> None:
    async def post(api: Conversing) -> int:
        transport = httpx.ASGITransport(api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = json.dumps(asking(stream=False))
            return (await http.post(CHAT, content=body, headers={"Content-Type": kind})).status_code

    assert Conversing(saying("a")).run(post) == 200


def test_a_key_is_asked_for() -> None:
    api = Conversing(saying("a"), api_key=("secret-key-of-length-32-0123456789",))
    assert "API key" in refusal(api, CHAT, asking(), 401)
    answer = api.post(CHAT, asking(stream=False), Authorization="Bearer secret-key-of-length-32-0123456789")
    assert answer.status_code == 200


# ---------------------------------------------------------------- vectors


class Vectors(Conversing):
    """The app over an engine that gives vectors."""

    def __init__(self) -> None:
        self.client = FakeClient(self._pooled)
        self.client.info = replace(self.client.info, tasks=("embed",), embedding_size=FEATURES, max_model_len=16)
        self.app = create_app(self.client, Tokenizer(hf_byte_tokenizer()), "org/fake", settings=ServerSettings())

    def _pooled(self, request_id: str, source: Any, params: Any) -> Any:
        assert isinstance(params, PoolingParams)
        return pool(request_id, source, params)


def test_vectors_of_texts() -> None:
    api = Vectors()
    several = api.post("/api/embed", {"model": "org/fake:latest", "input": ["a", "bc"]}).json()
    openai = api.post("/v1/embeddings", {"input": ["a", "bc"], "normalize": True}).json()
    assert several["embeddings"] == [item["embedding"] for item in openai["data"]]
    assert (several["model"], several["prompt_eval_count"]) == ("org/fake:latest", openai["usage"]["prompt_tokens"])
    one = api.post("/api/embed", {"input": "a"}).json()
    assert one["embeddings"] == several["embeddings"][:1]
    assert api.post("/api/embed", {"input": []}).json()["embeddings"] == []
    assert len(api.post("/api/embeddings", {"prompt": "a"}).json()["embedding"]) == FEATURES
    assert api.post("/api/embeddings", {"prompt": ""}).json() == {"embedding": []}


def test_texts_are_cut_unless_that_is_forbidden() -> None:
    api = Vectors()
    long = "a" * 100
    assert api.post("/api/embed", {"input": long}).json()["prompt_eval_count"] == 16
    assert "truncate" in refusal(api, "/api/embed", {"input": long, "truncate": False})
    assert refusal(api, "/api/embed", {"input": [1]}) == "input: must be a string or a list of strings; got [1]."
    assert refusal(Conversing(saying("a")), "/api/embed", {"input": "a"}).startswith("org/fake cannot serve")
