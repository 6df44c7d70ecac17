"""Structured output: answers are what was asked for, by every search, alone and in company."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance
import numpy as np
import pytest
from support import reference
from support.checkpoints import Checkpoint, random_prompt
from support.driving import BOTH_DEPTHS, Job, add, finish, make_engine, preempt_all, run, run_alone, tokens_of
from support.jobs import beams, greedy, sampled
from support.reference import MIN_MARGIN
from support.structured import PERSON, Oracle, make_json_checkpoint, tokenizer_of
from test_isolation import faults

from engine import LLM, Engine, InvalidRequestError, SamplingParams, StructuredOutputsParams
from engine.interface.sampling_table import mask_words
from engine.scheduling.plan import StepPlan
from engine.text import grammars
from engine.text.processor import Tokenizer
from engine.text.vocabulary import Vocabulary

CALL = {
    "structures": [{"begin": "<f>", "schema": {"type": "integer", "maximum": 9}, "end": "</f>"}],
    "triggers": ["<f"],
}
PERSON_PARAMS = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
ASKED: dict[str, StructuredOutputsParams] = {
    "json": StructuredOutputsParams(json=PERSON),
    "compact": PERSON_PARAMS,
    "text": StructuredOutputsParams(json=json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})),
    "choice": StructuredOutputsParams(choice=["the house", "the pages", 'a "quoted" \\ naïve 日本 one']),
    "regex": StructuredOutputsParams(regex=r"[a-f]{2,4}/[0-9]{3}-(the|then)"),
    "grammar": StructuredOutputsParams(grammar='start: "(" item ("," item){1,3} ")"\nitem: /[0-9a-f]{1,3}/'),
    "object": StructuredOutputsParams(
        json={"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2}
    ),
}


def is_right(name: str, text: str) -> bool:
    """Whether a whole answer is what was asked for."""
    asked = ASKED[name]
    if asked.json is not None:
        return bool(jsonschema_rs.is_valid(json.loads(str(asked.json)), json.loads(text)))
    if asked.choice is not None:
        return text in asked.choice
    pattern = asked.regex or r"\([0-9a-f]{1,3}(,[0-9a-f]{1,3}){1,3}\)"
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_json_checkpoint(tmp_path_factory.mktemp("json"))


@pytest.fixture(scope="module")
def tokenizer(model: Checkpoint) -> Tokenizer:
    return tokenizer_of(model.path)


@pytest.fixture
def engines(model: Checkpoint, request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(make_engine(model.path, **(getattr(request, "param", {}) | settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def asking(params: SamplingParams, asked: StructuredOutputsParams) -> SamplingParams:
    return replace(params, structured_outputs=asked, ignore_eos=False)


def jobs_of(vocab: int, length: int = 60) -> list[tuple[str, Job]]:
    """Every kind by every search."""
    found = []
    for number, name in enumerate(ASKED):
        for params in (greedy(length), sampled(number, length, n=3), beams(3, length)):
            found.append((name, Job(random_prompt(vocab, number, 4 + number), asking(params, ASKED[name]))))
    return found


@BOTH_DEPTHS
def test_answers_are_what_was_asked_for(
    engines: Callable[..., Engine], model: Checkpoint, tokenizer: Tokenizer
) -> None:
    """Greedy, several drawn answers, beams: what ended by itself is whole."""
    one = engines()
    jobs = jobs_of(model.vocab)
    for number, (_, job) in enumerate(jobs):
        add(one, str(number), job)
    outputs, ended = finish(one), 0
    for number, (name, _) in enumerate(jobs):
        for answer in outputs[str(number)].outputs:
            assert answer.finish_reason in ("stop", "length"), answer.stop_reason
            if answer.finish_reason == "stop":
                ended += 1
                assert is_right(name, tokenizer.decode(answer.token_ids)), (name, tokenizer.decode(answer.token_ids))
    assert ended > 0.6 * sum(len(output.outputs) for output in outputs.values())


@pytest.mark.slow
@BOTH_DEPTHS
def test_alone_and_in_company(engines: Callable[..., Engine], model: Checkpoint) -> None:
    """With chunks of prompts, preemptions and steps that fail, and whether forced tokens are appended or not."""
    jobs = [job for _, job in jobs_of(model.vocab, 40)]
    jobs += [Job(random_prompt(model.vocab, 50, 30), greedy(20)), Job(random_prompt(model.vocab, 51, 9), beams(2, 12))]
    one = engines(enable_prefix_caching=False, max_num_batched_tokens=64, max_num_seqs=64)
    one.scheduler.drafts_forced_tokens = False
    expected = run_alone(one, jobs)
    assert one.stats().num_draft_tokens == 0
    one.scheduler.drafts_forced_tokens = True
    preempted = calls = 0

    def between(step: int) -> None:
        nonlocal preempted
        preempted += preempt_all(one) if step % 7 == 3 else 0

    def fail(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 1 and plan.num_rows > 8:  # of one request, and of those that have just ended
            raise RuntimeError("made by the test")

    with faults(one, fail) as raised:
        assert run(one, jobs, between) == expected
    assert preempted > 10
    assert len(raised) > 2
    stats = one.stats()
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 30


def test_forced_tokens_are_appended(engines: Callable[..., Engine], model: Checkpoint, tokenizer: Tokenizer) -> None:
    """An answer takes fewer steps than tokens, and says the same, log-probabilities included."""
    job = Job(random_prompt(model.vocab, 3, 8), asking(greedy(60, logprobs=1), PERSON_PARAMS))
    one = engines()
    add(one, "r", job)
    (with_drafts,) = finish(one).values()
    steps = one.stats().num_steps
    other = engines()
    other.scheduler.drafts_forced_tokens = False
    add(other, "r", job)
    (without,) = finish(other).values()
    assert tokens_of(with_drafts) == tokens_of(without)
    tokens = len(with_drafts.outputs[0].token_ids)
    assert other.stats().num_steps == tokens
    assert steps <= tokens - 10
    assert with_drafts.outputs[0].logprobs is not None
    for found, expected in zip(with_drafts.outputs[0].logprobs, without.outputs[0].logprobs or (), strict=True):
        assert list(found) == list(expected)
        assert [e.logprob for e in found.values()] == pytest.approx([e.logprob for e in expected.values()], abs=1e-5)


@pytest.mark.slow
def test_a_runner_in_another_process(engines: Callable[..., Engine], model: Checkpoint) -> None:
    jobs = [job for _, job in jobs_of(model.vocab, 30)]
    expected = run(engines(), jobs)
    assert run(engines(distributed_executor_backend="mp"), jobs) == expected


@pytest.mark.parametrize("name", ["compact", "json", "choice", "regex"])
def test_beams_equal_the_reference(
    name: str, engines: Callable[..., Engine], model: Checkpoint, tokenizer: Tokenizer
) -> None:
    """`transformers.generate(prefix_allowed_tokens_fn=...)`, the function made from llguidance's own view of the
    tokenizer: tokens and scores, greedily and by beams."""
    oracle, one, clear = Oracle(tokenizer.hf, model.vocab, model.eos), engines(), 0
    for seed in range(6):
        prompt = random_prompt(model.vocab, seed, 6 + seed)
        allowed = oracle.prefix_function(ASKED[name], len(prompt))
        expected = reference.greedy(model.model, prompt, model.eos, 40, prefix_allowed_tokens_fn=allowed)
        if expected.margin > MIN_MARGIN:
            (found,) = run(one, [Job(prompt, asking(greedy(40), ASKED[name]))])
            assert found == [expected.answers[0].tokens]
        expected = reference.beams(
            model.model, prompt, model.eos, 40, num_beams=4, n=4, prefix_allowed_tokens_fn=allowed
        )
        if expected.margin <= MIN_MARGIN:
            continue
        clear += 1
        add(one, "r", Job(prompt, asking(beams(4, 40), ASKED[name])))
        (output,) = finish(one).values()
        assert tokens_of(output) == [answer.tokens for answer in expected.answers]
        for answer, other in zip(output.outputs, expected.answers, strict=True):
            assert answer.score == pytest.approx(other.score, abs=1e-4)
    assert clear >= 2


def test_limits_of_an_answer(engines: Callable[..., Engine], model: Checkpoint, tokenizer: Tokenizer) -> None:
    """max_tokens cuts it off; min_tokens does not keep a whole one from ending; stop ids of the request end it, too."""
    one, prompt = engines(), random_prompt(model.vocab, 8, 5)

    def answer(asked: StructuredOutputsParams, **more: Any) -> Any:
        add(one, "r", Job(prompt, asking(greedy(**({"length": 40} | more)), asked)))
        (output,) = finish(one).values()
        return output.outputs[0]

    cut = answer(PERSON_PARAMS, length=5)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    for asked in (ASKED["choice"], StructuredOutputsParams(regex="")):
        early = answer(asked, min_tokens=30)
        assert early.finish_reason == "stop"
        assert len(early.token_ids) < 30
    # It may end at every letter, and does not before there are enough.
    late = answer(StructuredOutputsParams(regex="[a-z]*"), min_tokens=20, length=30, logit_bias={model.eos[0]: 80.0})
    assert (late.finish_reason, len(late.token_ids)) == ("stop", 21)
    whole = answer(PERSON_PARAMS).token_ids
    stopped = answer(PERSON_PARAMS, stop_token_ids=[whole[3]])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", whole[: whole.index(whole[3]) + 1])


def test_what_cannot_be_asked_for_together() -> None:
    for name, value in (("ignore_eos", True), ("allowed_token_ids", [1])):
        with pytest.raises(InvalidRequestError, match=f"{name} cannot be used with structured output") as caught:
            SamplingParams(structured_outputs=PERSON_PARAMS, **{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ({}, "exactly one of choice, grammar, json, json_object, regex, structural_tag, got none", ""),
        ({"json": {}, "regex": "a"}, "got json, regex", ""),
        ({"json_object": False}, "got none", ""),
        ({"json": 5}, "json must be an object or a boolean, or the same as a string, got 5", ".json"),
        ({"json": "{"}, "json is a string that is not JSON", ".json"),
        ({"json": "5"}, "json must be an object or a boolean", ".json"),
        ({"json": {"a": float("nan")}}, "json is not JSON", ".json"),
        ({"json": {"title": "x" * 140_000}}, "json may have at most 131072 bytes, got 140012", ".json"),
        ({"json": json.dumps({"title": "x" * 140_000})}, "json may have at most 131072 bytes, got 140013", ".json"),
        ({"json": {"enum": ["é" * 70_000]}}, "json may have at most 131072 bytes, got 1400", ".json"),
        ({"json": {"enum": [[]] * 100_000}}, "json may have at most 131072 bytes, got more", ".json"),
        ({"json": {"properties": {f"p{i}": {} for i in range(1001)}}}, "at most 1000 properties in all", ".json"),
        ({"regex": "a" * 131_073}, "regex may have at most 131072 bytes, got 131073", ".regex"),
        ({"regex": 5}, "regex must be a string, got 5", ".regex"),
        ({"grammar": "\ud800"}, "grammar is not valid Unicode", ".grammar"),
        ({"choice": []}, "choice must be a list of at least one string", ".choice"),
        ({"choice": "ab"}, "choice must be a list of at least one string", ".choice"),
        ({"choice": [1]}, "choice must hold strings, got 1", ".choice"),
        ({"choice": ["a"] * 1001}, "choice may have at most 1000 strings, got 1001", ".choice"),
        ({"json_object": 1}, "json_object must be true or false, got 1", ".json_object"),
        ({"structural_tag": True}, "structural_tag must be an object", ".structural_tag"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused_at_once(given: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**given)
    assert message in str(caught.value)
    assert caught.value.param == f"structured_outputs{param}"


def test_depth_is_bounded() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(31):
        deep = {"properties": {"a": deep}}
    StructuredOutputsParams(json=deep)
    for _ in range(2):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidRequestError, match="json may be nested at most 64 levels deep"):
        StructuredOutputsParams(json=deep)
    with pytest.raises(InvalidRequestError, match="json is a string that is not JSON"):
        StructuredOutputsParams(json='{"a":' * 20_000)


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"json": {"properties": {"a": {"items": {"uniqueItems": True}}}}}, '"uniqueItems" at #/properties/a/items)'),
    ({"json": {"$defs": {"a/b": {"not": {}}}, "$ref": "#/$defs/a~1b"}}, '(keyword "not" at #/$defs/a~1b)'),
    ({"json": {"items": {"format": "color", "type": "string"}}}, '(keyword "format" at #/items)'),
    ({"json": {"anyOf": [{"type": "frog"}]}}, '(keyword "type" at #/anyOf/0)'),
    ({"json": {"$ref": "#/definitions/x"}}, '(keyword "$ref" at #)'),
    ({"json": {"$ref": "http://example.org/other"}}, '(keyword "$ref" at #)'),
    ({"json": {"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}}, '(keyword "pattern" at #/properties/a)'),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, '(keyword "minimum" at #)'),
    ({"json": {"properties": {"a": False}, "required": ["a"], "type": "object"}}, '(keyword "required" at #)'),
    ({"json": {"items": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}}, '(keyword "oneOf" at #/items)'),
    ({"json": False}, '(keyword "false" at #)'),
    ({"json": {"properties": {"a": {"minimum": 10**30}}}}, '(keyword "minimum" at #/properties/a)'),
    ({"json": {"minimum": 10**400, "maximum": 0.5}}, '(keyword "minimum" at #)'),
    (
        {"json": {"items": {"enum": [1, [{"b": -(2**53) - 1}]]}}},
        '(keyword "enum" at #/items): -90071992',
    ),
    (
        {"json": {"properties": {f"p{i}": {} for i in range(900)}}},
        "3607 continuations at one place, and the limit is 2000",
    ),
    ({"regex": "("}, "the regular expression cannot be used"),
    ({"regex": "(a)\\1"}, "backreferences are not supported"),
    ({"grammar": "start: other"}, "unknown name"),
    ({"grammar": 'rule ::= "a"'}, "the grammar has no rule root"),
    ({"structural_tag": {"structures": []}}, 'must have "structures" and "triggers"'),
    ({"structural_tag": {**CALL, "triggers": ["x"]}}, "no trigger is a prefix of '<f>'"),
]


@pytest.mark.parametrize(
    ("limit", "grammar", "message"),
    [
        ("step_max_items", 'start: s\ns: s s | "a" | "!" | /./', "more than the limit of 20 parser items"),
        ("max_lexer_states", "start: /(ab|cd|ef|gh){1,20}/", "more than the limit of 20 lexer states"),
        ("step_lexer_fuel", "start: /(a|b)*a(a|b){18}/", "lexer steps for a token"),
        ("max_items_in_row", "start: " + " ".join(f'"a{i}"?' for i in range(30)), "and the limit is 20"),
    ],
)
def test_a_limit_that_is_exceeded_is_named(
    limit: str, grammar: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "LARK_LIMITS", grammars.LIMITS | {limit: 20})
    with pytest.raises(InvalidRequestError, match=message):
        grammars.Trial().check(StructuredOutputsParams(grammar=grammar))


@pytest.mark.parametrize(("given", "message"), UNUSABLE, ids=lambda value: str(value)[:40])
def test_what_cannot_be_compiled(given: dict[str, Any], message: str) -> None:
    """Found out without a model, by what a worker does; the place is named."""
    params = StructuredOutputsParams(**given)
    with pytest.raises(InvalidRequestError) as caught:
        grammars.Trial().check(params)
    assert message in str(caught.value)
    assert caught.value.param == f"structured_outputs.{params.kind}"
    assert caught.value.code == "invalid_grammar"


BOUNDS: list[tuple[dict[str, Any], str, str]] = [  # each with what it allows, and what it does not
    ({"exclusiveMinimum": 0, "maximum": 0.3}, "0.1 0.3 0.0000001", "0 0.0 -0 0.31"),
    ({"exclusiveMaximum": 0, "minimum": -0.3}, "-0.1 -0.3", "0 -0 -0.0 -0.31"),
    ({"exclusiveMinimum": 10, "exclusiveMaximum": 10.05}, "10.01 10.04999", "10 10.0 10.05"),
    ({"exclusiveMaximum": 1, "minimum": 0.1, "exclusiveMinimum": 0.01}, "0.1 0.98", "1 1.0 0.09"),
    ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.3}]}, "0.1 0.0000001", "0 -0 0.0 0.31"),
    ({"exclusiveMaximum": 0, "anyOf": [{"minimum": -0.3}]}, "-0.1 -0.3", "0 -0 -0.0 -0.31"),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5 0.99", "0 0.0 1 1.0"),
    ({"exclusiveMinimum": 2**53 - 2, "type": "integer"}, "9007199254740991 9007199254740993", "9007199254740990"),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "-9007199254740991 0", "9007199254740992"),
    ({"minimum": -3.4e38, "exclusiveMaximum": 3.4e38, "maximum": 7}, "-9007199254740991 7", "7.5 -9007199254740992"),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), BOUNDS, ids=lambda value: str(value)[:40])
def test_bounds_hold_where_they_are_close(schema: dict[str, Any], allowed: str, refused: str) -> None:
    params = StructuredOutputsParams(json={"type": "number"} | schema)

    def goes(text: str) -> bool:
        matcher = llguidance.LLMatcher(
            grammars.single_bytes(llguidance),
            grammars.grammar_text(params),
            limits=grammars.limits_of(llguidance, params),
        )
        return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()

    assert [text for text in allowed.split() if not goes(text)] == []
    assert [text for text in refused.split() if goes(text)] == []


def test_what_a_model_refuses_harms_no_other_request(engines: Callable[..., Engine], model: Checkpoint) -> None:
    one = engines()
    for given, message in UNUSABLE[:3]:
        with pytest.raises(InvalidRequestError) as caught:
            add(one, "r", Job([5], asking(greedy(3), StructuredOutputsParams(**given))))
        assert message in str(caught.value)
    unknown = StructuredOutputsParams(grammar='start: <|nothing|> "x"')  # only the model's tokenizer can tell
    with pytest.raises(InvalidRequestError, match="nothing"):
        add(one, "r", Job([5], asking(greedy(3), unknown)))
    assert len(run(one, [Job([5], asking(greedy(30), ASKED["choice"]))])[0][0]) > 1


def test_an_unreachable_answer_is_an_error_of_that_request(engines: Callable[..., Engine], model: Checkpoint) -> None:
    """A grammar that takes too much while it is followed ends its request, with the reason; no answer is cut short."""
    one = engines()
    wide = StructuredOutputsParams(json={"properties": {f"p{i}": {} for i in range(900)}, "type": "object"})
    add(one, "bad", Job([5], asking(greedy(30), wide)))
    add(one, "good", Job([5], asking(greedy(30), ASKED["choice"])))
    outputs = finish(one)
    (bad,) = outputs["bad"].outputs
    assert bad.finish_reason == "error"
    assert "the grammar cannot be applied any further" in str(bad.stop_reason)
    assert outputs["good"].outputs[0].finish_reason == "stop"


def test_a_costly_grammar_has_its_time(
    tokenizer: Tokenizer, model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of one that takes too long end with an error; those beside them go on. Time is counted by the request."""
    made = grammars.Grammars(lambda: tokenizer, model.vocab, frozenset(model.eos), opens_texts=False, threads=1)
    costly, cheap = made.get(ASKED["grammar"]), made.get(ASKED["choice"])
    answers = [costly.fork() for _ in range(9)]
    everything, now, compute = [*answers, cheap], 0.0, grammars._compute

    def fill(seconds: float) -> np.ndarray:
        """Some rows of the costly one take so long."""

        def computing(rows: list[Any], masks: np.ndarray) -> None:
            nonlocal now
            now += seconds if any(one is not cheap for one, _ in rows) else 0.0
            compute(rows, masks)

        monkeypatch.setattr(grammars, "_compute", computing)
        masks = np.zeros((10, mask_words(model.vocab)), dtype=np.uint32)
        grammars.GrammarConstraint.fill_together(everything, range(10), masks)
        return masks.any(axis=1)

    monkeypatch.setattr(grammars._Watch, "__init__", lambda watch: setattr(watch, "_began", now))
    monkeypatch.setattr(grammars._Watch, "seconds", lambda watch: now - watch._began)
    assert fill(0.0).all()
    assert fill(0.012).all()  # long, but not too long
    assert not any(one.problem for one in everything)
    assert fill(0.05).tolist() == [True] * 4 + [False] * 5 + [True]  # the step's time was over
    assert [one.problem is None for one in everything] == [True] * 4 + [False] * 5 + [True]
    everything[4:9] = [answers[0].fork() for _ in range(5)]
    for _ in range(10):
        fill(0.03)
    assert all("takes too long" in str(one.problem) for one in everything[:9])
    assert cheap.problem is None
    assert made.get(ASKED["grammar"]).problem is None  # other requests have their own time


