"""Several models behind one address, with engines that play scripts: which model answers, when one is loaded and
unloaded, and what a request hears that waits for one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, byte_tokenizer, pool, say

from cli.settings import load, settings_parser
from engine import ConfigError, EngineConfig, ModelLoadError
from engine.process.predict import MemoryPrediction
from server.app import create_app
from server.config.settings import ServerSettings
from server.door.drain import Drain
from server.door.keys import ApiKey, KeyRing, Role, read_api_keys
from server.models import registry as registry_module
from server.models.declared import Declared, declare, found_in
from server.models.loading import LoadedModel
from server.models.registry import Registry
from server.models.starting import find_missing, make_app

SIZES = {"a": 60, "b": 50, "c": 30, "huge": 101, "broken": 1}
LIMIT = 100
PATIENCE = 20


class Engine(FakeClient):
    """One whose end can be told. Its answers wait for `gate`."""

    death: str | None = None

    def __init__(self, name: str):
        self.gate = asyncio.Event()
        self.gate.set()
        self.given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        super().__init__(pool if name == "c" else self.play)
        if name == "c":
            self.info = replace(self.info, tasks=("embed",), encoder_only=True, embedding_size=4)
        self.name = name

    def play(self, request_id: str, source: Any, params: Any) -> Iterator[Any]:
        yield self.gate
        yield from say(request_id, [self.name], params)

    async def wait_failed(self) -> str:
        return await self.given_up


class World:
    """A service of several models. Loads wait for `open`, by the name of the model."""

    def __init__(self, registry: Registry, http: httpx.AsyncClient, app: Any):
        self.registry, self.http, self.app = registry, http, app
        self.loop = asyncio.get_running_loop()
        self.loads: list[str] = []
        self.engines: dict[str, Engine] = {}
        self.broken: dict[str, Exception] = {}
        self.open: dict[str, threading.Event] = {}
        self.most_taken = 0

    def load(self, model: Declared, log_format: str, tell: Callable[[int], None]) -> LoadedModel:
        """In a thread, as the real one."""
        self.loads.append(model.name)
        self.most_taken = max(self.most_taken, self.registry._budget.taken)
        tell(50)
        if model.name in self.open:
            assert self.open[model.name].wait(PATIENCE)
        if model.name in self.broken:
            raise self.broken[model.name]

        async def make() -> Engine:
            return Engine(model.name)

        self.engines[model.name] = engine = asyncio.run_coroutine_threadsafe(make(), self.loop).result(PATIENCE)
        return LoadedModel(engine, byte_tokenizer())  # type: ignore[arg-type]

    def hold(self, *names: str) -> None:
        """Let the loads of these models wait until `release`."""
        self.open |= {name: threading.Event() for name in names}

    def release(self, name: str) -> None:
        self.open.pop(name).set()

    async def complete(self, model: str | None, **options: Any) -> httpx.Response:
        body = {"prompt": "hi"} | ({} if model is None else {"model": model})
        return await self.http.post("/v1/completions", json=body, **options)

    async def text(self, model: str | None) -> str:
        answer = await self.complete(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def states(self) -> dict[str, str]:
        listed = (await self.http.get("/v1/models")).json()["data"]
        return {card["id"]: card["state"] for card in listed}

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not what():
                await asyncio.sleep(0.001)

    def served(self, name: str) -> Any:
        return self.registry._names[name]


def models(settings: ServerSettings, *names: str, **changes: Any) -> list[Declared]:
    made = []
    for name in names:
        one = Declared(name=name, engine=EngineConfig(model=f"/{name}"), settings=settings, idle_time=0)
        made.append(replace(one, **changes.get(name, {})))
    return made


@asynccontextmanager
async def world(
    monkeypatch: pytest.MonkeyPatch,
    *names: str,
    keys: Sequence[ApiKey] = (),
    changes: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    made = ServerSettings(max_memory=LIMIT, **settings)
    declared = models(made, *names, **(changes or {}))
    app, registry = make_app(declared, made, "1", "console", Drain(), KeyRing(keys))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def foresee(configs: Sequence[EngineConfig], *, download: bool = False) -> Iterator[MemoryPrediction]:
        for config in configs:
            name = config.model.removeprefix("/")
            problem = "" if name in SIZES else f"there is no {name}"
            yield MemoryPrediction(memory=SIZES.get(name, 0), weights=7, tasks=("generate",), problem=problem)

    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE) as http:
        found = World(registry, http, app)
        monkeypatch.setattr(registry_module, "load_model", found.load)
        monkeypatch.setattr(registry_module, "predict", foresee)
        monkeypatch.setattr(registry_module, "_LOOK", 0.005)
        async with app.router.lifespan_context(app):
            yield found


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 2 * PATIENCE))


# ---------------------------------------------------------------- which model answers


def test_model_selects_on_every_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        changes = {"c": {"aliases": ("vectors",)}}
        async with world(monkeypatch, "a", "c", changes=changes) as found:
            assert await found.states() == {"a": "unloaded", "c": "unloaded"}
            assert await found.text("a") == "a"
            assert found.loads == ["a"]
            for default in (None, "", "default", "a:latest"):
                assert await found.text(default) == "a"
            for name in ("c", "vectors", "vectors:latest"):
                answer = await found.http.post("/v1/embeddings", json={"model": name, "input": "hi"})
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == "c"
            assert found.loads == ["a", "c"]
            assert await found.states() == {"a": "loaded", "c": "loaded"}
            tokens = await found.http.post("/tokenize", json={"model": "c", "prompt": "hi"})
            assert tokens.json()["count"] == 2
            unknown = await found.complete("x")
            assert unknown.status_code == 404
            assert "this server serves 'a', 'c'" in unknown.json()["error"]["message"]

    run(go())


def test_adapters_are_listed_before_their_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        changes = {"a": {"engine": EngineConfig(model="/a", lora_modules=("sql=adapters/sql",))}}
        async with world(monkeypatch, "a", "b", changes=changes) as found:
            assert list(await found.states()) == ["a", "sql", "b"]
            card = (await found.http.get("/v1/models/sql")).json()
            assert (card["id"], card["parent"], card["root"], card["state"]) == ("sql", "a", "adapters/sql", "unloaded")
            assert found.loads == []

    run(go())


def test_an_adapter_cannot_take_a_models_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else no request would reach it."""

    async def go() -> None:
        keys = [ApiKey.of("operator", roles=frozenset({Role.ADMIN}))]
        settings = {"api_key": ["operator"], "enable_lora_loading": str(tmp_path)}
        async with world(monkeypatch, "a", "b", keys=keys, **settings) as found:
            body, headers = {"lora_name": "b", "lora_path": "x"}, {"Authorization": "Bearer operator"}
            refused = await found.http.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert refused.status_code == 400
            assert "lora_name selects the model b or one of its adapters" in refused.json()["error"]["message"]

    run(go())


