"""The HTTP face over a scripted engine: shapes, errors, streams, disconnects."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_client import EOS, FakeClient, Script, Step, byte_tokenizer, entry, say
from support.asgi import Call, Called, error, events, leave

from engine import (
    ChoiceDelta,
    EngineDeadError,
    InvalidRequestError,
    RequestDelta,
    RequestFailedError,
    SamplingParams,
    TokenInput,
)
from server.answering.pieces import PieceMaker
from server.app import create_app

MODEL = "org/fake"


def repeat_prompt(request_id: str, source: TokenInput, params: SamplingParams) -> Iterable[Step]:
    """Every choice says its prompt and its own number."""
    text = bytes(source.token_ids).decode()
    deltas = say(request_id, [f"<{text}{index}>" for index in range(params.n)], params)
    if params.prompt_logprobs is not None:
        known = [None, *(entry(token, params.prompt_logprobs) for token in source.token_ids[1:])]
        deltas[0] = replace(deltas[0], prompt_logprobs=known)
    deltas[0] = replace(deltas[0], num_cached_tokens=1)
    return deltas


class Api(Called):
    """An app over a script, called in process."""

    def __init__(self, script: Script = repeat_prompt, *, tokenizer: bool = True):
        self.client = FakeClient(script)
        self.app = create_app(self.client, byte_tokenizer() if tokenizer else None, MODEL)

    def complete(self, **body: Any) -> httpx.Response:
        return self.request("POST", "/v1/completions", json=body)

    def stream(self, **body: Any) -> list[Any]:
        answer = self.complete(stream=True, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert all(block.startswith("data: ") for block in answer.text.split("\n\n")[:-1])
        return events(answer.text)

    def leave(self, body: dict[str, Any], sent: int) -> Call:
        """A client that leaves once all prompts run and so many messages have come."""
        return leave(self.app, "/v1/completions", body, lambda: len(self.client.running) == len(body["prompt"]), sent)

    def sampling(self) -> SamplingParams:
        (asked,) = self.client.asked.values()
        return asked[1]


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Text and ends of each choice of a stream."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            whole = found.setdefault(choice["index"], {"text": "", "finish": [], "events": []})
            whole["text"] += choice["text"]
            whole["events"].append(choice)
            if choice["finish_reason"] is not None:
                whole["finish"].append(choice["finish_reason"])
    return found


# ---------------------------------------------------------------- completions


def test_one_prompt_has_openais_shape() -> None:
    body = Api().complete(model=MODEL, prompt="ab").json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == MODEL
    assert body["created"] > 1_700_000_000
    assert body["choices"] == [
        {
            "index": 0,
            "text": "<ab0>",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert body["system_fingerprint"] == "octavo-0"
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["<a0>"]),
        (["a", "bc"], ["<a0>", "<bc0>"]),
        ([97, 98], ["<ab0>"]),
        ([[97], [98, 99]], ["<a0>", "<bc0>"]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, texts: list[str]) -> None:
    choices = Api().complete(prompt=prompt).json()["choices"]
    assert [choice["text"] for choice in choices] == texts
    assert [choice["index"] for choice in choices] == list(range(len(texts)))


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt() -> None:
    body = Api().complete(prompt=["a", "b"], n=3).json()
    assert [choice["text"] for choice in body["choices"]] == [f"<{p}{i}>" for p in "ab" for i in range(3)]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 24
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("text", ['"\\n", "é"', '["\\n","é"]'])
def test_breakers_may_be_a_list_as_text(text: str) -> None:
    api = Api()
    assert api.complete(prompt="a", dry_sequence_breakers=text).status_code == 200
    assert api.sampling().dry_sequence_breakers == ["\n", "é"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"mirostat": 2}, "mirostat"),
        ({"mirostat_mode": 1, "mirostat_tau": 5.0, "mirostat_eta": 0.1}, "mirostat_mode"),
        ({"mirostat_tau": 3.0}, "mirostat_tau"),
        ({"mirostat_eta": 0.2}, "mirostat_eta"),
        ({"samplers": ["top_k", "temperature"]}, "samplers"),
        ({"sampler_seq": "kt"}, "sampler_seq"),
        ({"sampler_priority": ["temperature"]}, "sampler_priority"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"dynatemp_exponent": 1.5}, "dynatemp_exponent"),
        ({"dynamic_temperature": True}, "dynamic_temperature"),
        ({"tfs_z": 0.9}, "tfs_z"),
        ({"tfs": 0.9}, "tfs"),
        ({"top_a": 0.2}, "top_a"),
        ({"smoothing_factor": 0.3}, "smoothing_factor"),
        ({"smoothing_curve": 2}, "smoothing_curve"),
        ({"epsilon_cutoff": 3}, "epsilon_cutoff"),
        ({"mirostat": False}, "mirostat"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups"),
        ({"diversity_penalty": 0.5}, "diversity_penalty"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
    ],
)
def test_other_ways_to_sample_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    api = Api()
    problem = error(api.complete(prompt="a", **fields))
    assert (problem["param"], problem["code"]) == (param, "unsupported_parameter")
    assert problem["message"].startswith(f"{param} is not supported")
    assert not api.client.asked


def test_other_ways_to_sample_that_are_off_are_accepted() -> None:
    """As clients send them with every request."""
    off = {
        "repeat_penalty": 1, "repeat_last_n": 64,
        "mirostat": 0, "mirostat_mode": 0, "mirostat_tau": 3, "mirostat_eta": 0.2, "samplers": None,
        "sampler_seq": None, "dynatemp_range": 0, "dynatemp_exponent": 1.5, "dynamic_temperature": False,
        "dynatemp_low": 0.5, "dynatemp_high": 2, "tfs_z": 1, "tfs": 1.0, "top_a": 0, "smoothing_factor": 0.0,
        "smoothing_curve": 2, "epsilon_cutoff": 0, "eta_cutoff": 0, "temperature_last": False,
        "num_beam_groups": 1, "diversity_penalty": 0, "penalty_alpha": 0.0, "guidance_scale": 1,
    }  # fmt: skip
    api = Api()
    answer = api.complete(prompt="a", **off)
    assert answer.status_code == 200
    assert "x-octavo-ignored-fields" not in answer.headers
    assert api.sampling() == SamplingParams()
    assert Api().complete(prompt="a", mirostat_tau=5, mirostat_eta=0.1, dynatemp_exponent=1).status_code == 200


def test_stop_string_ends_the_choice_and_the_engines_work_on_it() -> None:
    api = Api()
    body = api.complete(prompt="a|b", stop="|", n=2).json()
    assert [choice["text"] for choice in body["choices"]] == ["<a", "<a"]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert {choice["stop_reason"] for choice in body["choices"]} == {"|"}
    assert body["usage"]["completion_tokens"] == 6
    (request_id,) = api.client.asked
    assert api.client.aborted == [(request_id, 0)]
    assert api.client.cut_short == [request_id]  # the last one takes the request along
    assert api.client.cut_short == [request_id]
    assert not api.client.running


def test_eos_is_a_stop_without_text() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        yield RequestDelta(request_id=request_id, choices=[ChoiceDelta(index=0, token_ids=[65])])
        last = ChoiceDelta(index=0, token_ids=[EOS], finish_reason="stop")
        yield RequestDelta(request_id=request_id, choices=[last], finished=True)

    choice = Api(script).complete(prompt="a", return_token_ids=True).json()["choices"][0]
    assert choice["text"] == "A"
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["token_ids"] == [65, EOS]
    assert choice["prompt_token_ids"] == [97]


def test_logprobs() -> None:
    logprobs = Api().complete(prompt="a", logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["<", "a", "0", ">"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [
            {"<": -0.5, "=": -1.5},
            {"a": -0.5, "b": -1.5},
            {"0": -0.5, "1": -1.5},
            {">": -0.5, "?": -1.5},
        ],
        "text_offset": [0, 1, 2, 3],
    }


def test_minus_infinity_can_be_said_in_json() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        impossible = ChoiceDelta(
            index=0, token_ids=[65], logprobs=[entry(65, 1, float("-inf"))], finish_reason="length"
        )
        yield RequestDelta(request_id=request_id, choices=[impossible], finished=True)

    logprobs = Api(script).complete(prompt="a", logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_echo_with_logprobs_covers_the_prompt(prompt: Any) -> None:
    api = Api()
    body = api.complete(prompt=[prompt, prompt] if isinstance(prompt, str) else prompt, echo=True, logprobs=1).json()
    for choice in body["choices"]:
        assert choice["text"] == "ab<ab0>"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == list("ab<ab0>")
        assert logprobs["token_logprobs"] == [None, *[-0.5] * 6]
        assert logprobs["top_logprobs"] == [None, *({token: -0.5} for token in "b<ab0>")]
        assert logprobs["text_offset"] == list(range(7))
        assert choice["prompt_logprobs"] is None
    assert all(params.prompt_logprobs == 1 for _, params in api.client.asked.values())


def test_prompt_logprobs_in_vllms_shape() -> None:
    choice = Api().complete(prompt="ab", prompt_logprobs=1).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    assert choice["text"] == "<ab0>"


def test_best_of_keeps_the_most_probable() -> None:
    api = Api()
    body = api.complete(prompt=["a", "b"], n=2, best_of=4).json()
    assert api.client.asked[f"{body['id']}-0"][1].n == 4
    # The script's answers get less probable with their number, except that all tokens are alike here:
    # the cumulative log-probability is what it says.
    assert [choice["text"] for choice in body["choices"]] == ["<a0>", "<a1>", "<b0>", "<b1>"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 32  # all that was generated


def test_best_of_orders_by_score_and_not_by_number() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        choices = [
            ChoiceDelta(index=index, token_ids=[65 + index], finish_reason="length", cumulative_logprob=score)
            for index, score in enumerate([-3.0, -1.0, -2.0])
        ]
        yield RequestDelta(request_id=request_id, choices=choices, finished=True)

    body = Api(script).complete(prompt="a", n=2, best_of=3).json()
    assert [choice["text"] for choice in body["choices"]] == ["B", "C"]


@pytest.mark.parametrize(
    ("fields", "num_beams", "n"),
    [
        ({"use_beam_search": True}, 2, 1),
        ({"use_beam_search": True, "n": 3}, 3, 3),
        ({"use_beam_search": True, "n": 2, "best_of": 5}, 5, 2),
        ({"use_beam_search": True, "num_beams": 6}, 6, 1),
        ({"num_beams": 4, "n": 2}, 4, 2),
        ({"num_beams": 4, "n": 2, "best_of": 5}, 5, 2),
    ],
)
def test_beam_search_aliases(fields: dict[str, Any], num_beams: int, n: int) -> None:
    api = Api()
    assert len(api.complete(prompt="a", **fields).json()["choices"]) == n
    assert api.sampling().num_beams == num_beams
    assert api.sampling().n == n


def test_beams_accept_sampling_fields_that_ask_for_nothing() -> None:
    nothing = {
        "temperature": 0,
        "top_k": -1,
        "top_p": 1,
        "min_p": 0,
        "typical_p": 1,
        "top_n_sigma": -1,
        "response_format": {"type": "text"},
    }
    assert Api().complete(prompt="a", num_beams=2, **nothing).status_code == 200


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    api = Api(tokenizer=False)
    assert error(api.complete(prompt="a"))["code"] == "no_tokenizer"
    choice = api.complete(prompt=[97], return_token_ids=True, logprobs=0, echo=True).json()["choices"][0]
    assert choice["text"] == ""
    assert bytes(choice["token_ids"]) == b"<a0>"
    assert choice["logprobs"]["tokens"] == ["97", "60", "97", "48", "62"]
    events = api.stream(prompt=[97], return_token_ids=True)
    assert [event["choices"][0]["token_ids"] for event in events] == [[60], [97], [48], [62]]
    for field, value in [("stop", "x"), ("suffix", "x"), ("decoder_prompt", "x")]:
        assert error(api.complete(prompt=[97], **{field: value}))["param"] == field
    assert error(api.request("POST", "/tokenize", json={"prompt": "a"}))["code"] == "no_tokenizer"
    assert error(api.request("POST", "/detokenize", json={"tokens": [97]}))["code"] == "no_tokenizer"


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "ab"},
        {"prompt": "aé|b", "stop": ["b0"]},
        {"prompt": ["a", "b☃"], "n": 2},
        {"prompt": "ab", "echo": True, "logprobs": 1},
        {"prompt": "a", "return_token_ids": True, "prompt_logprobs": 0},
    ],
)
def test_a_stream_adds_up_to_the_unstreamed_answer(fields: dict[str, Any]) -> None:
    whole = Api().complete(**fields).json()["choices"]
    events = Api().stream(**fields)
    assert all(len(event["choices"]) == 1 for event in events)
    assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1
    choices = joined(events)
    assert len(choices) == len(whole)
    for expected in whole:
        streamed = choices[expected["index"]]
        assert streamed["text"] == expected["text"]
        assert streamed["finish"] == [expected["finish_reason"]]
        assert streamed["events"][-1]["finish_reason"] is not None
        if expected["logprobs"] is not None:
            parts = [event["logprobs"] for event in streamed["events"] if event["logprobs"]]
            for key in expected["logprobs"]:
                assert [item for part in parts for item in part[key]] == expected["logprobs"][key]
        if expected["token_ids"] is not None:
            assert [token for event in streamed["events"] for token in event["token_ids"]] == expected["token_ids"]
            assert streamed["events"][0]["prompt_logprobs"] == expected["prompt_logprobs"]


@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_plain_text_comes_as_any_other_piece(
    path: str, options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, whatever the text: what is around it is made once for all events of a choice."""
    text = 'a"\\/\n\t\r\b\x01\x1f\x7fé\u2028\ufeff\U0001f40b{}'
    body = {"stream": True, "n": 2, "stream_options": options, "prompt": text}
    body["messages"] = [{"role": "user", "content": text}]

    def streamed() -> list[str]:
        tokenizer = byte_tokenizer()
        tokenizer._hf.chat_template = "{{ messages[0].content }}"
        api = Api()
        api.app.state.service = replace(api.app.state.service, tokenizer=tokenizer)
        answer = api.request("POST", path, json=body)
        assert answer.status_code == 200, answer.text
        events = answer.text.split("\n\n")
        assert events.count("data: [DONE]") == 1
        return [re.sub(r'"(id|created)":[^,]+,', "", event) for event in events]

    found = streamed()
    monkeypatch.setattr(PieceMaker, "news", PieceMaker.pieces)
    assert streamed() == found


