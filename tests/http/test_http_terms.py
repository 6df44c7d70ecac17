"""The terms of a request: its API key's pages, its priority, its time. Over a scripted engine, and over a real one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_client import FEATURES, FakeClient, Script, Step, hf_byte_tokenizer, pool, say
from support.asgi import Call, Called
from support.checkpoints import Checkpoint
from support.local_client import LocalClient

from engine import MAX_PRIORITY, ChoiceDelta, EngineConfig, PoolingParams, RequestDelta, TokenInput
from engine.text.processor import Tokenizer
from server.answering.terms import scoped_salt
from server.api.schemas import MAX_SALT, MAX_TIMEOUT
from server.app import create_app
from server.config.settings import ServerSettings

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    EMBEDDINGS: {"input": "a"},
}
LATE = ChoiceDelta(index=0, token_ids=(), finish_reason="abort", stop_reason="deadline")


class Api(Called):
    """An app over a client, with two keys."""

    def __init__(
        self,
        client: Any,
        *,
        keys: tuple[str, ...] = ("one", "two"),
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ):
        self.client = client
        hf = hf_byte_tokenizer() if tokenizer is None else tokenizer._hf
        hf.chat_template = "{{ messages[0].content }}"
        chosen = ServerSettings(api_key=keys, **{"max_queue_time": 0} | settings)
        self.app = create_app(client, Tokenizer(hf), "tiny", settings=chosen)

    def call(self, path: str = COMPLETIONS, *, key: str = "one", timeout: str | None = None, **body: Any) -> Call:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        if timeout is not None:
            headers.append((b"x-request-timeout", timeout.encode()))
        return Call(self.app, path, {**BODIES.get(path, {}), **body}, headers=headers)

    def post(self, path: str = COMPLETIONS, **how: Any) -> Call:
        """A whole call."""

        async def whole() -> Call:
            call = self.call(path, **how)
            await call.wait_end()
            return call

        return asyncio.run(whole())


def answer(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
    if isinstance(params, PoolingParams):
        yield from pool(request_id, source, params)
    else:
        yield from say(request_id, ["xy"], params)


def scripted(script: Script = answer, **how: Any) -> Api:
    client = FakeClient(script)
    client.info = replace(client.info, tasks=("generate", "embed"), embedding_size=FEATURES)
    return Api(client, **how)


def error(call: Call, status: int) -> dict[str, Any]:
    assert call.status == status, call.text
    found: dict[str, Any] = json.loads(call.text)["error"]
    return found


# ---------------------------------------------------------------- what the engine is told


@pytest.mark.parametrize("path", BODIES)
def test_the_engine_is_told_the_terms(path: str) -> None:
    api = scripted()
    before = time.monotonic()
    for key in ("one", "two"):
        call = api.post(path, key=key, priority=-3, cache_salt="s", request_timeout=50)
        assert call.status == 200, call.text
    first, second = api.client.terms.values()
    for terms in (first, second):
        assert terms["priority"] == -3
        assert before + 50 <= terms["deadline"] <= time.monotonic() + 50
    assert first["tenant"] != second["tenant"]
    assert first["cache_salt"] != second["cache_salt"]
    assert "one" not in first["tenant"]


def test_without_keys_and_terms_there_are_none() -> None:
    api = scripted(keys=())
    api.post()
    assert list(api.client.terms.values()) == [{"tenant": None, "cache_salt": None, "priority": 0, "deadline": None}]


@pytest.mark.parametrize(
    ("header", "field", "seconds"), [("40", 9, 9), ("9", 40, 9), ("0.5", None, 0.5), (None, 2.5, 2.5)]
)
def test_the_stricter_time_counts(header: str | None, field: float | None, seconds: float) -> None:
    api = scripted()
    before = time.monotonic()
    assert api.post(timeout=header, request_timeout=field).status == 200
    (terms,) = api.client.terms.values()
    assert before + seconds <= terms["deadline"] <= time.monotonic() + seconds


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": ""},
        {"cache_salt": "x" * (MAX_SALT + 1)},
        {"cache_salt": 5},
        {"priority": 1.5},
        {"priority": "high"},
        {"priority": True},
        {"priority": MAX_PRIORITY + 1},
        {"request_timeout": 0},
        {"request_timeout": -1},
        {"request_timeout": MAX_TIMEOUT + 1},
        {"request_timeout": "5"},
    ],
    ids=str,
)
def test_bad_fields_are_400_by_name(fields: dict[str, Any]) -> None:
    api = scripted()
    for path in BODIES:
        body = json.dumps({**BODIES[path], **fields})

        async def send(path: str = path, body: str = body) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://o") as http:
                headers = {"Authorization": "Bearer one", "Content-Type": "application/json"}
                return await http.post(path, content=body, headers=headers)

        answered = asyncio.run(send())
        assert answered.status_code == 400, answered.text
        assert answered.json()["error"]["param"] == next(iter(fields))
    assert not api.client.terms


@pytest.mark.parametrize("value", ["", "0", "-1", "soon", "1e3", "nan", "inf", "1,5", "5 s", "86401", "9" * 400, "٣"])
def test_a_bad_header_is_400(value: str) -> None:
    api = scripted()
    for path in BODIES:
        refused = error(api.post(path, timeout=value), 400)
        assert refused["param"] == "X-Request-Timeout"
        assert "2.5" in refused["message"]


# ---------------------------------------------------------------- cached pages


@pytest.fixture(scope="module")
def checkpoint_path(checkpoint: Callable[[str], Checkpoint]) -> str:
    return str(checkpoint("llama-grouped").path)


@pytest.mark.parametrize("path", [COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize("scope", ["key", "global"])
def test_whose_pages_a_key_finds(path: str, scope: str, checkpoint_path: str) -> None:
    config = EngineConfig(model=checkpoint_path, dtype="float32", device="cpu", show_progress=False)
    api = Api(LocalClient(config), prefix_cache_scope=scope)
    field = "prompt" if path == COMPLETIONS else "input"

    def cached(key: str, salt: str | None = None) -> int:
        before = api.client.stats().prompt_tokens_cached
        call = api.post(path, key=key, cache_salt=salt, **{field: list(range(5, 70))}, **LAST[path])
        assert call.status == 200, call.text
        found: int = api.client.stats().prompt_tokens_cached - before
        if path == COMPLETIONS:
            assert json.loads(call.text)["usage"]["prompt_tokens_details"]["cached_tokens"] == found
        return found

    assert cached("one") == 0
    assert cached("one") > 0
    assert (cached("two") > 0) == (scope == "global")
    assert cached("two") > 0
    assert cached("one", "s") == 0, "a salt separates"
    assert cached("one", "s") > 0
    assert cached("one", "t") == 0
    assert (cached("two", "s") > 0) == (scope == "global"), "another key's salt may be known, and is of no use"
    asyncio.run(api.client.close())


LAST: dict[str, dict[str, Any]] = {COMPLETIONS: {"max_tokens": 1}, EMBEDDINGS: {"pooling": "last"}}


def test_salts_of_keys_and_requests_are_not_confused() -> None:
    parts = [None, "a", "ab", "b", '","', "null", "a\0b"]
    salts = [scoped_salt(tenant, salt) for tenant in parts for salt in parts]
    assert len(set(salts)) == len(salts)
    assert salts[0] is None


# ---------------------------------------------------------------- a time that is over


def accepts_then(*steps: Step) -> Script:
    def script(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
        yield RequestDelta(request_id=request_id, choices=())
        for step in steps:
            yield replace(step, request_id=request_id) if isinstance(step, RequestDelta) else step

    return script


OVER = RequestDelta(request_id="", choices=[LATE], finished=True)
FIRST = RequestDelta(request_id="", choices=[ChoiceDelta(index=0, token_ids=[65])])


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_that_is_over_before_the_first_token(stream: bool) -> None:
    api = scripted(accepts_then(OVER))
    call = api.post(timeout="5", stream=stream)
    if stream:
        assert call.status == 200
        (event,) = call.text.split("\n\n")[:-1]
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    else:
        assert error(call, 504)["code"] == "deadline_exceeded"
        assert "X-Request-Timeout" in call.text
    assert api.counts("octavo_requests_aborted_total") == {"deadline": 1}
    assert api.service.admission.num_prompts == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_that_is_over_in_the_middle(stream: bool) -> None:
    api = scripted(accepts_then(FIRST, OVER))
    call = api.post(timeout="5", stream=stream)
    assert call.status == 200
    if stream:
        *events, done = call.text.split("\n\n")[:-1]
        assert done == "data: [DONE]"
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    else:
        choices = json.loads(call.text)["choices"]
    assert "".join(choice["text"] for choice in choices) == "A"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("abort", "deadline")
    assert api.counts("octavo_requests_aborted_total") == {"deadline": 1}


def test_one_prompt_of_several_has_begun() -> None:
    def script(request_id: str, source: TokenInput, params: Any) -> Iterator[Step]:
        steps = (FIRST, OVER) if request_id.endswith("-1") else (OVER,)
        yield from (replace(step, request_id=request_id) for step in steps)

    call = scripted(script).post(prompt=["a", "b"], timeout="5")
    assert call.status == 200
    choices = json.loads(call.text)["choices"]
    assert [(choice["text"], choice["stop_reason"]) for choice in choices] == [("", "deadline"), ("A", "deadline")]


def test_an_inputs_time_that_is_over_by_the_engine() -> None:
    api = scripted(accepts_then(RequestDelta(request_id="", choices=(), finished=True, error="deadline")))
    assert error(api.post(EMBEDDINGS, timeout="5"), 504)["code"] == "deadline_exceeded"
    assert api.counts("octavo_requests_aborted_total") == {"deadline": 1}
    assert api.counts("octavo_request_success_total") == {"abort": 1}


def test_an_inputs_time_that_is_over_before_its_turn() -> None:
    """The engine never hears of most of them."""
    api = scripted(lambda *_: [asyncio.Event()])
    call = api.post(EMBEDDINGS, input=["a"] * 100, timeout="0.01")
    assert error(call, 504)["code"] == "deadline_exceeded"
    assert len(api.client.terms) < 100
    assert not api.client.running
    assert api.service.pooling.num_prompts == api.service.turns.num_waiting == 0
    assert set(api.counts("octavo_requests_aborted_total")) == {"deadline"}


def test_a_real_engine_ends_what_is_late(checkpoint_path: str) -> None:
    config = EngineConfig(model=checkpoint_path, dtype="float32", device="cpu", show_progress=False, max_num_seqs=1)
    api = Api(LocalClient(config))

    async def scenario() -> None:
        api.client.held = True
        calls = [api.call(prompt=[5, 6, 7], max_tokens=4, timeout=timeout) for timeout in ("0.001", None, "60")]
        async with asyncio.timeout(20):
            while len(api.client.asked) < 3:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.002)
        api.client.held = False
        for call in calls:
            await call.wait_end()
        assert [call.status for call in calls] == [504, 200, 200]

    asyncio.run(scenario())
    asyncio.run(api.client.close())


# ---------------------------------------------------------------- a service that is full


def test_a_full_service_refuses_before_it_reads_the_body() -> None:
    api = scripted(lambda *_: [asyncio.Event()], max_num_queued_reqs=0)

    async def scenario() -> None:
        calls = [api.call() for _ in range(api.service.admission.max_prompts)]
        while len(api.client.terms) < len(calls):
            await asyncio.sleep(0.001)
        refused = Call(api.app, COMPLETIONS, None, headers=[(b"authorization", b"Bearer one")])
        refused._body = b"no JSON"
        await refused.wait_end()
        assert error(refused, 503)["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert refused._body is not None, "the body was read"
        other = api.call("/v1/embeddings", key="one")
        await other.wait_end()
        assert other.status != 503, "requests for vectors have places of their own"
        for call in calls:
            call.leave()
            await call.wait_end()
        assert api.counts("octavo_requests_rejected_total") == {"queue_full": 1}

    api.client.script = lambda name, source, params: (
        pool(name, source, params) if isinstance(params, PoolingParams) else [asyncio.Event()]
    )
    asyncio.run(scenario())


async def test_one_key_does_not_lock_others_out() -> None:
    api = scripted(lambda *_: [asyncio.Event()], max_num_queued_reqs=8)  # the engine runs 8 at a time
    calls = [api.call(key="one") for _ in range(30)]
    while len(api.client.terms) < 16:
        await asyncio.sleep(0.001)
    others = [api.call(key="two") for _ in range(4)]
    while len(api.client.terms) < 18:
        await asyncio.sleep(0.001)
    await asyncio.gather(*(call.task for call in [*calls[16:], *others[2:]]))
    assert {call.status for call in [*calls[16:], *others[2:]]} == {503}
    for call in [*calls[:16], *others[:2]]:
        call.leave()
        await call.wait_end()


def test_time_that_cannot_suffice_is_refused_at_once() -> None:
    api = scripted(lambda *_: [asyncio.Event()])
    now = time.monotonic()
    clock = [now]
    api.service.admission._clock = lambda: clock[0]
    for pace in api.service.admission._starts.values():
        pace._clock = lambda: clock[0]

    async def scenario() -> None:
        waiting = api.call()
        while not api.client.terms:
            await asyncio.sleep(0.001)
        clock[0] += 10  # nothing has begun for so long
        refused, patient = api.call(timeout="5"), api.call(timeout="500")
        await refused.wait_end()
        assert error(refused, 503)["code"] == "overloaded"
        assert "its time limit ends" in refused.text
        assert int(refused.headers["retry-after"]) > 1
        while len(api.client.terms) < 2:
            await asyncio.sleep(0.001)
        for call in (waiting, patient):
            call.leave()
            await call.wait_end()

    asyncio.run(scenario())
    assert api.counts("octavo_requests_rejected_total") == {"deadline": 1}