def test_special_tokens_come_where_a_grammar_names_them(
    engines: Callable[..., Engine], model: Checkpoint, tokenizer: Tokenizer
) -> None:
    call = tokenizer.token_id("<|call|>")
    one, asked = engines(), StructuredOutputsParams(grammar="start: <|call|> /[a-c]{2}/")
    (answer,) = run(one, [Job([5], asking(greedy(9), asked))])[0]
    assert answer[0] == call
    # Written as a string it is text.
    (answer,) = run(one, [Job([5], asking(greedy(20), StructuredOutputsParams(choice=["<|call|>"])))])[0]
    assert call not in answer
    assert tokenizer.decode(answer) == "<|call|>"


def test_tags_in_free_text(tokenizer: Tokenizer, model: Checkpoint) -> None:
    made = grammars.Grammars(lambda: tokenizer, model.vocab, frozenset(model.eos), opens_texts=False, threads=1)

    def goes(text: str) -> tuple[int, bool]:
        constraint = made.get(StructuredOutputsParams(structural_tag=CALL)).fork()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return constraint._matcher.try_consume_tokens(tokens) - len(tokens), constraint._matcher.is_accepting()

    for right in ("hi", "", "<f>3</f>", "so <f>7</f>, and <f>-2</f>.", "a < f"):
        assert goes(right) == (0, True), right
    for wrong in ("<f>x", "<f>12</f>", "<fg>"):
        assert goes(wrong)[0] < 0, wrong
    assert goes("<f>3")[1] is False


