"""/pooling, and what /v1/embeddings takes and writes besides: conversations, mixed inputs, other kinds of numbers."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch
from support.asgi import error
from support.pooling_api import MODEL, PoolingApi
from support.text_encoders import TEXTS
from test_http_embeddings import Api

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def chatting(**settings: Any) -> Api:
    """An app whose model has a chat template."""
    api = Api(**settings)
    assert api.service.tokenizer is not None
    api.service.tokenizer._hf.chat_template = TEMPLATE
    return api


def read(api: Api) -> str:
    """The text of the only input that the engine got."""
    ((source, _),) = api.client.asked.values()
    return bytes(source.token_ids).decode()


# ---------------------------------------------------------------- inputs


def test_texts_and_ids_in_one_list() -> None:
    api = Api()
    mixed = api.vectors(input=["a", [98, 99], {"text": "de"}, [102]])
    assert mixed == [api.vectors(input=each)[0] for each in ("a", "bc", "de", "f")]
    assert error(api.embed(input=["a", [98, 10**9]]))["param"] == "input"
    assert "input[1] is too long" in error(api.embed(input=["a", [98] * 65, "b" * 65]))["message"]
    assert "input[2] is too long" in error(api.embed(input=["a", [98], "b" * 65]))["message"]


def test_a_conversation_is_one_input() -> None:
    for body, text in [
        ({}, "u:hi;a:ho;"),
        ({"add_generation_prompt": True}, "u:hi;a:ho;a:"),
        ({"continue_final_message": True}, "u:hi;a:ho"),
        ({"truncate_prompt_tokens": 4}, "u:hi"),
        ({"truncate_prompt_tokens": -1}, "u:hi;a:ho;"),
    ]:
        api = chatting()
        answer = api.embed(messages=HELLO, **body)
        assert answer.status_code == 200, answer.text
        assert read(api) == text
        assert answer.json()["usage"]["prompt_tokens"] == len(text)
        api.check_empty()


def test_conversations_that_are_too_long() -> None:
    long = [{"role": "user", "content": "x" * 1000}]
    problem = error(chatting().embed(messages=long))
    assert (problem["param"], problem["code"]) == ("messages", "context_length_exceeded")
    assert "at most 64 (max_model_len)" in problem["message"]
    api = chatting()
    assert api.embed(messages=long, truncate_prompt_tokens=-1).status_code == 200
    assert read(api) == "u:" + "x" * 62


def test_what_a_conversation_needs() -> None:
    assert error(Api().embed(messages=HELLO))["code"] == "no_chat_template"
    assert error(chatting().embed(messages=[{"role": "owl", "content": "a"}]))["param"] == "messages[0].role"
    assert error(chatting().embed(messages=HELLO, add_special_tokens=True))["param"] == "add_special_tokens"
    assert error(chatting().embed())["code"] == "missing_required_parameter"


# ---------------------------------------------------------------- how numbers are written


def numbers(api: PoolingApi, path: str = "/v1/embeddings", **body: Any) -> torch.Tensor:
    name = "embedding" if path == "/v1/embeddings" else "data"
    return torch.tensor([item[name] for item in api.ask(path, **body)["data"]], dtype=torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_fewer_bits(headless: PoolingApi, dtype: str, endianness: str) -> None:
    expected = numbers(headless, input=TEXTS).to(getattr(torch, dtype))
    form = {"embed_dtype": dtype, "endianness": endianness}

    def back(written: bytes, shape: Any) -> torch.Tensor:
        bits = np.frombuffer(written, f"{'>' if endianness == 'big' else '<'}i{expected.itemsize}")
        return torch.from_numpy(bits.astype(bits.dtype.newbyteorder("="))).view(expected.dtype).reshape(shape)

    data = headless.ask("/v1/embeddings", input=TEXTS, encoding_format="base64", **form)["data"]
    for item, vector in zip(data, expected, strict=True):
        assert torch.equal(back(base64.b64decode(item["embedding"]), vector.shape), vector)

    answer = headless.post("/v1/embeddings", input=TEXTS, encoding_format="bytes", **form)
    assert answer.headers["content-type"] == "application/octet-stream"
    facts = json.loads(answer.headers["metadata"])
    assert set(facts) == {"id", "created", "model", "data", "usage"}
    assert facts["usage"]["prompt_tokens"] == sum(map(headless.checkpoint.count, TEXTS))
    for item, vector in zip(facts["data"], expected, strict=True):
        assert (item["embed_dtype"], item["endianness"]) == (dtype, endianness)
        assert torch.equal(back(answer.content[item["start"] : item["end"]], item["shape"]), vector)
    assert facts["data"][-1]["end"] == len(answer.content)

    bare = headless.post("/v1/embeddings", input=TEXTS, encoding_format="bytes_only", **form)
    assert (bare.content, "metadata" in bare.headers) == (answer.content, False)


def test_by_default_nothing_changes(headless: PoolingApi) -> None:
    plain = headless.ask("/v1/embeddings", input=TEXTS, encoding_format="base64")["data"]
    said = {"embed_dtype": "float32", "endianness": "native", "padding": "do_not_pad"}
    assert headless.ask("/v1/embeddings", input=TEXTS, encoding_format="base64", **said)["data"] == plain


def test_vllms_name_of_the_norm(headless: PoolingApi) -> None:
    raw = numbers(headless, input=TEXTS, use_activation=False)
    assert torch.equal(raw, numbers(headless, input=TEXTS, normalize=False))
    assert torch.allclose(torch.nn.functional.normalize(raw), numbers(headless, input=TEXTS, use_activation=True))
    assert not torch.allclose(raw.norm(dim=1), torch.ones(len(TEXTS)), rtol=0.01)


# ---------------------------------------------------------------- /pooling


def test_vectors_in_vllms_shape(headless: PoolingApi) -> None:
    body = headless.ask("/pooling", model=MODEL, input=TEXTS)
    assert set(body) == {"id", "object", "created", "model", "data", "usage"}
    assert body["id"].startswith("pool-")
    assert [set(item) for item in body["data"]] == [{"index", "object", "data"}] * len(TEXTS)
    assert {item["object"] for item in body["data"]} == {"pooling"}
    vectors = numbers(headless, input=TEXTS)
    assert torch.equal(numbers(headless, "/pooling", input=TEXTS), vectors)
    assert torch.equal(numbers(headless, "/pooling", input=TEXTS, task="embed"), vectors)
    ids = [headless.checkpoint.tokenizer(text).input_ids for text in TEXTS]
    assert torch.equal(numbers(headless, "/pooling", input=ids), vectors)
    assert numbers(headless, "/pooling", input=TEXTS, dimensions=3).shape == (len(TEXTS), 3)


@pytest.mark.parametrize("task", [None, "classify"])
def test_classes(classes: PoolingApi, task: str | None) -> None:
    expected = torch.stack([classes.checkpoint.logits(text) for text in TEXTS])
    found = numbers(classes, "/pooling", input=TEXTS, task=task)
    assert torch.allclose(found, expected.softmax(-1), rtol=1e-4, atol=1e-6)
    plain = numbers(classes, "/pooling", input=TEXTS, task=task, use_activation=False)
    assert torch.allclose(plain, expected, rtol=1e-4, atol=1e-5)


def test_classes_of_tokens(tokens: PoolingApi) -> None:
    text = TEXTS[0]
    expected = tokens.checkpoint.logits(text)
    body = tokens.ask("/pooling", input=text, use_activation=False)
    found = torch.tensor(body["data"][0]["data"])
    assert found.shape == (tokens.checkpoint.count(text), expected.shape[-1])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    answer = tokens.post("/pooling", input=text, use_activation=False, encoding_format="bytes")
    (item,) = json.loads(answer.headers["metadata"])["data"]
    assert np.frombuffer(answer.content, "<f4").reshape(item["shape"]) == pytest.approx(found.numpy())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"task": "token_embed"}, "task"),
        ({"task": "embed"}, "task"),
        ({"task": "score"}, "task"),
        ({"dimensions": 2}, "dimensions"),
        ({"normalize": True}, "normalize"),
    ],
)
def test_what_the_head_does_not_do(classes: PoolingApi, fields: dict[str, Any], param: str) -> None:
    problem = classes.refused("/pooling", input="a", **fields)
    assert problem["param"] == param
    assert "classify" in problem["message"]
