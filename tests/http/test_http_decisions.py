"""/v1/decisions and /v1/systemone over a real engine, and the log-probabilities that they are made of."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.local_client import LocalClient
from support.structured import make_json_checkpoint, tokenizer_of
from test_http_terms import Api, error

from engine import EngineConfig
from server.admission import Admission
from server.answering.shared_reservation import SharedReservation

DECISIONS, SYSTEM_ONE = "/v1/decisions", "/v1/systemone"
INPUT = "The package arrived with a broken screen. " * 3
THREE: list[dict[str, Any]] = [
    {"type": "predicate", "instructions": "The screen is broken."},
    {
        "type": "choice",
        "name": "team",
        "instructions": [{"type": "input_text", "text": "Who handles this?"}],
        "choices": [{"value": True}, {"value": "true", "description": "a text"}, {"value": False}],
    },
    {"type": "score", "instructions": "Rate it.", "levels": [{"label": "same"}, {"label": "same"}, {"label": "much"}]},
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    model = make_json_checkpoint(tmp_path_factory.mktemp("json"))
    client = LocalClient(EngineConfig(model=str(model.path), dtype="float32", device="cpu", show_progress=False))
    made = Api(client, tokenizer=tokenizer_of(model.path))
    yield made
    asyncio.run(client.close())


def ask(api: Api, path: str, **body: Any) -> Any:
    call = api.post(path, **body)
    assert call.status == 200, call.text
    return json.loads(call.text)


def test_openais_three_kinds_of_questions(api: Api) -> None:
    body = ask(api, DECISIONS, model="tiny", input=INPUT, questions=THREE)
    assert set(body) == {"model", "answers", "usage"}
    predicate, choice, score = body["answers"]
    assert set(predicate) == {"type", "name", "probability"}
    assert predicate["name"] is None
    assert 0 <= predicate["probability"] <= 1
    assert (choice["type"], choice["name"]) == ("choice", "team")
    assert [each["value"] for each in choice["probabilities"]] == [True, "true", False]
    best = max(choice["probabilities"], key=lambda each: each["probability"])
    assert choice["choice"] is best["value"] or choice["choice"] == best["value"]
    assert math.fsum(each["probability"] for each in choice["probabilities"]) == pytest.approx(1)
    assert 0 < choice["confidence"] <= best["probability"]
    assert [each["value"] for each in score["probabilities"]] == [0, 1, 2]
    assert [each["label"] for each in score["probabilities"]] == ["same", "same", "much"]
    assert score["score"] == pytest.approx(sum(each["value"] * each["probability"] for each in score["probabilities"]))
    usage = body["usage"]
    assert usage["output_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + 3


def test_probabilities_are_the_models(api: Api) -> None:
    tokenizer = api.service.tokenizer
    assert tokenizer is not None
    (answer,) = ask(api, DECISIONS, input="x", questions=THREE[:1])["answers"]
    prompt = "x\n\nQuestion: The screen is broken.\nA: false\nB: true\nReply with the letter of one option."
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    a, b = (tokenizer.encode(label, add_special_tokens=False)[0] for label in "AB")
    body = ask(
        api, "/v1/completions", prompt=ids, max_tokens=1, logprob_token_ids=[a, b], return_tokens_as_token_ids=True
    )
    top = body["choices"][0]["logprobs"]["top_logprobs"][0]
    no, yes = (math.exp(top[f"token_id:{token}"]) for token in (a, b))
    assert answer["probability"] == pytest.approx(yes / (yes + no))


def test_answers_are_the_same_alone_and_in_a_crowd(api: Api) -> None:
    crowd = [{**THREE[place % 3], "instructions": f"Is it {place}?"} for place in range(40)]
    crowd[10:13] = THREE
    together = ask(api, DECISIONS, input=INPUT, questions=crowd, cache_salt="crowd")
    assert together["usage"]["input_tokens_details"]["cached_tokens"] > 30 * 16
    for place in (10, 11, 12, 39):
        alone = ask(api, DECISIONS, input=INPUT, questions=crowd[place : place + 1], cache_salt=f"alone {place}")
        assert alone["answers"] == [together["answers"][place]], "to the last bit"


def test_a_default_server_answers_400_questions(api: Api) -> None:
    assert api.service.admission.max_prompts < 400
    body = ask(api, DECISIONS, input="x", questions=THREE[:1] * 400)
    assert len({answer["probability"] for answer in body["answers"]}) == 1
    assert len(body["answers"]) == 400
    assert (api.service.admission.num_prompts, api.service.admission.num_queued_tokens) == (0, 0)


def test_a_slot_is_free_once_the_last_of_its_prompts_has_ended() -> None:
    admission = Admission(max_running=2, max_queued=0, max_queued_tokens=99, rejected=print)
    with SharedReservation(admission.reserve(2, 9), 2, 3) as reservation:
        asyncio.run(reservation.measured([1, 2, 4]))
        assert admission.num_queued_tokens == 7
        reservation.started(0)
        reservation.started(0)
        assert (admission.num_prompts, admission.num_queued_tokens) == (2, 6)
        reservation.finished(0)
        reservation.finished(1)
        assert (admission.num_prompts, admission.num_queued_tokens, reservation.num_unfinished) == (1, 4, 1)
        reservation.finished(2)
        assert (admission.num_prompts, admission.num_queued_tokens, reservation.num_unfinished) == (0, 0, 0)


def test_input_items_are_read_in_their_order(api: Api) -> None:
    items = [
        {"role": "user", "content": "first"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "second"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "third"},
        {"role": "user", "content": [{"type": "input_json", "data": {"b": [2]}}]},
    ]
    text = 'first\n\ndeveloper: second\n\ncall of look: {"a": 1}\n\noutput: third\n\n{"b": [2]}'
    given, written = (ask(api, DECISIONS, input=value, questions=THREE)["answers"] for value in (items, text))
    assert given == written


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text input only"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role user, system"),
        ({"input": {"text": "x"}}, "Input should"),
        ({"questions": []}, "at least 1"),
        ({"questions": THREE[:1] * 401}, "at most 400 questions, got 401"),
        (
            {"questions": [{"type": "predicate", "instructions": 1}]},
            "questions.0.instructions: must be a string or a list of parts",
        ),
        (
            {"questions": [{**THREE[1], "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions.0: choices must have values that differ",
        ),
        (
            {"questions": [{**THREE[1], "choices": [{"value": 1}, {"value": "a"}]}]},
            "questions.0.choices.0.value: Input should be a valid string, or",
        ),
        ({"questions": [{**THREE[1], "choices": [{"value": "a"}]}]}, "at least 2"),
        (
            {"questions": [{**THREE[1], "choices": [{"value": str(i)} for i in range(256)]}]},
            "questions.0.choices may have at most 255",
        ),
        ({"questions": [{**THREE[1], "choices": [{"value": str(i)} for i in range(27)]}]}, "at most 26 choices"),
        (
            {"questions": [*THREE, {**THREE[2], "levels": [{"label": str(i)} for i in range(11)]}]},
            "questions.3.levels may have at most 10 levels, got 11",
        ),
        ({"questions": [*THREE, {"type": "score"}]}, "questions.3.instructions is required"),
        ({"input": "x" * 300_000}, "too long"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_decisions_refuse(api: Api, changed: dict[str, Any], message: str) -> None:
    found = error(api.post(DECISIONS, **{"input": "x", "questions": THREE} | changed), 400)
    assert message in found["message"]


def test_unknown_fields_of_questions_are_named(api: Api) -> None:
    choices = [{"value": "a", "weight": 1}, {"value": "b"}]
    questions = [THREE[0], {**THREE[1], "reasoning": True, "choices": choices}]
    call = api.post(DECISIONS, input="x", questions=questions)
    assert call.headers["x-octavo-ignored-fields"] == "questions.1.choices.0.weight, questions.1.reasoning"


def test_vllms_shape(api: Api) -> None:
    choice = {"type": "choice", "instructions": "Which team?", "criteria": {"billing": "invoices", "returns": None}}
    tone = {"type": "score", "instructions": "How upset?", "criteria": ["calm", "annoyed", "furious"]}
    coin = {"type": "choice", "criteria": {"heads": None}}
    body = ask(
        api, SYSTEM_ONE, state={"a": 1}, questions={"team": choice, "tone": tone, "coin": coin}, instructions="Be fair."
    )
    assert body["object"] == "structured_decision"
    assert list(body["answers"]) == ["team", "tone", "coin"] == list(body["diagnostics"])
    team, tone_found, coin_found = body["answers"].values()
    assert set(team["probabilities"]) == {"billing", "returns"}
    mass = body["diagnostics"]["team"]["label_mass"]
    assert team["confidence"] == pytest.approx(max(team["probabilities"].values()) * mass)
    assert tone_found["legend"] == {"0": "calm", "1": "annoyed", "2": "furious"}
    assert tone_found["score"] == pytest.approx(sum(i * p for i, p in enumerate(tone_found["probabilities"].values())))
    assert coin_found["probabilities"] == {"heads": 1.0}
    assert coin_found["confidence"] == body["diagnostics"]["coin"]["label_mass"]
    assert body["usage"]["output_tokens"] == 3
    assert body["joint"] is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": {"type": "choice", "criteria": {"a": None}, "depends_on": ["x"]}}, "unknown field(s) depends_on"),
        ({f"q{i}": {"type": "choice", "criteria": {"a": None}} for i in range(65)}, "at most 64"),
        ({}, "at least one"),
        ({"q": {"type": "noul", "criteria": ["yes", "no"]}}, "must be an object"),
        ({"q": {"type": "score", "criteria": ["calm"]}}, "ordered list of levels"),
        ({"q": {"type": "choice", "criteria": {str(i): None for i in range(27)}}}, "at most 26 options"),
        ({"q": {"type": "rank"}}, "must be one of choice, noul, score"),
        ({"q": {"type": "noul"}}, "does not encode the label 'yes' as a single token"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_systemone_refuses(api: Api, changed: dict[str, Any], message: str) -> None:
    assert message in error(api.post(SYSTEM_ONE, state="x", questions=changed), 400)["message"]


def test_thinking_and_joint_reads_are_refused(api: Api) -> None:
    questions = {"q": {"type": "choice", "criteria": {"a": None, "b": None}}}
    asked = {"state": "x", "questions": questions}
    problem = error(api.post(SYSTEM_ONE, **asked, chat_template_kwargs={"enable_thinking": True}), 400)
    assert "thinking must be off" in problem["message"]
    assert error(api.post(SYSTEM_ONE, **asked, joint=True), 400)["param"] == "joint"
    assert error(api.post(SYSTEM_ONE, **asked, images=["x"]), 400)["param"] == "images"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"messages": 5}, "must not contain 'messages'"),
        ({"tools": []}, "must not contain 'tools'"),
        ({"add_generation_prompt": False}, "must not contain 'add_generation_prompt'"),
        ({"deep": functools.reduce(lambda inner, _: [inner], range(900), [])}, "more than 32 levels"),
        ({f"x{i}": 1 for i in range(65)}, "at most 64 variables"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_systemone_checks_template_variables(api: Api, variables: dict[str, Any], message: str) -> None:
    questions = {"q": {"type": "choice", "criteria": {"a": None, "b": None}}}
    problem = error(api.post(SYSTEM_ONE, state="x", questions=questions, chat_template_kwargs=variables), 400)
    assert message in problem["message"]
    assert problem["param"] == "chat_template_kwargs"


def test_logprob_token_ids(api: Api) -> None:
    asked = {"max_tokens": 3, "temperature": 0, "return_tokens_as_token_ids": True, "ignore_eos": True}
    plain = ask(api, "/v1/completions", prompt=[5, 6, 7], logprobs=1, **asked)["choices"][0]
    listed = ask(api, "/v1/completions", prompt=[5, 6, 7], logprobs=1, logprob_token_ids=[9, 200, 9], **asked)
    found = listed["choices"][0]["logprobs"]
    for before, after in zip(plain["logprobs"]["top_logprobs"], found["top_logprobs"], strict=True):
        assert after.items() >= before.items()
        assert {"token_id:9", "token_id:200"} <= set(after)
    assert found["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    chat = ask(api, "/v1/chat/completions", logprobs=True, logprob_token_ids=[9, 200], **asked)
    for entry in chat["choices"][0]["logprobs"]["content"]:
        assert {top["token"] for top in entry["top_logprobs"]} >= {"token_id:9", "token_id:200"}


def test_beams_report_listed_tokens_too(api: Api) -> None:
    (choice,) = ask(
        api, "/v1/completions", prompt=[5, 6], max_tokens=2, num_beams=2, logprob_token_ids=[9], temperature=0
    )["choices"]
    assert all(top for top in choice["logprobs"]["top_logprobs"])


def test_listed_ids_have_limits(api: Api) -> None:
    for ids, message in (([1] * 129, "at most 128"), ([-1], "logprob_token_ids"), ([10**6], "logprob_token_ids")):
        assert message in error(api.post("/v1/completions", logprob_token_ids=ids), 400)["message"]
