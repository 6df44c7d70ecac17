"""Structured output over HTTP: the fields of OpenAI, vLLM and llama.cpp, their errors, and schemas that run away."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema_rs
import pytest
from support.local_client import LocalClient
from support.service import Service
from support.structured import PERSON, make_json_checkpoint, tokenizer_of
from test_http_terms import COMPLETIONS, Api, error

from engine import EngineConfig, InvalidRequestError, StructuredOutputsParams
from server.answering.grammars import GrammarChecks
from server.workers import grammars as jobs
from server.workers.pool import WorkerPool

CHAT = "/v1/chat/completions"
TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
LARK = 'start: "(" /[a-f]{3}/ ")"'
COMPACT = {"json": PERSON, "disable_any_whitespace": True}
PERSON_TEXT, WORD = json.dumps(PERSON), r"[a-f]{3}-[0-9]"


def is_person(text: str) -> bool:
    return bool(jsonschema_rs.is_valid(PERSON, json.loads(text)))


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


ASKED: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}},
        is_person,
    ),
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, is_person),
    ({"response_format": {"type": "text"}, "structured_outputs": COMPACT}, is_person),
    ({"structured_outputs": {"json": PERSON_TEXT}}, is_person),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, ("red", "blue").__contains__),
    ({"structured_outputs": {"regex": WORD}}, re.compile(WORD).fullmatch),
    ({"structured_outputs": {"grammar": LARK, "disable_fallback": True}}, re.compile(r"\([a-f]{3}\)").fullmatch),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"guided_json": PERSON}, is_person),
    ({"guided_regex": WORD}, re.compile(WORD).fullmatch),
    ({"guided_choice": ["red", "blue"]}, ("red", "blue").__contains__),
    ({"guided_grammar": LARK}, re.compile(r"\([a-f]{3}\)").fullmatch),
    ({"json_schema": PERSON}, is_person),
    ({"grammar": 'root ::= "(" ([a-f]{3} | root) ")"'}, re.compile(r"\(+[a-f]{3}\)+").fullmatch),
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    model = make_json_checkpoint(tmp_path_factory.mktemp("json"))
    client = LocalClient(EngineConfig(model=str(model.path), dtype="float32", device="cpu", show_progress=False))
    made = Api(client, tokenizer=tokenizer_of(model.path))
    yield made
    asyncio.run(client.close())


def body(path: str) -> dict[str, Any]:
    return {"prompt": [5, 6, 7]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ab"}]}


def texts_of(text: str, stream: bool) -> list[tuple[str, str]]:
    """Each choice's text and why it ended."""
    lines = (
        [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")] if stream else [text]
    )
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        part = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + part
        ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"], "")
    return [(texts[index], ends[index]) for index in sorted(texts)]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("asked", "is_right"), ASKED, ids=[f"{i}-{min(asked)}" for i, (asked, _) in enumerate(ASKED)])
