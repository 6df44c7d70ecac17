"""`octavo serve` as a process of its own, over an encoder without pages and over a decoder, against the reference."""

from __future__ import annotations

import base64
import concurrent.futures
import itertools
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from support.service import PATIENCE, Service, serving, stopped, wait_for
from support.text_encoders import MAX_LENGTH, TEXTS, TextEncoder, make_text_encoder

from cli.main import main

pytestmark = pytest.mark.slow

MODEL = "headless"


class Api:
    """A service of a checkpoint."""

    def __init__(self, service: Service, checkpoint: TextEncoder):
        self.service = service
        self.checkpoint = checkpoint
        self.http = httpx.Client(base_url=service.url, timeout=PATIENCE)

    def vectors(self, **body: Any) -> np.ndarray[Any, Any]:
        answer = self.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return np.array([item["embedding"] for item in answer.json()["data"]], np.float32)

    def wanted(self, texts: list[str], how: str = "mean") -> np.ndarray[Any, Any]:
        """The reference's vectors, before they are normalised."""
        found = []
        for text in texts:
            with torch.no_grad():
                states = self.checkpoint.model(**self.checkpoint.tokenizer(text, return_tensors="pt"))
            states = states.last_hidden_state[0]
            found.append({"mean": states.mean(0), "cls": states[0], "last": states[-1]}[how].numpy())
        return np.array(found)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("encoder")
    checkpoint = make_text_encoder(MODEL, folder / MODEL)
    with serving(
        str(checkpoint.path), "--dtype", "float32", log=folder / "service.log", signum=signal.SIGINT
    ) as service:
        yield Api(service, checkpoint)


