"""Catalogues of an engine: files and what is wrong with them, requests and what they are refused for, and constrained
answers whatever happens on the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.catalogues import random_titles, write
from support.checkpoints import SHAPES, Checkpoint, with_generation_config
from support.driving import BOTH_DEPTHS, Job, add, finish, make_engine, preempt_all, run, run_alone
from support.jobs import CHECKPOINT, MIXED, VOCAB, beams, greedy, prompt, sampled
from test_isolation import faults

from engine import LLM, ConfigError, Engine, EngineConfig, InvalidRequestError, SamplingParams
from engine.interface.trie import Member
from engine.process.messages import decode_command, encode_add
from engine.scheduling.plan import StepPlan
from engine.text.catalogues import read_titles

EOS = SHAPES[CHECKPOINT].eos
TITLES = random_titles(1, 300, VOCAB, without=(*EOS, 5))
CATALOGUE = {"catalogue": "titles"}
NO_LIMIT: dict[str, Any] = {"max_tokens": None, "ignore_eos": False, "constraint": CATALOGUE}
DEMO = "server/demo/chat"


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "titles.jsonl", TITLES)


def constrained(params: SamplingParams, **more: Any) -> SamplingParams:
    return replace(params, **(NO_LIMIT | more))


JOBS = [
    Job(prompt(1, 19), constrained(greedy(), logit_bias={9: 3.0})),
    Job(prompt(2, 3), constrained(sampled(5), n=3, top_p=0.9)),
    Job(prompt(3, 41), constrained(sampled(6), temperature=2.0)),
    Job(prompt(4, 8), constrained(beams(4))),
    Job(prompt(5, 12), constrained(beams(7), repetition_penalty=1.1, length_penalty=0.3)),
    Job(prompt(6, 22), constrained(greedy(), presence_penalty=0.7, logprobs=2)),
    Job(prompt(7, 9), constrained(beams(3), stream_beams=True, stop_token_ids=[5])),
]
BESIDE = [*JOBS, *MIXED[:4], MIXED[6]]


def check_members(jobs: list[Job], answers: list[list[list[int]]]) -> None:
    known = set(TITLES)
    for job, texts in zip(jobs, answers, strict=True):
        if job.params.constraint is None:
            continue
        ends = {*EOS, *(job.params.stop_token_ids or ())}
        assert all(text[-1] in ends for text in texts)
        assert all(tuple(text[:-1]) in known for text in texts)
        if (job.params.num_beams or 1) > 1:
            assert len({tuple(text[:-1]) for text in texts}) == len(texts)


def check_states(engine: Engine) -> int:
    """Every state is the one that its sequence's output leads to; how many were looked at."""
    found = 0
    for group in engine.scheduler.groups():
        constraint = group.request.decoding.constraint
        for sequence in group.sequences if isinstance(constraint, Member) else ():
            again = constraint.fork()
            for token in sequence.output():
                again.accept(token)
            assert isinstance(sequence.constraint, Member)
            assert (sequence.constraint._first, sequence.constraint._last) == (again._first, again._last)
            found += 1
    return found