def test_a_character_never_arrives_in_halves() -> None:
    pieces = [choice["text"] for choice in joined(Api().stream(prompt="é☃"))[0]["events"]]
    assert pieces == ["<", "é", "☃", "0", ">"]


def test_stream_usage_comes_last_and_alone() -> None:
    events = Api().stream(prompt="ab", stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] == 7
    assert "usage" not in Api().stream(prompt="ab", stream_options={"include_usage": False})[-1]


def test_an_error_inside_a_stream_is_an_event_and_the_end() -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        yield RequestDelta(request_id=request_id, choices=[ChoiceDelta(index=0, token_ids=[65])])
        yield RequestFailedError("secret detail")

    api = Api(script)
    answer = api.complete(prompt="a", stream=True)
    assert answer.status_code == 200
    blocks = [json.loads(block.removeprefix("data: ")) for block in answer.text.strip().split("\n\n")]
    assert blocks[0]["choices"][0]["text"] == "A"
    assert blocks[1]["error"]["type"] == "server_error"
    assert len(blocks) == 2
    assert "secret" not in answer.text
    assert 'octavo_request_success_total{finished_reason="error"} 1.0' in api.request("GET", "/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_one_refused_prompt_fails_the_request_and_ends_the_others(stream: bool) -> None:
    def script(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
        if bytes(source.token_ids) == b"bad":
            yield InvalidRequestError("prompt is too long", param="prompt", code="context_length_exceeded")
        yield RequestDelta(request_id=request_id, choices=[ChoiceDelta(index=0, token_ids=[65])])
        yield asyncio.Event()

    api = Api(script)
    problem = error(api.complete(prompt=["good", "bad"], stream=stream))
    assert problem["code"] == "context_length_exceeded"
    assert problem["param"] == "prompt"
    assert not api.client.running
    assert len(api.client.cut_short) == 1


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "a", "early_stopping": "often"}, "early_stopping"),
        ({"prompt": "a", "suffix": "x"}, "suffix"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": 5}, "stream_options"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "num_beams": 2, "n": 3}, "n"),
        ({"prompt": "a", "num_beams": 2, "stop": "x"}, "stop"),
        ({"prompt": "a", "n": 9}, "n"),
        ({"prompt": "a", "n": 2**31 - 1, "use_beam_search": True}, "n"),
        ({"prompt": "a", "best_of": 2**31 - 1}, "best_of"),
        ({"prompt": "a", "num_beams": 2, "temperature": 0.1}, "temperature"),
        ({"prompt": "a", "use_beam_search": True, "top_k": 5}, "top_k"),
        ({"prompt": "a", "use_beam_search": True, "top_p": 0.9}, "top_p"),
        ({"prompt": "a", "num_beams": 3, "min_p": 0.1}, "min_p"),
        ({"prompt": "a", "num_beams": 3, "xtc_probability": 0.1}, "xtc_probability"),
        ({"prompt": "a", "dry_sequence_breakers": "a, b"}, "dry_sequence_breakers"),
        ({"prompt": "a", "dry_sequence_breakers": "[" * 50_000}, "dry_sequence_breakers"),
        ({"prompt": "a", "dry_sequence_breakers": '"\\ud800"'}, "dry_sequence_breakers"),
        ({"prompt": "a", "dry_sequence_breakers": ["a"] * 33}, "dry_sequence_breakers"),
        ({"prompt": "a", "dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"prompt": "a", "tools": [{}]}, "tools"),
        ({"prompt": "a", "response_format": {"type": "json"}}, "response_format"),
        ({"prompt": ["a"] * 2049}, "prompt"),
    ],
)
def test_what_is_wrong_is_400_and_names_the_field(fields: dict[str, Any], param: str) -> None:
    api = Api()
    problem = error(api.complete(**fields))
    assert problem["type"] == "invalid_request_error"
    assert problem["param"] == param
    assert param in problem["message"]
    assert len(problem["message"]) < 400
    assert not api.client.asked


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineDeadError("secret"), 503, "engine_dead"),
        (RequestFailedError("secret"), 500, "internal_error"),
        (RuntimeError("secret"), 500, "internal_error"),
        (InvalidRequestError("too long", param="prompt", code="x"), 400, "x"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_failures_of_the_engine(failure: Exception, status: int, code: str, stream: bool) -> None:
    answer = Api(lambda *_: [failure]).complete(prompt="a", stream=stream)
    assert error(answer, status)["code"] == code
    assert "secret" not in answer.text


def test_a_request_that_the_engine_ends_is_an_error_or_says_so() -> None:
    failed = RequestDelta(request_id="x", choices=(), finished=True, error="secret")
    answer = Api(lambda *_: [failed]).complete(prompt="a")
    error(answer, 500)
    assert "secret" not in answer.text
    aborted = RequestDelta(request_id="x", choices=(), finished=True)
    (choice,) = Api(lambda *_: [aborted]).complete(prompt="a").json()["choices"]
    assert choice["finish_reason"] == "abort"


# ---------------------------------------------------------------- disconnects


def endless(request_id: str, source: TokenInput, params: SamplingParams) -> Iterator[Step]:
    yield RequestDelta(request_id=request_id, choices=[ChoiceDelta(index=0, token_ids=[65])])
    yield asyncio.Event()


@pytest.mark.parametrize(
    ("script", "prompts", "stream", "sent", "statuses"),
    [
        (endless, ["a", "b", "c"], False, 0, [499]),
        (endless, ["a", "b"], True, 2, [200]),
        (lambda *_: [asyncio.Event()], ["a"], True, 0, []),  # before the first token
    ],
)
def test_a_client_that_leaves_ends_what_runs(
    script: Script, prompts: list[str], stream: bool, sent: int, statuses: list[int]
) -> None:
    api = Api(script)
    call = api.leave({"prompt": prompts, "stream": stream}, sent)
    assert not api.client.running
    assert len(api.client.cut_short) == len(prompts)
    assert [message.get("status") for message in call.sent[:1]] == statuses
    aborted = f'octavo_request_success_total{{finished_reason="abort"}} {len(prompts)}.0'
    assert aborted in api.request("GET", "/metrics").text


# ---------------------------------------------------------------- the other routes


def test_models() -> None:
    api = Api()
    (card,) = api.request("GET", "/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert card["object"] == "model"
    assert card["max_model_len"] == 64
    assert api.request("GET", f"/v1/models/{MODEL}").json() == card
    assert error(api.request("GET", "/v1/models/other/one"), 404)["code"] == "model_not_found"


def test_health_follows_the_engine() -> None:
    api = Api()
    assert api.request("GET", "/health").json() == {"status": "ok"}
    api.client.dead = True
    assert error(api.request("GET", "/health"), 503)["code"] == "engine_dead"
    assert error(api.request("GET", "/health/ready"), 503)["code"] == "engine_dead"
    assert api.request("GET", "/health/live").json() == {"status": "ok"}
    assert error(api.complete(prompt="a"), 503)["code"] == "engine_dead"
    text = api.request("GET", "/metrics").text
    assert "octavo_engine_up 0.0" in text
    assert "octavo_num_requests_running" not in text


def test_a_stuck_engine_is_not_live() -> None:
    api = Api(lambda *_: [])
    api.client.stuck_for = 61.0
    assert api.request("GET", "/health/live").status_code == 200  # it has nothing to do
    api.client.running.add("one")
    assert error(api.request("GET", "/health/live"), 503)["code"] == "engine_stuck"
    api.client.stuck_for = 59.0
    assert api.request("GET", "/health/live").status_code == 200


def test_metrics() -> None:
    api = Api()
    api.complete(prompt="a", n=2)
    answer = api.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for line in (
        "octavo_engine_up 1.0",
        "octavo_num_requests_running 0.0",
        "octavo_num_requests_waiting 0.0",
        'octavo_kv_pages{state="held"} 2.0',
        'octavo_kv_pages{state="cached"} 3.0',
        'octavo_kv_pages{state="free"} 5.0',
        "octavo_prompt_tokens_total 11.0",
        "octavo_generation_tokens_total 12.0",
        "octavo_num_preemptions_total 1.0",
        "octavo_prefix_cache_queries_total 9.0",
        "octavo_prefix_cache_hits_total 4.0",
        "octavo_page_copies_total 6.0",
        "octavo_steps_total 7.0",
        "octavo_time_to_first_token_seconds_count 1.0",
        'octavo_time_to_first_token_seconds_bucket{le="160.0"} 1.0',
        'octavo_request_success_total{finished_reason="length"} 2.0',
        'octavo_request_success_total{finished_reason="abort"} 0.0',
    ):
        assert line in answer.text.splitlines(), line


def test_two_apps_fit_in_one_process() -> None:
    first, second = Api(), Api()
    first.complete(prompt="a")
    assert 'finished_reason="length"} 0.0' in second.request("GET", "/metrics").text


def test_documentation() -> None:
    api = Api()
    assert api.request("GET", "/docs").status_code == 200
    document = api.request("GET", "/openapi.json").json()
    assert "422" not in json.dumps(document)
    assert set(document["paths"]) >= {
        "/v1/completions", "/v1/chat/completions", "/v1/embeddings",
        "/v1/score", "/v1/rerank", "/v1/classify", "/v1/answer", "/v1/entities", "/v1/fill-mask", "/tokenize",
        "/detokenize",
        "/v1/audio/transcriptions", "/v1/audio/translations",
        "/version", "/v1/models", "/v1/models/{model_id}", "/health", "/health/live", "/health/ready",
        "/metrics"
    }  # fmt: skip
    others = {path for path in document["paths"] if not path.startswith(("/v1/", "/health"))}
    others -= {"/version", "/metrics", "/load", "/server_info", "/tokenizer_info"}
    assert others == {
        "/pooling", "/tokenize", "/detokenize", "/translate", "/languages", "/inference/v1/generate", "/infill",
        "/apply-template",
        "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/tags", "/api/ps", "/api/show", "/api/pull",
        "/api/version",
    }, "pages for people are no part of it"  # fmt: skip
    for operation in (
        document["paths"]["/v1/responses"]["post"],
        document["paths"]["/v1/responses/{response_id}"]["get"],
    ):
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    elsewhere = {"timestamps", "detokenize", "reasoning_budget", "predicted_token_ids"}
    assert set(SamplingParams.__dataclass_fields__) - elsewhere <= set(fields)
    assert fields["top_p"]["description"].startswith("keep the smallest set")


def test_the_lifespan_closes_the_engine() -> None:
    api = Api()

    async def live() -> None:
        async with api.app.router.lifespan_context(api.app):
            assert not api.client.closed

    asyncio.run(live())
    assert api.client.closed
