"""POST /v1/embeddings over a scripted engine: shapes, refusals, many inputs, and that nothing leaks."""

from __future__ import annotations

import asyncio
import base64
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_client import FEATURES, VOCAB_SIZE, FakeClient, Script, Step, hf_byte_tokenizer, pool
from structlog.testing import capture_logs
from support.asgi import Call, Called, error, until

from engine import EngineDeadError, InvalidRequestError, PoolingParams, RequestDelta, RequestFailedError, TokenInput
from engine.text.processor import Tokenizer
from server.answering import encoding
from server.app import create_app
from server.config.settings import ServerSettings
from server.door.drain import Drain

PATH, MODEL, LONGEST = "/v1/embeddings", "org/fake", 64
ENDED = RequestDelta(request_id="x", choices=(), finished=True)


class Api(Called):
    """An app over a script whose model reads inputs whole, three in a step."""

    def __init__(self, script: Script = pool, *, info: dict[str, Any] | None = None, **settings: Any):
        self.client = FakeClient(script)
        facts: dict[str, Any] = {
            "tasks": ("embed",), "embedding_size": FEATURES, "hidden_size": FEATURES, "pooling_modes": ("mean",),
            "encoder_only": True, "num_blocks": 0, "block_size": 0, "max_num_seqs": 3, "max_num_batched_tokens": 1000,
        }  # fmt: skip
        self.client.info = replace(self.client.info, **{**facts, **(info or {})})
        self.drain = Drain()
        made = ServerSettings(**settings)
        self.app = create_app(self.client, Tokenizer(hf_byte_tokenizer()), MODEL, settings=made, drain=self.drain)

    def embed(self, **body: Any) -> httpx.Response:
        return self.request("POST", PATH, json=body)

    def vectors(self, **body: Any) -> list[list[float]]:
        answer = self.embed(**body)
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    def params(self) -> PoolingParams:
        (asked,) = self.client.asked.values()
        assert isinstance(asked[1], PoolingParams)
        return asked[1]

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        assert not self.client.running
        for admission in (self.service.pooling, self.service.admission, self.service.tokenizing):
            assert (admission.num_prompts, admission.num_queued_tokens) == (0, 0)
        turns = self.service.turns
        assert (turns.num_waiting, turns._inputs, turns._tokens) == (0, 0, 0)
        assert not self.service.metrics._watched
        assert self.drain.num_running == 0
        assert not self.drain._interruptions


def expected(text: str) -> list[float]:
    """What the script says of a text; a third as float32 has it."""
    values = [len(text), *text.encode()[: FEATURES - 2], float(np.float32(1 / 3))]
    return values + [0.0] * (FEATURES - len(values))


# ---------------------------------------------------------------- shapes


def test_openais_shape() -> None:
    api = Api()
    body = api.embed(input="abc", model=MODEL, user="me").json()
    assert body.pop("id").startswith("embd-")
    assert abs(body.pop("created") - time.time()) < 60
    (item,) = body.pop("data")
    usage = {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0}
    assert body == {"object": "list", "model": MODEL, "usage": usage}
    assert (item["object"], item["index"]) == ("embedding", 0)
    assert item["embedding"] == pytest.approx(expected("abc"), rel=1e-8)
    assert np.float32(item["embedding"][3]) == np.float32(1 / 3)
    assert api.params() == PoolingParams(task="embed")
    api.check_empty()


