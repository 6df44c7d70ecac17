"""/v1/files and /v1/batches, by OpenAI's client in process: answers, refusals, interruptions."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_client import say
from support.conversing import Conversing, saying
from support.service import PATIENCE

from engine import ConfigError
from server.batches import runner as runners
from server.batches import store as stores
from server.batches.store import BatchStore
from server.models.status import ModelStatus

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int, endpoint: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"hi {number}"}], "max_tokens": 9}
    return {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": body | fields}


def jsonl(*lines: Any) -> bytes:
    return b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines)


def parrot(request_id: str, source: Any, params: Any) -> Any:
    """Answers with the prompt."""
    return say(request_id, [f"{source.text}\0"], params, "stop")


class Batching(Conversing):
    """The app with a store."""

    def __init__(self, folder: Path, script: Any = parrot, **settings: Any):
        super().__init__(script, batch_store=str(folder), **settings)


async def uploaded(client: openai.AsyncOpenAI, content: bytes) -> str:
    return (await client.files.create(file=("in.jsonl", content), purpose="batch")).id


async def begun(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    id_ = await uploaded(client, content)
    return await client.batches.create(input_file_id=id_, endpoint=endpoint, **{"completion_window": "24h", **fields})


async def ended(client: openai.AsyncOpenAI, id_: str) -> Any:
    """The batch, once it has ended."""
    async with asyncio.timeout(PATIENCE):
        while (batch := await client.batches.retrieve(id_)).status not in ENDED:
            await asyncio.sleep(0.01)
    return batch


async def entries(client: openai.AsyncOpenAI, id_: str | None) -> list[dict[str, Any]]:
    if id_ is None:
        return []
    return [json.loads(item) for item in (await client.files.content(id_)).text.splitlines()]


def test_a_batch_is_answered(tmp_path: Path) -> None:
    async def scene(api: Conversing) -> None:
        client = api.openai()
        wrong = line(2, top_p=7)
        batch = await begun(client, jsonl(line(1), wrong, b"", line(3)), metadata={"a": "b"})
        assert (batch.status, batch.metadata, batch.expires_at - batch.created_at) == ("validating", {"a": "b"}, 86400)
        batch = await ended(client, batch.id)
        assert (batch.status, batch.completed_at is not None, batch.errors) == ("completed", True, None)
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        good, bad = await entries(client, batch.output_file_id), await entries(client, batch.error_file_id)
        assert [entry["custom_id"] for entry in good] == ["line-1", "line-3"]
        assert all(set(entry) == {"id", "custom_id", "response", "error"} for entry in (*good, *bad))
        assert [entry["response"]["body"]["choices"][0]["message"]["content"] for entry in good] == [
            "user:hi 1;assistant:", "user:hi 3;assistant:",
        ]  # fmt: skip
        assert (bad[0]["custom_id"], bad[0]["response"]["status_code"]) == ("line-2", 400)
        assert bad[0]["response"]["body"]["error"]["param"] == "top_p"
        assert {terms["priority"] for terms in api.client.terms.values()} == {2**31 - 1}
        output = await client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.bytes) == ("batch_output", len((await client.files.content(output.id)).content))

    Batching(tmp_path).run(scene)
    assert oct((tmp_path / "batches.db").stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/decisions", {"input": "hi"}),
    ],
)
def test_every_endpoint_has_its_own_answers(tmp_path: Path, endpoint: str, body: dict[str, Any]) -> None:
    async def scene(api: Conversing) -> None:
        client = api.openai()
        item = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        batch = await ended(client, (await begun(client, jsonl(item), endpoint)).id)
        (entry,) = await entries(client, batch.output_file_id or batch.error_file_id)
        direct = await api.ask("POST", endpoint, body)
        assert entry["response"]["status_code"] == direct.status_code
        assert set(entry["response"]["body"]) == set(direct.json())

    Batching(tmp_path).run(scene)


def test_files_are_listed_and_deleted(tmp_path: Path) -> None:
    async def scene(api: Conversing) -> None:
        client = api.openai()
        ids = [await uploaded(client, jsonl(line(number))) for number in range(3)]
        page = await client.files.list(limit=2)
        assert [file.id for file in page.data] == ids[:0:-1]
        assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
        assert (await client.files.list(purpose="batch_output")).data == []
        assert (await client.files.content(ids[0])).content == jsonl(line(0))
        assert (await client.files.delete(ids[0])).deleted
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="There is no file"):
                await call(ids[0])
        assert not (tmp_path / ids[0]).exists()

    Batching(tmp_path).run(scene)


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line(1), b"{no"], "invalid_json_line", 2),
        ([[1]], "invalid_json_line", 1),
        ([line(1), line(1)], "duplicate_custom_id", 2),
        ([line(1) | {"custom_id": 7}], "invalid_custom_id", 1),
        ([line(1) | {"method": "GET"}], "invalid_method", 1),
        ([line(1) | {"url": "/v1/embeddings"}], "invalid_url", 1),
        ([line(1) | {"body": None}], "invalid_body", 1),
        ([line(1, stream=True)], "invalid_body", 1),
        ([line(1, model="gpt")], "model_not_found", 1),
        ([line(1, model=["gpt"])], "model_not_found", 1),
        ([], "empty_file", None),
    ],
)
def test_a_wrong_file_fails_before_it_begins(tmp_path: Path, lines: list[Any], code: str, number: int | None) -> None:
    async def scene(api: Conversing) -> None:
        client = api.openai()
        batch = await ended(client, (await begun(client, jsonl(*lines))).id)
        assert (batch.status, batch.output_file_id) == ("failed", None)
        (problem,) = batch.errors.data
        assert (problem.code, problem.line) == (code, number)
        assert problem.message.endswith(".")
        assert not api.client.asked

    Batching(tmp_path).run(scene)


def test_what_is_refused(tmp_path: Path) -> None:
    async def scene(api: Conversing) -> None:
        client = api.openai()
        id_ = await uploaded(client, jsonl(line(1)))
        for fields, message in (
            ({"endpoint": "/v1/audio/transcriptions"}, "endpoint must be one of /v1/completions"),
            ({"endpoint": "/v1/classify"}, "org/fake cannot serve /v1/classify"),
            ({"completion_window": "99d"}, "completion_window must be from 1h to 30d, got '99d'"),
            ({"completion_window": "soon"}, "completion_window: "),
            ({"input_file_id": "file-1"}, "There is no file 'file-1' with purpose batch"),
        ):
            given: Any = {"input_file_id": id_, "endpoint": CHAT, "completion_window": "24h"} | fields
            with pytest.raises(openai.BadRequestError, match=message):
                await client.batches.create(**given)
        with pytest.raises(openai.BadRequestError, match="purpose must be batch, got 'assistants'"):
            await client.files.create(file=b"a", purpose="assistants")
        with pytest.raises(openai.BadRequestError, match="--batch-store-max-size"):
            await uploaded(client, b" " * 2000)
        with pytest.raises(openai.NotFoundError, match="There is no batch 'b'"):
            await client.batches.cancel("b")

    Batching(tmp_path, batch_store_max_size=1000).run(scene)


def test_without_a_folder_the_setting_is_named() -> None:
    async def scene(api: Conversing) -> None:
        for call in (api.openai().files.list(), api.openai().batches.list()):
            with pytest.raises(openai.BadRequestError, match="--batch-store"):
                await call

    Conversing(saying("a")).run(scene)


def test_a_foreign_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "batches.db").write_text("something else, which is long enough to be read as a database" * 20)
    with pytest.raises(ConfigError, match="batch_store"):
        BatchStore(tmp_path, 10**6)


def test_keys_do_not_see_each_other(tmp_path: Path) -> None:
    keys = [f"key-{name}-0123456789-0123456789-0123456789" for name in "ab"]

    async def scene(api: Conversing) -> None:
        first, second = map(api.openai, keys)
        batch = await begun(first, jsonl(line(1)))
        assert await entries(first, (await ended(first, batch.id)).output_file_id)
        assert (await second.batches.list()).data == []
        assert (await second.files.list()).data == []
        for call in (second.batches.retrieve(batch.id), second.files.content(batch.input_file_id)):
            with pytest.raises(openai.NotFoundError):
                await call
        assert {terms["tenant"] is not None for terms in api.client.terms.values()} == {True}

    Batching(tmp_path, api_key=tuple(keys)).run(scene)


class Held:
    """A script whose answers wait until they are let go.

    Attributes:
        begun: prompts in the engine.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gate = asyncio.Event()

    def __call__(self, request_id: str, source: Any, params: Any) -> Any:
        self.begun.append(source.text)
        deltas = say(request_id, ["a\0"], params, "stop")
        return [deltas[0], self.gate, *deltas[1:]]

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.begun) < count:
                await asyncio.sleep(0.01)