def unit(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_vectors_are_the_references(encoder: Api) -> None:
    wanted = encoder.wanted(TEXTS)
    together = encoder.vectors(input=TEXTS)
    assert np.abs(together - unit(wanted)).max() < 1e-5
    alone = np.concatenate([encoder.vectors(input=text) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-6
    assert np.abs(encoder.vectors(input=TEXTS, normalize=False) - wanted).max() < 1e-4 * np.abs(wanted).max()
    ids = [encoder.checkpoint.tokenizer(text).input_ids for text in TEXTS]
    assert np.abs(encoder.vectors(input=ids) - together).max() < 1e-6
    assert np.abs(encoder.vectors(input=TEXTS, dimensions=5) - unit(wanted[:, :5])).max() < 1e-5
    for how in ("cls", "last"):
        assert np.abs(encoder.vectors(input=TEXTS, pooling=how) - unit(encoder.wanted(TEXTS, how))).max() < 1e-5
    bare = [encoder.checkpoint.tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    plain = encoder.vectors(input=TEXTS, add_special_tokens=False)
    assert np.abs(plain - encoder.vectors(input=bare)).max() < 1e-6 < np.abs(plain - together).max()


def test_a_text_is_cut_as_transformers_cuts_it(encoder: Api) -> None:
    text = " ".join(TEXTS * 4)
    for asked, length in ((-1, MAX_LENGTH), (7, 7)):
        ids = encoder.checkpoint.tokenizer(text, truncation=True, max_length=length).input_ids
        assert len(ids) == length
        found = encoder.vectors(input=text, truncate_prompt_tokens=asked)
        assert np.abs(found - encoder.vectors(input=ids)).max() < 1e-6
    refused = encoder.http.post("/v1/embeddings", json={"input": text}).json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert str(MAX_LENGTH) in refused["message"]
    least = encoder.http.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": 1}).json()["error"]
    assert least["param"] == "truncate_prompt_tokens"


def test_openai_client(encoder: Api) -> None:
    with openai.OpenAI(base_url=f"{encoder.service.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        wanted = unit(encoder.wanted(TEXTS))
        for fields in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model=MODEL, input=TEXTS, **fields)  # type: ignore[arg-type]
            found = [item.embedding for item in answer.data]
            if fields.get("encoding_format") == "base64":
                found = [np.frombuffer(base64.b64decode(str(item)), "<f4") for item in found]  # type: ignore[misc]
            assert np.abs(np.array(found) - wanted).max() < 1e-5
            assert answer.usage.prompt_tokens == sum(map(encoder.checkpoint.count, TEXTS))
        many = client.embeddings.create(model=MODEL, input=[TEXTS[place % len(TEXTS)] for place in range(2048)])
        assert (
            np.abs(np.array([item.embedding for item in many.data[-len(TEXTS) :]]) - np.roll(wanted, -4, 0)).max()
            < 1e-5
        )
        with pytest.raises(openai.BadRequestError, match="encoder-only model") as refused:
            client.completions.create(model=MODEL, prompt="a")
        assert refused.value.code == "unsupported_endpoint"
        (card,) = client.models.list()
        assert card.model_dump()["tasks"] == ["embed", "token_embed"]


def test_a_client_that_leaves_lets_others_in(encoder: Api) -> None:
    service, body = encoder.service, {"input": [TEXTS[4]] * 2048}
    aborted = 'octavo_requests_aborted_total{reason="disconnect"}'
    before = service.metric(aborted)

    def leave() -> bool:
        """Whether the service had begun with it."""
        with pytest.raises(httpx.ReadTimeout):
            encoder.http.post("/v1/embeddings", json=body, timeout=httpx.Timeout(PATIENCE, read=0.5))
        return service.metric(aborted) > before

    with stopped(service.engine()):
        wait_for(leave, "nobody noticed")
    for name in ("octavo_num_requests_in_service", "octavo_num_requests_running", "octavo_num_requests_waiting"):
        service.wait_metric(name, 0)
    assert service.metric("octavo_num_queued_tokens") == 0
    assert encoder.vectors(input="a").shape == (1, 32)


def test_many_clients_at_once(encoder: Api) -> None:
    wanted = encoder.vectors(input=TEXTS)

    def ask(number: int) -> float:
        part = [place % len(TEXTS) for place in range(number, number + 40)]
        return float(np.abs(encoder.vectors(input=[TEXTS[place] for place in part]) - wanted[part]).max())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, range(24))) < 1e-6


def test_what_the_log_and_the_doctor_say(encoder: Api, capsys: pytest.CaptureFixture[str]) -> None:
    log = encoder.service.log.read_text()
    assert re.search(rf"encoder-only, embed, token_embed, inputs of up to {MAX_LENGTH} tokens", log)
    assert re.search(r"No KV cache: .* at most \d+ of them with 2048 tokens together", log)
    assert "Endpoints: /v1/embeddings, /pooling, /v1/score, /v1/rerank." in log
    assert "pages of" not in log
    assert main(["doctor", str(encoder.checkpoint.path), "--port", "0"]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"ok +model .*: BertModel, 1 file of weights, encoder-only, embed, .* {MAX_LENGTH} tokens", said)
    assert re.search(r"ok +memory +weights .* \(float32\), no KV cache; ", said)
    assert "chat" not in said


def test_a_page_less_engine_has_metrics(encoder: Api) -> None:
    encoder.vectors(input=TEXTS)
    service = encoder.service
    assert service.metric("octavo_kv_cache_usage_perc") == 0
    for state in ("held", "cached", "free"):
        assert service.metric(f'octavo_kv_pages{{state="{state}"}}') == 0
    assert service.metric("octavo_prompt_tokens_total") >= sum(map(encoder.checkpoint.count, TEXTS))
    assert service.metric("octavo_generation_tokens_total") == 0
    for path in ("/health", "/health/live", "/health/ready"):
        assert encoder.http.get(path).status_code == 200


# ---------------------------------------------------------------- beside generation


@pytest.fixture
def demo(bundled: Callable[..., Service]) -> Service:
    return bundled()


def test_a_prompt_does_not_wait_for_a_batch_of_inputs(demo: Service) -> None:
    with httpx.Client(base_url=demo.url, timeout=PATIENCE) as http:
        prompt = {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}
        alone = http.post("/v1/completions", json=prompt).json()["choices"][0]["text"]
        short = http.post("/v1/embeddings", json={"input": "a cat"}).json()["data"][0]["embedding"]
        numbers = itertools.count()

        def embed(done: threading.Event) -> httpx.Response:
            texts = [f"{next(numbers)} " + "and so on " * 40 for _ in range(400)]
            answer = httpx.post(f"{demo.url}/v1/embeddings", json={"input": texts}, timeout=PATIENCE)
            done.set()
            return answer

        def is_overtaken() -> bool:
            """Whether others had their answers while the batch was computed."""
            done = threading.Event()
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                batch = pool.submit(embed, done)
                wait_for(lambda: demo.metric("octavo_num_requests_waiting") or done.is_set(), "it did not arrive")
                beside = http.post("/v1/completions", json=prompt).json()["choices"][0]["text"]
                again = http.post("/v1/embeddings", json={"input": "a cat"}).json()["data"][0]["embedding"]
                overtaken = not done.is_set()
                assert batch.result().status_code == 200
            assert beside == alone
            assert np.abs(np.array(again) - np.array(short)).max() < 1e-5
            return overtaken

        # A busy machine may ask too late; not again and again.
        assert any(is_overtaken() for _ in range(5))
    for name in ("octavo_num_requests_in_service", "octavo_num_queued_tokens", 'octavo_kv_pages{state="held"}'):
        demo.wait_metric(name, 0)
