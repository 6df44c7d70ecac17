"""Decoding parameters and `generation_config.json` of encoder-decoder models, compared with `transformers`; and the
limits of their inputs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import reference
from support.checkpoints import random_prompt
from support.driving import finish, make_engine
from support.reference import MIN_MARGIN, Reference
from support.seq2seq import (
    BEAM_TOKENS,
    GREEDY_TOKENS,
    MAX_LEN,
    NO_PAIRS,
    START,
    Case,
    Seq2SeqCheckpoint,
    make_seq2seq_checkpoint,
)
from support.seq2seq_shapes import SHAPES

from engine import LLM, CompletionOutput, Engine, InvalidRequestError, RequestOutput, SamplingParams, Seq2SeqInput

NAME = "bart"
THIRD = list(range(0, 97, 3))
SETTINGS_FOR_LLM: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "show_progress": False, "max_model_len": MAX_LEN, "max_step_time": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Seq2SeqCheckpoint, LLM]]]:
    """Gives the checkpoint of a name and an engine that has loaded it, made once."""
    made: dict[str, tuple[Seq2SeqCheckpoint, LLM]] = {}

    def get(name: str) -> tuple[Seq2SeqCheckpoint, LLM]:
        if name not in made:
            model = make_seq2seq_checkpoint(SHAPES[name], tmp_path_factory.mktemp(name))
            made[name] = model, LLM(str(model.path), **SETTINGS_FOR_LLM)
        return made[name]

    yield get
    for _, llm in made.values():
        llm.engine.check_integrity()
        llm.close()


Models = Callable[[str], tuple[Seq2SeqCheckpoint, LLM]]


def is_clear(expected: Reference) -> bool:
    """Every decision was; an unclear one may fall otherwise on another machine."""
    return expected.margin > MIN_MARGIN


def assert_equal(ours: list[CompletionOutput], expected: Reference) -> None:
    assert is_clear(expected)
    assert [answer.token_ids for answer in ours] == [answer.tokens for answer in expected.answers]
    for answer, other in zip(ours, expected.answers, strict=True):
        if other.score is not None:
            assert answer.score == pytest.approx(other.score, abs=1e-4)


def expect(model: Seq2SeqCheckpoint, case: Case, num_beams: int, theirs: dict[str, Any]) -> Reference:
    return model.greedy(case, **theirs) if num_beams == 1 else model.beams(case, num_beams, **theirs)


def ask(llm: LLM, case: Case, num_beams: int, **ours: Any) -> list[CompletionOutput]:
    if num_beams == 1:
        params = SamplingParams(temperature=0.0, **({"max_tokens": GREEDY_TOKENS} | NO_PAIRS | ours))
    else:
        params = SamplingParams(num_beams=num_beams, n=num_beams, **({"max_tokens": BEAM_TOKENS} | NO_PAIRS | ours))
    return run(llm.engine, [(Seq2SeqInput(case.source, case.begin), params)])[0].outputs


def run(engine: Engine, jobs: Sequence[tuple[Seq2SeqInput, SamplingParams]]) -> list[RequestOutput]:
    """Run the jobs together."""
    for number, (input, params) in enumerate(jobs):
        engine.add_request(str(number), input, params)
    finished = finish(engine)
    return [finished[str(number)] for number in range(len(jobs))]


def same(**settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Words that both use."""
    return settings, settings