def test_no_line_begins_while_a_client_waits(tmp_path: Path) -> None:
    held = Held()

    async def scene(api: Conversing) -> None:
        client = api.openai()
        asked = asyncio.create_task(api.ask("POST", CHAT, line(0)["body"]))
        await held.wait(1)
        batch = await begun(client, jsonl(*map(line, range(1, 6))))
        for _ in range(20):  # the runner has had its turns
            assert (await client.batches.retrieve(batch.id)).status in ("validating", "in_progress")
            await asyncio.sleep(0.01)
        assert len(held.begun) == 1
        held.gate.set()
        assert (await asked).status_code == 200
        assert (await ended(client, batch.id)).request_counts.completed == 5
        assert len(held.begun) == 6

    Batching(tmp_path, held).run(scene)


def test_lines_do_not_wait_behind_clients_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, one at a time is an ordinary request, even if all have begun in the background."""
    monkeypatch.setattr(runners, "_PATIENCE", 0.05)
    background, ordinary = Held(), Held()

    def script(request_id: str, source: Any, params: Any) -> Any:
        is_line = api.client.terms[request_id]["priority"] or "hi 0;" not in source.text
        if not is_line:
            return background(request_id, source, params)
        return (background if api.client.terms[request_id]["priority"] else ordinary)(request_id, source, params)

    async def scene(api: Conversing) -> None:
        client = api.openai()
        batch = await begun(client, jsonl(line(1)))
        await background.wait(1)  # it has begun, and the engine computes nothing for it
        asked = asyncio.create_task(api.ask("POST", CHAT, line(0)["body"]))
        other = await begun(client, jsonl(line(2)))
        await ordinary.wait(1)
        await asyncio.sleep(0.2)
        assert len(ordinary.begun) == 1, "one at a time"
        ordinary.gate.set()
        for id_ in (batch.id, other.id):
            assert (await ended(client, id_)).request_counts.completed == 1
        assert sorted(ordinary.begun) == ["user:hi 1;assistant:", "user:hi 2;assistant:"]
        assert not asked.done()
        background.gate.set()
        assert (await asked).status_code == 200

    api = Batching(tmp_path, script)
    api.run(scene)


def test_lines_take_no_clients_room(tmp_path: Path) -> None:
    held = Held()

    async def scene(api: Conversing) -> None:
        client = api.openai()
        batch = await begun(client, jsonl(*map(line, range(8))))
        await held.wait(8)  # as many as fit
        asked = [asyncio.create_task(api.ask("POST", CHAT, line(0)["body"])) for _ in range(9)]
        await held.wait(17)
        held.gate.set()
        assert [(await each).status_code for each in asked] == [200] * 9
        assert (await ended(client, batch.id)).request_counts.completed == 8

    Batching(tmp_path, held, max_num_queued_reqs=1).run(scene)


def test_no_more_lines_run_than_are_allowed(tmp_path: Path) -> None:
    held = Held()

    async def scene(api: Conversing) -> None:
        client = api.openai()
        batch = await begun(client, jsonl(*map(line, range(5))))
        await held.wait(2)
        await asyncio.sleep(0.1)
        assert len(held.begun) == 2
        held.gate.set()
        assert (await ended(client, batch.id)).request_counts.completed == 5

    Batching(tmp_path, held, batch_max_running=2).run(scene)


def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    held = Held()

    def script(request_id: str, source: Any, params: Any) -> Any:
        quick = "hi 0;" in source.text
        return say(request_id, ["a\0"], params, "stop") if quick else held(request_id, source, params)

    async def scene(api: Conversing) -> None:
        client = api.openai()
        batch = await begun(client, jsonl(*map(line, range(3))))
        await held.wait(1)
        with pytest.raises(openai.BadRequestError, match="Cancel that batch first"):
            await client.files.delete(batch.input_file_id)
        with pytest.raises(openai.RateLimitError, match="--batch-max-unfinished"):
            await begun(client, jsonl(line(1)))
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("cancelled", 1, None)
        assert [entry["custom_id"] for entry in await entries(client, batch.output_file_id)] == ["line-0"]
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        assert not api.client.running
        await client.files.delete(batch.input_file_id)

    Batching(tmp_path, script, batch_max_running=1, batch_max_unfinished=1).run(scene)


def test_lines_of_a_model_that_cannot_be_loaded_do_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failed:
        """The models of a service with one that has failed."""

        def find(self, name: str) -> ModelStatus:
            return ModelStatus(name=name, state="failed")

    async def refused(*request: Any) -> tuple[int, str, Any]:
        return 503, "id", {"error": {"code": "model_failed"}}

    async def scene(api: Conversing) -> None:
        runner, client = api.service.batches, api.openai()
        monkeypatch.setattr(runner, "_service", replace(runner._service, models=Failed()))
        monkeypatch.setattr(runner._door, "post", refused)
        batch = await ended(client, (await begun(client, jsonl(line(1, model="x"), line(2, model="x")))).id)
        assert (batch.status, batch.request_counts.failed) == ("completed", 2)
        codes = [entry["response"]["body"]["error"]["code"] for entry in await entries(client, batch.error_file_id)]
        assert codes == ["model_failed"] * 2

    monkeypatch.setattr(runners, "_HOPELESS", 0.1)
    Batching(tmp_path).run(scene)


def test_a_batch_that_cannot_be_ended_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = 0

    async def scene(api: Conversing) -> None:
        nonlocal late
        store, client = api.service.batches.store, api.openai()
        with monkeypatch.context() as meanwhile:  # the service stops before it has read the file
            meanwhile.setattr(store, "hold", lambda: False)
            lines = line(1), b"{", {"custom_id": 7}
            batch = await begun(client, jsonl(*lines), completion_window="1h")
        late = 3601
        broken = await begun(client, jsonl(line(1)))
        store.path(broken.input_file_id).unlink()
        assert (await ended(client, batch.id)).status == "expired"
        missing = await entries(client, (await client.batches.retrieve(batch.id)).error_file_id)
        assert [entry["custom_id"] for entry in missing] == ["line-1"]
        assert (await ended(client, broken.id)).status == "failed"
        good = await begun(client, jsonl(line(1)))
        assert (await ended(client, good.id)).request_counts.completed == 1

    api = Batching(tmp_path)
    store = api.service.batches.store
    before = store.now()
    monkeypatch.setattr(store, "_clock", lambda: before + late)
    api.run(scene)


def test_a_batch_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, late = Held(), 0

    def script(request_id: str, source: Any, params: Any) -> Any:
        quick = "hi 0;" in source.text
        return say(request_id, ["a\0"], params, "stop") if quick else held(request_id, source, params)

    async def scene(api: Conversing) -> None:
        nonlocal late
        client = api.openai()
        batch = await begun(client, jsonl(*map(line, range(3))), completion_window="1h")
        await held.wait(1)
        late = 3601
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("expired", 1)
        assert [entry["custom_id"] for entry in await entries(client, batch.output_file_id)] == ["line-0"]
        missing = await entries(client, batch.error_file_id)
        assert [entry["custom_id"] for entry in missing] == ["line-1", "line-2"]
        assert {entry["error"]["code"] for entry in missing} == {"batch_expired"}

    api = Batching(tmp_path, script, batch_max_running=1)
    store = api.service.batches.store
    before = store.now()
    monkeypatch.setattr(store, "_clock", lambda: before + late)
    api.run(scene)


# ---------------------------------------------------------------- interruptions


class Killed(BatchStore):
    """A store that copies its folder at every moment at which a kill -9 could leave another state."""

    copies: Path

    def _copy(self) -> None:
        number = len(list(self.copies.iterdir()))
        shutil.copytree(self._folder, self.copies / f"{number:03}", ignore=shutil.ignore_patterns("lock", "*-shm"))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._copy()
        with super()._transaction():
            yield
            self._copy()
        self._copy()

    @contextmanager
    def _written(self, id_: str) -> Iterator[Callable[[bytes], int]]:
        with super()._written(id_) as write:
            yield write
            self._copy()
        self._copy()


def test_every_line_is_answered_once_whenever_the_service_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def all_of(api: Conversing) -> None:
        client = api.openai()
        await ended(client, (await begun(client, jsonl(line(0), line(1, top_p=7)))).id)

    async def rest(api: Conversing) -> Counter[str]:
        client = api.openai()
        found: Counter[str] = Counter()
        for batch in (await client.batches.list()).data:
            batch = await ended(client, batch.id)
            assert batch.status == "completed"
            good, bad = await entries(client, batch.output_file_id), await entries(client, batch.error_file_id)
            found.update(entry["custom_id"] for entry in (*good, *bad))
            assert batch.request_counts.model_dump() == {"total": 2, "completed": len(good), "failed": len(bad)}
            files = (await client.files.list()).data
            assert {file.id for file in files} == {batch.input_file_id, batch.output_file_id, batch.error_file_id}
        async with asyncio.timeout(PATIENCE):
            while not api.service.batches.store._tidy:
                await asyncio.sleep(0.001)
        listed = {file.id for file in (await client.files.list()).data}
        assert {path.name for path in api.service.batches.store._folder.glob("file-*")} == listed, (
            "an upload was left behind"
        )
        return found

    Killed.copies = tmp_path / "copies"
    Killed.copies.mkdir()
    monkeypatch.setattr(stores, "BatchStore", Killed)
    Batching(tmp_path / "first", batch_max_running=1).run(all_of)
    monkeypatch.undo()
    moments = sorted(Killed.copies.iterdir())
    found = [Batching(moment).run(rest) for moment in moments]
    assert len(moments) > 16
    assert found[0] == {}, "the batch had not been accepted"
    begun_at = next(index for index, lines in enumerate(found) if lines)
    assert all(lines == {f"line-{number}": 1 for number in range(2)} for lines in found[begun_at:])
    assert begun_at < 8


def test_one_process_answers_and_the_others_serve(tmp_path: Path) -> None:
    async def scene(api: Conversing) -> None:
        client = api.openai()
        batch = await begun(client, jsonl(line(1)))
        other = BatchStore(tmp_path, 10**6)
        try:
            await ended(client, batch.id)
            assert not other.hold()
            assert other.batch(batch.id, None)["status"] == "completed"
        finally:
            other.close()

    Batching(tmp_path).run(scene)
