"""Which endpoints a model's kind serves, what /v1/models says of it, and how the others are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fake_client import FEATURES, FakeClient, Script, hf_byte_tokenizer, pool
from support.asgi import Call, Called
from support.service import PATIENCE

from engine import PoolingParams
from engine.text.processor import Tokenizer
from server.app import create_app
from server.routes.tasks import LACKS

CONVERSATIONS = [
    "/v1/completions", "/v1/chat/completions", "/v1/decisions", "/v1/systemone", "/inference/v1/generate",
    "/v1/responses", "/v1/messages",
]  # fmt: skip
VECTORS = ["/v1/embeddings", "/pooling", "/v1/score", "/v1/rerank"]
ENCODER: dict[str, Any] = {"encoder_only": True, "block_size": 0, "num_blocks": 0, "full_requests": 0.0}
EMBEDS: dict[str, Any] = {"embedding_size": FEATURES}
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "decoder": ({"tasks": ("generate", "embed"), **EMBEDS}, [*CONVERSATIONS, *VECTORS]),
    "encoder-decoder": ({"tasks": ("generate",), "max_encoder_len": 64}, ["/v1/completions"]),
    "headless": ({"tasks": ("embed",), **ENCODER, **EMBEDS}, VECTORS),
    "masked": ({"tasks": ("fill_mask", "embed"), **ENCODER, **EMBEDS}, [*VECTORS, "/v1/fill-mask"]),
    "classes": ({"tasks": ("classify",), "labels": ("a", "b"), **ENCODER}, ["/pooling", "/v1/classify"]),
    "cross-encoder": (
        {"tasks": ("classify",), "labels": ("a",), **ENCODER},
        ["/pooling", "/v1/score", "/v1/rerank", "/v1/classify"],
    ),
    "headless-decoder": ({"tasks": ("embed",), **EMBEDS}, VECTORS),
    "decoder-with-classes": ({"tasks": ("classify",), "labels": ("a", "b")}, ["/pooling", "/v1/classify"]),
    "answers": ({"tasks": ("answer",), **ENCODER}, ["/v1/answer"]),
    "entities": ({"tasks": ("entities",), **ENCODER}, ["/v1/entities"]),
    "tokens": ({"tasks": ("token_classify",), "labels": ("O", "B-X"), **ENCODER}, ["/pooling", "/v1/classify"]),
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]},
    "/v1/systemone": {"state": "a", "questions": {"b": {"type": "noul"}}},
    "/inference/v1/generate": {"token_ids": [1]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/classify": {"input": "a"},
    "/v1/answer": {"question": "a", "context": "b"},
    "/v1/entities": {"input": "a", "labels": ["b"]},
    "/v1/fill-mask": {"input": "a"},
    "/translate": {"q": "a", "source": "en", "target": "de"},
    "/v1/audio/transcriptions": {},
    "/v1/audio/translations": {},
}


# Some of the reasons why a kind does not serve an endpoint.
REASONS = {
    ("masked", "/v1/answer"): "it is a masked language model, and it does not find answers",
    ("masked", "/v1/entities"): "it is a masked language model, and it does not find entities by label",
    ("answers", "/v1/classify"): "its head finds answers to questions",
    ("entities", "/v1/classify"): "its head finds entities by labels",
    ("classes", "/v1/rerank"): "2 classes",
}


class Api(Called):
    """An app whose model is of a kind."""

    def __init__(
        self,
        kind: str,
        *,
        template: str | None = "{{ messages[0].content }}",
        tokenizer: bool = True,
        script: Script | None = None,
    ):
        self.client = FakeClient(script or self._answer)
        self.client.info = replace(self.client.info, **KINDS[kind][0])
        hf = hf_byte_tokenizer()
        hf.chat_template = template
        self.app = create_app(self.client, Tokenizer(hf) if tokenizer else None, "org/fake")

    def _answer(self, request_id: str, source: Any, params: Any) -> Any:
        assert isinstance(params, PoolingParams), "only vectors are asked for here"
        return pool(request_id, source, params)

    def card(self) -> dict[str, Any]:
        (card,) = self.request("GET", "/v1/models").json()["data"]
        assert self.request("GET", "/v1/models/org/fake").json() == card
        return dict(card)

    def refused(self, path: str) -> dict[str, Any]:
        answer = self.request("POST", path, json=BODIES[path])
        assert answer.status_code == 400, answer.text
        assert not self.client.asked
        return dict(answer.json()["error"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_says_what_is_served(kind: str) -> None:
    facts, endpoints = KINDS[kind]
    card = Api(kind).card()
    assert card["endpoints"] == endpoints
    assert card["tasks"] == list(facts["tasks"])
    assert card["inputs"] == ["text"]
    assert card.get("embedding_size") == facts.get("embedding_size")
    assert card.get("labels") == (list(facts["labels"]) if "labels" in facts else None)


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind in KINDS for path in BODIES if path not in KINDS[kind][1]]
)
def test_what_is_not_served_is_refused_with_the_reason(kind: str, path: str) -> None:
    api, (_, endpoints) = Api(kind), KINDS[kind]
    problem = api.refused(path)
    if path == "/v1/messages":  # Anthropic's shape
        assert problem["type"] == "invalid_request_error"
    else:
        assert (problem["param"], problem["code"]) == ("model", "unsupported_endpoint")
    assert problem["message"].startswith(f"org/fake cannot serve {path}: it")
    assert REASONS.get((kind, path), "") in problem["message"]
    assert problem["message"].endswith(f"Endpoints that it serves: {', '.join(endpoints)}.")


def test_every_endpoint_is_asked_for_here() -> None:
    assert set(BODIES) == set(LACKS)


def test_what_needs_texts_needs_a_tokenizer() -> None:
    assert Api("decoder", tokenizer=False).card()["endpoints"] == [
        "/v1/completions", "/inference/v1/generate", "/v1/embeddings", "/pooling",
    ]  # fmt: skip
    assert Api("masked", tokenizer=False).card()["endpoints"] == ["/v1/embeddings", "/pooling"]
    api = Api("headless", tokenizer=False)
    assert api.request("POST", "/v1/embeddings", json={"input": [1, 2]}).status_code == 200
    refused = Api("headless", tokenizer=False).refused("/v1/embeddings")
    assert (refused["param"], refused["code"]) == ("input", "no_tokenizer")


def test_chat_needs_a_template() -> None:
    api = Api("decoder", template=None)
    assert "/v1/chat/completions" not in api.card()["endpoints"]
    assert "no chat template" in api.refused("/v1/chat/completions")["message"]


def test_an_encoders_tokens() -> None:
    api = Api("headless")
    assert api.request("POST", "/tokenize", json={"prompt": "ab"}).json()["tokens"] == [97, 98]
    assert api.request("POST", "/detokenize", json={"tokens": [97, 98]}).json()["prompt"] == "ab"
    chat = api.request("POST", "/tokenize", json=BODIES["/v1/chat/completions"]).json()["error"]
    assert (chat["param"], chat["code"]) == ("messages", "no_chat")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_other_routes_do_without_pages(kind: str) -> None:
    api = Api(kind)
    for path in ("/health", "/health/live", "/health/ready", "/version"):
        assert api.request("GET", path).status_code == 200, path
    assert "octavo_kv_cache_usage_perc" in api.request("GET", "/metrics").text


def test_the_document_is_the_same_for_all_kinds() -> None:
    first, second = (Api(kind).request("GET", "/openapi.json") for kind in ("decoder", "headless"))
    assert first.status_code == 200
    assert first.json() == second.json()


# A kind that serves each endpoint.
SERVING = {path: kind for kind, (_, paths) in KINDS.items() for path in paths}


@pytest.mark.parametrize("path", SERVING)
@pytest.mark.whole
def test_another_model_is_404(path: str) -> None:
    for kind in {SERVING[path], "classes"}:  # also where this model would refuse it
        answer = Api(kind).request("POST", path, json=BODIES[path] | {"model": "other"})
        problem = answer.json()["error"]
        assert answer.status_code == 404, answer.text
        assert "'other'" in problem["message"]
        if path != "/v1/messages":  # Anthropic's shape has neither
            assert (problem["param"], problem["code"]) == ("model", "model_not_found")


# The others need a real tokenizer or model to read their input: test_http_fill_mask.py and test_http_decisions.py.
@pytest.mark.parametrize("path", sorted(SERVING.keys() - {"/v1/fill-mask", "/v1/entities", "/v1/systemone"}))
@pytest.mark.whole
async def test_a_client_that_leaves_ends_the_work(path: str) -> None:
    api = Api(SERVING[path], script=lambda *_: [asyncio.Event()])
    more = {"input": ["a", "b"]} if path in ("/v1/embeddings", "/v1/classify", "/pooling") else {}
    call = Call(api.app, path, BODIES[path] | more)
    async with asyncio.timeout(PATIENCE):
        while not api.client.running and not call.task.done():
            await asyncio.sleep(0.001)
    call.leave()
    await call.wait_end()
    assert len(api.client.asked) > bool(more)
    assert sorted(api.client.cut_short) == sorted(api.client.asked)
    metrics = (await asyncio.to_thread(api.request, "GET", "/metrics")).text
    assert "octavo_num_requests_in_service 0.0" in metrics