def test_a_capability_error_names_the_models_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "c") as found:
            await found.text("a")
            refused = await found.complete("c")
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert message.startswith("c cannot serve /v1/completions")
            assert message.endswith("Loaded models that serve /v1/completions: a.")

    run(go())


def test_the_service_answers_for_itself_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a") as found:
            for path in (
                "/health",
                "/health/live",
                "/metrics",
                "/v1/models",
                "/version",
                "/load",
                "/",
            ):
                assert (await found.http.get(path)).status_code == 200, path
            assert (await found.http.get("/v1/responses/resp_1")).status_code == 404
            assert found.loads == []
            assert (await found.http.get("/tokenizer_info", params={"model": "a"})).status_code == 200
            assert found.loads == ["a"]

    run(go())


def test_a_key_may_be_for_some_models(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        keys = [
            ApiKey.of("some", roles=frozenset({Role.INFERENCE}), models=frozenset({"b"})),
            ApiKey.of("all", roles=frozenset({Role.INFERENCE})),
            ApiKey.of("operator", roles=frozenset({Role.ADMIN}), models=frozenset({"b"})),
        ]
        async with world(monkeypatch, "a", "b", keys=keys) as found:
            found.http.headers["Authorization"] = "Bearer some"
            assert list(await found.states()) == ["b"]
            assert (await found.http.get("/v1/models/a")).status_code == 404
            refused = await found.complete("a")
            assert refused.status_code == 403
            assert "may not use the model 'a'. Models that it may use: 'b'" in refused.json()["error"]["message"]
            assert await found.text(None) == "b"  # the first that it may use
            assert (await found.http.post("/v1/models/unload", json={"model": "b"})).status_code == 403
            found.http.headers["Authorization"] = "Bearer operator"
            for action in ("load", "unload"):
                answers = [await found.http.post(f"/v1/models/{action}", json={"model": name}) for name in "ab"]
                assert [answer.status_code for answer in answers] == [403, 200]
            found.http.headers["Authorization"] = "Bearer all"
            assert list(await found.states()) == ["a", "b"]

    run(go())


def test_no_message_names_a_model_that_the_key_may_not_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def go() -> None:
        keys = [ApiKey.of("operator", models=frozenset({"c"})), ApiKey.of("none", models=frozenset())]
        changes = {"a": {"pinned": True, "aliases": ("nick",)}}
        store = str(tmp_path / "batches")
        names = ("a", "b", "c")
        async with world(monkeypatch, *names, keys=keys, changes=changes, batch_store=store) as found:
            await found.until(lambda: found.served("a").state == "loaded")
            found.http.headers["Authorization"] = "Bearer operator"
            incapable = (await found.complete("c")).json()["error"]["message"]
            assert incapable.endswith("Loaded models that serve /v1/completions: none.")
            serves_only_c = "The model 'x' does not exist; this server serves 'c'."
            assert (await found.complete("x")).json()["error"]["message"] == serves_only_c
            assert (await found.http.get("/v1/models/x")).json()["error"]["message"] == serves_only_c
            for action in ("load", "unload"):
                refused = await found.http.post(f"/v1/models/{action}", json={"model": "x"})
                assert (refused.status_code, refused.json()["error"]["message"]) == (404, serves_only_c)
            other = "This API key may not use the model 'nick'. Models that it may use: 'c'."
            asked = {"completions": {"prompt": "hi"}, "models/load": {}, "models/unload": {}}
            for path, body in asked.items():
                refused = await found.http.post(f"/v1/{path}", json=body | {"model": "nick"})
                assert (refused.status_code, refused.json()["error"]["message"]) == (403, other)
            refused = await found.complete(None, headers={"Authorization": "Bearer none"})
            none = "This API key may use no model of this service."
            assert (refused.status_code, refused.json()["error"]["message"]) == (403, none)
            assert [one["name"] for one in (await found.http.get("/api/tags")).json()["models"]] == ["c:latest"]
            assert [one["name"] for one in (await found.http.get("/api/ps")).json()["models"]] == ["c:latest"]
            lines = [
                {"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": {"model": name, "input": "hi"}}
                for name in ("a", "x")
            ]
            file = ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())
            sent = await found.http.post("/v1/files", files={"file": file}, data={"purpose": "batch"})
            body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
            path = f"/v1/batches/{(await found.http.post('/v1/batches', json=body)).json()['id']}"
            while (batch := (await found.http.get(path)).json())["status"] == "validating":
                await asyncio.sleep(0.001)
            assert [
                problem["message"].partition(": ")[2] or problem["message"] for problem in batch["errors"]["data"]
            ] == [serves_only_c.replace("'x'", f"'{name}'") for name in ("a", "x")]

    run(go())