@BOTH_DEPTHS
def test_answers_are_titles_whatever_happens(engines: Callable[..., Engine], file: str) -> None:
    """Alone and beside others, sampled and by beams; with chunks of prompts, preemptions and steps that fail."""
    one = engines(catalogue=[f"titles={file}"], enable_prefix_caching=False, max_num_batched_tokens=32, max_num_seqs=32)
    expected = run_alone(one, BESIDE)
    check_members(BESIDE, expected)
    states = preempted = beams_preempted = calls = 0

    def between(step: int) -> None:
        nonlocal states, preempted, beams_preempted
        states += check_states(one)
        if step % 3 == 1:
            searches = [group for group in one.scheduler._running if group.beam is not None and group.started]
            beams_preempted += sum(group.request.decoding.constraint is not None for group in searches)
            preempted += preempt_all(one)

    assert run(one, BESIDE, between) == expected
    assert states > 30
    assert preempted > 5
    assert beams_preempted > 1

    def fail(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 1 and plan.num_rows > 4:
            raise RuntimeError("made by the test")

    with faults(one, fail) as raised:
        assert run(one, BESIDE, lambda step: check_states(one) and None) == expected
    assert len(raised) > 2


def test_an_answer_has_room_for_the_longest_title(engines: Callable[..., Engine], file: str) -> None:
    """Where max_tokens is left out; one that is cut off says so, and a least length bans no end that must come."""
    one = engines(catalogue=[f"titles={file}"])
    longest = max(map(len, TITLES))
    (title,) = [title for title in TITLES if len(title) == longest][:1]
    bias = dict.fromkeys(title, 60.0)
    for more in ({}, {"min_tokens": 50}, {"min_length": 90}):
        add(one, "r", Job(prompt(1, 5), constrained(greedy(), logit_bias=bias, **more)))
        (output,) = finish(one).values()
        assert output.outputs[0].finish_reason == "stop"
        assert tuple(output.outputs[0].token_ids[:-1]) in TITLES
    assert len(output.outputs[0].token_ids) == longest + 1
    add(one, "r", Job(prompt(1, 5), constrained(greedy(), logit_bias=bias, max_tokens=2)))
    (output,) = finish(one).values()
    assert output.outputs[0].finish_reason == "length"
    assert any(title[:2] == tuple(output.outputs[0].token_ids) for title in TITLES)


def test_a_forced_end_cuts_no_title_off(checkpoint: Callable[[str], Checkpoint], tmp_path: Path, file: str) -> None:
    """A model's own forced_eos_token_id would make what is no title look like one."""
    folder = with_generation_config(
        checkpoint(CHECKPOINT), tmp_path / "model", {"eos_token_id": list(EOS), "forced_eos_token_id": EOS[0]}
    )
    one = make_engine(folder, catalogue=[f"titles={file}"])
    bias = {token: 60.0 for title in TITLES if len(title) > 4 for token in title}
    add(one, "r", Job(prompt(1, 5), constrained(greedy(), logit_bias=bias, max_tokens=2)))
    (output,) = finish(one).values()
    assert output.outputs[0].finish_reason == "length"
    assert not {*output.outputs[0].token_ids} & {*EOS}
    one.close()


def test_a_model_that_names_no_end(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    folder = with_generation_config(checkpoint("gpt2-untied"), tmp_path / "model", {"eos_token_id": None})
    config = folder / "config.json"
    stored = json.loads(config.read_text()) | {"eos_token_id": None}
    config.unlink()
    config.write_text(json.dumps(stored))
    one = make_engine(folder, catalogue=[f"titles={write(tmp_path / 'few.jsonl', [(3, 4), (5,)])}"])
    with pytest.raises(InvalidRequestError, match=r"this model names none.*Send stop_token_ids") as caught:
        add(one, "r", Job([1], SamplingParams(constraint=CATALOGUE)))
    assert caught.value.param == "constraint"
    answers = run(one, [Job([1], SamplingParams(constraint=CATALOGUE, num_beams=3, n=2, stop_token_ids=[9]))])
    assert sorted(answers[0]) == [[3, 4, 9], [5, 9]]
    one.close()


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"constraint": {"catalogue": "other"}}, "constraint", "no catalogue 'other'; the catalogues are titles."),
        ({"constraint": {"catalogue": ""}}, "constraint", 'must be {"catalogue": NAME}, got'),
        ({"constraint": {"catalogues": "titles"}}, "constraint", 'must be {"catalogue": NAME}, got'),
        ({"constraint": {"catalogue": "titles", "x": "y"}}, "constraint", 'must be {"catalogue": NAME}, got'),
        ({"constraint": {"catalogue": 7}}, "constraint", 'must be {"catalogue": NAME}, got'),
        ({"constraint": "titles"}, "constraint", 'must be {"catalogue": NAME}, got'),
        ({"constraint": {}}, "constraint", 'must be {"catalogue": NAME}, got'),
        ({"ignore_eos": True}, "ignore_eos", "cannot be used with constraint"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids", "cannot be used with constraint"),
        ({"forced_eos_token_id": 7}, "forced_eos_token_id", "cannot be used with constraint"),
        ({"stop_token_ids": [TITLES[0][0]]}, "stop_token_ids", f"holds {TITLES[0][0]}, which occurs in titles"),
        ({"num_beams": 12, "n": 12, "constraint": {"catalogue": "few"}}, "n", "the catalogue few has 2 titles"),
    ],
)
def test_what_is_refused(
    engines: Callable[..., Engine], file: str, tmp_path: Path, params: dict[str, Any], param: str, message: str
) -> None:
    names = ["titles"] + (["few"] if "few" in str(params) else [])
    few = write(tmp_path / "few.jsonl", [(3, 4), (5,)])
    one = engines(catalogue=[f"{name}={file if name == 'titles' else few}" for name in names])
    with pytest.raises(InvalidRequestError) as caught:
        add(one, "r", Job([1], SamplingParams(**({"constraint": CATALOGUE} | params))))
    assert message in str(caught.value)
    assert caught.value.param == param
    assert not one.has_unfinished_requests()