@pytest.mark.parametrize(
    ("given", "texts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([97, 98], ["ab"]), ([[97, 98], [99]], ["ab", "c"])],
)
def test_the_four_forms_of_an_input(given: Any, texts: list[str]) -> None:
    api = Api()
    answer = api.embed(input=given)
    assert [item["index"] for item in answer.json()["data"]] == list(range(len(texts)))
    for found, text in zip(answer.json()["data"], texts, strict=True):
        assert found["embedding"] == pytest.approx(expected(text), rel=1e-8)
    count = len("".join(texts))
    assert answer.json()["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}


def test_base64_holds_little_endian_float32() -> None:
    wide = Api().vectors(input=["abc", "d"], encoding_format="float")
    for text, numbers in zip(Api().vectors(input=["abc", "d"], encoding_format="base64"), wide, strict=True):
        assert isinstance(text, str)
        assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == np.array(numbers, np.float32).tolist()


def test_every_field_reaches_the_engine() -> None:
    api = Api()
    assert len(api.vectors(input="abc", dimensions=2, normalize=False, pooling="cls")[0]) == 2
    assert api.params() == PoolingParams(task="embed", dimensions=2, normalize=False, pooling="cls")


PROMPTS = {"prompts": {"query": "q: ", "passage": "p: "}, "default_prompt": "passage"}


@pytest.mark.parametrize(
    ("fields", "info", "text", "skipped"),
    [
        ({}, {}, "abc", 0),
        ({}, PROMPTS, "p: abc", 0),
        ({"prompt_name": "query"}, PROMPTS, "q: abc", 0),
        ({"prompt_name": "query"}, PROMPTS | {"include_prompt": False}, "q: abc", 3),
    ],
)
def test_the_models_prompts(fields: dict[str, Any], info: dict[str, Any], text: str, skipped: int) -> None:
    api = Api(info=info)
    assert api.embed(input=["abc"], **fields).json()["usage"]["prompt_tokens"] == len(text)
    ((source, params),) = api.client.asked.values()
    assert bytes(source.token_ids).decode() == text
    assert params == PoolingParams(task="embed", skip_tokens=skipped)


def test_prompts_that_are_not_there() -> None:
    for info, said in ((PROMPTS, "query, passage"), ({}, "none")):
        problem = error(Api(info=info).embed(input="a", prompt_name="other"))
        assert problem["param"] == "prompt_name"
        assert said in problem["message"]
        assert problem["message"].startswith("this model has no prompt named 'other'"), "nor where its folder is"
    assert error(Api(info=PROMPTS).embed(input=[97], prompt_name="query"))["param"] == "prompt_name"
    api = Api(info=PROMPTS)
    api.embed(input=[97])
    assert [source.token_ids for source, _ in api.client.asked.values()] == [[97]], "ids are taken as they are"


def test_an_input_type_is_refused() -> None:
    problem = error(Api().embed(input="abc", input_type="query"))
    assert (problem["param"], problem["code"]) == ("input_type", "unsupported_parameter")
    assert "prompt_name" in problem["message"]
    assert Api().embed(input="abc", input_type=None).status_code == 200


def test_null_is_the_default_for_every_optional_field() -> None:
    api = Api()
    fields = api.app.openapi()["components"]["schemas"]["EmbeddingRequest"]["properties"]
    nothing = {name: None for name in fields if name != "input"}
    assert {"model", "encoding_format", "dimensions", "truncate_prompt_tokens", "normalize", "pooling"} <= set(nothing)
    assert api.embed(input="a", **nothing).status_code == 200
    assert api.params() == PoolingParams(task="embed")


def test_unknown_fields_are_listed() -> None:
    answer = Api().embed(input="a", frobnicate=1, user="me", shade=3)
    assert answer.headers["x-octavo-ignored-fields"] == "frobnicate, shade"


def test_a_models_id_is_written_as_json() -> None:
    api = Api()
    app = create_app(api.client, Tokenizer(hf_byte_tokenizer()), 'a "b" \u00e9\\')
    api.app = app
    assert api.embed(input="a").json()["model"] == 'a "b" \u00e9\\'


# ---------------------------------------------------------------- long inputs


def test_inputs_are_cut_only_when_asked_to() -> None:
    text = "".join(chr(97 + place % 26) for place in range(LONGEST + 36))
    for given in (text, list(text.encode())):
        whole = error(Api().embed(input=given))
        assert (whole["param"], whole["code"]) == ("input", "context_length_exceeded")
        for part in (str(len(text)), str(LONGEST), "max_model_len", "truncate_prompt_tokens"):
            assert part in whole["message"]
        for asked, kept in ((-1, LONGEST), (LONGEST, LONGEST), (5, 5), (1, 1)):
            api = Api()
            answer = api.embed(input=given, truncate_prompt_tokens=asked)
            assert answer.json()["usage"]["prompt_tokens"] == kept
            assert [source.token_ids for source, _ in api.client.asked.values()] == [list(text.encode())[:kept]]


def test_the_place_of_the_one_that_is_too_long_is_said() -> None:
    api = Api()
    for given in (["a", "b" * 65, "c" * 99], [[97], [98] * 65, [99] * 99]):
        assert error(api.embed(input=given))["message"].startswith("input[1] is too long: it has 65 tokens")
    assert not api.client.asked, "what is refused costs the engine nothing"
    api.check_empty()


def test_a_hopelessly_long_text_costs_little() -> None:
    tokenizer, seen = Tokenizer(hf_byte_tokenizer()), []

    class Counting(Tokenizer):
        def __init__(self) -> None:
            self.__dict__.update(tokenizer.__dict__)

        def encode(self, text: str, *rest: Any, **more: Any) -> list[int]:
            seen.append(len(text))
            return tokenizer.encode(text, *rest, **more)

        def encode_input(self, text: str, *rest: Any, **more: Any) -> Any:
            seen.append(len(text))
            return tokenizer.encode_input(text, *rest, **more)

    api = Api()
    api.app = create_app(api.client, Counting(), MODEL)
    problem = error(api.embed(input="x" * 8_000_000))
    assert (problem["param"], problem["code"]) == ("input", "context_length_exceeded")
    assert sum(seen) < 100 * LONGEST
    seen.clear()
    assert api.embed(input="x" * 8_000_000, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == LONGEST
    assert 0 < sum(seen) < 100 * LONGEST


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [1, [1]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [[True]]}, "input"),
        ({"input": [1.0]}, "input"),
        ({"input": [[1.5]]}, "input"),
        ({"input": [None]}, "input"),
        ({"input": [[["a"]]]}, "input"),
        ({"input": 5}, "input"),
        ({"input": True}, "input"),
        ({"input": {"text": "a", "text_pair": "b"}}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": [[1], [2, 10**30]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": -1}, "dimensions"),
        ({"input": "a", "dimensions": FEATURES + 1}, "dimensions"),
        ({"input": "a", "dimensions": "2"}, "dimensions"),
        ({"input": "a", "dimensions": 2.0}, "dimensions"),
        ({"input": "a", "dimensions": True}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "encoding_format": 1}, "encoding_format"),
        ({"input": "a", "pooling": "best"}, "pooling"),
        ({"input": "a", "normalize": 1}, "normalize"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": LONGEST + 1}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
        ({"input": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        ({"input": "a", "model": 5}, "model"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"input": "a", "chat_template": "{{ x }}"}, "chat_template"),
        ({"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype"),
        ({"input": "a", "endianness": "middle"}, "endianness"),
        ({"input": "a", "padding": "longest"}, "padding"),
        ({"input": "a", "padding": "max_length"}, "padding"),
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation"),
        ({"input": ["a"] * 257, "encoding_format": "bytes"}, "encoding_format"),
    ],
)
def test_what_is_wrong_is_400_and_names_the_field(fields: dict[str, Any], param: str) -> None:
    api = Api()
    problem = error(api.embed(**fields))
    assert problem["param"] == param
    assert problem["code"] is not None
    assert param in problem["message"]
    assert not api.client.asked
    api.check_empty()


@pytest.mark.parametrize("content", [b'{"input": NaN}', b'{"input": [NaN]}', b'{"input": "\\ud800"}', b"[]", b"{"])
def test_what_is_no_json_is_400(content: bytes) -> None:
    error(Api().request("POST", PATH, content=content, headers={"Content-Type": "application/json"}))


def test_an_empty_one_among_many_is_named() -> None:
    assert error(Api().embed(input=["a", "b", ""]))["message"] == "input must not be empty: item 2 is."
    assert error(Api().embed(input=""))["message"] == "input must not be empty."


# ---------------------------------------------------------------- what the engine says


@pytest.mark.parametrize(
    ("failure", "status", "code", "counted"),
    [
        (EngineDeadError("secret"), 503, "engine_dead", {"error": 1.0}),
        (RequestFailedError("secret"), 500, "internal_error", {"error": 1.0}),
        (replace(ENDED, error="secret"), 500, "internal_error", {"error": 1.0}),
        (ENDED, 500, "internal_error", {"error": 1.0}),
        (InvalidRequestError("no", param="input", code="x"), 400, "x", {}),
    ],
)  # fmt: skip
def test_one_failure_is_the_requests_and_ends_the_others(
    failure: Any, status: int, code: str, counted: dict[str, float]
) -> None:
    def script(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
        if source.token_ids == [98]:
            yield failure
        yield asyncio.Event()

    api = Api(script)
    answer = api.embed(input=["a", "b", "c"] * 5)
    problem = error(answer, status)
    assert problem["code"] == code
    assert "secret" not in answer.text
    assert len(api.client.asked) == 6, "two steps' worth was handed over, and nothing after the failure"
    assert api.counts("octavo_request_success_total") == {"abort": 6.0 - 2, **({"error": 2.0} if counted else {})}
    api.check_empty()


def test_while_the_engine_is_dead() -> None:
    api = Api()
    api.client.dead = True
    answer = api.embed(input="a")
    assert error(answer, 503)["code"] == "engine_dead"
    assert answer.headers["retry-after"]
    assert api.counts("octavo_requests_rejected_total") == {"engine_dead": 1.0}
    api.check_empty()


def test_an_engine_that_dies_between_two_inputs() -> None:
    api = Api()

    def script(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
        api.client.dead = source.token_ids == [99]
        yield from pool(request_id, source, params)

    api.client.script = script
    assert error(api.embed(input=["a"] * 7 + ["c"] * 10), 503)["code"] == "engine_dead"
    api.client.dead = False
    api.check_empty()


# ---------------------------------------------------------------- many inputs, many requests


@pytest.mark.parametrize("ids", [False, True])
def test_as_many_inputs_as_openai_takes(ids: bool) -> None:
    api = Api()
    most = 0

    def script(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
        nonlocal most
        most = max(most, len(api.client.running))
        yield from pool(request_id, source, params)

    api.client.script = script
    texts = [f"{number:04d}" for number in range(2048)]
    answer = api.embed(input=[list(text.encode()) for text in texts] if ids else texts)
    assert answer.status_code == 200
    found = [item["embedding"] for item in answer.json()["data"]]
    assert [item["index"] for item in answer.json()["data"]] == list(range(2048))
    assert found == [pytest.approx(expected(text), rel=1e-8) for text in texts]
    assert most == 6, "two steps' worth"
    assert api.counts("octavo_request_success_total") == {"stop": 2048.0}
    assert api.counts("octavo_request_prompt_tokens_count") == {"": 2048.0}
    assert api.counts("octavo_e2e_request_latency_seconds_count") == {"": 2048.0}
    api.check_empty()


async def test_a_short_request_does_not_wait_for_a_long_one() -> None:
    gates: list[asyncio.Event] = []

    def script(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
        gates.append(asyncio.Event())
        yield gates[-1]
        yield from pool(request_id, source, params)

    api = Api(script)
    long = Call(api.app, PATH, {"input": ["x"] * 500})
    await until(lambda: len(gates) == 6)
    short = Call(api.app, PATH, {"input": "y"})
    await until(lambda: api.service.turns.num_waiting == 495)
    assert api.counts("octavo_num_requests_waiting") == {"": 495.0}
    gates[0].set()
    await until(lambda: len(gates) == 7)  # one more of the long request, whose turn it was
    gates[1].set()
    await until(lambda: len(gates) == 8)
    gates[7].set()
    await short.wait_end()
    assert (short.status, long.sent) == (200, [])
    long.leave()
    await long.wait_end()
    assert api.counts("octavo_requests_aborted_total") == {"disconnect": 498.0}
    api.check_empty()


async def test_a_client_that_leaves_ends_what_runs() -> None:
    api = Api(lambda *_: [asyncio.Event()])
    call = Call(api.app, PATH, {"input": ["a"] * 100})
    await until(lambda: len(api.client.running) == 6)
    assert (api.service.pooling.num_prompts, api.service.pooling.num_queued_tokens) == (1, 100)
    assert api.counts("octavo_num_requests_in_service") == {"": 1.0}
    call.leave()
    await call.wait_end()
    assert len(api.client.cut_short) == 6
    assert api.counts("octavo_requests_aborted_total") == {"disconnect": 100.0}
    assert api.counts("octavo_request_success_total") == {"abort": 6.0}
    api.check_empty()


async def test_the_end_of_the_service_ends_it_with_503() -> None:
    api = Api(lambda *_: [asyncio.Event()])
    call = Call(api.app, PATH, {"input": ["a"] * 10})
    await until(lambda: len(api.client.running) == 6)
    api.drain.begin()
    api.drain.interrupt()
    await call.wait_end()
    assert call.status == 503
    assert "shutting_down" in call.text
    api.check_empty()


async def test_tokens_wait_until_their_answer() -> None:
    gates: list[asyncio.Event] = []

    def script(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
        gates.append(asyncio.Event())
        yield gates[-1]
        yield from pool(request_id, source, params)

    api = Api(script, max_num_queued_tokens=50)
    call = Call(api.app, PATH, {"input": [[97] * 10] * 6})  # alone, it may be of any size
    await until(lambda: len(gates) == 6)
    assert api.service.pooling.num_queued_tokens == 60
    other = Call(api.app, PATH, {"input": [[97] * 30]})
    await other.wait_end()
    assert (other.status, other.headers["retry-after"]) == (503, "1")
    assert "max_num_queued_tokens" in other.text
    for gate in gates[:4]:
        gate.set()
    await until(lambda: api.service.pooling.num_queued_tokens == 20)
    third = Call(api.app, PATH, {"input": [[97] * 30]})
    await until(lambda: len(gates) == 7)
    for gate in gates:
        gate.set()
    await call.wait_end()
    await third.wait_end()
    assert (call.status, third.status) == (200, 200)
    assert api.counts("octavo_requests_rejected_total") == {"queued_tokens": 1.0}
    api.check_empty()


@pytest.mark.parametrize("field", ["input", "ids"])
def test_many_texts_bring_no_more_tokens_than_one_request_may(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nothing waits. The texts behind the bound are not tokenised."""
    monkeypatch.setattr(encoding, "MANY_TOKENS", 50)
    api = Api(max_num_queued_tokens=10)
    texts: list[Any] = ["a" * 9] * 5 if field == "input" else [[97] * 9] * 5
    assert len(api.vectors(input=texts)) == 5
    problem = error(api.embed(input=[*texts, *texts]))
    assert problem["code"] == "too_many_tokens"
    assert all(part in problem["message"] for part in ("input", "10 inputs", "50 tokens", "--max-num-queued-tokens"))
    assert len(api.vectors(input=["a" * 60])) == 1, "a single text is bounded by the model"
    api.check_empty()


def test_texts_are_tokenised_in_little_memory() -> None:
    """Each token is kept in 4 bytes, and only one text at a time takes more."""
    api, texts = Api(), [chr(97 + at % 26) * 900 for at in range(400)]
    api.client.info = replace(api.client.info, max_model_len=1000)

    async def read() -> int:
        tracemalloc.start()
        try:
            found = await encoding.read_inputs(api.service, texts)
            assert sum(len(source.token_ids) for source in found) == 360_000
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert asyncio.run(read()) < 6 * 360_000


async def test_requests_are_bounded_and_those_for_text_have_bounds_of_their_own() -> None:
    info = {"tasks": ("generate", "embed"), "encoder_only": False, "num_blocks": 10, "block_size": 16}
    api = Api(lambda *_: [asyncio.Event()], info=info, max_num_queued_reqs=1)
    calls = [Call(api.app, PATH, {"input": ["a"] * 20}) for _ in range(4)]
    await until(lambda: api.service.pooling.num_prompts == 4 and api.client.running)
    full = Call(api.app, PATH, {"input": "a"})
    await full.wait_end()
    assert full.status == 503
    assert "max_num_seqs (3) + max_num_queued_reqs (1)" in full.text
    text = Call(api.app, "/v1/completions", {"prompt": ["a"] * 4})
    await until(lambda: api.service.admission.num_prompts == 4)
    assert api.counts("octavo_num_requests_in_service") == {"": 8.0}
    for call in (*calls, text):
        call.leave()
        await call.wait_end()
    api.check_empty()


@pytest.mark.parametrize(("seqs", "tokens"), [(3, 4 * 3 * LONGEST), (2048, 4 * 128 * LONGEST)])
def test_without_pages_the_longest_inputs_are_the_measure(seqs: int, tokens: int) -> None:
    assert Api(info={"max_num_seqs": seqs}).service.pooling._max_queued_tokens == tokens


# ---------------------------------------------------------------- the log


def logged(api: Api, **body: Any) -> dict[str, Any]:
    with capture_logs() as lines:
        api.embed(**body)
    (line,) = [line for line in lines if line["event"] == "request finished"]
    return dict(line)


def timed(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
    """Waits 50 ms and computes for 20, says its engine; one token was cached."""
    now = time.monotonic()
    *first, last = pool(request_id, source, params)
    yield from first
    yield replace(last, scheduled_time=now + 0.05, first_token_time=now + 0.07, num_cached_tokens=1)


def test_a_request_that_is_answered() -> None:
    api = Api(timed)
    line = logged(api, input=["the secret", "other"])
    seconds = {name: line.pop(name) for name in list(line) if name.endswith(("_seconds", "_second"))}
    assert line.pop("id").startswith("embd-")
    assert line == {
        "event": "request finished", "log_level": "info", "outcome": "ok", "path": PATH, "model": MODEL, "inputs": 2,
        "prompt_tokens": 15, "cached_tokens": 2,
    }  # fmt: skip
    assert set(seconds) == {"total_seconds", "queue_seconds", "compute_seconds", "tokens_per_second"}
    assert seconds["queue_seconds"] >= 0.05
    assert 0.02 <= seconds["compute_seconds"] < seconds["total_seconds"] + 0.03
    for name in ("octavo_request_queue_time_seconds", "octavo_request_prefill_time_seconds"):
        assert api.counts(f"{name}_count") == {"": 2.0}
        assert api.counts(f"vllm:{name.removeprefix('octavo_')}_count") != {}


def test_texts_are_logged_when_asked_for() -> None:
    assert logged(Api(log_prompts=True), input=["the secret", "other"])["input"] == ["the secret", "other"]
    assert logged(Api(log_prompts=True), input=[[97, 98]])["input"] == [[97, 98]]
    assert len(logged(Api(log_prompts=True), input=["a"] * 100)["input"]) == 16


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"input": 5}, "invalid_type"),
        ({"input": "a", "model": "x"}, "model_not_found"),
        ({"input": "a" * 65}, "context_length_exceeded"),
    ],
)
def test_a_request_that_is_refused(body: dict[str, Any], code: str) -> None:
    line = logged(Api(), **body)
    assert (line["outcome"], line["code"], line["path"]) == ("refused", code, PATH)