def test_a_key_for_other_models_cannot_use_the_only_one() -> None:
    async def go() -> None:
        keys = [ApiKey.of("other", models=frozenset({"x"})), ApiKey.of("this", models=frozenset({"x", "a"}))]
        engine = FakeClient(lambda name, source, params: say(name, ["hi"], params))
        app = create_app(engine, byte_tokenizer(), "a", api_keys=KeyRing(keys))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for key, status in (("other", 403), ("this", 200)):
                http.headers["Authorization"] = f"Bearer {key}"
                answer = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
                assert answer.status_code == status, answer.text
                assert (await http.get("/v1/models")).status_code == 200
            assert len(engine.asked) == 1

    run(go())


# ---------------------------------------------------------------- loads


def test_requests_wait_for_one_load_while_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "c") as found:
            await found.text("a")
            found.hold("c")
            body = {"model": "c", "input": "hi"}
            waiting = [asyncio.create_task(found.http.post("/v1/embeddings", json=body)) for _ in range(3)]
            await found.until(lambda: found.served("c").waiting == 3 and found.loads[-1] == "c")
            card = (await found.http.get("/v1/models/c")).json()
            assert (card["state"], card["percent"], card["running_requests"]) == ("loading", 50, 3)
            assert await found.text("a") == "a"
            conflict = await found.http.post("/v1/models/unload", json={"model": "c"})
            assert conflict.status_code == 409
            found.release("c")
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
            assert found.loads == ["a", "c"]

    run(go())