NORMAL = {"renormalize_logits": True, "processors": [transformers.LogitNormalization()]}
# Ours, and the reference's words for it.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty": same(repetition_penalty=1.5),
    "unigrams": same(no_repeat_ngram_size=1),
    "trigrams": same(no_repeat_ngram_size=3),
    "none": same(no_repeat_ngram_size=0),
    "encoder_penalty": same(encoder_repetition_penalty=1.6),
    "encoder_reward": same(encoder_repetition_penalty=0.7),
    "encoder_unigrams": same(encoder_no_repeat_ngram_size=1),
    "min_length": same(min_length=9),
    "min_tokens": ({"min_tokens": 9}, {"min_new_tokens": 9}),
    "suppress": same(suppress_tokens=THIRD),
    "begin_suppress": same(begin_suppress_tokens=THIRD),
    "forced_bos": same(forced_bos_token_id=33),
    "forced_eos": same(forced_eos_token_id=44),
    "bad_words": same(bad_words_ids=[[t] for t in THIRD] + [[7]]),
    "renormalize": ({"suppress_tokens": THIRD, "renormalize_logits": True}, {"suppress_tokens": THIRD, **NORMAL}),
    "together": (
        {
            "repetition_penalty": 1.2, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2,
            "bad_words_ids": [[5], [6, 8]], "min_length": 6, "begin_suppress_tokens": THIRD, "renormalize_logits": True,
            "forced_bos_token_id": 33, "forced_eos_token_id": 7,
        },
        {
            "repetition_penalty": 1.2, "encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2,
            "bad_words_ids": [[5], [6, 8]], "min_length": 6, "begin_suppress_tokens": THIRD, **NORMAL,
            "forced_bos_token_id": 33, "forced_eos_token_id": 7,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(models: Models) -> Callable[[Case, int], Reference]:
    """Gives the reference's answer to a case without any setting, computed once."""
    return functools.cache(lambda case, num_beams: expect(models(NAME)[0], case, num_beams, {}))


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.slow
def test_setting(setting: str, num_beams: int, models: Models, plain: Callable[[Case, int], Reference]) -> None:
    """Each parameter alone and all together; each changes at least one of the answers."""
    reference.skip_if_older(num_beams > 1 and setting in ("encoder_penalty", "encoder_reward", "together"))
    model, llm = models(NAME)
    ours, theirs = SETTINGS[setting]
    # One input has every other token; one with nearly all of them would leave nothing to choose from.
    cases = [case for case in model.cases() if len(case.source) < 100]
    cases.append(Case(tuple(range(1, 97, 2)), (START,)))
    changed = compared = 0
    for case in cases:
        expected = expect(model, case, num_beams, theirs)
        if is_clear(expected):
            assert_equal(ask(llm, case, num_beams, **ours), expected)
            changed += expected.answers != plain(case, num_beams).answers
            compared += 1
    assert changed > 0
    assert compared >= 3


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["t5", "marian-two-vocabularies"])
def test_words_of_several_tokens(name: str, num_beams: int, models: Models) -> None:
    """What was answered is forbidden, piece by piece; the first word begins with the decoder's start token."""
    reference.skip_if_older()
    model, llm = models(name)
    for case in model.cases()[1:4]:
        answer = expect(model, case, num_beams, {}).answers[0].tokens
        tokens = [*case.begin, *answer]
        words = [tokens[len(case.begin) - 1 :][:2], answer[1:4], [*model.shape.eos], answer[:8], [9, *answer[1:3]]]
        words = [word for word in words if word]
        expected = expect(model, case, num_beams, {"bad_words_ids": words})
        assert_equal(ask(llm, case, num_beams, bad_words_ids=words), expected)
        assert expected.answers[0].tokens != answer
        assert answer[:2] != expected.answers[0].tokens[:2]


def test_repeated_pairs_of_the_encoder_s_input(models: Models) -> None:
    """Random layers like to repeat a token, which the input forbids: it has each several times in a row."""
    model, llm = models("t5")
    for num_beams, size in ((1, 2), (3, 2), (1, 3), (3, 3)):
        case = Case(tuple(token for token in range(190 // size) for _ in range(size)), (START,))
        plain = {"no_repeat_ngram_size": 0, "min_new_tokens": 9}
        expected = expect(model, case, num_beams, plain | {"encoder_no_repeat_ngram_size": size})
        ours = {"no_repeat_ngram_size": 0, "min_tokens": 9, "encoder_no_repeat_ngram_size": size}
        assert_equal(ask(llm, case, num_beams, **ours), expected)
        assert expected.answers != expect(model, case, num_beams, plain).answers


def test_tokens_of_an_encoder_with_its_own_vocabulary(models: Models) -> None:
    """Those that the decoder has count; the reference fails on the others, which count for nothing."""
    reference.skip_if_older()
    model, llm = models("marian-two-vocabularies")
    known = Case(tuple(t % 97 for t in model.cases()[1].source), (START,))
    settings = {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 1}
    for number in (1, 3):
        assert_equal(ask(llm, known, number, **settings), expect(model, known, number, settings))
        (*_, last) = ask(llm, Case((*known.source, 130), (START,)), number, **settings)
        assert last.token_ids


def test_the_start_token_may_be_sent_or_left_out(models: Models) -> None:
    model, llm = models(NAME)
    case = model.cases()[3]
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS, **NO_PAIRS)
    inputs = [Seq2SeqInput(case.source, begin) for begin in (case.begin, case.begin[1:])]
    outputs = run(llm.engine, [(input, params) for input in inputs])
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids == model.greedy(case).answers[0].tokens
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids == list(case.begin)


# ------------------------------------------------------------------ generation_config.json

# As published with small models' numbers: bart-large-cnn, mbart-large-50, opus-mt, pegasus-xsum, flan-t5.
DEFAULTS: dict[str, dict[str, Any]] = {
    "bart": {
        "early_stopping": True, "forced_bos_token_id": 5, "forced_eos_token_id": 7, "length_penalty": 2.0,
        "max_length": 14, "min_length": 6, "no_repeat_ngram_size": 3, "num_beams": 4,
    },
    "mbart": {"early_stopping": True, "forced_eos_token_id": 7, "max_length": 12, "num_beams": 5},
    "marian": {
        "bad_words_ids": [[0]], "forced_eos_token_id": 7, "max_length": 13, "num_beams": 6, "renormalize_logits": True,
    },
    "pegasus": {"forced_eos_token_id": 7, "length_penalty": 0.6, "max_length": 12, "num_beams": 8},
    "t5": {"max_length": 15},
    "t5-gated": {
        "encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.3, "repetition_penalty": 1.4,
        "max_new_tokens": 9, "min_new_tokens": 3, "num_beams": 2,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_reference(name: str, models: Models, tmp_path: Path) -> None:
    """The reference reads the same file; nothing is asked for but the model's defaults."""
    model, _ = models(name)
    values = DEFAULTS[name]
    eos = list(model.shape.eos)
    for file in model.path.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    ids = {"eos_token_id": eos, "decoder_start_token_id": START, "pad_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(ids | values), encoding="utf-8")
    config = transformers.GenerationConfig.from_pretrained(tmp_path)
    llm = LLM(str(tmp_path), **SETTINGS_FOR_LLM)
    sources = [case.source for case in model.cases()]
    params = SamplingParams() if "num_beams" in values else SamplingParams(temperature=0.0)
    compared = 0
    for source, output in zip(sources, llm.generate(sources, params), strict=True):
        rest = {k: v for k, v in values.items() if k not in ("max_length", "max_new_tokens", "num_beams")}
        if values.get("renormalize_logits"):
            rest["processors"] = NORMAL["processors"]
        longest = values.get("max_new_tokens") or values["max_length"] - 1
        arguments = (model.model, source, eos, longest)
        if "num_beams" in values:
            clear = reference.beams(*arguments, begin=[START], num_beams=values["num_beams"], **rest)
        else:
            clear = reference.greedy(*arguments, begin=[START], **rest)
        if not is_clear(clear):
            continue
        encoded = torch.tensor([source])
        expected = model.model.generate(encoded, attention_mask=torch.ones_like(encoded), generation_config=config)
        tokens = expected[0, 1:].tolist()
        stops = [place for place, token in enumerate(tokens) if token in eos]
        tokens = tokens[: stops[0] + 1 if stops else None]
        assert output.outputs[0].token_ids == tokens == clear.answers[0].tokens
        assert len(tokens) < values.get("max_length", 100)
        compared += 1
    assert compared >= 3
    llm.close()


# ------------------------------------------------------------------ limits


def test_encoder_and_decoder_have_all_positions_each(models: Models) -> None:
    model, llm = models(NAME)
    case = Case(tuple(random_prompt(97, 3, MAX_LEN)), (START, *random_prompt(97, 5, MAX_LEN - GREEDY_TOKENS - 1)))
    expected = model.greedy(case)
    assert_equal(ask(llm, case, 1), expected)
    assert len(case.begin) + GREEDY_TOKENS == MAX_LEN


@pytest.mark.parametrize(
    ("source", "begin", "max_tokens", "param", "parts"),
    [
        (MAX_LEN + 1, 1, 1, "prompt", ("the prompt is too long", "225", "encoder", "224", "--max-model-len")),
        (201, 1, 1, "prompt", ("201", "200", "max_num_batched_tokens", "encoded in one step")),
        (3, MAX_LEN, 1, "decoder_prompt", ("the decoder_prompt is too long", "224 tokens", "--max-model-len")),
        (3, 200, 25, "max_tokens", ("the decoder's beginning takes 200", "max_tokens is 25", "225", "224")),
    ],
)
def test_too_long(source: int, begin: int, max_tokens: int, param: str, parts: tuple[str, ...], models: Models) -> None:
    """Nothing is queued, and what fits runs."""
    model, _ = models(NAME)
    engine = make_engine(model.path, max_num_batched_tokens=200)
    assert engine.info.max_model_len == engine.info.max_encoder_len == MAX_LEN
    input = Seq2SeqInput([5] * source, [START, *[5] * (begin - 1)])
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("long", input, SamplingParams(max_tokens=max_tokens))
    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert not engine.has_unfinished_requests()
    shorter = Seq2SeqInput([5] * min(source, 200), [START, *[5] * (min(begin, 223) - 1)])
    (output,) = run(engine, [(shorter, SamplingParams(max_tokens=1))])
    assert len(output.outputs[0].token_ids) == 1
    engine.close()


@pytest.mark.parametrize(
    ("source", "begin", "param", "part"),
    [
        ([], None, "prompt", "empty"),
        ([131], None, "prompt", "0 to 130"),
        ([130], [97], "decoder_prompt", "0 to 96"),
        ("ab", None, "prompt", "list of token ids"),
        ([1], "ab", "decoder_prompt", "list of token ids"),
    ],
)
def test_inputs_are_checked(source: Any, begin: Any, param: str, part: str, models: Models) -> None:
    """Each side by its own vocabulary."""
    engine = models("marian-two-vocabularies")[1].engine
    with pytest.raises(InvalidRequestError, match=part) as caught:
        engine.add_request("bad", Seq2SeqInput(source, begin), SamplingParams())
    assert caught.value.param == param


def test_t5_has_no_last_position_but_a_usual_length(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    """n_positions of the config, which may be exceeded."""
    model, _ = models("t5")
    engine = make_engine(model.path)
    assert engine.info.max_model_len == 512
    engine.close()
    longer = make_engine(model.path, max_model_len=700, max_num_batched_tokens=1024)
    assert "trained with 512 tokens" in caplog.text
    case = Case(tuple(random_prompt(97, 3, 650)), (START,))
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS, **NO_PAIRS)
    (output,) = run(longer, [(Seq2SeqInput(case.source), params)])
    assert_equal(output.outputs, model.greedy(case))
    longer.close()
