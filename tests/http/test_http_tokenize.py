"""POST /tokenize and /detokenize, GET /version: over a byte tokenizer, and as a real process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_client import EOS, VOCAB_SIZE, FakeClient, hf_byte_tokenizer
from support.asgi import error, request
from support.service import PATIENCE, Service
from tokenizers import processors

from cli import version
from engine.text.processor import Tokenizer
from server.app import create_app

TEMPLATE = (
    "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ add }}"
    "{% if add_generation_prompt %}>{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def call(path: str, *, tokenizer: bool = True, template: str | None = TEMPLATE, **body: Any) -> httpx.Response:
    """Of an app whose tokenizer opens every text with <eos>."""
    hf = hf_byte_tokenizer()
    hf.chat_template = template
    hf._tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    app = create_app(FakeClient(lambda *_: []), Tokenizer(hf) if tokenizer else None, "org/fake", version="1.2.3")
    return request(app, "POST", path, json=body) if body else request(app, "GET", path)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [EOS, *"hé".encode()]),
        ({"prompt": "hi", "add_special_tokens": True, "model": "org/fake"}, [EOS, *b"hi"]),
        ({"prompt": "hi", "add_special_tokens": False, "messages": None}, [*b"hi"]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"messages": HELLO}, [EOS, *b"hi>"]),
        ({"messages": HELLO, "add_generation_prompt": False}, [EOS, *b"hi"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, [EOS, *b"a>"]),
        ({"messages": HELLO, "continue_final_message": True}, [EOS, *b"hi"]),
        ({"messages": HELLO, "chat_template_kwargs": {"add": "+"}}, [EOS, *b"hi+>"]),
    ],
)
def test_tokenize(body: dict[str, Any], tokens: list[int]) -> None:
    found = {"count": len(tokens), "max_model_len": 64, "tokens": tokens, "token_strs": None}
    assert call("/tokenize", **body).json() == found


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "org/fake"}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": HELLO, "tools": [{}]}, "tools[0].type"),
        ({"prompt": "a", "tools": [{}]}, "tools"),
        ({"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_tokenized_is_400_and_names_the_field(body: dict[str, Any], param: str) -> None:
    problem = error(call("/tokenize", **body))
    assert problem["param"] == param
    assert param in problem["message"]


@pytest.mark.parametrize("tokens", [[EOS, *"hé".encode()], [0x68]])
def test_detokenize_shows_special_tokens(tokens: list[int]) -> None:
    text = "".join("<eos>" if token == EOS else "" for token in tokens)
    text += bytes(token for token in tokens if token != EOS).decode()
    assert call("/detokenize", tokens=tokens).json() == {"prompt": text, "content": text}


@pytest.mark.parametrize("tokens", [None, [], "ab", [1.5], [True], [-1], [VOCAB_SIZE], [10**30], [[1]], ["1"]])
def test_what_cannot_be_detokenized_is_400_and_names_the_field(tokens: Any) -> None:
    problem = error(call("/detokenize", tokens=tokens))
    assert problem["param"] == "tokens"
    assert "tokens" in problem["message"]


def test_the_other_model_is_unknown() -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert error(call(path, model="gpt-9", **body), 404)["code"] == "model_not_found"


def test_without_a_tokenizer_or_a_template() -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [1]}),
    ):
        assert error(call(path, tokenizer=False, **body))["code"] == "no_tokenizer"
    assert error(call("/tokenize", template=None, messages=HELLO))["code"] == "no_chat_template"


def test_version() -> None:
    assert call("/version").json() == {"version": "1.2.3"}


@pytest.mark.slow
def test_the_bundled_model(bundled: Callable[..., Service]) -> None:
    with httpx.Client(base_url=bundled().url, timeout=PATIENCE) as http:
        text = "The sailor sings: héllo ☃"
        made = http.post("/tokenize", json={"prompt": text}).json()
        assert made["max_model_len"] == 512
        assert made["count"] == len(made["tokens"]) > 4
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == f"<s>{text}"
        completion = http.post("/v1/completions", json={"prompt": text, "max_tokens": 1}).json()
        assert completion["usage"]["prompt_tokens"] == made["count"]
        made = http.post("/tokenize", json={"messages": HELLO}).json()
        prompt = http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"]
        assert prompt == "<s><|user|>hi</s><|assistant|>"
        chat = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).json()
        assert chat["usage"]["prompt_tokens"] == made["count"]
        assert http.get("/version").json() == {"version": version()}


# ---------------------------------------------------------------- how much at once


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {"prompt": "a" * 65536}, "it has 65537 tokens, but the limit is 65536"),
        ("/tokenize", {"prompt": "a" * 200_000}, "the first 131072 of its 200000 characters have 131073 tokens"),
        ("/tokenize", {"prompt": "a" * 1_500_000}, "the first 131072 of its 1500000 characters"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 65536}]}, "it has 65538 tokens"),
        ("/detokenize", {"tokens": [97] * 65537}, "it has 65537 tokens, but the limit is 65536"),
    ],
)
def test_what_is_too_long_for_one_request_is_400(path: str, body: dict[str, Any], said: str) -> None:
    problem = error(call(path, **body))
    assert said in problem["message"]
    assert "Send it in parts" in problem["message"]
    assert (problem["param"], problem["code"]) == (next(iter(body)), "context_length_exceeded")


def test_the_longest_is_taken() -> None:
    assert call("/tokenize", prompt="a" * 65535).json()["count"] == 65536
    assert len(call("/detokenize", tokens=[97] * 65536).json()["prompt"]) == 65536


def test_a_longer_body_than_one_text_needs_is_413() -> None:
    for path, body in (("/tokenize", {"prompt": "a" * 2**21}), ("/detokenize", {"tokens": [97] * 2**20})):
        problem = error(call(path, **body), 413)
        assert f"the limit is {2**21} (for {path}, from the model's limits)" in problem["message"]
