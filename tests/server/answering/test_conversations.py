"""/v1/conversations: items that are kept, answers in them, limits, tenants, deletion."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.conversing import PARSERS, THOUGHT_AND_CALLS, Conversing, file_in, saying

from server.conversation_store import ConversationTooLargeError
from server.response_store import ResponseStore

PATH = "/v1/conversations"
DAY = 86_400.0
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def app(folder: Path, *texts: str, **settings: Any) -> Conversing:
    return Conversing(saying(*texts or ("ok",)), response_store=file_in(folder), **settings)


def test_the_client_keeps_a_conversation(tmp_path: Path) -> None:
    """Its items come before each input, whatever the way in which the answer is made."""

    async def work(api: Conversing) -> None:
        async with api.openai() as client:
            begun = await client.conversations.create(metadata={"a": "b"}, items=[{"role": "system", "content": "S"}])
            ask: Any = {"model": "org/fake", "conversation": begun.id}
            first = await client.responses.create(input="a", store=False, **ask)
            assert first.conversation is not None
            assert first.conversation.id == begun.id
            ask["conversation"] = {"id": begun.id}
            async for _ in await client.responses.create(input="b", stream=True, **ask):
                pass
            later = await client.responses.create(input="c", background=True, **ask)
            while (later := await client.responses.retrieve(later.id)).status != "completed":
                await asyncio.sleep(0.005)
            counted = await client.responses.input_tokens.count(input="d", **ask)
            listed = [item async for item in client.conversations.items.list(begun.id, order="asc", limit=3)]
            texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
            assert texts == ["S", "a", "One.", "b", "Two.", "c", "Three."]
            newest = await client.conversations.items.list(begun.id, limit=1)
            assert newest.data[0] == listed[-1]
            assert newest.has_more
            last = await client.responses.create(input="d", **ask)
            assert last.usage is not None
            assert last.usage.input_tokens == counted.input_tokens
            shown = await client.conversations.items.retrieve(listed[1].id or "", conversation_id=begun.id)
            assert shown == listed[1]
            left = await client.conversations.items.delete(listed[1].id or "", conversation_id=begun.id)
            assert left.id == begun.id
            changed = await client.conversations.update(begun.id, metadata={"c": "d"})
            assert await client.conversations.retrieve(begun.id) == changed
            assert changed.metadata == {"c": "d"}
            await client.responses.create(**ask)  # as it is: the last word was the model's

    api = app(tmp_path, "One.", "Two.", "Three.", "Four.")
    api.run(work)
    assert api.prompts == [
        "system:S;user:a;assistant:",
        "system:S;user:a;assistant:One.;user:b;assistant:",
        "system:S;user:a;assistant:One.;user:b;assistant:Two.;user:c;assistant:",
        "system:S;user:a;assistant:One.;user:b;assistant:Two.;user:c;assistant:Three.;user:d;assistant:",
        "system:S;assistant:One.;user:b;assistant:Two.;user:c;assistant:Three.;user:d;assistant:Four.;assistant:",
    ]


def test_calls_and_results_are_items(tmp_path: Path) -> None:
    async def work(api: Conversing) -> None:
        async with api.openai() as client:
            begun = await client.conversations.create()
            ask: Any = {"model": "org/fake", "conversation": begun.id}
            tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
            first = await client.responses.create(input="Weather?", tools=[tool], **ask)
            calls = [item.call_id for item in first.output if item.type == "function_call"]
            results: Any = [{"type": "function_call_output", "call_id": id_, "output": "mild"} for id_ in calls]
            await client.conversations.items.create(begun.id, items=results)
            again: Any = [item.model_dump() for item in first.output[:1]]  # an id that is there already
            added = await client.conversations.items.create(begun.id, items=again)
            assert added.data[0].id not in (None, first.output[0].id)
            listed = [item.type async for item in client.conversations.items.list(begun.id, order="asc")]
            assert listed == [
                "message", "reasoning", "message", "function_call", "function_call", "function_call_output",
                "function_call_output", "reasoning",
            ]  # fmt: skip

    app(tmp_path, THOUGHT_AND_CALLS, **PARSERS).run(work)


def test_deleted_texts_are_overwritten(tmp_path: Path) -> None:
    async def work(api: Conversing) -> None:
        items = [{"role": "user", "content": f"secret-{number}"} for number in range(3)]
        ids = []
        for _ in range(2):
            made = (await api.ask("POST", PATH, {"items": items, "metadata": {"k": "secret-label"}})).json()
            ids.append(made["id"])
        assert (await api.ask("DELETE", f"{PATH}/{ids[0]}")).json() == {
            "id": ids[0], "object": "conversation.deleted", "deleted": True,
        }  # fmt: skip
        for method, path, body in (
            ("GET", "", None), ("DELETE", "", None), ("POST", "", {"metadata": {}}), ("GET", "/items", None),
            ("POST", "/items", {"items": HELLO}), ("GET", "/items/x", None), ("DELETE", "/items/x", None),
        ):  # fmt: skip
            assert (await api.ask(method, f"{PATH}/{ids[0]}{path}", body)).status_code == 404
        for item in (await api.ask("GET", f"{PATH}/{ids[1]}/items")).json()["data"]:
            assert (await api.ask("DELETE", f"{PATH}/{ids[1]}/items/{item['id']}")).status_code == 200
        await api.ask("POST", f"{PATH}/{ids[1]}", {"metadata": {}})
        store = api.service.response_store
        assert store is not None
        assert store._database.execute("SELECT count(*) FROM items").fetchone() == (0,)
        assert not any(b"secret-" in path.read_bytes() for path in tmp_path.iterdir())  # nor in the write-ahead log

    app(tmp_path).run(work)
    assert b"secret-" not in Path(file_in(tmp_path)).read_bytes()


def test_what_was_not_answered_is_not_added(tmp_path: Path) -> None:
    async def work(api: Conversing) -> None:
        id_ = (await api.ask("POST", PATH, {})).json()["id"]
        refused = await api.ask("POST", "/v1/responses", {"input": "a" * 300_000, "conversation": id_})
        assert refused.status_code == 400
        assert (await api.ask("GET", f"{PATH}/{id_}/items")).json() == {
            "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
        }  # fmt: skip

    app(tmp_path).run(work)


def test_keys_are_tenants(tmp_path: Path) -> None:
    keys = ("first-key-of-length", "second-key-of-length")
    mine, other = ({"authorization": f"Bearer {key}"} for key in keys)

    async def work(api: Conversing) -> None:
        id_ = (await api.ask("POST", PATH, {"items": HELLO}, **mine)).json()["id"]
        item = (await api.ask("GET", f"{PATH}/{id_}/items", **mine)).json()["data"][0]["id"]
        for method, path, body in (
            ("GET", "", None), ("DELETE", "", None), ("POST", "", {"metadata": {}}), ("GET", "/items", None),
            ("POST", "/items", {"items": HELLO}), ("GET", f"/items/{item}", None), ("DELETE", f"/items/{item}", None),
        ):  # fmt: skip
            assert (await api.ask(method, f"{PATH}/{id_}{path}", body, **other)).status_code == 404
            assert (await api.ask(method, f"{PATH}/{id_}{path}", body)).status_code == 401
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            asked = await api.ask("POST", path, {"input": "b", "conversation": id_}, **other)
            assert (asked.status_code, asked.json()["error"]["param"]) == (404, "conversation")
        assert (await api.ask("GET", f"{PATH}/{id_}/items/{item}", **mine)).json()["id"] == item

    app(tmp_path, api_key=keys).run(work)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("", {"items": HELLO * 21}, "items"), ("", {"items": [{"type": "message"}]}, "items[0].role"),
     ("", {"metadata": {"a": 1}}, "metadata"), ("/ID", {}, "metadata"), ("/ID/items", {"items": []}, "items"),
     ("/ID/items", {}, "items"), ("/ID/items?limit=0", None, "limit"), ("/ID/items?after=x", None, "after"),
     ("RESPONSE", {"input": "a", "conversation": 5}, "conversation"),
     ("RESPONSE", {"input": "a", "conversation": {"id": ""}}, "conversation"),
     ("RESPONSE", {"input": "a", "conversation": "ID", "previous_response_id": "resp_x"}, "conversation"),
     ("RESPONSE", {"conversation": "ID"}, "input")],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, path: str, body: Any, param: str) -> None:
    async def work(api: Conversing) -> Any:
        id_ = (await api.ask("POST", PATH, {})).json()["id"]
        where = "/v1/responses" if path == "RESPONSE" else f"{PATH}{path.replace('ID', id_)}"
        asked = {**body, "conversation": id_} if body and body.get("conversation") == "ID" else body
        return await api.ask("GET" if body is None else "POST", where, asked)

    answer = app(tmp_path).run(work)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    async def work(api: Conversing) -> None:
        id_ = (await api.ask("POST", PATH, {})).json()["id"]
        for path, body in (("", {}), (f"/{id_}", {"metadata": {}}), (f"/{id_}/items", {"items": HELLO})):
            answer = await api.ask("POST", f"{PATH}{path}", {**body, "colour": "red"})
            assert (answer.status_code, answer.headers["x-octavo-ignored-fields"]) == (200, "colour")

    app(tmp_path).run(work)


def test_a_conversation_holds_as_much_as_a_body(tmp_path: Path) -> None:
    items = [{"role": "user", "content": "a" * 700}]

    async def work(api: Conversing) -> None:
        id_ = (await api.ask("POST", PATH, {"items": items})).json()["id"]
        many = {"items": [{"role": "user", "content": "a"}] * 12}  # ids and types make them larger than the body
        for path, body in ((f"/{id_}/items", {"items": items}), ("", many)):
            refused = await api.ask("POST", f"{PATH}{path}", body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, "items", "context_length_exceeded")
            assert "bytes, but at most 1024 are allowed (max_body_size)" in error["message"]
        assert len((await api.ask("GET", f"{PATH}/{id_}/items")).json()["data"]) == 1

    app(tmp_path, max_body_size="1KiB").run(work)


def test_without_a_store_there_are_none() -> None:
    api = Conversing(saying("ok"))
    for path, body in ((PATH, {}), ("/v1/responses", {"input": "a", "conversation": "conv_x"})):
        answer = api.post(path, body)
        assert answer.status_code == 400
        assert "--response-store" in answer.json()["error"]["message"]


async def test_age_and_size_are_limited(tmp_path: Path) -> None:
    now = [1e9]
    store = ResponseStore(file_in(tmp_path), max_age=DAY, max_size=20_000, clock=lambda: now[0])
    kept = store.conversations

    def item(number: int, size: int = 10) -> Any:
        return {"id": f"msg_{number}", "text": "ä" * (size // 2)}

    async with store.opened():
        ask = store._database.execute
        old, used = [(await kept.create(None, {}, [item(1)])).id for _ in range(2)]
        now[0] += DAY - 1
        await kept.add(used, None, [item(2)])
        now[0] += 2
        assert await kept.get(old, None) is None
        assert await kept.get(used, None) is not None
        with pytest.raises(ConversationTooLargeError, match="3 items, but at most 2"):
            await kept.add(used, None, [item(3)], 2)
        with pytest.raises(ConversationTooLargeError, match="bytes, but at most 30 are read"):
            await kept.history(used, None, 10, 30)
        for number in range(10):
            await kept.add(used, "", [item(number + 10, 500)])
        large = [(await kept.create("large", {}, [item(1, 3000)])).id for _ in range(10)]
        assert await kept.get(used, None) is not None  # the tenant with the most makes room
        assert [await kept.get(id_, "large") is not None for id_ in large] == [False] * 6 + [True] * 4
        await store.put("resp_x", "large", previous=None, frame="{}", input="[]", output=f'["{"x" * 9000}"]')
        assert await store.get("resp_x", "large") is not None
        await kept.delete(used, None)
        sums = dict(ask("SELECT tenant, sum(size) FROM conversations GROUP BY 1"))
        in_items = sum(len(text.encode()) for (text,) in ask("SELECT item FROM items"))
        rest = ask("SELECT sum(64 + length(metadata)) FROM conversations").fetchone()[0]
        assert sum(sums.values()) == in_items + rest
        responses = dict(ask("SELECT tenant, sum(size) FROM responses GROUP BY 1"))
        used_by = dict(ask("SELECT tenant, size FROM usage"))
        assert used_by == {"large": sums["large"] + responses["large"]}