def test_without_a_catalogue(engines: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidRequestError, match=r"there is none \(--catalogue NAME=FILE\)") as caught:
        add(engines(), "r", Job([1], SamplingParams(constraint=CATALOGUE)))
    assert caught.value.code == "unknown_catalogue"


def test_it_travels_to_the_engines_process() -> None:
    params = SamplingParams(constraint=CATALOGUE, num_beams=2)
    command = decode_command(encode_add("r", [1], params))
    assert not isinstance(command, tuple)
    assert command.params == params  # type: ignore[union-attr]


# ------------------------------------------------------------------ files


def test_titles_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "titles.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf"one"\r\n\n  \n{"text": "two", "id": 7, "ids": null}\n{"ids": [3, 4]}\n"\\u00e9\xc3\xa9"'
    )
    assert list(read_titles("t", str(path))) == [(1, "one"), (4, "two"), (5, [3, 4]), (6, "éé")]


def test_equal_titles_are_one(engines: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says which line was the first that repeats another; an end behind a title makes no other title of it."""
    path = write(tmp_path / "titles.jsonl", [(3, 4), (5,), (3, 4, EOS[0]), (6,), (5,), (5, 6)])
    caplog.set_level(logging.INFO, "octavo")
    one = engines(catalogue=[f"titles={path}"])
    assert [(info.name, info.titles, info.longest) for info in one.info.catalogues] == [("titles", 4, 2)]
    assert (
        f"Catalogue titles: line 3 of {path} repeats the title of line 1; 2 repeated titles are ignored." in caplog.text
    )
    assert f"Catalogue titles from {path}: 4 titles of up to 2 tokens" in caplog.text
    answers = run(one, [Job([1], SamplingParams(num_beams=8, n=4, constraint=CATALOGUE))])
    assert sorted(tuple(text[:-1]) for text in answers[0]) == [(3, 4), (5,), (5, 6), (6,)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"a"\n"b', ", line 2 is not JSON (Unterminated string starting at): '\"b'."),
        (b"[" * 100_000, ", line 1 is not JSON"),
        (b'{"ids": [1]}\n7\n', ", line 2 must be a JSON string, or an object with text"),
        (b"null\n", ", line 1 must be a JSON string"),
        (b'{"ids": [3]}\n{"name": "b"}\n', ", line 2 must have either text or ids, got none of them."),
        (b'{"text": "a", "ids": [3]}', ", line 1 must have either text or ids, got text and ids."),
        (b'{"text": ["a"]}', ", line 1 must be a JSON string"),
        (b'{"ids": [3, "4"]}', ", line 1: ids must be a list of integers, got [3, '4']."),
        (b'{"ids": [true]}', ", line 1: ids must be a list of integers"),
        (b'{"ids": "3"}', ", line 1: ids must be a list of integers"),
        (b'\n{"ids": []}', ", line 2: the title is empty."),
        (b'""', ", line 1: the title is empty."),
        (b'{"ids": [3]}\n"\xff"', ", line 2 is not UTF-8: byte 1 is 0xff."),
        (b'"a\\ud800"', ", line 1 is not valid Unicode: character 1 is the unpaired surrogate '\\ud800'."),
        (b'{"ids": [3]}\n{"ids": [3, 307]}', ", line 2: token id 307 is outside the vocabulary, which has ids 0 to"),
        (b'{"ids": [3, -1]}', ", line 1: token id -1 is outside the vocabulary"),
        (b'{"ids": [4294967299]}', ", line 1: token id 4294967299 is outside the vocabulary"),
        (b'{"ids": [3, 1%s]}' % (b"0" * 40), ", line 1: token id 1000000000000000000000000000000"),
        (b'{"ids": [3]}\n{"ids": [3, 7, 4]}', ", line 2: the title contains token 7, which ends answers"),
        (b'{"ids": [7]}', ", line 1: the title contains token 7, which ends answers"),
        (
            b'{"ids": [3]}\n\n{"ids": [%s]}' % b",".join([b"3"] * 63),
            ", line 3: the title has 63 tokens, but at most",
        ),
        (b'{"ids": [3]}\n"a"', ", line 2: the title is a text, and the model has no tokenizer"),
        (b"", " is empty; it must hold at least one title."),
        (b"\n \r\n\n", " is empty; it must hold at least one title."),
        (None, " cannot be read: No such file or directory."),
    ],
)
def test_what_is_no_catalogue(
    engines: Callable[..., Engine], tmp_path: Path, content: bytes | None, message: str
) -> None:
    """The start fails, and says which line is wrong."""
    path = tmp_path / "titles.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        engines(catalogue=[f"mine={path}"], max_model_len=64)
    assert str(caught.value).startswith(f"catalogue mine: {path}{message}")


def test_the_file_is_missed_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Engine(EngineConfig(model=str(tmp_path / "no-model"), catalogue=(f"a={tmp_path / 'none'}",)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["titles.jsonl"], "catalogue must be NAME=FILE"),
        (["a="], "catalogue must be NAME=FILE"),
        (["=file"], "catalogue must be NAME=FILE"),
        (["a b=file"], "catalogue must be NAME=FILE"),
        (["a" * 65 + "=file"], "catalogue must be NAME=FILE"),
        ([7], "catalogue must be NAME=FILE"),
        (["a=one", "b=two", "a=three"], "catalogue has two files with the name a"),
        ("a=one", "catalogue must be a list of texts NAME=FILE"),
    ],
)
def test_settings(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", catalogue=given)
    assert EngineConfig(model="m", catalogue=["a=b=c"]).catalogues == {"a": "b=c"}  # type: ignore[arg-type]


def test_texts_of_the_bundled_model(tmp_path: Path) -> None:
    """Titles go on from a prompt as their first characters say; two batches of them; objects beside texts."""
    titles = [f" the {word} number {number}" for word in ("old", "red") for number in range(5_000)]
    texts = [*titles, {"text": " a fox", "more": 1}]
    llm = LLM(DEMO, device="cpu", show_progress=False, catalogue=[f"t={write(tmp_path / 't.jsonl', texts)}"])
    assert [info.titles for info in llm.engine.info.catalogues] == [10_001]
    params = [SamplingParams(constraint={"catalogue": "t"}, seed=seed) for seed in range(8)]
    params += [SamplingParams(constraint={"catalogue": "t"}, num_beams=8, n=8)]
    for output in llm.generate(["Once upon a time there was"] * 9, params):
        for answer in output.outputs:
            assert answer.finish_reason == "stop"
            assert answer.text in {*titles, " a fox"}
    llm.close()