def test_two_loads_at_once_never_take_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits, and goes on when the first model has answered and can be unloaded."""

    async def go() -> None:
        async with world(monkeypatch, "a", "b") as found:
            found.hold("a", "b")
            first, second = (asyncio.create_task(found.text(name)) for name in ("a", "b"))
            await found.until(lambda: found.loads and found.served("b").bringing)
            assert found.loads == ["a"]
            found.open["b"].set()
            found.release("a")
            assert await first == "a"
            assert await second == "b"
            assert found.engines["a"].closed
            assert await found.states() == {"a": "unloaded", "b": "loaded"}
            assert 0 < found.most_taken <= LIMIT
            assert found.registry._budget.taken == SIZES["b"]

    run(go())


def test_a_model_with_running_requests_is_not_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "b", "c") as found:
            await found.text("a")
            await found.http.post("/v1/embeddings", json={"model": "c", "input": "hi"})
            found.engines["a"].gate.clear()
            running = asyncio.create_task(found.text("a"))
            await found.until(lambda: found.engines["a"].running)
            late = asyncio.create_task(found.text("b"))
            # c goes, which is not enough.
            await found.until(lambda: found.engines["c"].closed)
            assert not found.engines["a"].closed
            refused = await found.http.post("/v1/models/unload", json={"model": "a"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
            assert found.loads == ["a", "c"]
            found.engines["a"].gate.set()
            assert await running == "a"
            assert await late == "b"
            assert found.most_taken <= LIMIT

    run(go())


def test_the_least_recently_used_model_is_unloaded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "c", "b", changes={}) as found:
            await found.text("a")
            await found.http.post("/v1/embeddings", json={"model": "c", "input": "hi"})
            await found.text("b")
            assert await found.states() == {"a": "unloaded", "c": "loaded", "b": "loaded"}

    run(go())


def test_a_pinned_model_is_loaded_at_the_start_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "b", changes={"a": {"pinned": True}}) as found:
            await found.until(lambda: found.served("a").running is not None)
            refused = await found.complete("b")
            assert refused.status_code == 503
            assert "b with the pinned models needs" in refused.json()["error"]["message"]
            assert await found.text("a") == "a"

    run(go())


def test_a_failed_load_tells_its_waiters_why_and_leaves_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "broken", "huge", "missing") as found:
            found.broken["broken"] = ModelLoadError("the file is torn")
            found.hold("broken")
            waiting = [asyncio.create_task(found.complete("broken")) for _ in range(2)]
            await found.until(lambda: found.served("broken").waiting == 2 and found.loads)
            found.release("broken")
            for answer in await asyncio.gather(*waiting):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_failed")
                assert "broken could not be loaded: the file is torn" in answer.json()["error"]["message"]
                assert int(answer.headers["retry-after"]) >= 1
            assert found.loads == ["broken"]
            assert await found.text("a") == "a"
            # A moment later it is not even tried, but an operator can have it tried again.
            assert (await found.complete("broken")).status_code == 503
            assert found.loads == ["broken", "a"]
            assert (await found.http.get("/v1/models/broken")).json()["reason"] == "the file is torn"
            found.broken.clear()
            loaded = await found.http.post("/v1/models/load", json={"model": "broken"})
            assert loaded.json()["state"] == "loaded"
            too_large = await found.complete("huge")
            assert too_large.status_code == 503
            assert "(max_memory)" in too_large.json()["error"]["message"]
            assert "there is no missing" in (await found.complete("missing")).json()["error"]["message"]
            assert found.loads == ["broken", "a", "broken"]
            assert found.registry._budget.taken == SIZES["a"] + SIZES["broken"]

    run(go())


def test_an_engine_whose_model_cannot_be_served_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives its memory back."""

    def refuse(*args: Any) -> None:
        raise ConfigError("made by the test")

    async def go() -> None:
        async with world(monkeypatch, "a") as found:
            monkeypatch.setattr(registry_module, "make_reader", refuse)
            assert "made by the test" in (await found.complete("a")).json()["error"]["message"]
            assert found.engines["a"].closed
            assert found.registry._budget.taken == 0

    run(go())


