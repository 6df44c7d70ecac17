"""`octavo serve` with several models, each with an engine of its own, used by openai's client."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from support.service import PATIENCE, Service, children, is_running, wait_for
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
embed: {embed}
translate: {translate}
broken: {broken}
gone: {broken}/gone.gguf
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("several")
    make_text_encoder("headless", folder / "encoder")
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"architectures": ["Lla')
    file = folder / "models.yaml"
    places = {"chat": DEMOS["chat"], "translate": DEMOS["seq2seq"], "embed": folder / "encoder"}
    file.write_text(MODELS.format(broken=folder / "broken", **places))
    made = Service("--models", str(file), "--max-memory", "640MiB", log=folder / "service.log")
    try:
        made.wait_ready()
        yield made
        assert made.stop() == 0
        assert "Traceback" not in made.log.read_text()
    finally:
        made.process.kill()
        made.process.wait()


def states(service: Service) -> dict[str, str]:
    return {card["id"]: card["state"] for card in service.get("/v1/models").json()["data"]}


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
    assert states(service) == {"chat": "loaded", "embed": "loaded", "translate": "unloaded"} | unusable
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
    assert states(service) == {"chat": "loaded", "embed": "unloaded", "translate": "loaded"} | unusable
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
