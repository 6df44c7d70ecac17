"""What clients that were made for other servers send and expect: vLLM's, llama.cpp's, text-generation-inference's."""

from __future__ import annotations

from typing import Any

import pytest
from fake_client import EOS, hf_byte_tokenizer, say
from support.asgi import error
from test_http_api import MODEL, Api
from test_http_chat import HELLO, tokenizer_with
from test_http_chat import Api as ChatApi
from tokenizers import processors

from engine.text.processor import Tokenizer
from server.app import create_app
from server.config.settings import ServerSettings


def chatting(template: str | None = "{{ messages[0].content }}") -> Api:
    """An app whose model chats."""
    api = Api()
    api.app = create_app(api.client, tokenizer_with(template), MODEL)
    return api


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["", "default", "dummy", "tgi"])
def test_a_single_model_has_the_names_that_clients_give_it(name: str) -> None:
    api = Api()
    assert api.complete(model=name, prompt="a").json()["model"] == MODEL
    settings = ServerSettings(strict_model_name=True)
    api.app = create_app(api.client, api.app.state.service.tokenizer, MODEL, settings=settings)
    assert error(api.complete(model=name, prompt="a"), 404)["code"] == "model_not_found"
    assert api.complete(model=MODEL, prompt="a").status_code == 200


def test_paths_without_a_version() -> None:
    api = chatting()
    with_version, without = (
        api.request("POST", f"{prefix}/chat/completions", json={"messages": HELLO}).json() for prefix in ("/v1", "")
    )
    assert without["choices"] == with_version["choices"]
    assert api.request("GET", "/models").json() == api.request("GET", "/v1/models").json()
    assert api.request("GET", "/models/org/fake").json()["id"] == "org/fake"
    assert Api().request("POST", "/completions", json={"prompt": "ab"}).json()["choices"][0]["text"] == "<ab0>"
    # What a model cannot serve has the same refusal under both.
    assert error(api.request("POST", "/embeddings", json={"input": "a"}))["code"] == "unsupported_endpoint"
    assert error(Api().request("POST", "/chat/completions", json={"messages": HELLO}))["code"] == "unsupported_endpoint"


# ---------------------------------------------------------------- about the service


def test_what_tells_of_the_service() -> None:
    api = Api()
    for method in ("GET", "POST"):
        assert api.request(method, "/ping").status_code == 200
    assert api.request("HEAD", "/ping").status_code == 200
    assert api.request("GET", "/load").json() == {"server_load": 0}
    facts = api.request("GET", "/server_info").json()
    assert facts["model"] == MODEL
    assert facts["max_model_len"] == api.client.info.max_model_len
    assert facts["num_blocks"] == api.client.info.num_blocks


def test_load_counts_what_runs() -> None:
    api = Api()
    api.app.state.service.drain.num_running = 3
    assert api.request("GET", "/load").json() == {"server_load": 3}


def test_the_tokenizer_tells_of_itself() -> None:
    facts = chatting("{{ messages }}").request("GET", "/tokenizer_info").json()
    assert facts["chat_template"] == "{{ messages }}"
    assert facts["vocab_size"] == 257
    assert facts["special_tokens"]["eos_token"] == "<eos>"
    assert facts["tokenizer_class"].endswith("TokenizerFast") or facts["tokenizer_class"] == "TokenizersBackend"
    assert error(Api(tokenizer=False).request("GET", "/tokenizer_info"), 404)["code"] == "no_tokenizer"


def test_keys_guard_them_but_not_the_ping() -> None:
    api = Api()
    api.app = create_app(api.client, api.app.state.service.tokenizer, MODEL, settings=ServerSettings(api_key=("k",)))
    assert api.request("GET", "/ping").status_code == 200
    for path in ("/load", "/server_info", "/tokenizer_info", "/models"):
        assert api.request("GET", path).status_code == 401


# ---------------------------------------------------------------- tokens


def test_tokenize_by_the_name_of_llama_cpp() -> None:
    api = Api()
    answer = api.request("POST", "/tokenize", json={"content": "hi", "return_token_strs": True}).json()
    assert answer["tokens"] == [104, 105]
    assert answer["token_strs"] == ["h", "i"]
    assert api.request("POST", "/detokenize", json={"tokens": [104, 105]}).json() == {"prompt": "hi", "content": "hi"}
    problem = error(api.request("POST", "/tokenize", json={"content": "hi", "prompt": "ho"}))
    assert "contradict" in problem["message"]


