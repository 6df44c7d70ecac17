"""Streams over a scripted engine: keep-alives, slow readers, and that nothing leaks, however a request ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Script, Step, entry, hf_byte_tokenizer, say
from support.asgi import Call, Called, events, until
from support.service import PATIENCE

from engine import ChoiceDelta, EngineDeadError, InvalidRequestError, RequestDelta, SamplingParams, TokenInput
from engine.text.processor import Tokenizer
from server.answering.streaming import Wanted
from server.app import create_app
from server.config.settings import ServerSettings
from server.door.drain import Drain, shutting_down

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def accepted(request_id: str) -> RequestDelta:
    return RequestDelta(request_id=request_id, choices=())


class Api(Called):
    """An app over a script."""

    def __init__(self, script: Script, template: str = TEMPLATE, **settings: Any):
        self.client = FakeClient(script)
        self.drain = Drain()
        hf = hf_byte_tokenizer()
        hf.chat_template = template
        made = ServerSettings(**{"max_queue_time": 0} | settings)
        self.app = create_app(self.client, Tokenizer(hf), "fake", settings=made, drain=self.drain)

    def call(self, path: str = COMPLETIONS, **body: Any) -> Call:
        given = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
        return Call(self.app, path, {**given, **body})

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        assert not self.client.running
        assert (self.service.admission.num_prompts, self.service.admission.num_queued_tokens) == (0, 0)
        assert (self.service.tokenizing.num_prompts, self.service.tokenizing.num_queued_tokens) == (0, 0)
        assert self.drain.num_running == 0
        assert not self.drain._interruptions


# ---------------------------------------------------------------- keep-alive


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_is_kept_alive_from_its_acceptance_on(path: str) -> None:
    go = asyncio.Event()

    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        yield accepted(request_id)
        yield go
        yield from say(request_id, ["four"], params)

    api = Api(script, stream_keepalive=0.02)
    call = api.call(path, stream=True)
    await call.wait_sent(4)  # the status and three comments, before the first token
    assert call.status == 200
    assert call.headers["cache-control"] == "no-cache"
    assert call.headers["x-accel-buffering"] == "no"
    assert call.text == ": keep-alive\n\n" * (len(call.sent) - 1)
    go.set()
    await call.wait_end()
    assert call.complete
    received = events(call.text)
    said = "".join(
        choice["text"] if path == COMPLETIONS else choice["delta"]["content"]
        for event in received
        for choice in event["choices"]
    )
    assert said == "four"
    api.check_empty()


async def test_no_status_is_sent_before_the_acceptance_so_that_a_refusal_is_400() -> None:
    go = asyncio.Event()

    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        if request_id.endswith("-0"):
            yield accepted(request_id)
            yield asyncio.Event()
        yield go
        yield InvalidRequestError("too long", param="prompt")

    api = Api(script, stream_keepalive=0.01)
    call = api.call(stream=True, prompt=["a", "b"])
    await until(lambda: len(api.client.running) == 2)
    await asyncio.sleep(0.05)
    assert call.sent == []
    go.set()
    await call.wait_end()
    assert call.status == 400
    assert api.client.cut_short == [next(iter(api.client.asked))]
    api.check_empty()


async def test_a_busy_stream_sends_no_comments_and_zero_turns_them_off() -> None:
    go = asyncio.Event()

    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        yield accepted(request_id)
        yield go
        yield from say(request_id, ["text"], params)

    api = Api(script, stream_keepalive=0)
    call = api.call(stream=True)
    await call.wait_sent(1)
    await asyncio.sleep(0.05)
    assert len(call.sent) == 1
    go.set()
    await call.wait_end()

    busy = Api(lambda request_id, source, params: say(request_id, ["text"], params), stream_keepalive=600.0)
    other = busy.call(stream=True)
    await other.wait_end()
    assert ":" not in [line[:1] for line in other.text.splitlines()]


# ---------------------------------------------------------------- slow readers


def chatter(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
    texts = [f"answer {index}: na\u00efve \u2014 {'la' * (5 + index)}." for index in range(params.n)]
    deltas = say(request_id, texts, params)
    if params.prompt_logprobs is not None:
        known = [None, *(entry(token, params.prompt_logprobs) for token in source.token_ids[1:])]
        deltas[0] = replace(deltas[0], prompt_logprobs=known)
    return [accepted(request_id), *deltas]


ASKED = [
    (COMPLETIONS, {"n": 3}),
    (COMPLETIONS, {"n": 2, "logprobs": 2, "echo": True, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": ["ab", "cd"], "n": 2, "prompt_logprobs": 1}),
    (COMPLETIONS, {"n": 2, "stop": "la"}),
    (CHAT, {"n": 2, "logprobs": True, "top_logprobs": 2}),
]


def joined(received: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Whole choices of a stream's events, each of which must hold exactly one."""
    found: dict[int, dict[str, Any]] = {}
    for event in received:
        (choice,) = event["choices"]
        whole = found.setdefault(choice["index"], {"text": "", "tokens": [], "ids": [], "offsets": [], "ends": []})
        assert not whole["ends"], "news after the end"
        if "delta" in choice:
            whole["text"] += choice["delta"]["content"]
            whole["tokens"] += (choice["logprobs"] or {}).get("content", [])
        else:
            whole["text"] += choice["text"]
            logprobs = choice["logprobs"] or {}
            whole["tokens"] += zip(
                logprobs.get("tokens", []), logprobs.get("token_logprobs", []), logprobs.get("top_logprobs", []),
                strict=True,
            )  # fmt: skip
            whole["offsets"] += logprobs.get("text_offset", [])
        whole["ids"] += choice.get("token_ids") or []
        if choice["finish_reason"] is not None:
            whole["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
    assert all(len(whole["ends"]) == 1 for whole in found.values())
    return found


@pytest.mark.parametrize(("path", "fields"), ASKED)
async def test_a_slow_reader_gets_the_same_answer_in_fewer_events(path: str, fields: dict[str, Any]) -> None:
    async def answer(after: int | None) -> list[dict[str, Any]]:
        api = Api(chatter)
        call = api.call(path, stream=True, **fields)
        if after is not None:
            await call.wait_sent(after)
            call.reading.clear()
            await until(lambda: not api.client.running)  # the engine does not wait for the reader
            assert api.service.admission.num_prompts == 0
            call.reading.set()
        await call.wait_end()
        api.check_empty()
        return events(call.text)

    quick = await answer(None)
    expected = joined(quick)
    assert len(expected) > 1
    for after in (1, 3):
        slow = await answer(after)
        assert joined(slow) == expected
        assert len(slow) < len(quick) / 2


async def test_a_stop_string_ends_the_work_of_an_unread_stream() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        yield accepted(request_id)
        for letter in b"some STOP":
            yield RequestDelta(request_id=request_id, choices=[ChoiceDelta(index=0, token_ids=[letter])])
        yield asyncio.Event()

    api = Api(script)
    call = api.call(stream=True, stop="STOP")
    call.reading.clear()
    await until(lambda: api.client.cut_short)
    api.service.metrics.render(None)
    assert api.counts("octavo_request_success_total") == {"stop": 1}
    call.reading.set()
    await call.wait_end()
    assert joined(events(call.text))[0]["text"] == "some "
    api.check_empty()


# ---------------------------------------------------------------- every way to end, from every place


STUCK = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def silent(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
    yield asyncio.Event()


def queued(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
    yield accepted(request_id)
    yield asyncio.Event()


def speaking(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
    yield accepted(request_id)
    yield RequestDelta(request_id=request_id, choices=[ChoiceDelta(index=0, token_ids=[65])])
    yield asyncio.Event()


PLACES: dict[str, tuple[Script, str, dict[str, Any], int]] = {  # and how many prompts
    "template": (silent, CHAT, {}, 1),
    "unaccepted": (silent, COMPLETIONS, {"prompt": ["a", "b"]}, 2),
    "queued": (queued, COMPLETIONS, {"prompt": ["a", "b", "c"]}, 3),
    "speaking": (speaking, COMPLETIONS, {"n": 3}, 1),
    "chatting": (speaking, CHAT, {}, 1),
}


ENDINGS = [
    (place, ending)
    for place in PLACES
    for ending in ("disconnect", "shutdown", "error", "cancel")
    if (place, ending) != ("template", "error")  # the engine has not been asked for anything yet
]


@pytest.mark.parametrize(("place", "ending"), ENDINGS)
@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_is_left_however_a_request_ends(place: str, stream: bool, ending: str) -> None:
    script, path, fields, num_prompts = PLACES[place]
    failure = asyncio.Event()

    def play(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        for step in script(request_id, source, params):
            yield failure if isinstance(step, asyncio.Event) else step
        yield EngineDeadError("gone")

    api = Api(play, STUCK if place == "template" else TEMPLATE)
    call = api.call(path, stream=stream, **fields)
    await until(lambda: api.service.admission.num_prompts == num_prompts)
    if place != "template":
        await until(lambda: len(api.client.running) == num_prompts)
    begun = stream and place not in ("template", "unaccepted")
    if begun:
        await call.wait_sent(2 if place in ("speaking", "chatting") else 1)
    await asyncio.sleep(0.01)
    if ending == "disconnect":
        call.leave()
    elif ending == "shutdown":
        api.drain.begin()
        api.drain.interrupt()
    elif ending == "error":
        failure.set()
    else:  # as uvicorn does it in the very end
        call.task.cancel()
    await call.wait_end()
    api.check_empty()
    counted = api.counts("octavo_requests_aborted_total")
    assert counted == ({} if ending == "cancel" else {ending: num_prompts})
    if ending in ("shutdown", "error"):
        code = "shutting_down" if ending == "shutdown" else "engine_dead"
        assert call.complete
        assert call.status == (200 if begun else 503)
        if begun:
            *_, last, rest = call.text.split("\n\n")
            assert rest == ""
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
        else:
            assert json.loads(call.text)["error"]["code"] == code
            assert call.headers["retry-after"].isdigit()


async def test_a_refused_request_counts_as_nothing() -> None:
    api = Api(lambda *_: [InvalidRequestError("no", param="prompt")])
    for stream in (True, False):
        call = api.call(stream=stream)
        await call.wait_end()
        assert call.status == 400
    api.check_empty()
    assert api.counts("octavo_requests_aborted_total") == {}
    assert api.counts("octavo_request_success_total") == {}


async def test_what_the_engine_aborts_is_counted_by_its_reason() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        yield accepted(request_id)
        late = ChoiceDelta(index=0, token_ids=(), finish_reason="abort", stop_reason="deadline")
        yield RequestDelta(request_id=request_id, choices=[late], finished=True)

    api = Api(script)
    call = api.call()
    await call.wait_end()
    assert call.status == 504
    assert api.counts("octavo_requests_aborted_total") == {"deadline": 1}
    api.check_empty()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "stop": "t"}, {"n": 2, "stop": "t"}])
async def test_counters_are_final_when_the_last_bytes_are_sent(fields: dict[str, Any]) -> None:
    api = Api(lambda request_id, source, params: say(request_id, ["text"] * params.n, params))
    call = api.call(**fields)
    settled: list[bool] = []

    async def settle() -> None:
        settled.append(call.complete)

    api.client.settled = settle  # type: ignore[method-assign]
    seen = []
    take = call.sent.append

    def note(message: dict[str, Any]) -> None:
        seen.append((api.counts("octavo_request_success_total"), api.service.admission.num_prompts))
        take(message)

    call.sent = type("Noted", (list,), {"append": lambda _, message: note(message)})()
    await call.task
    n = fields.get("n", 1)
    assert seen[-1] == ({"stop" if "stop" in fields else "length": n}, 0)
    assert settled == ([False] if "stop" in fields else [])


# ---------------------------------------------------------------- admission over HTTP


def problem(call: Call | httpx.Response, status: int = 503) -> dict[str, Any]:
    body = json.loads(call.text)
    assert (call.status if isinstance(call, Call) else call.status_code) == status, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert int(call.headers["retry-after"]) >= 1
    return body["error"]  # type: ignore[no-any-return]


async def test_over_the_bound_is_503_and_room_is_used_again() -> None:
    go = asyncio.Event()

    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        yield accepted(request_id)
        yield go
        yield from say(request_id, ["done"], params)

    api = Api(script, max_num_queued_reqs=4)  # the scripted engine runs 8
    calls = [api.call(stream=bool(number % 2)) for number in range(40)]
    await until(lambda: sum(call.task.done() for call in calls) == 28)
    refused = [call for call in calls if call.task.done()]
    await until(lambda: len(api.client.asked) == 12)
    for call in refused:
        error = problem(call)
        assert error["code"] == "overloaded"
        assert "max_num_queued_reqs (4)" in error["message"]
    assert api.counts("octavo_requests_rejected_total") == {"queue_full": 28}
    go.set()
    for call in calls:
        await call.wait_end()
    assert len(api.client.asked) == 12, "a refused request reached the engine"
    assert sum("done" in call.text or call.text.count("data:") == 5 for call in calls) == 12
    again = api.call()
    await again.wait_end()
    assert again.status == 200
    api.check_empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_waits_for_no_other_turn_of_the_event_loop(stream: bool) -> None:
    """A busy loop's turns are long, and those of a crowd that wait for one place would wait through several."""
    api = Api(silent, max_num_queued_reqs=0)
    held = [api.call() for _ in range(7)]  # the scripted engine runs 8
    await until(lambda: api.service.admission.num_prompts == 7)
    crowd = [api.call(stream=stream) for _ in range(20)]
    batch = api.call(prompt=["a", "b"], stream=stream)  # one would find a place at the door, two find none
    for _ in range(2):  # each call's own task, and the one that notes its end
        await asyncio.sleep(0)
    refused = [call for call in crowd if call.task.done()]
    assert len(refused) == 19
    assert {problem(call)["code"] for call in [*refused, batch]} == {"overloaded"}
    for call in [*held, *crowd]:
        call.leave()
        await call.wait_end()
    api.check_empty()


async def test_a_place_is_given_back_where_the_stream_never_began(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(wanted: Wanted, scope: Any, receive: Any, work: Coroutine[Any, Any, Any]) -> None:
        work.close()
        raise shutting_down()

    monkeypatch.setattr(Wanted, "run", ended)
    api = Api(silent)
    call = api.call(stream=True)
    await call.wait_end()
    assert problem(call)["code"] == "shutting_down"
    api.check_empty()


async def test_a_batch_beyond_the_bound_is_400_and_names_the_setting() -> None:
    api = Api(silent, max_num_queued_reqs=4)
    call = api.call(prompt=["a"] * 13)
    await call.wait_end()
    error = json.loads(call.text)["error"]
    assert call.status == 400
    assert error["param"] == "prompt"
    assert "13 prompts" in error["message"]
    assert "--max-num-queued-reqs" in error["message"]
    api.check_empty()


async def test_waiting_prompt_tokens_are_bounded_before_and_after_tokenising() -> None:
    api = Api(queued, max_num_queued_tokens=40)
    first = api.call(prompt="x" * 30)
    await until(lambda: api.service.admission.num_queued_tokens == 30)
    ids = api.call(prompt=[65] * 11)
    await ids.wait_end()
    assert "max_num_queued_tokens" in problem(ids)["message"]
    text = api.call(prompt="x" * 11)  # about 3 by the estimate, 11 in truth
    await text.wait_end()
    assert problem(text)["code"] == "overloaded"
    assert api.counts("octavo_requests_rejected_total") == {"queued_tokens": 2}
    assert len(api.client.asked) == 1
    first.leave()
    await first.wait_end()
    api.check_empty()


@pytest.mark.parametrize(("path", "param"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
async def test_a_hopelessly_long_text_costs_little(path: str, param: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning is tokenised, not the whole, and it takes no more room in the queue than one that fits."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, *how: object, **more: object) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, *how, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "encode", spy)
    api = Api(queued, max_num_queued_tokens=100)
    text = "x" * 1_000_000
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    first = api.call(prompt=[65] * 30)
    await until(lambda: api.service.admission.num_queued_tokens == 30)
    lengths.clear()
    call = Call(api.app, path, body)
    await call.wait_end()
    assert call.status == 400
    error = json.loads(call.text)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 64 tokens" in error["message"]
    assert sum(lengths) < 2000
    first.leave()
    await first.wait_end()
    api.check_empty()


async def test_far_too_many_token_ids_never_reach_the_engine() -> None:
    api = Api(queued)
    call = api.call(prompt=[65] * 129)  # the context has 64
    await call.wait_end()
    assert (call.status, json.loads(call.text)["error"]["code"]) == (400, "context_length_exceeded")
    assert not api.client.asked
    left_to_the_engine = api.call(prompt=[65] * 128)
    await until(lambda: len(api.client.asked) == 1)
    left_to_the_engine.leave()
    await left_to_the_engine.wait_end()
    api.check_empty()


async def test_a_text_of_few_tokens_may_have_many_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of spaces that a tokenizer drops."""
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **terms: encode(self, text.strip() or "a", **terms))
    api = Api(chatter)
    call = api.call(prompt=" " * 100_000)
    await call.wait_end()
    assert call.status == 200
    api.check_empty()


async def test_tokenizing_is_bounded_too() -> None:
    api = Api(silent, STUCK, max_num_queued_reqs=0)
    body = {"messages": [{"role": "user", "content": "a"}]}
    calls = [Call(api.app, "/tokenize", body) for _ in range(9)]  # 8 at once
    await until(lambda: any(call.task.done() for call in calls))
    (refused,) = (call for call in calls if call.task.done())
    assert problem(refused)["code"] == "overloaded"
    assert api.service.tokenizing.num_prompts == 8
    for call in calls:
        call.task.cancel()
    await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
    api.check_empty()


async def test_while_the_engine_is_dead_nothing_is_tokenised() -> None:
    api = Api(silent)
    api.client.dead = True
    for path in (COMPLETIONS, CHAT):
        call = api.call(path, stream=path == CHAT)
        await call.wait_end()
        assert problem(call)["code"] == "engine_dead"
    assert api.counts("octavo_requests_rejected_total") == {"engine_dead": 2}
    api.check_empty()


async def test_while_it_drains_only_watchers_are_answered() -> None:
    api = Api(speaking)
    running = api.call(stream=True)
    await running.wait_sent(2)
    api.drain.begin()
    transport = httpx.ASGITransport(api.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for method, path in [
            ("POST", COMPLETIONS), ("POST", "/tokenize"), ("GET", "/v1/models"), ("GET", "/nowhere"),
            ("GET", "/health"), ("GET", "/health/ready"),
        ]:  # fmt: skip
            answer = await http.request(method, path, json={} if method == "POST" else None)
            assert problem(answer)["code"] == "shutting_down", path
            assert answer.headers["connection"] == "close"
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
    assert api.counts("octavo_requests_rejected_total") == {"shutting_down": 4}
    assert api.drain.num_running == 1
    assert not running.task.done()
    assert not await api.drain.wait_idle(0.01)
    running.leave()
    assert await api.drain.wait_idle(PATIENCE)
    await running.wait_end()
    api.check_empty()