def test_answers(api: Api, path: str, asked: dict[str, Any], is_right: Callable[[str], Any]) -> None:
    """Greedy, several drawn ones, beams, streams: what ended by itself is what was asked for."""
    ended = 0
    for search in (
        {"temperature": 0},
        {"n": 3, "seed": 4},
        {"num_beams": 4, "n": 2},
        {"temperature": 0, "stream": True},
        {"n": 2, "seed": 9, "stream": True},
        {"use_beam_search": True, "n": 2, "stream": True},
    ):
        call = api.post(path, **body(path), **search, **asked, max_tokens=150)
        assert call.status == 200, call.text
        answers = texts_of(call.text, bool(search.get("stream")))
        assert len(answers) == search.get("n", 1)
        for text, end in answers:
            assert end in ("stop", "length")
            if end == "stop":
                ended += 1
                assert is_right(text), text
    assert ended >= (1 if is_right is is_object else 4)  # an object may go on as long as it likes


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_ends(api: Api, path: str) -> None:
    """Cut off by max_tokens, by a stop string; whole whatever min_tokens says."""
    asked = {**body(path), "temperature": 0, "structured_outputs": COMPACT}
    ((text, end),) = texts_of(api.post(path, **asked, max_tokens=6).text, False)
    assert end == "length"
    ((whole, end),) = texts_of(api.post(path, **asked, max_tokens=99, min_tokens=90).text, False)
    assert end == "stop"
    assert is_person(whole)
    assert whole.startswith(text)
    ((text, end),) = texts_of(api.post(path, **asked, max_tokens=99, stop=['"age"']).text, False)
    assert (text, end) == (whole.partition('"age"')[0], "stop")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"response_format": {"type": "frog"}}, "response_format", "'text', 'json_object', 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}}}},
            "response_format.json_schema",
            '(keyword "not" at #/items)',
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"items": {"not": {}}}}},
            "response_format.schema",
            '(keyword "not" at #/items)',
        ),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "is only allowed with type"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format", "must be a JSON schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", 'must have "structures" and "triggers"'),
        ({"structured_outputs": {}}, "structured_outputs", "must hold exactly one of"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": "a", "disable_additional_properties": True}}, "structured_outputs", "False"),
        ({"guided_json": 5}, "guided_json", "must be a JSON schema: an object or a boolean, or that as a string"),
        ({"guided_json": {"oneOf": [{}, {}]}}, "guided_json", '(keyword "oneOf" at #)'),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_choice": ["a"] * 1001}, "guided_choice", "may have at most 1000 strings, got 1001"),
        ({"guided_grammar": 'rule ::= "a"'}, "guided_grammar", "no rule root"),
        ({"guided_grammar": "start: <|none|>"}, "guided_grammar", "<|none|>"),
        ({"json_schema": {"title": "x" * 140_000}}, "json_schema", "at most 131072 bytes, got 140012"),
        ({"grammar": "root ::= rule"}, "grammar", "the grammar has no rule rule"),
        ({"grammar": "root ::= a", "guided_json": {}}, "grammar", "guided_json and grammar cannot be used together"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "guided_json and guided_regex cannot be used"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "cannot be used together"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos cannot be used with structured output"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids", "cannot be used with structured output"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_is_refused(api: Api, path: str, asked: dict[str, Any], param: str, message: str) -> None:
    found = error(api.post(path, **body(path), **asked, max_tokens=3), 400)
    assert message in found["message"]
    assert found["param"].startswith(param)


def test_other_endpoints_refuse_it(api: Api) -> None:
    found = error(api.post("/tokenize", prompt="a", response_format={"type": "json_object"}), 400)
    assert found["code"] == "unsupported_parameter"


# ------------------------------------------------------------------ grammars that run away


async def check_all(given: list[StructuredOutputsParams], seconds: float) -> list[str]:
    """What becomes of each, by a pool of its own."""
    pool = WorkerPool()
    try:
        checks, found = GrammarChecks(pool), []
        for params in given:
            try:
                await checks.check(params, seconds)
                found.append("")
            except InvalidRequestError as problem:
                found.append(f"{problem.code}: {problem}")
        return found
    finally:
        pool.close()


def test_a_worker_tries_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = StructuredOutputsParams(regex="a"), StructuredOutputsParams(regex="(")
    found = asyncio.run(check_all([good, bad, good], 30.0))
    assert found[0] == found[2] == ""
    assert found[1].startswith("invalid_grammar: the regular expression cannot be used")
    with pytest.raises(ValueError, match="unclosed group"):
        jobs.try_grammar(bad)


def test_what_takes_too_long_is_ended() -> None:
    """The worker is killed in the middle of what it computes; the limit is named, with the setting."""
    costly = StructuredOutputsParams(
        json={"anyOf": [{"type": "object", "properties": {f"p{i}": {"enum": list(range(30))} for i in range(j, j + 90)}}
                        for j in range(10)]}
    )  # fmt: skip
    began = time.monotonic()
    (found,) = asyncio.run(check_all([costly], 0.001))
    assert found == (
        "grammar_timeout: json takes more than 0.001 seconds to compile (grammar_timeout). Simplify it, or raise "
        "--grammar-timeout."
    )
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_requests_wait_for_their_grammars_alone(bundled: Callable[..., Service]) -> None:
    """Over processes: several at a time, whose grammars are compiled while others run; one that only the model refuses;
    beams."""
    service = bundled()
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": f"^[ab{i}]*x$"} for i in range(300)},
    }
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "temperature": 0}

    def post(more: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{service.url}{CHAT}", json=asked | more, timeout=60)

    with ThreadPoolExecutor(8) as threads:
        wanted: list[dict[str, Any]] = [{"guided_regex": f"[a-d]{{{n}}}"} for n in range(3, 9)]
        wanted += [{"guided_json": wide}, {"guided_grammar": "start: <|none|>"}]
        answers = list(threads.map(post, wanted))
    assert [answer.status_code for answer in answers] == [200] * 7 + [400]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers[:7]]
    assert [len(text) for text in texts[:6]] == list(range(3, 9))
    assert texts[6].startswith("{")
    assert answers[7].json()["error"]["param"] == "guided_grammar"
    again = post({"guided_choice": ["one", "two"], "num_beams": 3, "n": 2}).json()["choices"]
    assert {choice["message"]["content"] for choice in again} <= {"one", "two"}
