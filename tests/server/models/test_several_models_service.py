"""`octavo serve` with several models, each with an engine of its own, used by openai's client."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import transformers
from support import reference
from support.peft_folders import adapter_tensors, matrices, merged, write_adapter
from support.service import PATIENCE, Service, children, is_running, serving, wait_for
from support.text_encoders import make_text_encoder

from cli.main import main
from server.config.settings import DEMOS

ANSWER = "A KV cache keeps the keys and"  # of the bundled model
pytestmark = pytest.mark.slow

MODELS = """\
chat:
  model: {chat}
  aliases: [gpt-4o]
  kv_cache_memory: 16MiB
  lora_modules: [sql={adapter}]
embed: {embed}
rerank: {rerank}
translate: {translate}
broken: {broken}
gone: {broken}/gone.gguf
"""


def adapter(folder: Path) -> Any:
    """An adapter of the bundled model in this folder, and the model of transformers into which it is merged."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMOS["chat"])
    tensors = adapter_tensors({name: size for name, size in matrices(model).items() if name != "lm_head"})
    write_adapter(folder, tensors)
    return merged(model, tensors)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("several")
    make_text_encoder("headless", folder / "encoder")
    make_text_encoder("cross", folder / "reranker")
    adapter(folder / "adapter")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"architectures": ["Lla')
    file = folder / "models.yaml"
    places = {"chat": DEMOS["chat"], "translate": DEMOS["seq2seq"], "embed": folder / "encoder"}
    places |= {"rerank": folder / "reranker", "adapter": folder / "adapter"}
    file.write_text(MODELS.format(broken=folder / "broken", **places))
    flags = ("--models", str(file), "--max-memory", "640MiB", "--quantization-cache", str(folder / "weights"))
    with serving(*flags, log=folder / "service.log") as made:
        yield made


def states(service: Service) -> dict[str, str]:
    cards = service.get("/v1/models").json()["data"]
    return {card["id"]: card["state"] for card in cards if "parent" not in card}


def ask(client: openai.OpenAI, model: str) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is a KV cache?"}], max_tokens=8, temperature=0
    )
    return answer.choices[0].message.content or ""


def octavo(*arguments: str) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(arguments)
    return status, output.getvalue()


def test_several_models_are_loaded_on_demand(service: Service) -> None:
    """Two at once, of which each loads once, under a limit that both fit, and a third for which the oldest one goes."""
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)
    assert children(service.process.pid) == []
    unusable = {"broken": "failed", "gone": "failed"}
    assert states(service)["gone"] == "failed"
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(client, "gpt-4o"))),
        threading.Thread(target=lambda: answers.append(ask(client, "chat"))),
        threading.Thread(target=lambda: client.embeddings.create(model="embed", input="a b")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers[0] == answers[1] == ANSWER
    assert (
        states(service)
        == {"chat": "loaded", "embed": "loaded", "translate": "unloaded", "rerank": "unloaded"} | unusable
    )
    ask(client, "chat")  # so that embed is the one that was used before
    listed = {card["id"]: card for card in service.get("/v1/models").json()["data"]}
    assert listed["embed"]["tasks"] == ["embed", "token_embed"]
    assert sum(listed[name]["memory"] for name in ("chat", "embed")) < 640 * 2**20
    assert "config.json" in listed["broken"]["reason"]

    with pytest.raises(openai.InternalServerError, match=r"The model broken could not be loaded: .*config.json"):
        ask(client, "broken")
    with pytest.raises(openai.NotFoundError, match="does not exist; this server serves 'chat'"):
        ask(client, "gpt-5")

    assert client.completions.create(model="translate", prompt="luma li ursu pika.", temperature=0).choices[0].text
    assert (
        states(service)
        == {"chat": "loaded", "embed": "unloaded", "translate": "loaded", "rerank": "unloaded"} | unusable
    )
    assert len(children(service.process.pid)) == 2
    with pytest.raises(openai.BadRequestError, match="Loaded models that serve /v1/chat/completions: chat"):
        ask(client, "translate")


def test_an_engine_that_is_killed_starts_again_while_others_serve(service: Service) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)
    for name in ("embed", "translate"):
        httpx.post(f"{service.url}/v1/models/unload", json={"model": name}, timeout=PATIENCE).raise_for_status()
    ask(client, "chat")
    (victim,) = children(service.process.pid)
    client.embeddings.create(model="embed", input="a b")
    (other,) = set(children(service.process.pid)) - {victim}
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not is_running(victim), "it is not dead")
    assert len(client.embeddings.create(model="embed", input="a b").data) == 1
    assert is_running(other)

    def answers() -> bool:
        with contextlib.suppress(openai.InternalServerError):
            return ask(client, "chat") == ANSWER
        return False

    wait_for(answers, "chat did not come back")
    assert f"Packed weights are mapped from {service.log.parent / 'weights'}" in service.log.read_text()
    service.wait_metric('octavo_engine_restarts_total{model_name="chat"}', 1)
    assert service.metric('octavo_engine_restarts_total{model_name="embed"}') == 0


