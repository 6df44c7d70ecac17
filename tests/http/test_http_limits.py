"""What bodies may say and what not, over a scripted engine: ranges, encodings, unknown fields, routes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
from fake_client import EOS, FEATURES, FakeClient, Step, entry, hf_byte_tokenizer, pool, say
from support.asgi import Called, error, events
from tokenizers import processors

from engine import PoolingParams, RequestDelta, SamplingParams, TokenInput
from engine.interface.request import MAX_STOP_LENGTH, MAX_STOP_STRINGS, NUMBER_RANGES
from engine.interface.values import MAX_LISTED_IDS
from engine.text.processor import Tokenizer
from server.api.fields import UNSUPPORTED
from server.app import create_app
from server.config.settings import ServerSettings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
NEEDS_A_HEAD = {
    "/v1/answer",
    "/v1/classify",
    "/v1/entities",
    "/v1/fill-mask",
    "/translate",
}  # that the model here has not
NEEDS_MORE = {
    "/v1/conversations": "unsupported_parameter",
    "/infill": "unsupported_endpoint",
    "/v1/batches": "unsupported_endpoint",
}  # a store, and tokens for filling in
MINIMAL: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": HELLO},
    "/tokenize": {"prompt": "a"},
}


def answer_x(request_id: str, source: TokenInput, params: SamplingParams | PoolingParams) -> Iterable[Step]:
    """Every choice says "xyz"; prompts are scored, and have vectors, if asked for."""
    if isinstance(params, PoolingParams):
        return pool(request_id, source, params)
    texts = ["xyz"[: params.max_tokens]] * params.n
    deltas: list[RequestDelta] = say(request_id, texts, params)
    if params.prompt_logprobs is not None:
        known = [None, *(entry(token, max(params.prompt_logprobs, 1)) for token in source.token_ids[1:])]
        deltas[0] = replace(deltas[0], prompt_logprobs=known)
    return deltas


class Api(Called):
    """An app over a script, called in process; the engine's steps hold 200 sequences, and its model embeds, too."""

    def __init__(self, **settings: Any):
        self.client = FakeClient(answer_x)
        embeds: dict[str, Any] = {"tasks": ("generate", "embed"), "embedding_size": FEATURES}
        self.client.info = replace(self.client.info, max_num_seqs=200, **embeds)
        hf = hf_byte_tokenizer()
        hf.chat_template = "{{ messages[0].content }}"
        self.app = create_app(
            self.client, Tokenizer(hf), "org/fake", settings=ServerSettings(**{"max_queue_time": 0} | settings)
        )

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.request("POST", path, json={**MINIMAL[path], **fields})

    def raw(self, content: bytes, path: str = COMPLETIONS) -> httpx.Response:
        return self.request("POST", path, content=content, headers={"Content-Type": "application/json; charset=utf-8"})


@cache
def schemas() -> dict[str, Any]:
    """The shapes of bodies as the document has them, which takes a second to make."""
    found: dict[str, Any] = Api().app.openapi()["components"]["schemas"]
    return found