def test_what_grammars_share_is_prepared_before_the_first_one(tokenizer: Tokenizer, model: Checkpoint) -> None:
    loads: list[str] = []

    def load() -> Tokenizer:
        loads.append(threading.current_thread().name)
        return tokenizer

    made = grammars.Grammars(load, model.vocab, frozenset(model.eos), opens_texts=False, threads=1)
    for _ in range(2):
        made.warm()
    compiling = made.begin(ASKED["choice"])
    assert compiling is not None
    compiling.result(60)
    assert len(loads) == 1
    assert loads[0].startswith("octavo-grammar")


def test_a_vocabulary_needs_no_list_of_its_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id is not None
    made = Vocabulary(tokenizer, tokenizer.vocab_size + 3, [tokenizer.eos_token_id])
    known, whole = list(made.tokens), made("A caf\u00e9")
    made.tokens.clear()
    assert list(map(made._bytes, range(len(known)))) == known
    assert made("A caf\u00e9") == whole
    part = "caf\u00e9".encode()[:-1]  # the end is no character
    assert b"".join(map(made._bytes, made(part))) == part


@pytest.mark.parametrize(
    ("tokens", "weights", "free", "warms"),
    [
        (49_152, 90 << 20, 1 << 30, True),
        (64_001, 90 << 20, 1 << 30, False),
        (151_936, 560 << 20, 4 << 30, False),
        (151_936, 640 << 20, 4 << 30, True),
        (262_144, 240 << 20, 7 << 30, False),
        (262_144, 240 << 20, 8 << 30, True),
    ],
)
def test_grammars_are_prepared_at_the_start_where_they_take_little_beside_the_weights_or_the_free_memory(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tokens: int, weights: int, free: int, warms: bool
) -> None:
    one = engines()
    monkeypatch.setattr("engine.engine.available_memory", lambda: free)
    assert 0 < one.executor.facts.weights < 64_000_000
    assert one.warms_grammars
    monkeypatch.setattr(one, "info", replace(one.info, vocab_size=tokens))
    monkeypatch.setattr(one.executor, "facts", replace(one.executor.facts, weights=weights))
    assert one.warms_grammars is warms
    monkeypatch.setattr(one, "info", replace(one.info, tasks=("embed",)))
    assert not one.warms_grammars


