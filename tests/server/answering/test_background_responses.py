"""Answers that are made in the background: polling, streams that are resumed, ends of all kinds, restarts, keys."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_client import say
from support.conversing import Conversing, file_in, kinds, read_events, saying

from server.admission import Admission
from server.answering import background
from server.response_store import ResponseStore, StoreError

PATH = "/v1/responses"
LATER: dict[str, Any] = {"input": "hi", "background": True}


class Held:
    """An app whose model says three letters, waits, and says the rest."""

    def __init__(self, folder: Path, **settings: Any):
        self.gate = asyncio.Event()

        def script(request_id: str, source: Any, params: Any) -> Any:
            said = list(say(request_id, ["abcdef\0"], params, "stop"))
            return [*said[:4], self.gate, *said[4:]]

        self.api = Conversing(script, response_store=file_in(folder), **settings)


async def status_of(api: Conversing, id_: str, **headers: str) -> dict[str, Any]:
    answer = await api.ask("GET", f"{PATH}/{id_}", **headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def until(api: Conversing, id_: str, wanted: str, **headers: str) -> dict[str, Any]:
    """The answer, once it has that status; before the engine has accepted it, it is not there."""
    while (shown := (await api.ask("GET", f"{PATH}/{id_}", **headers)).json()).get("status") != wanted:
        await asyncio.sleep(0.005)
    return dict(shown)


async def idle(api: Conversing) -> None:
    while api.service.background or api.service.drain.num_running:
        await asyncio.sleep(0.001)


def test_an_answer_is_made_without_its_client_and_polled(tmp_path: Path) -> None:
    held = Held(tmp_path)

    async def work(api: Conversing) -> None:
        made = (await api.ask("POST", PATH, LATER)).json()
        assert made["status"] in ("queued", "in_progress")
        assert (made["background"], made["output"], made["store"]) == (True, [], True)
        shown = await until(api, made["id"], "in_progress")
        assert shown["output"] == []
        going_on = await api.ask("POST", PATH, {"input": "b", "previous_response_id": made["id"]})
        assert "it has not ended yet" in going_on.json()["error"]["message"]
        assert going_on.json()["error"]["code"] == "response_not_completed"
        held.gate.set()
        final = await until(api, made["id"], "completed")
        assert final["output"][0]["content"][0]["text"] == "abcdef"
        assert final["usage"]["output_tokens"] == 7
        assert (await api.ask("POST", f"{PATH}/{made['id']}/cancel")).json() == final  # it has ended
        await idle(api)
        again = await api.ask("POST", PATH, {"input": "b", "previous_response_id": made["id"]})
        assert again.status_code == 200
        assert api.service.admission.num_prompts == 0

    held.api.run(work)
    assert os.listdir(tmp_path) == ["responses.db"]


def test_the_client_starts_leaves_and_resumes_a_stream(tmp_path: Path) -> None:
    held = Held(tmp_path)

    async def work(api: Conversing) -> None:
        async with api.openai() as client:
            held.gate.set()
            stream = await client.responses.create(model="org/fake", input="hi", background=True, stream=True)
            whole = [event async for event in stream]
            id_ = whole[0].response.id  # type: ignore[union-attr]
            resumed = await client.responses.retrieve(id_, stream=True, starting_after=3)
            assert [event async for event in resumed] == whole[4:]
            assert [event.sequence_number for event in whole] == list(range(len(whole)))
            kinds = [event.type for event in whole]
            assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
            assert kinds[-1] == "response.completed"
            shown = await client.responses.retrieve(id_)
            assert whole[-1].response == shown  # type: ignore[union-attr]
            assert shown.output_text == "abcdef"

    held.api.run(work)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_stream_is_followed_while_it_grows(tmp_path: Path, elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that makes it, and in another, which reads the store."""
    monkeypatch.setattr(background, "_WRITE_INTERVAL", 0.0)
    monkeypatch.setattr(background, "_LOOK_INTERVAL", 0.001)
    held = Held(tmp_path)

    async def work(api: Conversing) -> None:
        made = (await api.ask("POST", PATH, {**LATER, "stream": False})).json()
        refused = await api.ask("GET", f"{PATH}/{made['id']}?stream=true")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
        client = asyncio.create_task(api.ask("POST", PATH, {**LATER, "stream": True}))
        while len(api.service.background) < 2:
            await asyncio.sleep(0.001)
        id_ = list(api.service.background)[-1]
        await until(api, id_, "in_progress")
        hidden = dict(api.service.background)
        if elsewhere:
            api.service.background.clear()
        followed: AsyncIterator[str] = background.follow(api.service, id_, None, 1)
        text = ""
        while "abc" not in text.replace('"delta":"', "").replace('"', "") and text.count("output_text.delta\n") < 3:
            text += await anext(followed)
        held.gate.set()
        async for events in followed:
            text += events
        whole = (await client).text
        api.service.background.update(hidden)
        assert whole.endswith(text)
        assert len(read_events(text)) == len(read_events(whole)) - 2
        for id_ in hidden:
            await until(api, id_, "completed")

    held.api.run(work)