def test_tokens_named_by_their_ids() -> None:
    body = {"prompt": "a", "logprobs": 1, "max_tokens": 2, "return_tokens_as_token_ids": True}
    logprobs = Api().complete(**body, echo=True).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"][:3] == ["token_id:97", "token_id:60", "token_id:97"]
    assert logprobs["top_logprobs"][1] == {"token_id:60": -0.5}
    assert logprobs["text_offset"][:3] == [0, 1, 2]
    chat = ChatApi().chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()
    first = chat["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == first["top_logprobs"][0]["token"] == "token_id:60"


def test_as_many_log_probabilities_as_there_may_be() -> None:
    api = Api()
    assert api.complete(prompt="a", logprobs=-1, prompt_logprobs=-1).status_code == 200
    assert (api.sampling().logprobs, api.sampling().prompt_logprobs) == (20, 20)
    assert error(Api().complete(prompt="a", logprobs=-2))["param"] == "logprobs"
    chat = ChatApi()
    assert chat.chat(logprobs=True, top_logprobs=-1).status_code == 200
    ((_, params),) = chat.client.asked.values()
    assert params.logprobs == 20
    assert error(ChatApi().chat(top_logprobs=-1))["param"] == "top_logprobs"
    assert error(ChatApi().chat(logprobs=True, top_logprobs=-2))["param"] == "top_logprobs"


def test_logit_bias_as_pairs() -> None:
    api = Api()
    assert api.complete(prompt="a", logit_bias=[[97, 1.5], [98, False]]).status_code == 200
    assert api.sampling().logit_bias == {97: 1.5, 98: -100.0}
    for wrong in ([[97]], [["a", 1.0]], [97, 1.0], [[97, 1.0, 2.0]]):
        problem = error(Api().complete(prompt="a", logit_bias=wrong))
        assert problem["param"] == "logit_bias"


# ---------------------------------------------------------------- usage


def test_the_event_with_the_role_has_no_tokens_yet() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = ChatApi().stream(stream_options=options)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[0]["usage"]["completion_tokens"] == 0
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4


# ---------------------------------------------------------------- prompts that are cut


def framed() -> Tokenizer:
    """Bytes, with <eos> before each text."""
    hf = hf_byte_tokenizer()
    hf._tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    return Tokenizer(hf)


def asked(tokenizer: Tokenizer | None = None, **body: Any) -> list[int]:
    """The token ids that the engine gets."""
    api = Api(lambda request_id, source, params: say(request_id, ["x"], params))
    if tokenizer is not None:
        api.app = create_app(api.client, tokenizer, MODEL)
    answer = api.complete(**body)
    assert answer.status_code == 200, answer.text
    ((source, _),) = api.client.asked.values()
    assert answer.json()["usage"]["prompt_tokens"] == len(source.token_ids)
    return list(source.token_ids)


def test_the_end_of_a_prompt_stays() -> None:
    assert asked(prompt="abcdef", truncate_prompt_tokens=3) == [*b"def"]
    assert asked(prompt=[*b"abcdef"], truncate_prompt_tokens=3) == [*b"def"]
    assert asked(prompt="ab", truncate_prompt_tokens=3) == [*b"ab"]
    # Special tokens are no part of the text.
    assert asked(framed(), prompt="abcdef", truncate_prompt_tokens=3) == [EOS, *b"ef"]
    assert asked(framed(), prompt="abcdef", truncate_prompt_tokens=3, add_special_tokens=False) == [*b"def"]


def test_bad_words_become_tokens() -> None:
    api = Api(lambda request_id, source, params: say(request_id, ["x"], params))
    assert api.complete(prompt="a", bad_words=["no", " no"], bad_words_ids=[[7]]).status_code == 200
    ((_, params),) = api.client.asked.values()
    assert (params.bad_words, params.bad_words_ids) == (None, [(7,), (*b"no",), (*b" no",)])
    answer = api.complete(prompt="a", bad_words=[""])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bad_words")


def test_as_much_as_leaves_room_for_the_answer() -> None:
    longest = Api().client.info.max_model_len
    assert len(asked(prompt="x" * 3 * longest, truncate_prompt_tokens=-1, max_tokens=5)) == longest - 5
    assert len(asked(prompt="x" * 3_000_000, truncate_prompt_tokens=-1, max_tokens=5)) == longest - 5
    assert len(asked(prompt=[1] * 3 * longest, truncate_prompt_tokens=-1, max_tokens=5)) == longest - 5
    assert len(asked(prompt=[1] * 3 * longest, truncate_prompt_tokens=-1)) == longest - 16, "the usual answer"


@pytest.mark.parametrize("wrong", [0, -2, 10**6])
def test_no_prompt_has_so_many_tokens(wrong: int) -> None:
    problem = error(Api().complete(prompt="a", truncate_prompt_tokens=wrong))
    assert problem["param"] == "truncate_prompt_tokens"


def test_a_conversation_that_is_cut() -> None:
    api = ChatApi()
    body = api.chat(truncate_prompt_tokens=4).json()
    ((source, _),) = api.client.asked.values()
    assert bytes(source.token_ids) == b"i;a:"
    assert body["usage"]["prompt_tokens"] == 4
    long = [{"role": "user", "content": "x" * 5000 + "y"}]
    assert ChatApi().chat(messages=long, truncate_prompt_tokens=-1, max_tokens=4).status_code == 200
    api = ChatApi()
    assert api.chat(messages=long, truncate_prompt_tokens=-1).status_code == 200
    ((source, params),) = api.client.asked.values()
    longest = api.client.info.max_model_len
    assert (len(source.token_ids), params.max_tokens) == (longest - min(256, longest // 4), min(256, longest // 4))
    assert error(ChatApi().chat(messages=long))["code"] == "context_length_exceeded"