# ---------------------------------------------------------------- ranges


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 129}, "n is 129, but at most 128 answers are allowed (max_n). Ask for fewer, or raise --max-n."),
        ({"best_of": 129}, "best_of is 129, but at most 128"),
        ({"n": 10**300}, "n must be at least 1 and at most 2147483647, got 1000"),
        ({"num_beams": 17}, "num_beams is 17, but at most 16 beams are allowed (max_num_beams)"),
        ({"use_beam_search": True, "n": 17}, "n is 17, but at most 16 beams"),
        ({"use_beam_search": True, "best_of": 17}, "best_of is 17, but at most 16 beams"),
        ({"temperature": -0.5}, "temperature must be at least 0.0, got -0.5."),
        ({"top_p": 0}, "top_p must be greater than 0.0 and at most 1.0, got 0.0."),
        ({"top_p": 1.5}, "top_p must be greater than 0.0 and at most 1.0, got 1.5."),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be at least -2.0 and at most 2.0, got -2.5."),
        ({"seed": 2**64}, "seed must be at least -9223372036854775808 and at most 18446744073709551615"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"stop": ["a"] * 17}, "stop may have at most 16 strings, got 17."),
        ({"stop": ""}, "stop must hold non-empty strings, got ''."),
        ({"stop": ["b", "a" * 1025]}, "stop string may have at most 1024 characters, got one of 1025."),
        ({"stop": ["b", None]}, "stop: Input should be a valid string"),
        ({"logit_bias": {"5": -100.5}}, "logit_bias must be at least -100.0 and at most 100.0, got -100.5."),
        ({"logit_bias": {"-1": 1}}, "logit_bias: "),
        ({"logit_bias": {"5": None}}, "logit_bias: Input should be a valid number"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias may have at most 1024 token ids, got 1025."),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids may have at most 1024 token ids, got 1025."),
        ({"stop_token_ids": 5}, "stop_token_ids: Input should be a valid list; got 5."),
        ({"stop_token_ids": [1.0]}, "stop_token_ids: Input should be a valid integer; got [1.0]"),
        ({"temperature": 10**400}, "temperature: Input should be a valid number"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage: Input should be"),
    ],
)
def test_the_error_names_field_limit_and_value(path: str, fields: dict[str, Any], said: str) -> None:
    api = Api()
    problem = error(api.post(path, **fields))
    assert said.partition(";")[0] in problem["message"]
    assert problem["param"] in {*fields, "stream_options.include_usage"}
    assert problem["code"] in ("invalid_value", "invalid_type")
    assert not api.client.asked


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128},
        {"n": 2, "best_of": 128},
        {"num_beams": 16},
        {"use_beam_search": True, "n": 16},
        {"temperature": -0.0, "top_k": -0, "presence_penalty": 2, "frequency_penalty": -2.0},
        {"top_k": -1, "top_p": 1},
        {"stop": ["é" * 1024, *"bcdefghijklmnop"]},
        {"stop": [], "logit_bias": {}, "stop_token_ids": []},
        {"logit_bias": {str(i % 257): 100 for i in range(1024)}},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(path: str, fields: dict[str, Any]) -> None:
    assert Api().post(path, **fields).status_code == 200


def test_the_most_answers_are_a_setting() -> None:
    assert Api(max_n=2).post(COMPLETIONS, n=2).status_code == 200
    assert "at most 2 answers" in error(Api(max_n=2).post(COMPLETIONS, n=3))["message"]