@pytest.mark.parametrize("streamed", [False, True])
def test_it_can_be_cancelled(tmp_path: Path, streamed: bool) -> None:
    held = Held(tmp_path)

    async def work(api: Conversing) -> None:
        client = asyncio.create_task(api.ask("POST", PATH, {**LATER, "stream": streamed}))
        while not api.service.background:
            await asyncio.sleep(0.001)
        (id_,) = api.service.background
        await client if not streamed else None
        await until(api, id_, "in_progress")
        cancelled = (await api.ask("POST", f"{PATH}/{id_}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        shown = await until(api, id_, "cancelled")
        assert shown["output"] == cancelled["output"] != []
        assert shown["output"][0]["status"] == "incomplete"
        assert (await api.ask("POST", f"{PATH}/{id_}/cancel")).json() == shown
        if streamed:
            assert read_events((await client).text)[-1][1]["response"] == shown
        assert len(api.client.cut_short) == 1

    held.api.run(work)


def test_deleting_it_ends_it(tmp_path: Path) -> None:
    held = Held(tmp_path)

    async def work(api: Conversing) -> None:
        id_ = (await api.ask("POST", PATH, {**LATER})).json()["id"]
        await until(api, id_, "in_progress")
        assert (await api.ask("DELETE", f"{PATH}/{id_}")).json()["deleted"] is True
        await idle(api)
        assert (await api.ask("GET", f"{PATH}/{id_}")).status_code == 404
        assert len(api.client.cut_short) == 1

    held.api.run(work)


def test_what_a_killed_process_was_making_has_failed(tmp_path: Path) -> None:
    """The file as the process leaves it; another process that lives keeps its own."""
    held = Held(tmp_path)
    left = tmp_path / "left"
    left.mkdir()

    async def work(api: Conversing) -> tuple[str, str]:
        polled = (await api.ask("POST", PATH, LATER)).json()["id"]
        client = asyncio.create_task(api.ask("POST", PATH, {**LATER, "stream": True}))
        while len(api.service.background) < 2:
            await asyncio.sleep(0.001)
        streamed = next(id_ for id_ in api.service.background if id_ != polled)
        for id_ in (polled, streamed):
            await until(api, id_, "in_progress")
        beside = ResponseStore(file_in(tmp_path), max_age=1e6, max_size=1 << 20)
        async with beside.opened():
            seen = await beside.get(polled, None)
            assert seen is not None
            assert not seen.ended
        for path in tmp_path.glob("responses.db*"):
            shutil.copy(path, left)
        held.gate.set()
        await client
        await until(api, polled, "completed")
        return polled, streamed

    polled, streamed = held.api.run(work)
    assert len(list(left.glob("*.lock"))) == 1

    async def look(api: Conversing) -> None:
        for id_ in (polled, streamed):
            shown = await status_of(api, id_)
            assert shown["status"] == "failed"
            assert shown["error"]["code"] == "server_error"
            assert "The server stopped before the answer was complete" in shown["error"]["message"]
        events = read_events((await api.ask("GET", f"{PATH}/{streamed}?stream=true")).text)
        assert events[-1][0] == "response.failed"
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        resumed = await api.ask("GET", f"{PATH}/{streamed}?stream=true&starting_after={len(events) - 2}")
        assert read_events(resumed.text) == events[-1:]
        for seen in (len(events) - 1, len(events) + 5):  # the client had events that the store did not get
            resumed = await api.ask("GET", f"{PATH}/{streamed}?stream=true&starting_after={seen}")
            name, data = events[-1]
            assert read_events(resumed.text) == [(name, data | {"sequence_number": seen + 1})]

    Conversing(saying("ok"), response_store=file_in(left)).run(look)
    assert os.listdir(left) == ["responses.db"]


def test_it_fails_when_the_service_stops(tmp_path: Path) -> None:
    held = Held(tmp_path)

    async def work(api: Conversing) -> str:
        id_ = str((await api.ask("POST", PATH, LATER)).json()["id"])
        await until(api, id_, "in_progress")
        assert api.service.drain.num_running == 1  # so that a stop waits for it
        api.service.drain.interrupt()
        await idle(api)
        return id_

    id_ = held.api.run(work)
    held.api.start()
    shown = held.api.run(lambda api: status_of(api, id_))
    assert (shown["status"], shown["output"][0]["content"][0]["text"]) == ("failed", "abcd")
    assert "shutting down" in shown["error"]["message"]


def test_a_disk_that_is_full_at_the_end_fails_it(tmp_path: Path) -> None:
    held = Held(tmp_path)

    async def work(api: Conversing) -> None:
        store = api.service.response_store
        assert store is not None
        id_ = (await api.ask("POST", PATH, LATER)).json()["id"]
        await until(api, id_, "in_progress")
        store._max_size = 10
        held.gate.set()
        await idle(api)
        assert (await status_of(api, id_))["status"] == "failed"
        refused = await api.ask("POST", PATH, LATER)
        assert refused.status_code == 500
        await idle(api)
        assert api.service.admission.num_prompts == 0

    held.api.run(work)


def test_events_that_could_not_be_written_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_WRITE_INTERVAL", 0.0)
    held = Held(tmp_path)
    failures = ["full", "full"]

    async def work(api: Conversing) -> None:
        store = api.service.response_store
        assert store is not None
        update = store.update

        async def failing(*ids: Any, **news: Any) -> bool:
            if failures:
                raise StoreError(failures.pop())
            return await update(*ids, **news)

        monkeypatch.setattr(store, "update", failing)
        held.gate.set()
        whole = (await api.ask("POST", PATH, {**LATER, "stream": True})).text
        await idle(api)
        id_ = read_events(whole)[0][1]["response"]["id"]
        assert (await api.ask("GET", f"{PATH}/{id_}?stream=true")).text == whole

    held.api.run(work)
    assert not failures


def test_it_counts_among_its_key_s_requests_until_it_ends(tmp_path: Path) -> None:
    keys = ("first-key-of-length", "second-key-of-length")
    held = Held(tmp_path, api_key=keys, key_max_concurrency=1)
    mine, other = ({"authorization": f"Bearer {key}"} for key in keys)

    async def work(api: Conversing) -> None:
        id_ = (await api.ask("POST", PATH, LATER, **mine)).json()["id"]
        shown = await until(api, id_, "in_progress", **mine)  # looking is free
        for path in ("", "?stream=true", "/cancel"):
            method = "POST" if path == "/cancel" else "GET"
            assert (await api.ask(method, f"{PATH}/{id_}{path}", **other)).status_code == 404
        refused = await api.ask("POST", PATH, {"input": "b"}, **mine)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        held.gate.set()
        assert (await api.ask("POST", PATH, {"input": "b"}, **other)).status_code == 200
        shown = await until(api, id_, "completed", **mine)
        await idle(api)
        assert (await api.ask("POST", PATH, {"input": "b"}, **mine)).status_code == 200
        assert json.dumps(shown)

    held.api.run(work)


@asynccontextmanager
async def full(api: Conversing) -> AsyncIterator[None]:
    """While this lasts, there is no room for a further prompt."""
    admission = api.service.admission
    assert isinstance(admission, Admission)
    with admission.reserve(admission.max_prompts, 0):
        assert (await api.ask("POST", PATH, {"input": "now"})).status_code == 503
        yield


@pytest.mark.parametrize("streamed", [False, True])
def test_it_waits_for_room(tmp_path: Path, streamed: bool) -> None:
    api = Conversing(saying("abcdef"), response_store=file_in(tmp_path), max_num_queued_reqs=2)

    async def work(api: Conversing) -> None:
        async with full(api):
            clients = [asyncio.create_task(api.ask("POST", PATH, {**LATER, "stream": streamed})) for _ in range(2)]
            while api.service.queueing.num_inside < 2:
                await asyncio.sleep(0.001)
            for id_ in api.service.background:
                shown = await until(api, id_, "queued")
                assert (shown["output"], shown["background"]) == ([], True)
            refused = await api.ask("POST", PATH, LATER)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert not api.prompts
            ids = list(api.service.background)
        for client, id_ in zip(clients, ids, strict=True):
            final = await until(api, id_, "completed")
            assert final["output"][0]["content"][0]["text"] == "abcdef"
            if streamed:
                events = read_events((await client).text)
                assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
                assert kinds(events)[:3] == ["response.created", "response.queued", "response.in_progress"]
                assert events[-1][1]["response"] == final
                stored = await api.ask("GET", f"{PATH}/{id_}?stream=true")
                assert read_events(stored.text) == events
        await idle(api)
        assert api.service.admission.num_prompts == 0
        assert not api.service.running_responses

    api.run(work)


@pytest.mark.parametrize("ending", ["cancel", "delete", "deadline", "stop"])
def test_the_wait_ends_without_room(tmp_path: Path, ending: str) -> None:
    api = Conversing(saying("abcdef"), response_store=file_in(tmp_path))
    body = {**LATER, "stream": True, "request_timeout": 0.05 if ending == "deadline" else 60}

    async def work(api: Conversing) -> None:
        async with full(api):
            client = asyncio.create_task(api.ask("POST", PATH, body))
            while not api.service.queueing.num_inside:
                await asyncio.sleep(0.001)
            (id_,) = api.service.background
            if ending == "cancel":
                await until(api, id_, "queued")
                assert (await api.ask("POST", f"{PATH}/{id_}/cancel")).json()["status"] == "cancelled"
            elif ending == "delete":
                await until(api, id_, "queued")
                assert (await api.ask("DELETE", f"{PATH}/{id_}")).json()["deleted"] is True
            elif ending == "stop":
                await until(api, id_, "queued")
                api.service.drain.interrupt()
                await client
                await idle(api)
                store = api.service.response_store
                kept = None if store is None else await store.get(id_, None)
                assert kept is not None
                assert json.loads(kept.frame)["status"] == "failed"
                assert "shutting down" in kept.frame
                return
            events = read_events((await client).text)
            await idle(api)
            final = events[-1][1]["response"]
            if ending in ("cancel", "delete"):
                assert (events[-1][0], final["status"]) == ("response.incomplete", "cancelled")
            else:
                assert (events[-1][0], final["status"]) == ("response.failed", "failed")
                assert "time limit (X-Request-Timeout" in final["error"]["message"]
            if ending == "delete":
                assert (await api.ask("GET", f"{PATH}/{id_}")).status_code == 404
            else:
                assert await status_of(api, id_) == final
            assert not api.prompts
            assert not api.service.queueing.num_inside
            assert not api.service.running_responses

    api.run(work)


def test_a_prompt_that_turns_out_too_long_for_the_queue_waits(tmp_path: Path) -> None:
    """The estimate finds room, and the exact number of tokens does not."""
    api = Conversing(saying("ok"), response_store=file_in(tmp_path), max_num_queued_tokens=200)

    async def work(api: Conversing) -> None:
        admission = api.service.admission
        assert isinstance(admission, Admission)
        with admission.reserve(1, 100):
            id_ = (await api.ask("POST", PATH, {**LATER, "input": "a" * 200})).json()["id"]
            while not api.service.queueing.num_inside:
                await asyncio.sleep(0.001)
            assert (await status_of(api, id_))["status"] == "queued"
        assert (await until(api, id_, "completed"))["output"][0]["content"][0]["text"] == "ok"
        await idle(api)

    api.run(work)


@pytest.mark.parametrize(
    ("body", "stored", "param"),
    [
        (LATER, False, "background"),
        ({**LATER, "store": False}, True, "background"),
        ({**LATER, "input": "a" * 300_000}, True, "input"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(tmp_path: Path, body: Any, stored: bool, param: str) -> None:
    settings = {"response_store": file_in(tmp_path)} if stored else {}
    api = Conversing(saying("ok"), **settings)
    answer = api.post(PATH, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not api.service.background