def test_the_command_line_shows_loads_and_unloads(service: Service) -> None:
    url = f"--url={service.url}"
    status, text = octavo("load", "embed", url, "--json")
    assert (status, json.loads(text)["state"]) == (0, "loaded")
    status, text = octavo("ps", url)
    assert status == 0
    lines = [line.split()[:2] for line in text.splitlines()]
    assert lines[0] == ["model", "state"]
    assert ["embed", "loaded"] in lines
    assert octavo("unload", "embed", url)[0] == 0
    assert states(service)["embed"] == "unloaded"
    assert octavo("unload", "x", url)[0] == 1


def test_an_adapter_selects_its_model(service: Service, tmp_path: Path) -> None:
    """Its name loads the base model; its answer is that of transformers with the adapter merged."""
    httpx.post(f"{service.url}/v1/models/unload", json={"model": "chat"}, timeout=PATIENCE)
    expected = reference.greedy(adapter(tmp_path), [5, 6, 7], None, 8)
    assert expected.margin > reference.MIN_MARGIN
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True}}
    answers = {
        name: httpx.post(f"{service.url}/inference/v1/generate", json=body | {"model": name}, timeout=PATIENCE).json()
        for name in ("sql", "chat")
    }
    ids = {name: answer["choices"][0]["token_ids"] for name, answer in answers.items()}
    assert ids["sql"] == list(expected.answers[0].tokens)
    assert ids["chat"] != ids["sql"]
    listed = {card["id"]: card for card in service.get("/v1/models").json()["data"]}
    assert (listed["sql"]["parent"], listed["sql"]["state"]) == ("chat", "loaded")


def test_open_webuis_calls(service: Service) -> None:
    """The calls of Open WebUI with one Ollama and one OpenAI connection, embeddings and a reranker at one address."""
    http = httpx.Client(base_url=service.url, timeout=PATIENCE, headers={"Authorization": "Bearer none"})
    for name in ("chat", "embed", "rerank"):
        http.post("/v1/models/unload", json={"model": name})

    def ask(path: str, **body: Any) -> Any:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    # It looks for the server and its models. This loads none.
    assert http.get("/").status_code == 200
    assert http.get("/api/version").json()["version"]
    tags = {one["name"]: one for one in http.get("/api/tags").json()["models"]}
    assert {"chat:latest", "embed:latest", "rerank:latest"} <= tags.keys()
    assert all(one["model"] == name and one["digest"] and one["details"] for name, one in tags.items())
    assert tags["chat:latest"]["capabilities"] == ["completion", "tools"]
    assert tags["embed:latest"]["capabilities"] == ["embedding"]
    shown = ask("/api/show", name="CHAT:latest")
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["llama.context_length"]
    assert "messages" in shown["template"]
    assert {"chat", "embed", "rerank"} <= {card["id"] for card in http.get("/v1/models").json()["data"]}
    assert not {"chat:latest", "embed:latest"} & {one["name"] for one in http.get("/api/ps").json()["models"]}

    # A chat by each connection, with the options that its interface sets, and the title of the chat.
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    options = {"temperature": 0, "num_predict": 8, "num_ctx": 2048, "num_keep": 0, "use_mmap": True}
    body = {"model": "chat:latest", "messages": messages, "options": options, "stream": True, "keep_alive": "5m"}
    with http.stream("POST", "/api/chat", json=body) as stream:
        assert stream.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in stream.iter_lines()]
    assert "".join(line["message"]["content"] for line in lines) == ANSWER
    assert (lines[-1]["done"], lines[-1]["done_reason"], lines[-1]["eval_count"]) == (True, "length", 8)
    assert [one["name"] for one in http.get("/api/ps").json()["models"]].count("chat:latest") == 1
    body = {"model": "chat", "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body | {"stream_options": {"include_usage": True}}) as stream:
        events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert (text, chunks[-1]["usage"]["completion_tokens"]) == (ANSWER, 8)
    title = ask("/v1/chat/completions", model="chat", messages=messages, stream=False, max_completion_tokens=8)
    assert title["choices"][0]["message"]["content"]
    ask("/api/generate", model="chat:latest", prompt="Hi", stream=False, options={"num_predict": 1})

    # A question about documents.
    old = ask("/api/embeddings", model="embed:latest", prompt="a b")["embedding"]
    many = ask("/api/embed", model="embed:latest", input=["a b", "snow"], truncate=True)["embeddings"]
    data = ask("/v1/embeddings", model="embed", input=["a b", "snow"], encoding_format="float")["data"]
    assert [len(vector) for vector in many] == [32, 32]
    for vector, item in zip(many, data, strict=True):
        assert vector == pytest.approx(item["embedding"], abs=1e-5)
    assert len(old) == 32
    ranked = ask("/v1/rerank", model="rerank", query="snow", documents=["a b", "snow"], top_n=2)["results"]
    assert sorted(result["index"] for result in ranked) == [0, 1]
    assert ranked[0]["relevance_score"] >= ranked[1]["relevance_score"]

    # It frees the memory of a model.
    ask("/api/generate", model="chat:latest", keep_alive=0)
    wait_for(lambda: states(service)["chat"] == "unloaded", "chat is still loaded")
