"""Adapters over HTTP: a request's model selects one on every endpoint; an admin's key loads and unloads them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from support import reference
from support.asgi import request
from support.local_client import LocalClient
from support.peft_folders import adapter_tensors, matrices, merged, write_adapter

from engine import ConfigError, EngineConfig, SamplingParams
from server.app import create_app
from server.config.settings import DEMO_MODEL, ServerSettings, Settings
from server.facts import read_tokenizer

PROMPT = "Once upon a time"
REQUEST_PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
ADMIN, USER = "admin-key", "user-key"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/v1/decisions": {"input": "Hi", "questions": [{"type": "predicate", "name": "a", "instructions": "Is it?"}]},
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho"]},
}


class Api:
    """An app over an engine in this process, with a folder of adapters.

    Attributes:
        folder: that clients may load from.
        tensors: of the adapter `sql`, which is loaded.
    """

    def __init__(self, root: Path):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
        sizes = {name: size for name, size in matrices(self.model).items() if name != "lm_head"}
        self.tensors = adapter_tensors(sizes)
        self.folder = root / "adapters"
        outside = write_adapter(root / "outside", adapter_tensors(sizes, seed=1))
        write_adapter(self.folder / "sql", self.tensors)
        write_adapter(self.folder / "second", adapter_tensors(sizes, seed=1))
        (self.folder / "link").symlink_to(outside)
        halved = write_adapter(self.folder / "halved", self.tensors)
        (halved / "adapter_model.safetensors").unlink()
        (halved / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
        keys = root / "keys"
        keys.write_text(f"{ADMIN} role=admin\n{USER} role=inference\n")
        config = EngineConfig(
            model=str(DEMO_MODEL), device="cpu", dtype="float32", kv_cache_memory="16MiB", show_progress=False,
            lora_modules=(f"sql={self.folder / 'sql'}",), max_loras=2,
        )  # fmt: skip
        self.client = LocalClient(config)
        settings = ServerSettings(api_key_file=str(keys), enable_lora_loading=str(self.folder))
        tokenizer = read_tokenizer(config, self.client.info)
        self.app = create_app(self.client, tokenizer, "demo", settings=settings)

    def send(self, method: str, path: str, key: str = USER, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
        return request(self.app, method, path, headers=headers, strict=True, **options)

    def post(self, path: str, key: str = USER, **body: Any) -> httpx.Response:
        return self.send("POST", path, key, json=body)

    def error(self, path: str, key: str = ADMIN, **body: Any) -> tuple[int, str, str]:
        answer = self.post(path, key, **body)
        problem = answer.json()["error"]
        return answer.status_code, problem["code"], problem["message"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    found = Api(tmp_path_factory.mktemp("adapters"))
    yield found
    asyncio.run(found.client.close())


@pytest.mark.parametrize("path", REQUESTS)
def test_a_requests_model_selects_the_adapter(path: str, api: Api) -> None:
    for model, name, adapter in (("sql", "sql", "sql"), ("demo", "demo", None), (None, "demo", None)):
        api.client.forget()
        answer = api.post(path, **REQUESTS[path], **({} if model is None else {"model": model}))
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        assert set(api.client.with_adapter) == {adapter}


def test_answers_are_the_merged_models(api: Api) -> None:
    """Whole and streamed; the base model's answer is another one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    prompt = tokenizer(PROMPT).input_ids
    texts = {}
    for name, model in (("sql", merged(api.model, api.tensors)), ("demo", api.model)):
        expected = reference.greedy(model, prompt, None, 8)
        assert expected.margin > reference.MIN_MARGIN
        asked = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        choice = api.post("/v1/completions", **asked, return_token_ids=True).json()["choices"][0]
        assert choice["token_ids"] == list(expected.answers[0].tokens)
        streamed = api.post("/v1/completions", **asked, stream=True).text
        assert f'"model":"{name}"' in streamed
        texts[name] = choice["text"]
    assert texts["sql"] != texts["demo"]