def test_without_a_tokenizer_only_requests_with_a_grammar_are_refused(model: Checkpoint) -> None:
    made = grammars.Grammars(lambda: None, model.vocab, frozenset(model.eos), opens_texts=False, threads=1)
    made.warm()
    compiling = made.begin(ASKED["choice"])
    assert compiling is not None
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        compiling.result(60)


def test_compiled_grammars_are_kept(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    text = grammars.grammar_text
    monkeypatch.setattr(
        grammars, "grammar_text", lambda params, **more: compiled.append(params.kind) or text(params, **more)
    )
    monkeypatch.setattr(grammars, "MOST_CACHED", 2)
    one = engines()
    for name in ("choice", "choice", "regex", "choice", "grammar", "choice", "regex"):
        run(one, [Job([5], asking(greedy(4), ASKED[name]))])
    assert compiled == ["choice", "regex", "grammar", "regex"]
    assert (one.prepare(asking(greedy(4), ASKED["regex"])), one.prepare(asking(greedy(4), ASKED["choice"]))) == (
        None,
        None,
    )
    waiting = one.prepare(asking(greedy(4), ASKED["json"]))
    assert waiting is not None
    waiting.result(timeout=60)
    assert one.prepare(asking(greedy(4), ASKED["json"])) is None


def test_offline(model: Checkpoint) -> None:
    """`LLM`: texts, and stop strings."""
    llm = LLM(str(model.path), device="cpu", dtype="float32", show_progress=False)
    try:
        params = SamplingParams(structured_outputs=ASKED["compact"], temperature=0, max_tokens=60)
        (output,) = llm.generate("The reader", params)
        assert is_right("compact", output.outputs[0].text)
        (output,) = llm.generate("The reader", replace(params, stop='"age"'))
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", '"age"')
        assert output.outputs[0].text.endswith(",")
    finally:
        llm.close()
    llm = LLM(str(model.path), device="cpu", dtype="float32", show_progress=False, skip_tokenizer_init=True)
    try:
        with pytest.raises(InvalidRequestError, match="structured output needs a tokenizer, but this model has none"):
            llm.generate([[5, 6]], params)
    finally:
        llm.close()


@pytest.mark.slow
def test_without_llguidance(model: Checkpoint) -> None:
    """The engine runs; a request for structured output is refused, with what to install."""
    script = f"""
import sys
sys.modules["llguidance"] = None
from engine import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
llm = LLM({str(model.path)!r}, device="cpu", dtype="float32", show_progress=False)
print(len(llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
try:
    llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
except InvalidRequestError as error:
    print(error, error.param)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "3",
        "structured output needs the package llguidance, which is not installed on the server: "
        "pip install llguidance. structured_outputs",
    ]