def test_max_tokens_is_checked_even_where_it_does_not_count() -> None:
    assert error(Api().post(CHAT, max_tokens=0, max_completion_tokens=5))["param"] == "max_tokens"
    assert Api().post(CHAT, max_tokens=1, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_a_long_wrong_value_is_cut() -> None:
    for fields in (
        {"model": "m" * 100_000},
        {"max_tokens": 10**4000},
        {"prompt": [10**4000]},
        {"stop_token_ids": [10**4000]},
        {"prompt": {"a" * 100_000: 1}},
        {"echo": [["x" * 100_000] * 50]},
    ):
        error(Api().post(COMPLETIONS, **fields), 404 if "model" in fields else 400)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("wrong", ["x", 1.5, True, [1], {"a": 1}, [], {}])
def test_a_wrong_type_is_400_for_every_field(path: str, wrong: Any) -> None:
    api = Api()
    schema = schemas()
    fields = schema["CompletionRequest" if path == COMPLETIONS else "ChatCompletionRequest"]["properties"]
    for name, described in fields.items():
        branches = described.get("anyOf", [described])
        kinds = {branch.get("type", "const") for branch in branches}
        mine = {str: "string", float: "number", bool: "boolean", list: "array", dict: "object"}[type(wrong)]
        if mine in kinds or "const" in kinds or wrong in ([], {}):
            continue
        answer = api.post(path, **{name: wrong})
        assert error(answer)["param"].partition("[")[0] == name, (name, wrong)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_is_the_default_for_every_optional_field(path: str) -> None:
    api = Api()
    schema = schemas()
    described = schema["CompletionRequest" if path == COMPLETIONS else "ChatCompletionRequest"]
    nulls = {name: None for name in described["properties"] if name not in described["required"]}
    assert len(nulls) > 30
    answer = api.post(path, **{**dict.fromkeys(UNSUPPORTED), **nulls, "unknown": None})
    assert answer.status_code == 200, answer.text
    (asked,) = api.client.asked.values()
    assert asked[1] == SamplingParams(max_tokens=None if path == COMPLETIONS else 62)


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "a"}'.encode("utf-16"), "not valid UTF-8"),
        ('{"prompt": "\\ud800"}'.encode("utf-16-le"), "not valid JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', "not valid UTF-8: invalid continuation byte at byte 12"),
        (b'{"prompt": "a", "stop": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b'{"prompt": "a", "\xed\xa0\x80": 1}', "not valid UTF-8"),
        (b'{"prompt": "a", "\\ud800": 1}', "not valid JSON"),
        (b'{"prompt": "a", "x": "\\ude00\\ud83d"}', "not valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "cannot be read: Number out of range."),
        (b'{"prompt": "a", "logit_bias": {"5": -1e999}}', "out of range"),
        (b'{"prompt": "a", "x": -Infinity}', "not valid JSON"),
        (b'{"prompt": "a",}', "not valid JSON"),
        (b'{"prompt": "a"} {}', "not valid JSON"),
        (b'{"prompt": "a\n"}', "not valid JSON"),
        (b"42", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
        (b"", "must be a JSON object"),
        (b"\xef\xbb\xbf", "not valid JSON"),
    ],
)
def test_what_is_no_utf8_json_object_is_400(content: bytes, said: str) -> None:
    assert said in error(Api().raw(content))["message"]


def test_json_at_its_edges_is_understood() -> None:
    api = Api()
    for content in (
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'\t\r\n {"prompt": "a"} ',
        b'{"prompt": "b", "prompt": "a"}',
        b'{"prompt": "\\u0061", "x": "\\ud83d\\ude00", "\\u0000": "\\u0000"}',
    ):
        assert api.raw(content).status_code == 200
    assert {bytes(source.token_ids) for source, _ in api.client.asked.values()} == {b"a"}


@pytest.mark.parametrize("depth", [*range(850, 1000, 30), 100_000])
@pytest.mark.parametrize(
    ("path", "opening", "closing"),
    [
        (COMPLETIONS, b'{"prompt":', b"}"),
        (COMPLETIONS, b'{"prompt":"a","logit_bias":', b"}"),
        (COMPLETIONS, b'{"prompt":"a","unknown":', b"}"),
        (COMPLETIONS, b'{"prompt":"a","tools":', b"}"),
        (CHAT, b'{"messages":', b"}"),
        *[
            (CHAT, b'{"messages":[{"role":"user","content":"a"}],' + field, b"}")
            for field in (b'"tools":', b'"documents":', b'"chat_template_kwargs":', b'"tool_choice":')
        ],
        (CHAT, b'{"messages":[{"role":"user","content":[{"type":', b"}]}]}"),
    ],
)
def test_depth_is_no_server_error(path: str, opening: bytes, closing: bytes, depth: int) -> None:
    api = Api()
    for content in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
        answer = api.raw(opening + content + closing, path)
        if answer.status_code != 200:
            error(answer)
        else:
            assert b"unknown" in opening


# ---------------------------------------------------------------- unknown fields


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fields_that_would_change_the_answer_are_refused_by_name(name: str) -> None:
    api = Api()
    paths = {COMPLETIONS: "CompletionRequest", CHAT: "ChatCompletionRequest", "/tokenize": "TokenizeRequest"}
    unknown = [path for path, schema in paths.items() if name not in schemas()[schema]["properties"]]
    assert unknown
    for path in unknown:
        for value in ("x", 5, {"type": "json_object"}, 0, ""):
            kind = float if type(value) is int and float in map(type, UNSUPPORTED[name]) else type(value)
            if any(type(nothing) is kind and value == nothing for nothing in UNSUPPORTED[name]):
                continue  # asks for nothing
            problem = error(api.post(path, **{name: value}))
            assert (problem["param"], problem["code"]) == (name, "unsupported_parameter")
            assert name in problem["message"]
        for nothing in UNSUPPORTED[name]:
            answer = api.post(path, **{name: nothing})
            assert answer.status_code == 200
            assert "x-octavo-ignored-fields" not in answer.headers


def test_other_unknown_fields_are_listed_and_harmless_ones_not() -> None:
    for stream in (False, True):
        answer = Api().post(
            CHAT,
            user="me",
            store=True,
            metadata={"a": "b"},
            service_tier="auto",
            verbosity="low",
            stream=stream,
            **({"stream_options": {"include_obfuscation": False, "color": "red"}} if stream else {}),
            **{"not sendable": 1, "x\r\ny": 2, "é": 3},
        )
        assert answer.status_code == 200
        listed = "stream_options.color, verbosity" if stream else "verbosity"
        assert answer.headers["x-octavo-ignored-fields"] == listed


def test_tokenizing_lists_and_refuses_them_too() -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = Api().request("POST", path, json={**body, "return_pieces": True, "user": "me"})
        assert answer.headers["x-octavo-ignored-fields"] == "return_pieces"
        assert error(Api().request("POST", path, json={**body, "tools": [{}]}))["param"] == "tools"


def test_an_empty_suffix_and_no_alternatives_ask_for_nothing() -> None:
    assert Api().post(COMPLETIONS, suffix="").status_code == 200
    assert error(Api().post(COMPLETIONS, suffix="x"))["param"] == "suffix"
    assert Api().post(CHAT, top_logprobs=0).status_code == 200


def test_special_tokens_may_be_left_out() -> None:
    api = Api()
    rust = api.app.state.service.tokenizer._hf._tokenizer
    rust.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    for value, prompt in ((None, [EOS, 97]), (True, [EOS, 97]), (False, [97])):
        api.client.asked.clear()
        assert api.post(COMPLETIONS, add_special_tokens=value).status_code == 200
        ((source, _),) = api.client.asked.values()
        assert source.token_ids == prompt


# ---------------------------------------------------------------- scores and usage


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_is_scored_as_evaluation_harnesses_ask_for_it(max_tokens: int, stream: bool) -> None:
    """lm-eval's local-completions: prompts as ids, echo, logprobs, one token (or with OpenAI's own way, none)."""
    prompts = [list(b"the cat"), list(b"a dog")]
    fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1234}
    answer = Api().post(COMPLETIONS, **fields, stream=stream)
    assert answer.status_code == 200, answer.text
    if stream:
        choices = [event["choices"][0] for event in events(answer.text)]
    else:
        body = answer.json()
        choices = body["choices"]
        assert body["usage"]["prompt_tokens"] == 12
        assert body["usage"]["completion_tokens"] == 2 * max_tokens
    for index, prompt in enumerate(prompts):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == bytes(prompt).decode() + "x" * max_tokens
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
        scored = [choice["logprobs"] for choice in mine if choice["logprobs"]]
        logprobs = [item for part in scored for item in part["token_logprobs"]]
        top = [item for part in scored for item in part["top_logprobs"]]
        assert len(logprobs) == len(top) == len(prompt) + max_tokens
        assert logprobs[0] is None
        assert all(max(candidates.values()) == own for own, candidates in zip(logprobs[1:], top[1:], strict=True))


def test_usage_in_every_chunk() -> None:
    for path in (COMPLETIONS, CHAT):
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(Api().post(path, stream=True, stream_options=options).text)
        counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counted == sorted(counted)
        assert set(counted) == ({0, 1, 2, 3} if path == CHAT else {1, 2, 3}), "a role is no token"
        assert chunks[-1]["choices"] == []
        only = Api().post(path, stream=True, stream_options={"continuous_usage_stats": True}).text
        assert "usage" not in only, "without include_usage it asks for nothing"


# ---------------------------------------------------------------- routes


def test_head_is_get_without_a_body() -> None:
    api = Api()
    for path in ("/health", "/health/live", "/v1/models", "/v1/models/org/fake", "/version", "/metrics", "/docs"):
        answer = api.request("HEAD", path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == api.request("GET", path).headers["content-type"]
    assert api.request("HEAD", "/nothing").status_code == 404
    assert api.request("HEAD", COMPLETIONS).status_code == 405


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/playground/none.js", 404, "unknown_route"),
        ("GET", "/v1//models", 404, "unknown_route"),
        ("POST", "/v1/completions/", 404, "unknown_route"),
        ("GET", "/health/", 404, "unknown_route"),
        ("POST", "/v1/assistants", 404, "unknown_route"),
        ("GET", "/" + "a" * 5000, 404, "unknown_route"),
        ("GET", "/docs/static/none.js", 404, "unknown_route"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/org%2Fother", 404, "model_not_found"),
        ("GET", "/v1/models/org/fake/more", 404, "model_not_found"),
        ("GET", "/v1/models/%FF%00", 404, "model_not_found"),
        ("DELETE", "/v1/models/org/fake", 405, "method_not_allowed"),
        ("PUT", COMPLETIONS, 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("FROB", "/tokenize", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_methods(method: str, path: str, status: int, code: str) -> None:
    answer = Api().request(method, path)
    assert error(answer, status)["code"] == code
    assert ("allow" in answer.headers) == (status == 405)


def test_all_methods_of_a_path_are_named() -> None:
    for path, methods in (("/v1/responses/resp_x", "GET, DELETE"), ("/v1/conversations/x", "GET, POST, DELETE")):
        answer = Api().request("PUT", path)
        assert answer.headers["allow"] == methods
        assert f"does not answer PUT; it answers {methods}." in error(answer, 405)["message"]


def test_ids_with_slashes_are_found() -> None:
    for path in ("/v1/models/org/fake", "/v1/models/org%2Ffake"):
        assert Api().request("GET", path).json()["id"] == "org/fake"


# ---------------------------------------------------------------- the documentation


def test_the_document_states_the_limits_that_hold() -> None:
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        properties = schemas()[name]["properties"]
        for field, allowed in NUMBER_RANGES.items():
            if name == "ChatCompletionRequest" and field == "logprobs":
                continue
            described, null = properties[field]["anyOf"]
            assert null == {"type": "null"}
            least = described.get("exclusiveMinimum" if allowed.open_low else "minimum")
            low = -1 if field in ("logprobs", "prompt_logprobs") else allowed.low  # as many as there may be
            assert (described.get("maximum"), least) == pytest.approx((allowed.high, low))
        one, several, _ = properties["stop"]["anyOf"]
        assert several["maxItems"] == MAX_STOP_STRINGS
        assert one["maxLength"] == several["items"]["maxLength"] == MAX_STOP_LENGTH
        assert properties["logit_bias"]["anyOf"][0]["maxProperties"] == MAX_LISTED_IDS
        assert properties["stop_token_ids"]["anyOf"][0]["maxItems"] == MAX_LISTED_IDS
        assert properties["allowed_token_ids"]["anyOf"][0]["maxItems"] == MAX_LISTED_IDS
        assert properties["allowed_token_ids"]["anyOf"][0]["minItems"] == 1


def test_every_route_is_documented_with_examples_that_work() -> None:
    api = Api()
    api.client.info = replace(api.client.info, max_model_len=256)  # bytes are many tokens
    document = api.request("GET", "/openapi.json").json()
    examples = 0
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            assert operation["description"], path
            assert {"200", "4XX", "5XX"} <= set(operation["responses"]), path
            assert operation["responses"]["200"]["content"], path
            if method == "post" and not path.endswith("/cancel"):  # has no body
                content = operation["requestBody"]["content"].get("application/json")
                if content is None:  # a form, for speech models or with a file
                    assert path.startswith(("/v1/audio/", "/v1/files"))
                    continue
                for example in content["examples"].values():
                    answer = api.request("POST", path, json=example["value"])
                    if code := NEEDS_MORE.get(path.partition("/{")[0]):
                        assert error(answer)["code"] == code, (path, answer.text)
                        continue
                    if path in NEEDS_A_HEAD:
                        assert error(answer)["code"] == "unsupported_endpoint", (path, answer.text)
                        continue
                    assert answer.status_code == 200, (path, answer.text)
                    examples += 1
    assert examples >= 8
    assert "422" not in json.dumps(document)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_the_documentation_needs_no_other_site() -> None:
    api = Api()
    page = api.request("GET", "/docs").text
    assert "://" not in page.replace("http://www.w3.org", "")
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"):
        assert f"/docs/static/{name}" in page
        assert api.request("GET", f"/docs/static/{name}").status_code == 200


# ---------------------------------------------------------------- what a body and an answer may hold


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stop_token_ids": [""] * 200_000}, "The body has 2000"),
        ({"stop_token_ids": [""] * 100_000}, "stop_token_ids may have at most 1024 token ids, got 100000."),
        ({"stop_token_ids": [""] * 1000}, "stop_token_ids: Input should be a valid integer; got ''."),
        ({"stop": [1] * 100_000}, "stop may have at most 16 strings, got 100000."),
        ({"logit_bias": {str(number): "x" for number in range(5000)}}, "logit_bias may have at most 1024 token ids"),
        ({"bad_words_ids": [["x"] * 9] * 3000}, "bad_words_ids may have at most 1024 token ids in total, got 27000."),
        ({"prompt": [[1]] * 40_000}, "The body has 40002 arrays and objects, but at most 32768"),
        ({"x": {str(number): 1 for number in range(66_000)}}, "fields of objects, but at most 65536"),
        ({str(number): 1 for number in range(2000)}, "The body may have at most 1024 fields, got 2001."),
        ({"prompt": [1] * 2_200_000}, "The body has 2200000 elements, but at most 2097152"),
        ({"src_lang": "x" * 1000}, "src_lang: String should have at most 256 characters"),
    ],
)
def test_a_body_is_bounded_by_what_it_holds(fields: dict[str, Any], said: str) -> None:
    assert said in error(Api().post(COMPLETIONS, **fields))["message"]


def test_a_conversation_has_so_many_messages() -> None:
    talk = [*HELLO, {"role": "assistant", "content": "hi"}]
    assert Api().post(CHAT, messages=talk * 4096, max_tokens=1).status_code == 200
    assert "at most 8192 messages, got 8193" in error(Api().post(CHAT, messages=HELLO * 8193))["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"n": 128, "max_tokens": 60, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 64, "n": 2, "max_tokens": 60, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"prompt": ["a" * 60] * 200, "prompt_logprobs": 20, "max_tokens": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 200, "n": 128, "max_tokens": 60}, "max_tokens"),
        (CHAT, {"n": 128, "max_tokens": 60, "logprobs": True, "top_logprobs": 20}, "logprobs"),
    ],
)
@pytest.mark.slow
def test_an_answer_is_bounded_by_what_it_holds(path: str, fields: dict[str, Any], param: str) -> None:
    problem = error(Api(max_num_queued_reqs=1000, max_answer_size="4MiB").post(path, **fields))
    assert (problem["param"], problem["code"]) == (param, "answer_too_large")
    assert "the limit is 4194304 (max_answer_size)" in problem["message"]
    assert Api(max_answer_size="8GiB", max_num_queued_reqs=1000).post(path, **fields).status_code == 200


def test_a_chat_without_max_tokens_ends_where_its_answer_is_full() -> None:
    api = Api(max_answer_size=50_000)
    assert api.post(CHAT, logprobs=True, top_logprobs=4).status_code == 200
    ((_, params),) = api.client.asked.values()
    assert params.max_tokens == 50_000 // (64 + 5 * 400)


def test_a_stream_is_bounded_by_what_waits_to_be_read() -> None:
    fields = {"n": 8, "max_tokens": 60, "logprobs": 5, "stream": True}
    slow = Api(max_answer_size=9000).post(COMPLETIONS, **fields).text  # all tokens come at once here
    assert "The stream is read too slowly: " in slow
    assert "data: [DONE]" not in slow
    assert "data: [DONE]" in Api(max_answer_size="1MiB").post(COMPLETIONS, **fields).text
    refused = error(Api(max_answer_size=9000).post(COMPLETIONS, prompt="a" * 9, echo=True, **fields))
    assert refused["param"] == "prompt_logprobs"