def test_models_lists_adapters(api: Api) -> None:
    model, adapter = api.send("GET", "/v1/models").json()["data"]
    assert (model["id"], model["root"], "parent" in model) == ("demo", "demo", False)
    assert (adapter["id"], adapter["root"], adapter["parent"]) == ("sql", str(api.folder / "sql"), "demo")
    assert api.send("GET", "/v1/models/sql").json() == adapter
    anthropic = api.send("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [each["id"] for each in anthropic["data"]] == ["demo", "sql"]
    assert anthropic["last_id"] == "sql"
    status, code, message = api.error("/v1/completions", USER, model="other", prompt="a")
    assert (status, code) == (404, "model_not_found")
    assert "serves 'demo' and the adapters 'sql'" in message


def test_loading_and_unloading(api: Api) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert api.error(load, USER, lora_name="second", lora_path="second")[:2] == (403, "insufficient_permissions")
    assert api.post(load, ADMIN, lora_name="second", lora_path="second").text == (
        "Success: LoRA adapter 'second' added successfully."
    )
    assert api.post("/v1/completions", **REQUESTS["/v1/completions"], model="second").json()["model"] == "second"
    found = api.error(load, lora_name="third", lora_path=str(api.folder / "second"))
    assert found[1] == "invalid_adapter"
    assert "max_loras is 2. Unload one, or raise --max-loras." in found[2]
    assert api.error(unload, USER, lora_name="second")[0] == 403
    assert api.post(unload, ADMIN, lora_name="second").status_code == 200
    assert api.error(unload, lora_name="second")[:2] == (404, "model_not_found")
    assert api.error("/v1/completions", USER, model="second", prompt="a")[0] == 404


@pytest.mark.parametrize(
    "path",
    ["../outside", "link", "halved", "missing", ".", "/etc", "sql/../../outside", "a\0b", "../adapters/../outside"],
)
def test_paths_outside_of_the_folder_are_refused(path: str, api: Api) -> None:
    for written in (path, str(api.folder / path)):
        status, code, message = api.error("/v1/load_lora_adapter", lora_name="x", lora_path=written)
        assert (status, code) == (400, "invalid_value")
        assert "in the folder that --enable-lora-loading names" in message
    assert list(api.client.adapters) == ["sql"]


@pytest.mark.parametrize("name", ["demo", "a b", "a\n", "é", "x" * 129])
def test_names_that_are_refused(name: str, api: Api) -> None:
    assert api.error("/v1/load_lora_adapter", lora_name=name, lora_path="second")[:2] == (400, "invalid_value")


def test_requests_of_an_unloaded_adapter_end(api: Api) -> None:
    """While it waits in the engine, its adapter goes; a request of the base model goes on."""
    client = api.client

    async def scenario() -> tuple[httpx.Response, httpx.Response]:
        headers = {"Authorization": f"Bearer {USER}"}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(api.app), base_url="http://localhost", headers=headers
        ) as http:
            client.forget()
            client.held = True
            asked = [
                asyncio.create_task(http.post("/v1/completions", json=REQUESTS["/v1/completions"] | {"model": model}))
                for model in ("second", "demo")
            ]
            while len(client.asked) < 2:
                await asyncio.sleep(0)
            await client.unload_adapter("second")
            client.held = False
            return await asked[0], await asked[1]

    api.post("/v1/load_lora_adapter", ADMIN, lora_name="second", lora_path="second")
    ended, other = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert (ended.status_code, ended.json()["error"]["code"]) == (404, "model_not_found")
    assert ended.json()["error"]["message"] == "The adapter 'second' was unloaded while the request ran."
    assert other.status_code == 200
    assert not client.engine.has_unfinished_requests()


def test_metrics(api: Api) -> None:
    api.post("/v1/embeddings", model="sql", input="a")
    text = api.send("GET", "/metrics", ADMIN).text
    assert 'octavo_lora_requests_total{lora_name="sql"}' in text
    assert 'vllm:lora_requests_info{engine="0",max_lora="2",model_name="demo",running_lora_adapters=""' in text
    client = api.client
    client.engine.add_request("a", [1, 2], REQUEST_PARAMS, adapter="sql")
    assert client.stats().waiting_adapters == ("sql",)
    client.engine.step_deltas()
    assert (client.stats().running_adapters, client.stats().waiting_adapters) == (("sql",), ())
    client.engine.abort_request("a")
    assert client.stats().running_adapters == ()


def test_settings(tmp_path: Path) -> None:
    """Both forms of lora_modules; what loading needs; the default number of slots."""
    json_form = '{"name": "b", "path": "y, z", "base_model_name": "m"}'
    config = Settings(model="m", lora_modules=f"a=x,{json_form}, c=w").engine
    assert config.adapters == {"a": "x", "b": "y, z", "c": "w"}
    assert config.most_loras == 3
    keyed = {"model": "m", "api_key": "k", "enable_lora_loading": str(tmp_path)}
    assert Settings(**keyed).engine.most_loras == 1
    assert Settings(**keyed, max_loras=5).engine.most_loras == 5
    assert EngineConfig(model="m").most_loras == 0
    for values, message in (
        ({"enable_lora_loading": str(tmp_path)}, "no API keys: loading needs one with the role admin"),
        ({"enable_lora_loading": str(tmp_path / "none"), "api_key": "k"}, "must be a folder"),
        ({"lora_modules": ["a"]}, "lora_modules must be NAME=PATH"),
        ({"lora_modules": ['{"name": 3}']}, "lora_modules must be NAME=PATH"),
        ({"lora_modules": ["a=x", "a=y"]}, "two adapters with the name a"),
        ({"lora_modules": ["a=x", "b=y"], "max_loras": 1}, "names 2 adapters, but max_loras is 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Settings(model="m", **values).engine  # noqa: B018
