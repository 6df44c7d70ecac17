"""Stored answers: going on from them, age, size, tenants, restarts, files that are damaged or full."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as chosen
from hypothesis import strategies as st
from support.conversing import PARSERS, THOUGHT_AND_CALLS, WEATHER_SCHEMA, Conversing, file_in, read_events, saying
from support.service import PATIENCE, Service

from engine import ConfigError
from server.response_store import HistoryError, ResponseStore, StoreError

T = TypeVar("T")

PATH = "/v1/responses"
DAY = 86_400.0


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


def within(store: ResponseStore, work: Callable[[ResponseStore], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with store.opened():
            return await work(store)

    return asyncio.run(asyncio.wait_for(run(), 60))


async def keep(
    store: ResponseStore, id_: str, tenant: str | None = None, previous: str | None = None, size: int = 0
) -> None:
    await store.put(
        id_,
        tenant,
        previous=previous,
        frame=json.dumps({"id": id_}),
        input=json.dumps([{"in": id_, "pad": "x" * size}]),
        output=json.dumps([{"out": id_}]),
    )


def make(folder: Path, **limits: Any) -> ResponseStore:
    return ResponseStore(file_in(folder), **{"max_age": DAY, "max_size": 1 << 20, **limits})


# ---------------------------------------------------------------- the store itself


def test_what_is_kept_is_there_until_it_is_deleted(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "a")
        kept = await store.get("a", None)
        assert kept is not None
        assert json.loads(kept.whole()) == {"id": "a", "output": [{"out": "a"}]}
        assert json.loads(kept.input)[0]["in"] == "a"
        assert await store.delete("a", None)
        assert not await store.delete("a", None)
        assert await store.get("a", None) is None

    within(make(tmp_path), work)


def test_a_conversation_is_told_from_its_beginning(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "a")
        await keep(store, "b", previous="a")
        await keep(store, "c", previous="b")
        await keep(store, "other", previous="a")
        told = await store.history("c", None, 10_000)
        assert [item.get("in") or item["out"] for item in told] == ["a", "a", "b", "b", "c", "c"]
        with pytest.raises(HistoryError, match="more than 30 characters") as long:
            await store.history("c", None, 30)
        assert long.value.missing is None
        await store.delete("a", None)
        with pytest.raises(HistoryError, match="an earlier response of its conversation, a,") as gone:
            await store.history("c", None, 10_000)
        assert gone.value.missing == "a"
        with pytest.raises(HistoryError, match="no stored response has the id x"):
            await store.history("x", None, 10_000)

    within(make(tmp_path), work)


def test_a_circle_ends(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "a", previous="b")
        await keep(store, "b", previous="a")
        with pytest.raises(HistoryError, match="more than 4096 turns"):
            await store.history("a", None, 1 << 30)

    within(make(tmp_path), work)


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "a", "one")
        await keep(store, "b", "two", previous="a")
        for stranger in ("two", None, ""):
            assert await store.get("a", stranger) is None
            assert not await store.delete("a", stranger)
            with pytest.raises(HistoryError):
                await store.history("a", stranger, 10_000)
        assert await store.get("a", "one") is not None
        with pytest.raises(HistoryError, match="earlier response"):
            await store.history("b", "two", 10_000)

    within(make(tmp_path), work)


def test_what_is_too_old_is_not_shown_and_then_gone(tmp_path: Path) -> None:
    clock = Clock()

    async def work(store: ResponseStore) -> None:
        await keep(store, "a")
        clock.now += DAY - 1
        await keep(store, "b", previous="a")
        assert await store.get("a", None) is not None
        clock.now += 1
        assert await store.get("a", None) is None
        assert not await store.delete("a", None)
        with pytest.raises(HistoryError, match="no longer stored"):
            await store.history("b", None, 10_000)
        assert store._database.execute("SELECT count(*) FROM responses").fetchone() == (2,)
        await keep(store, "c")
        assert store._database.execute("SELECT id FROM responses ORDER BY id").fetchall() == [("b",), ("c",)]

    within(make(tmp_path, clock=clock), work)


def test_what_is_too_old_goes_without_requests_too(tmp_path: Path) -> None:
    clock = Clock()

    async def fill(store: ResponseStore) -> None:
        for number in range(600):
            await keep(store, f"a{number}")

    async def look(store: ResponseStore) -> None:
        while store._database.execute("SELECT count(*) FROM responses").fetchone() != (0,):
            await asyncio.sleep(0.01)
        assert store._database.execute("SELECT * FROM usage").fetchall() == []

    within(make(tmp_path, clock=clock), fill)
    clock.now += DAY
    within(make(tmp_path, clock=clock), look)


def test_the_tenant_with_the_most_makes_room(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        for number in range(3):
            await keep(store, f"small{number}", "small", size=500)
        for number in range(30):
            await keep(store, f"large{number}", "large", size=500)
        assert [number for number in range(3) if await store.get(f"small{number}", "small")] == [0, 1, 2]
        left = [number for number in range(30) if await store.get(f"large{number}", "large")]
        assert left == list(range(30 - len(left), 30))
        assert 10 < len(left) < 20
        assert store._database.execute("SELECT total(size) FROM usage").fetchone()[0] <= 10_000
        with pytest.raises(StoreError, match=r"an answer of \d+ bytes is larger than the store \(10000 bytes\)"):
            await keep(store, "huge", "large", size=10_000)
        await keep(store, "most", "third", size=9_800)  # all others go
        assert await store.get("most", "third") is not None

    within(make(tmp_path, max_size=10_000), work)


@chosen(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from("pd"), st.integers(0, 7), st.sampled_from("xyz"), st.integers(0, 900)), max_size=60
    )
)
def test_sizes_are_those_of_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, str, int]]
) -> None:
    async def work(store: ResponseStore) -> None:
        made: set[str] = set()
        for what, number, tenant, size in steps:
            id_ = f"{tenant}{number}"
            if what == "p" and id_ not in made:
                await keep(store, id_, tenant, size=size)
                made.add(id_)
                assert await store.get(id_, tenant) is not None
            elif what == "d":
                there = await store.get(id_, tenant) is not None
                assert await store.delete(id_, tenant) == there
            ask = store._database.execute
            sums = dict(
                ask("SELECT tenant, sum(length(frame) + length(input) + length(output)) FROM responses GROUP BY 1")
            )
            assert dict(ask("SELECT tenant, size FROM usage")) == sums
            assert sum(sums.values()) <= 3000

    within(make(tmp_path_factory.mktemp("store"), max_size=3000), work)


def test_the_file_is_for_this_user_alone(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> list[int]:
        await keep(store, "a")
        return [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()]

    modes = within(make(tmp_path), work)
    assert len(modes) == 3  # with the log and its index
    assert set(modes) == {0o600}
    assert os.listdir(tmp_path) == ["responses.db"]


def test_what_a_killed_process_left_beside_the_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "responses.db-0123.lock").touch()
    beside = make(tmp_path)
    beside._presence.announce()

    async def work(store: ResponseStore) -> list[str]:
        await store._run(store._fail_abandoned)
        return sorted(path.name for path in tmp_path.glob("*.lock"))

    assert within(make(tmp_path), work) == [f"responses.db-{beside._presence.name}.lock"]
    beside._close()
    assert not list(tmp_path.glob("*.lock"))


def test_deleted_texts_are_gone_while_the_service_runs(tmp_path: Path) -> None:
    """From the file and from its write-ahead log: at once after a deletion, with the next purge after that of age."""
    clock = Clock()

    def contents() -> bytes:
        return b"".join(part.read_bytes() for part in tmp_path.iterdir() if part.is_file())

    async def work(store: ResponseStore) -> None:
        for name in ("secret-a", "secret-b", "secret-c"):
            await keep(store, name, size=9000)
        await keep(store, "kept", size=9000)
        assert contents().count(b"secret-") > 3
        await store.delete("secret-a", None)
        assert b"secret-a" not in contents()
        assert b"secret-b" in contents()
        clock.now += DAY - 10
        await keep(store, "young")
        clock.now += 20
        await store._run(store._purge_once)
        assert b"secret-" not in contents()
        assert b"young" in contents()

    within(make(tmp_path, clock=clock), work)


def test_deleted_texts_are_overwritten(tmp_path: Path) -> None:
    async def work(store: ResponseStore) -> None:
        await keep(store, "secret-of-mine")
        await store.delete("secret-of-mine", None)

    within(make(tmp_path), work)
    assert b"secret-of-mine" not in Path(file_in(tmp_path)).read_bytes()


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_file_that_is_damaged_is_refused_at_the_start(tmp_path: Path, content: bytes) -> None:
    Path(file_in(tmp_path)).write_bytes(content)
    with pytest.raises(ConfigError, match=r"response_store '.*responses.db' cannot be used: .*move it away"):
        make(tmp_path)
    assert Path(file_in(tmp_path)).read_bytes() == content


def test_a_file_of_something_else_is_refused_at_the_start(tmp_path: Path) -> None:
    database = sqlite3.connect(file_in(tmp_path))
    database.execute("CREATE TABLE mine (a)")
    database.close()
    with pytest.raises(ConfigError, match=r"is not a database of Octavo\. Choose another file"):
        make(tmp_path)


def test_a_new_file_is_opened_by_several_processes_at_once(tmp_path: Path) -> None:
    """Each of them finds no tables, before one has made them."""
    looked = threading.Barrier(4)

    class Late(ResponseStore):
        def _prepare(self, database: sqlite3.Connection) -> None:
            waited = []

            def trace(statement: str) -> None:
                if "journal_mode" in statement and not waited:  # repeated while others write
                    waited.append(looked.wait(60))

            database.set_trace_callback(trace)
            super()._prepare(database)
            database.set_trace_callback(None)

    def open_one(number: int) -> None:
        store = Late(file_in(tmp_path), max_age=DAY, max_size=1 << 20)
        within(store, lambda opened: keep(opened, f"resp_{number}"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(open_one, range(4)))
    for number in range(4):
        assert within(make(tmp_path), lambda store, number=number: store.get(f"resp_{number}", None)) is not None


def test_a_new_file_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    """SQLite refuses at once to change the kind of journal while another connection has the file."""
    other = sqlite3.connect(file_in(tmp_path), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    attempts: list[str] = []

    class Late(ResponseStore):
        def _prepare(self, database: sqlite3.Connection) -> None:
            def trace(statement: str) -> None:
                if "journal_mode" in statement:
                    attempts.append(statement)
                    other.execute("BEGIN IMMEDIATE" if len(attempts) == 1 else "ROLLBACK")

            database.set_trace_callback(trace)
            other.execute("COMMIT")
            super()._prepare(database)
            database.set_trace_callback(None)

    store = Late(file_in(tmp_path), max_age=DAY, max_size=1 << 20)
    within(store, lambda opened: keep(opened, "a"))
    assert len(attempts) == 2
    other.close()


def test_a_file_of_another_version_is_refused_at_the_start(tmp_path: Path) -> None:
    within(make(tmp_path), lambda store: keep(store, "a"))
    database = sqlite3.connect(file_in(tmp_path))
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match=r"another version of Octavo \(it has version 99, this one needs 2\)"):
        make(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"response_store '.*' cannot be opened: .*No such file"):
        make(tmp_path / "none")


# ---------------------------------------------------------------- over HTTP


def store_of(folder: Path, *texts: str, **settings: Any) -> Conversing:
    return Conversing(saying(*texts), response_store=file_in(folder), **settings)


def test_a_conversation_goes_on_from_a_stored_answer(tmp_path: Path) -> None:
    api = store_of(tmp_path, "One.", "Two.", "Three.")

    async def talk(api: Conversing) -> list[dict[str, Any]]:
        first = (await api.ask("POST", PATH, {"input": "a", "instructions": "Be brief."})).json()
        second = await api.ask("POST", PATH, {"input": "b", "previous_response_id": first["id"], "stream": True})
        last = read_events(second.text)[-1][1]["response"]
        third = (await api.ask("POST", PATH, {"input": "c", "previous_response_id": last["id"]})).json()
        return [first, last, third]

    first, second, third = api.run(talk)
    assert api.prompts == [
        "system:Be brief.;user:a;assistant:",
        "user:a;assistant:One.;user:b;assistant:",
        "user:a;assistant:One.;user:b;assistant:Two.;user:c;assistant:",
    ]
    assert [answer["store"] for answer in (first, second, third)] == [True, True, True]
    assert (second["previous_response_id"], third["previous_response_id"]) == (first["id"], second["id"])


def test_calls_go_on_with_their_results_alone(tmp_path: Path) -> None:
    api = store_of(tmp_path, THOUGHT_AND_CALLS, "Fine.", **PARSERS)
    tools = [{"type": "function", "name": "weather", "parameters": WEATHER_SCHEMA}]

    async def talk(api: Conversing) -> Any:
        async with api.openai() as client:
            options: Any = {"model": "org/fake", "tools": tools}
            first = await client.responses.create(input="Weather?", **options)
            results: Any = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "mild"}
                for item in first.output
                if item.type == "function_call"
            ]
            return await client.responses.create(input=results, previous_response_id=first.id, **options)

    assert api.run(talk).output_text == "Fine."
    assert api.prompts[1].count("tool:mild(") == 2
    assert "user:Weather?;assistant:<think>It is about weather.</think>Let me look.[" in api.prompts[1]


def test_a_restart_loses_nothing(tmp_path: Path) -> None:
    api = store_of(tmp_path, "One.", "Two.")
    first = api.post(PATH, {"input": "a", "metadata": {"k": "v"}}).json()
    api.start()

    async def look(api: Conversing) -> tuple[Any, Any]:
        shown = (await api.ask("GET", f"{PATH}/{first['id']}")).json()
        return shown, (await api.ask("POST", PATH, {"input": "b", "previous_response_id": first["id"]})).json()

    shown, second = api.run(look)
    assert shown == first
    assert second["status"] == "completed"
    assert api.prompts[1] == "user:a;assistant:One.;user:b;assistant:"


def test_the_client_shows_lists_and_deletes(tmp_path: Path) -> None:
    async def work(api: Conversing) -> None:
        async with api.openai() as client:
            items: Any = [{"role": "user", "content": str(number)} for number in range(25)]
            made = await client.responses.create(model="org/fake", input=items)
            shown = await client.responses.retrieve(made.id)
            assert shown.output_text == made.output_text == "One."
            page = await client.responses.input_items.list(made.id, order="asc", limit=10)
            assert [item.content[0].text for item in page.data] == [str(number) for number in range(10)]  # type: ignore[union-attr]
            everything = [item.content[0].text async for item in client.responses.input_items.list(made.id)]  # type: ignore[union-attr]
            assert everything == [str(number) for number in reversed(range(25))]
            await client.responses.delete(made.id)
            for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
                with pytest.raises(Exception, match="There is no response") as missing:
                    await call(made.id)
                assert getattr(missing.value, "status_code", None) == 404

    store_of(tmp_path, "One.").run(work)


def test_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    api = store_of(tmp_path, "One.")
    made = api.post(PATH, {"input": "a", "store": False}).json()
    assert made["store"] is False
    api.start()
    assert api.run(lambda api: api.ask("GET", f"{PATH}/{made['id']}")).status_code == 404


def test_ids_cannot_be_guessed(tmp_path: Path) -> None:
    api = store_of(tmp_path, "One.")

    async def make_many(api: Conversing) -> list[str]:
        return [(await api.ask("POST", PATH, {"input": "a"})).json()["id"] for _ in range(40)]

    ids = api.run(make_many)
    assert all(re.fullmatch(r"resp_[0-9a-f]{32}", id_) for id_ in ids)
    numbers = [int(id_.removeprefix("resp_"), 16) for id_ in ids]
    # Version 4 of UUIDs: 122 random bits. Each varies, and no number follows from the one before.
    varying = 0
    for number in numbers:
        varying |= number ^ numbers[0]
    assert varying.bit_count() >= 118
    assert len({abs(a - b) >> 64 for a, b in itertools.pairwise(numbers)}) == len(ids) - 1


def test_keys_are_tenants(tmp_path: Path) -> None:
    keys = ("first-key-of-length", "second-key-of-length")
    api = store_of(tmp_path, "One.", api_key=keys)
    mine, other = ({"authorization": f"Bearer {key}"} for key in keys)

    async def work(api: Conversing) -> None:
        made = (await api.ask("POST", PATH, {"input": "a"}, **mine)).json()
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            answer = await api.ask(method, f"{PATH}/{made['id']}{path}", **other)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            assert (await api.ask(method, f"{PATH}/{made['id']}{path}")).status_code == 401
        going_on = {"input": "b", "previous_response_id": made["id"]}
        refused = await api.ask("POST", PATH, going_on, **other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert (await api.ask("POST", PATH, going_on, **mine)).status_code == 200
        cancelled = await api.ask("POST", f"{PATH}/{made['id']}/cancel", **mine)
        assert (cancelled.status_code, cancelled.json()["error"]["param"]) == (400, "response_id")

    api.run(work)


@pytest.mark.parametrize(
    ("question", "param"),
    [("?stream=true", "stream"), ("?stream=true&starting_after=-2", "starting_after"),
     (f"?stream=true&starting_after={2**63}", "starting_after"),
     ("/input_items?limit=0", "limit"), ("/input_items?limit=101", "limit"),
     ("/input_items?order=up", "order"), ("/input_items?after=msg_x", "after")],
)  # fmt: skip
def test_questions_that_are_wrong_are_refused(tmp_path: Path, question: str, param: str) -> None:
    async def work(api: Conversing) -> Any:
        made = (await api.ask("POST", PATH, {"input": "a"})).json()
        return await api.ask("GET", f"{PATH}/{made['id']}{question}")

    answer = store_of(tmp_path, "One.").run(work)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_long_conversation_is_refused_before_it_is_read(tmp_path: Path) -> None:
    api = store_of(tmp_path, "One.", max_body_size="1KiB")

    async def work(api: Conversing) -> Any:
        id_ = None
        for _ in range(8):
            answer = await api.ask("POST", PATH, {"input": "a" * 200, "previous_response_id": id_})
            if answer.status_code != 200:
                return answer.json()["error"]
            id_ = answer.json()["id"]

    error = api.run(work)
    assert (error["param"], error["code"]) == ("previous_response_id", "context_length_exceeded")


def test_a_full_disk_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    api = store_of(tmp_path, "One.")

    async def work(api: Conversing) -> None:
        store = api.service.response_store
        assert store is not None
        pages = store._database.execute("PRAGMA page_count").fetchone()[0]
        store._database.execute(f"PRAGMA max_page_count = {pages}")
        with caplog.at_level(logging.ERROR):
            made = (await api.ask("POST", PATH, {"input": "a" * 3000})).json()
            streamed = await api.ask("POST", PATH, {"input": "a" * 3000, "stream": True})
        last = read_events(streamed.text)[-1][1]["response"]
        for answer in (made, last):
            assert (answer["status"], answer["store"]) == ("completed", False)
            assert answer["output"][0]["content"][0]["text"] == "One."
            assert (await api.ask("GET", f"{PATH}/{answer['id']}")).status_code == 404
        assert caplog.text.count("The response store failed: ") == 1
        assert "full" in caplog.text
        assert "octavo_response_store_failures_total 2.0" in (await api.ask("GET", "/metrics")).text
        store._database.execute("PRAGMA max_page_count = 100000")
        healed = (await api.ask("POST", PATH, {"input": "a" * 3000})).json()
        assert healed["store"] is True
        assert (await api.ask("GET", f"{PATH}/{healed['id']}")).json() == healed

    api.run(work)


def test_a_file_that_is_damaged_meanwhile_costs_its_own_requests_alone(tmp_path: Path) -> None:
    api = store_of(tmp_path, "One.")

    async def fill(api: Conversing) -> str:
        return str([(await api.ask("POST", PATH, {"input": "a" * 3000})).json()["id"] for _ in range(20)][5])

    id_ = api.run(fill)
    content = bytearray(Path(file_in(tmp_path)).read_bytes())
    content[4096:] = b"\xaa" * (len(content) - 4096)  # all but the table of tables
    Path(file_in(tmp_path)).write_bytes(content)
    api.start()

    async def work(api: Conversing) -> None:
        answer = await api.ask("GET", f"{PATH}/{id_}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        going_on = await api.ask("POST", PATH, {"input": "b", "previous_response_id": id_})
        assert going_on.status_code == 500
        made = (await api.ask("POST", PATH, {"input": "c"})).json()
        assert (made["status"], made["store"]) == ("completed", False)

    api.run(work)


@pytest.mark.slow
def test_a_service_that_is_killed_keeps_what_it_has_said(tmp_path: Path) -> None:
    def start(number: int) -> Service:
        arguments = ("--kv-cache-memory", "64MiB", "--response-store", file_in(tmp_path))
        service = Service(*arguments, log=tmp_path / f"service-{number}.log")
        service.wait_ready()
        return service

    def client_of(service: Service) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    first_service = start(1)
    try:
        with client_of(first_service) as client:
            made = client.responses.create(model="octavo-demo", input="My name is Ada.", temperature=0)
            assert made.store is True  # type: ignore[attr-defined]
            options: Any = {"model": "octavo-demo", "previous_response_id": made.id, "temperature": 0}
            with client.responses.stream(input="What is an octavo?", **options) as stream:
                second = stream.get_final_response()
            kept_on: Any = {"max_output_tokens": 480, "extra_body": {"ignore_eos": True}}
            making = client.responses.create(
                model="octavo-demo", input="A story", background=True, stream=True, **kept_on
            )
            begun: Any = next(iter(making))
    finally:
        first_service.process.kill()
        first_service.process.wait(PATIENCE)
    again = start(2)
    try:
        with client_of(again) as client:
            assert client.responses.retrieve(made.id).output_text == made.output_text
            broken = client.responses.retrieve(begun.response.id)
            assert broken.status == "failed"
            assert broken.error is not None
            assert "The server stopped" in broken.error.message
            repeated = client.responses.create(input="What is an octavo?", **options)
            assert repeated.output_text == second.output_text
            assert client.responses.retrieve(second.id).previous_response_id == made.id
            client.responses.delete(made.id)
            with pytest.raises(openai.BadRequestError, match="earlier response"):
                client.responses.create(model="octavo-demo", input="And?", previous_response_id=second.id)
        assert again.stop() == 0, again.log.read_text()
    finally:
        again.process.kill()
        again.process.wait(PATIENCE)
    assert "Traceback" not in again.log.read_text()