def test_models_that_cannot_be_loaded_do_not_stop_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing file is found before the service listens, a damaged one by the prediction."""
    gone = str(tmp_path / "gone.gguf")
    declared = [replace(one, engine=EngineConfig(model=gone)) for one in models(ServerSettings(), "x", "y")]
    with pytest.raises(ModelLoadError, match=r"gone\.gguf does not exist"):
        find_missing(declared)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    torn = replace(declared[0], name="torn", engine=EngineConfig(model=str(tmp_path / "torn")))
    assert find_missing([*declared, torn]) == dict.fromkeys("xy", f"The file {gone} does not exist.")

    async def go() -> None:
        async with world(monkeypatch, "missing", "a") as found:
            await found.until(lambda: found.served("missing").state == "failed")
            assert (await found.http.get("/v1/models/missing")).json()["reason"] == "there is no missing"
            assert await found.text("a") == "a"

    run(go())


def test_an_engine_that_is_given_up_leaves_its_model_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "c") as found:
            await found.text("a")
            await found.http.post("/v1/embeddings", json={"model": "c", "input": "hi"})
            found.engines["a"].given_up.set_result("killed")
            await found.until(lambda: found.registry._budget.taken == SIZES["c"])
            card = (await found.http.get("/v1/models/a")).json()
            assert (card["state"], card["reason"]) == ("failed", "its engine keeps failing: killed")
            assert await found.states() == {"a": "failed", "c": "loaded"}
            assert (await found.http.get("/health")).status_code == 200
            await found.http.post("/v1/models/load", json={"model": "a"})
            assert await found.text("a") == "a"

    run(go())


# ---------------------------------------------------------------- waiting requests


def test_limits_apply_to_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", max_num_queued_reqs=1) as found:
            found.hold("a")
            late = await found.complete("a", headers={"X-Request-Timeout": "0.01"})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
            waiting = asyncio.create_task(found.text("a"))
            await found.until(lambda: found.served("a").waiting == 1)
            refused = await found.complete("a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
            found.release("a")
            assert await waiting == "a"
        async with world(monkeypatch, "a", model_load_timeout=0.01) as found:
            found.hold("a")
            late = await found.complete("a")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "model_loading")
            assert "(model_load_timeout)" in late.json()["error"]["message"]
            found.release("a")

    run(go())


async def streamed(found: World, path: str, body: dict[str, Any], seen: Callable[[str], None]) -> tuple[int, str]:
    """The status and the text of a stream, each part of which `seen` is told of."""
    content = json.dumps(body).encode()
    messages = iter([{"type": "http.request", "body": content, "more_body": False}])
    status, text = 0, ""

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()
        return message or {}

    async def send(message: Any) -> None:
        nonlocal status, text
        if message["type"] == "http.response.start":
            status = message["status"]
            assert dict(message["headers"])[b"content-type"].startswith(b"text/event-stream")
        else:
            text += message["body"].decode()
            seen(text)

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80), "scheme": "http",
        "root_path": "", "http_version": "1.1", "asgi": {"version": "3.0"},
    }  # fmt: skip
    await found.app(scope, receive, send)
    return status, text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_gets_comments_while_its_model_loads(path: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", stream_keepalive=0.005) as found:
            found.hold("a")
            if fails:
                found.broken["a"] = ModelLoadError("torn")

            def seen(text: str) -> None:
                if text.count(": keep-alive") == 2 and found.open:
                    found.release("a")

            said = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
            said = {"input": "hi"} if path == "/v1/responses" else said
            status, text = await streamed(found, path, {"model": "a", "stream": True, "max_tokens": 9, **said}, seen)
            assert status == 200
            events = text.replace(": keep-alive\n\n", "")
            if fails:
                assert "The model a could not be loaded: torn" in events
                assert events.startswith('data: {"error"' if path == "/v1/completions" else "event: error\ndata: {")
                assert events.count("data:") == 1
            elif path == "/v1/completions":
                assert events.endswith("data: [DONE]\n\n")
            else:  # the scripted model has no chat template: an error of the route
                assert "cannot serve" in events

    run(go())


def test_a_client_that_leaves_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "b") as found:
            await found.text("a")
            found.engines["a"].gate.clear()
            running = asyncio.create_task(found.text("a"))
            await found.until(lambda: found.engines["a"].running)
            waiting = asyncio.create_task(found.text("b"))
            await found.until(lambda: found.served("b").waiting)
            waiting.cancel()
            await found.until(lambda: found.served("b").bringing is None)
            assert await found.states() == {"a": "loaded", "b": "unloaded"}
            assert found.loads == ["a"]
            found.engines["a"].gate.set()
            await running

    run(go())


# ---------------------------------------------------------------- unloading


def test_an_idle_model_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "b", changes={"b": {"idle_time": 0.001}}) as found:
            await found.text("b")
            await found.until(lambda: found.served("b").state == "unloaded")
            await found.text("a")
            card = (await found.http.get("/v1/models/a")).json()
            assert "expires_at" not in card
            found.registry.keep("a", 1000)
            assert found.registry.find("a").expires_at is not None  # type: ignore[union-attr]
            found.registry.keep("a", 0)
            await found.until(lambda: found.served("a").state == "unloaded")
            assert found.engines["a"].closed
            assert found.registry._budget.taken == 0
            assert await found.text("a") == "a"
            unloaded = await found.http.post("/v1/models/unload", json={"model": "a"})
            assert unloaded.json()["state"] == "unloaded"
            assert (await found.http.post("/v1/models/unload", json={"model": "x"})).status_code == 404

    run(go())


def test_ollamas_clients_see_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        said = {"prompt": "hi"}
        async with world(monkeypatch, "a", "b", changes={"b": {"aliases": ("Other",)}}) as found:

            async def names(path: str) -> list[str]:
                return [one["name"] for one in (await found.http.get(path)).json()["models"]]

            shown = await found.http.post("/api/show", json={"model": "b"})
            assert shown.json()["capabilities"] == ["completion"], "it waits until this is known"
            assert (await found.http.get("/api/version")).status_code == 200
            assert (await names("/api/tags"), await names("/api/ps")) == (["a:latest", "b:latest"], [])
            assert found.loads == []
            body = {"model": "b", "prompt": "hi", "stream": False, "keep_alive": -1}
            answer = await found.http.post("/api/generate", json=body)
            assert answer.json()["response"] == "b"
            assert (await names("/api/tags"), await names("/api/ps")) == (["a:latest", "b:latest"], ["b:latest"])
            shown = await found.http.post("/api/show", json={"name": "b:latest"})
            assert shown.status_code == 200
            unloaded = await found.http.post("/api/show", json={"model": "A"})
            assert (unloaded.status_code, unloaded.json()["capabilities"]) == (200, ["completion"])
            pulls = [await found.http.post("/api/pull", json={"model": name, "stream": False}) for name in ("A", "x")]
            assert [answer.status_code for answer in pulls] == [200, 404]
            assert "It serves 'a', 'b'." in pulls[1].json()["error"]
            assert found.loads == ["b"]
            answer = await found.http.post("/api/generate", json={"model": "OTHER:latest", "stream": False} | said)
            assert answer.json()["response"] == "b"
            assert (await found.complete("OTHER")).status_code == 404
            await found.http.post("/api/generate", json={"model": "b", "keep_alive": 0})
            await found.until(lambda: found.served("b").state == "unloaded")
            assert await names("/api/ps") == []
            for path in ("chat", "generate"):  # it need not be loaded to be unloaded
                answer = await found.http.post(f"/api/{path}", json={"model": "B", "keep_alive": 0})
                assert (answer.json()["model"], answer.json()["done_reason"]) == ("B", "unload")
            assert found.loads == ["b"]

    run(go())


def test_metrics_carry_the_name_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with world(monkeypatch, "a", "c") as found:
            await found.text("a")
            await found.text("a")
            text = (await found.http.get("/metrics")).text
            assert 'octavo_request_success_total{finished_reason="length",model_name="a"} 2.0' in text
            assert 'octavo_engine_up{model_name="a"} 1.0' in text
            assert 'octavo_model_state{model_name="c",state="unloaded"} 1.0' in text
            assert 'octavo_model_memory_bytes{model_name="a"} 60.0' in text
            assert text.count("# TYPE octavo_request_success_total ") == 1
            assert text.count("\nprocess_cpu_seconds_total ") == 1
            assert 'model_name="c"' not in text.split("octavo_model_state")[0]

    run(go())


# ---------------------------------------------------------------- how models are named


def settings_of(*arguments: str) -> tuple[Declared, ...]:
    loaded, _ = load(settings_parser("serve"), list(arguments))
    return declare(loaded.settings, loaded.named)


def test_models_are_named_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_MODEL_LEN", "99")
    first, second = settings_of("chat=x/y", "--max-memory", "8GiB", "embed=org/name", "--model-idle-time", "7")
    assert (first.name, first.engine.model, second.name, second.engine.model) == ("chat", "x/y", "embed", "org/name")
    assert (first.idle_time, first.engine.max_model_len, first.engine.kv_cache_memory) == (7, 99, 2 << 30)
    assert settings_of("x/y") == ()


def test_models_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_MODEL_LEN", "99")
    file = tmp_path / "models.yaml"
    file.write_text(
        "chat:\n  model: x\n  aliases: [gpt-4o]\n  pinned: true\n  idle_time: 5\n  max-model-len: 7\n"
        "  lora_modules: [sql=y]\n  tool_call_parser: hermes\nembed: z\n"
    )
    chat, embed = settings_of("--models", str(file))
    assert (chat.aliases, chat.pinned, chat.idle_time) == (("gpt-4o",), True, 5)
    assert (chat.engine.max_model_len, chat.settings.tool_call_parser) == (7, "hermes")
    assert chat.engine.adapters == {"sql": "y"}
    assert (chat.engine.share_weights, embed.engine.share_weights) == (None, True), "pinned models are loaded once"
    file.write_text("a: x\nb: {model: y, quantization-cache: off}\nc: {model: z, share-weights: false}")
    assert [each.engine.share_weights for each in settings_of("--models", str(file))] == [True, None, False]
    assert settings_of("--models", str(file), "--no-share-weights")[0].engine.share_weights is False
    assert (embed.engine.model, embed.engine.max_model_len, embed.settings.tool_call_parser) == ("z", 99, "auto")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chat: {model: x, port: 1}", "model chat: port is a setting of the whole service"),
        (
            "chat: {model: x, max_model_lem: 1}",
            "model chat: unknown setting max_model_lem; did you mean max_model_len?",
        ),
        ("chat: {model: x, max_model_len: no}", "model chat: max_model_len must be"),
        ("chat: {aliases: [x]}", "chat lacks model: the folder, GGUF file or hub id"),
        ("chat: {model: x, pinned: 1}", "model chat: pinned must be true or false, got 1"),
        ("chat: {model: [x]}", "chat: model must be a folder, a GGUF file or a hub id, got ['x']"),
        (f"chat: {{model: x, idle_time: 1{'0' * 400}}}", "model chat: idle_time must be seconds, 0 for never"),
        ("chat: {model: x, idle_time: -1}", "model chat: idle_time must be seconds, 0 for never, got -1"),
        ("a: {model: x, aliases: b}\nb: y", "b selects both the model a and the model b"),
        ("a b: x", "a model's name must be"),
        ("[1]", "must contain lines such as chat: path/to/model"),
        ("{}", "lists no models"),
    ],
)
def test_a_wrong_file_of_models_is_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        settings_of("--models", str(file))
    assert said in str(caught.value)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("a: x")
    for arguments, said in (
        (("a=x", "a=y"), "two models have the name a"),
        (("a=x", "--models", str(file)), "models are also given as arguments"),
        (("x", "--models", str(file)), "MODEL is also set"),
        (("a=x", "--served-model-name", "z"), "served_model_name names a single model"),
        (("a=x", "--api-server-count", "2"), "one HTTP process serves several models"),
    ):
        with pytest.raises(ConfigError) as caught:
            settings_of(*arguments)
        assert said in str(caught.value)


def test_a_folder_of_models(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    (tmp_path / "two.gguf").touch()
    (tmp_path / "mmproj-two.gguf").touch()
    (tmp_path / "big-00001-of-00002.gguf").touch()
    (tmp_path / "notes").mkdir()
    assert found_in(str(tmp_path)) == {"one": tmp_path / "one", "two": tmp_path / "two.gguf"}
    assert [model.name for model in settings_of(str(tmp_path))] == ["one", "two"]
    (tmp_path / "config.json").write_text("{}")
    assert found_in(str(tmp_path)) == {}
    assert found_in("org/name") == {}


def test_keys_name_models_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one models=chat,embed\ntwo\n")
    one, two = read_api_keys(ServerSettings(api_key_file=str(file)))
    assert [one.may_use("chat"), one.may_use("other"), two.may_use("other")] == [True, False, True]
