"""What is refused at the border, and that the refusal names the field, the limit and the value."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config import EngineConfig, parse_bytes
from engine.errors import ConfigError, InvalidRequestError, ModelLoadError, OctavoError
from engine.interface.dry import Breakers, Dry
from engine.interface.generation import GenerationDefaults, load_defaults, plain_defaults, resolve
from engine.interface.request import (
    MAX_INT,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    Decoding,
    PoolingParams,
    Request,
    SamplingParams,
)
from engine.interface.sampling_table import FILTERS, Column

BAD_SAMPLING: list[tuple[str, Any, tuple[str, ...]]] = [
    ("max_tokens", 0, ("at least 1", "0")),
    ("max_tokens", -5, ("at least 1", "-5")),
    ("max_tokens", 2.0, ("an integer", "2.0")),
    ("max_tokens", "7", ("an integer", "'7'")),
    ("max_tokens", True, ("an integer", "True")),
    ("max_tokens", 2**31, (str(MAX_INT), str(2**31))),
    ("min_tokens", -1, ("at least 0", "-1")),
    ("temperature", -0.1, ("at least 0", "-0.1")),
    ("temperature", math.nan, ("finite", "nan")),
    ("temperature", math.inf, ("finite", "inf")),
    ("temperature", "hot", ("a number", "'hot'")),
    ("temperature", 10**400, ("finite", "1000")),
    ("top_k", -2, ("at least -1", "-2")),
    ("top_k", 1.5, ("an integer", "1.5")),
    ("top_k", 10**400, (str(MAX_INT), "1000")),
    ("top_p", 0.0, ("greater than 0", "at most 1", "0.0")),
    ("top_p", 1.01, ("at most 1", "1.01")),
    ("min_p", -0.01, ("at least 0", "-0.01")),
    ("min_p", 1.5, ("at most 1", "1.5")),
    ("typical_p", 1.5, ("at most 1", "1.5")),
    ("xtc_probability", 1.01, ("at most 1", "1.01")),
    ("xtc_threshold", -0.1, ("at least 0", "-0.1")),
    ("seed", -(2**63) - 1, (str(-(2**63)), str(-(2**63) - 1))),
    ("seed", MAX_SEED + 1, (str(MAX_SEED), str(MAX_SEED + 1))),
    ("seed", 10**400, (str(MAX_SEED), "1000")),
    ("n", 0, ("at least 1", "0")),
    ("n", None, ("an integer", "None")),
    ("repetition_penalty", 0.0, ("greater than 0", "0.0")),
    ("repetition_penalty", -1.0, ("greater than 0", "-1.0")),
    ("presence_penalty", 2.1, ("at most 2", "2.1")),
    ("presence_penalty", -2.1, ("at least -2", "-2.1")),
    ("presence_penalty", None, ("a number", "None")),
    ("frequency_penalty", 3, ("at most 2", "3")),
    ("frequency_penalty", -3, ("at least -2", "-3")),
    ("frequency_penalty", None, ("a number", "None")),
    ("dry_multiplier", -0.1, ("at least 0", "-0.1")),
    ("dry_base", 0.9, ("at least 1", "0.9")),
    ("dry_allowed_length", 1.5, ("an integer", "1.5")),
    ("dry_penalty_last_n", -2, ("at least -1", "-2")),
    ("dry_sequence_breakers", "\n", ("a list", "'\\n'")),
    ("dry_sequence_breakers", ["a", ""], ("non-empty", "''")),
    ("dry_sequence_breakers", ["a"] * 33, ("32", "33")),
    ("dry_sequence_breakers", ["\ud800"], ("Unicode", "ud800")),
    ("dry_sequence_breakers", ["a" * 65], ("64", "65")),
    ("logit_bias", {3: 101.0}, ("at most 100", "101.0")),
    ("logit_bias", {3: -101.0}, ("at least -100", "-101.0")),
    ("logit_bias", {3: None}, ("a number", "None")),
    ("logit_bias", {"3": 1.0}, ("token ids", "'3'")),
    ("logit_bias", {-1: 1.0}, ("at least 0", "-1")),
    ("logit_bias", {True: 1.0}, ("token ids", "True")),
    ("logit_bias", [(3, 1.0)], ("map", "(3, 1.0)")),
    ("stop", "", ("non-empty", "''")),
    ("stop", ["a", ""], ("non-empty", "''")),
    ("stop", ["a", 5], ("strings", "5")),
    ("stop", 5, ("a string or a list", "5")),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1), (str(MAX_STOP_STRINGS), str(MAX_STOP_STRINGS + 1))),
    ("stop", "x" * (MAX_STOP_LENGTH + 1), (str(MAX_STOP_LENGTH), str(MAX_STOP_LENGTH + 1))),
    ("stop_token_ids", [1, -2], ("at least 0", "-2")),
    ("stop_token_ids", [True], ("token ids", "True")),
    ("stop_token_ids", 5, ("a list", "5")),
    ("stop_token_ids", "12", ("a list", "'12'")),
    ("suppress_tokens", [0.5], ("token ids", "0.5")),
    ("begin_suppress_tokens", [-7], ("at least 0", "-7")),
    ("logprob_token_ids", [-1], ("at least 0", "-1")),
    ("logprob_token_ids", [1] * 129, ("at most 128", "129")),
    ("allowed_token_ids", [], ("at least one",)),
    ("allowed_token_ids", [-1], ("at least 0", "-1")),
    ("allowed_token_ids", 5, ("a list", "5")),
    ("predicted_token_ids", [-1], ("at least 0", "-1")),
    ("bad_words_ids", [5], ("a list", "5")),
    ("bad_words_ids", "12", ("a list", "'12'")),
    ("bad_words_ids", [[1], []], ("at least one", "[]")),
    ("bad_words_ids", [[1], None], ("at least one", "None")),
    ("bad_words_ids", [[1, -2]], ("at least 0", "-2")),
    ("bad_words_ids", [[1, 2]] * 513, ("1024", "1026")),
    ("bad_words", "a", ("a list", "'a'")),
    ("bad_words", [""], ("non-empty", "''")),
    ("bad_words", ["a"] * 1025, ("1024", "1025")),
    ("truncate_prompt_tokens", -2, ("at least -1", "-2")),
    ("truncate_prompt_tokens", 0, ("at least 1", "0")),
    ("detokenize", 0, ("true or false", "0")),
    ("encoder_repetition_penalty", 0, ("greater than 0", "0")),
    ("encoder_no_repeat_ngram_size", -1, ("at least 0", "-1")),
    ("renormalize_logits", 1, ("true or false", "1")),
    ("ignore_eos", "false", ("true or false", "'false'")),
    ("include_stop_str_in_output", 1, ("true or false", "1")),
    ("skip_special_tokens", None, ("true or false", "None")),
    ("spaces_between_special_tokens", 0, ("true or false", "0")),
    ("stream_beams", 1, ("true or false", "1")),
    ("timestamps", "word", ("true or false", "'word'")),
    ("structured_outputs", {"json": {}}, ("StructuredOutputsParams", "{'json': {}}")),
    ("constraint", {"catalogue": 7}, ('{"catalogue": NAME}', "7")),
    ("reasoning_budget", 7, ("must be ReasoningBudget", "7")),
    ("logprobs", -1, ("at least 0", "-1")),
    ("logprobs", MAX_LOGPROBS + 1, (f"at most {MAX_LOGPROBS}", str(MAX_LOGPROBS + 1))),
    ("logprobs", True, ("an integer", "True")),
    ("prompt_logprobs", MAX_LOGPROBS + 1, (f"at most {MAX_LOGPROBS}", str(MAX_LOGPROBS + 1))),
    ("num_beams", 0, ("at least 1", "0")),
    ("length_penalty", math.inf, ("finite", "inf")),
    ("length_penalty", "long", ("a number", "'long'")),
    ("early_stopping", "always", ("never", "'always'")),
    ("early_stopping", 1, ("never", "1")),
    ("no_repeat_ngram_size", -1, ("at least 0", "-1")),
    ("min_length", -1, ("at least 0", "-1")),
    ("decoder_start_token_id", -1, ("at least 0", "-1")),
    ("forced_bos_token_id", -1, ("at least 0", "-1")),
    ("forced_eos_token_id", 1.0, ("an integer", "1.0")),
]
BAD_SAMPLING += [  # those that are declared later, too
    (column.name, column.allowed.low - 1, ("greater than" if column.allowed.open_low else "at least",))
    for column in FILTERS
    if column.allowed is not None and column.allowed.low is not None
]


@pytest.mark.parametrize(("field", "value", "parts"), BAD_SAMPLING, ids=lambda v: str(v)[:30])
def test_bad_sampling_params(field: str, value: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.code == "invalid_value"
    message = str(caught.value)
    for part in (field, *parts):
        assert part in message, message


def test_every_field_has_a_bad_value_above() -> None:
    assert {field for field, _, _ in BAD_SAMPLING} == {field.name for field in dataclasses.fields(SamplingParams)}


GOOD_SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 5.0},
    {"top_k": -1},
    {"top_k": MAX_INT},
    {"top_p": 1},
    {"min_p": 0},
    {"min_p": 1.0},
    {"dry_multiplier": 0, "dry_base": 1, "dry_allowed_length": 0, "dry_penalty_last_n": -1},
    {"dry_sequence_breakers": ["a" * 64] * 32},
    {"dry_sequence_breakers": []},
    {"top_n_sigma": -1, "typical_p": 1, "xtc_probability": 1, "xtc_threshold": 0},
    {"seed": -(2**63)},
    {"seed": MAX_SEED},
    {"presence_penalty": -2, "frequency_penalty": 2.0},
    {"logit_bias": {0: -100, 5: 100}},
    {"logit_bias": {}},
    {"stop": []},
    {"stop": ["a"] * MAX_STOP_STRINGS},
    {"stop": "x" * MAX_STOP_LENGTH},
    {"stop_token_ids": ()},
    {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
    {"min_tokens": 5, "max_tokens": 5},
    {"num_beams": 4, "n": 4, "early_stopping": "never", "length_penalty": -3.5},
    {"num_beams": 4, "stop": []},
    {"num_beams": 1, "stop": "x", "n": 3},
    {"spaces_between_special_tokens": False},
]


@pytest.mark.parametrize("fields", GOOD_SAMPLING, ids=lambda v: str(v)[:30])
def test_values_at_the_limits_are_fine(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


@pytest.mark.parametrize(
    ("fields", "param", "parts"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ("min_tokens (9)", "max_tokens (8)")),
        ({"num_beams": 2, "n": 3}, "n", ("n (3)", "num_beams (2)")),
        ({"num_beams": 2, "stop": "x"}, "stop", ("num_beams is 2", "stop_token_ids")),
        (
            {"spaces_between_special_tokens": False, "skip_special_tokens": False},
            "spaces_between_special_tokens",
            ("must be true", "skip_special_tokens"),
        ),
    ],
)
def test_values_that_contradict_each_other(fields: dict[str, Any], param: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    assert all(part in str(caught.value) for part in parts)


def test_parameters_are_frozen_and_have_no_positions() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Request(request_id="r", prompt_token_ids=(1,), decoding=Decoding(max_tokens=1)).priority = 3  # type: ignore[misc]


def test_stop_strings_are_a_tuple() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pooling": "first"}, r"pooling must be one of mean, cls, last.*'first'"),
        ({"task": "generate"}, r"task must be one of embed, .*'generate'"),
        ({"normalize": "yes"}, r"normalize must be true or false, got 'yes'"),
        ({"use_activation": 1.5}, r"use_activation must be true or false, got 1.5"),
        ({"dimensions": 0}, r"dimensions must be at least 1"),
        ({"dimensions": True}, r"dimensions must be an integer, got True"),
        ({"task": "fill_mask"}, r"fill_mask needs the positions"),
        ({"task": "fill_mask", "positions": 1}, r"positions must be a list of integers, got 1"),
        ({"task": "fill_mask", "positions": "0"}, r"positions must be a list of integers, got '0'"),
        ({"task": "fill_mask", "positions": [0, -1]}, r"positions must hold integers of at least 0, got -1"),
        ({"task": "fill_mask", "positions": [True]}, r"positions must hold integers of at least 0, got True"),
        (
            {"task": "fill_mask", "positions": [0], "top_k": 1001},
            r"top_k must be at least 1 and at most 1000, got 1001",
        ),
        ({"skip_tokens": -1}, r"skip_tokens must be at least 0"),
    ],
)
def test_bad_pooling_params(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        PoolingParams(**wrong)


def test_errors_are_of_one_family() -> None:
    for kind in (InvalidRequestError, ConfigError):
        assert issubclass(kind, OctavoError)
        assert issubclass(kind, ValueError)


# ------------------------------------------------------------------ EngineConfig

BAD_CONFIG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"model": ""}, ("model",)),
    ({"max_num_seqs": 0}, ("max_num_seqs", "at least 1", "0")),
    ({"max_num_seqs": 2.5}, ("max_num_seqs", "integer", "2.5")),
    ({"max_num_batched_tokens": -1}, ("max_num_batched_tokens", "at least 1", "-1")),
    ({"block_size": 0}, ("block_size", "at least 1", "0")),
    ({"block_size": True}, ("block_size", "True")),
    ({"max_num_beams": 0}, ("max_num_beams", "at least 1", "0")),
    ({"max_model_len": 0}, ("max_model_len", "at least 1", "0")),
    ({"num_gpu_blocks_override": 0}, ("num_gpu_blocks_override", "at least 1", "0")),
    (
        {"max_num_seqs": 65, "max_num_batched_tokens": 64},
        ("max_num_batched_tokens (64)", "max_num_seqs (65)", "--max-num-seqs"),
    ),
    ({"gpu_memory_utilization": 0.0}, ("gpu_memory_utilization", "(0, 1]", "0.0")),
    ({"gpu_memory_utilization": 1.1}, ("gpu_memory_utilization", "(0, 1]", "1.1")),
    ({"gpu_memory_utilization": math.nan}, ("gpu_memory_utilization", "nan")),
    ({"dtype": "int8"}, ("dtype", "bfloat16", "'int8'")),
    ({"quantization": "awq"}, ("quantization", "int4", "'awq'")),
    ({"kv_cache_dtype": "fp4"}, ("kv_cache_dtype", "int8 or fp8", "'fp4'")),
    ({"device": "tpu"}, ("device", "cuda:N", "'tpu'")),
    ({"device": "cuda:x"}, ("device", "'cuda:x'")),
    ({"generation_config": "vllm"}, ("generation_config", "none", "'vllm'")),
    ({"kv_cache_memory": "much"}, ("kv_cache_memory", "4GiB", "'much'")),
    ({"kv_cache_memory": 0}, ("kv_cache_memory", "above 0", "0")),
]


@pytest.mark.parametrize(("fields", "parts"), BAD_CONFIG, ids=lambda v: str(v)[:40])
def test_bad_engine_config(fields: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", **fields})
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3"])
def test_devices(device: str) -> None:
    assert EngineConfig(model="m", device=device).device == device


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 * 2**30),
        ("4gi", 4 * 2**30),
        ("512MiB", 512 * 2**20),
        ("2g", 2 * 10**9),
        ("2GB", 2 * 10**9),
        (" 1.5 KiB ", 1536),
        ("1ti", 2**40),
        ("100b", 100),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 4", "-1", "1e9", "4XB", "1.G", "i", "4i", None, True, 1.5j, -1, 0, "0", "0.1"]
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, "kv_cache_memory")
    assert "kv_cache_memory" in str(caught.value)
    assert repr(text) in str(caught.value)


# ------------------------------------------------------------------ resolve

LIMITS: dict[str, Any] = {"prompt_len": 10, "max_model_len": 30, "vocab_size": 100, "random_seed": 77}


def completed(
    params: SamplingParams, values: dict[str, Any] | None = None, eos: tuple[int, ...] = (2,), **limits: Any
) -> Decoding:
    return resolve(params, GenerationDefaults(values=values or {}, eos_ids=frozenset(eos)), **{**LIMITS, **limits})


def test_without_any_default() -> None:
    assert completed(SamplingParams()) == Decoding(
        max_tokens=16, seed=77, stop_ids=frozenset({2}), eos_ids=frozenset({2})
    )


def test_the_model_s_defaults_apply_and_the_request_overrides_them() -> None:
    values = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "length_penalty": 2.0,
        "early_stopping": True,
        "no_repeat_ngram_size": 3,
        "min_length": 12,
        "suppress_tokens": [5, 6],
        "begin_suppress_tokens": [7],
        "forced_bos_token_id": 8,
        "forced_eos_token_id": [9, 2],
        "bad_words_ids": [[2], [9], [2, 9]],
        "encoder_repetition_penalty": 1.3,
        "encoder_no_repeat_ngram_size": 4,
        "renormalize_logits": True,
        "min_new_tokens": 4,
    }
    own = completed(SamplingParams(), values)
    listed = {"suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "min_length", "min_new_tokens"}
    listed |= {"bad_words_ids", "renormalize_logits"}
    for name in values.keys() - listed:
        assert getattr(own, name) == values[name], name
    assert own.min_length == 0, "as in transformers, min_new_tokens replaces min_length"
    assert completed(SamplingParams(), {"min_length": 12}).min_length == 12
    assert own.suppress_tokens == (5, 6)
    assert own.begin_suppress_tokens == (7,)
    assert own.forced_eos_token_ids == (2, 9)
    assert own.bad_words == ((9,), (2, 9)), "a word that is EOS alone is left out"
    assert own.renormalize
    assert completed(SamplingParams(ignore_eos=True), values).bad_words == ((2,), (9,), (2, 9))
    assert own.min_tokens == 4
    asked: dict[str, Any] = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "length_penalty": 0.0,
        "early_stopping": False,
        "no_repeat_ngram_size": 0,
        "min_length": 0,
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
        "forced_bos_token_id": 1,
        "forced_eos_token_id": 3,
        "bad_words_ids": [],
        "encoder_repetition_penalty": 1.0,
        "encoder_no_repeat_ngram_size": 0,
        "renormalize_logits": False,
        "min_tokens": 0,
        "seed": 5,
    }
    given = completed(SamplingParams(**asked), values)
    for name in asked.keys() - listed - {"min_tokens"}:
        assert getattr(given, name) == asked[name], name
    assert given.suppress_tokens == given.begin_suppress_tokens == given.bad_words == ()
    assert not given.renormalize
    assert given.min_length == given.min_tokens == 0
    assert given.forced_eos_token_ids == (3,)


def test_a_model_that_does_not_sample_is_greedy_unless_asked() -> None:
    values = {"do_sample": False, "temperature": 0.7}
    assert completed(SamplingParams(), values).temperature == 0.0
    assert completed(SamplingParams(temperature=0.9), values).temperature == 0.9


@pytest.mark.parametrize("nothing", [-1, 0])
def test_what_is_off_at_zero_and_below(nothing: int) -> None:
    assert completed(SamplingParams(top_k=nothing), {"top_k": 50}).top_k == 0
    assert completed(SamplingParams(top_n_sigma=nothing)).top_n_sigma == 0.0


def test_dry_is_off_where_it_takes_nothing() -> None:
    for off in ({}, {"dry_multiplier": 0.0, "dry_base": 2}, {"dry_multiplier": 1, "dry_penalty_last_n": 0}):
        params = SamplingParams(**off)
        assert not params.uses_dry
        assert completed(params).dry is None
    params = SamplingParams(dry_multiplier=0.8)
    assert params.uses_dry
    assert completed(params, breakers=Breakers({3: ((),)})).dry == Dry(
        multiplier=0.8, base=1.75, allowed_length=2, last_n=-1, breakers=Breakers({3: ((),)})
    )
    params = SamplingParams(dry_multiplier=1, dry_base=1, dry_allowed_length=0, dry_penalty_last_n=9)
    assert completed(params).dry == Dry(multiplier=1.0, base=1.0, allowed_length=0, last_n=9)


class TestMaxTokens:
    def test_default_and_room(self) -> None:
        assert completed(SamplingParams()).max_tokens == 16
        assert completed(SamplingParams(), prompt_len=25).max_tokens == 5
        assert completed(SamplingParams(min_tokens=18)).max_tokens == 18
        assert completed(SamplingParams(max_tokens=20)).max_tokens == 20

    def test_the_model_s_own(self) -> None:
        assert completed(SamplingParams(), {"max_new_tokens": 7}).max_tokens == 7
        assert completed(SamplingParams(), {"max_length": 22}).max_tokens == 12
        assert completed(SamplingParams(), {"max_length": 8}).max_tokens == 16
        assert completed(SamplingParams(), {"max_new_tokens": 700}).max_tokens == 20
        assert completed(SamplingParams(max_tokens=3), {"max_new_tokens": 7}).max_tokens == 3
        assert completed(SamplingParams(max_tokens=3), {"min_new_tokens": 7}).min_tokens == 3

    def test_a_prompt_that_fills_the_context(self) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            completed(SamplingParams(), prompt_len=30)
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        assert all(part in str(caught.value) for part in ("30 tokens", "(max_model_len)", "--max-model-len"))

    def test_an_answer_that_does_not_fit(self) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            completed(SamplingParams(max_tokens=21))
        assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
        assert all(
            part in str(caught.value) for part in ("10 tokens", "max_tokens is 21", "31", "30", "--max-model-len")
        )

    def test_min_tokens_above_what_there_is_room_for(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"min_tokens \(21\) must not exceed max_tokens \(20\)") as caught:
            completed(SamplingParams(min_tokens=21))
        assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {100: 1.0}),
        ("stop_token_ids", [3, 100]),
        ("suppress_tokens", [100]),
        ("begin_suppress_tokens", [100]),
        ("bad_words_ids", [[3], [5, 100]]),
        ("forced_bos_token_id", 100),
        ("forced_eos_token_id", 100),
    ],
)
def test_ids_outside_the_vocabulary(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completed(SamplingParams(**{field: value}))
    assert caught.value.param == field
    assert all(part in str(caught.value) for part in (field, "100", "0 to 99"))


def test_what_a_request_that_says_nothing_decodes_with() -> None:
    """As it is resolved; the length only where it depends on nothing else."""
    values = {"temperature": 0.6, "do_sample": True, "num_beams": 3, "max_length": 9, "suppress_tokens": [1]}
    plain = plain_defaults(GenerationDefaults(values=values))
    asked = resolve(
        SamplingParams(), GenerationDefaults(values=values), prompt_len=2, max_model_len=64, vocab_size=9, random_seed=1
    )
    shared = plain.keys() & {item.name for item in dataclasses.fields(asked)}
    assert {"temperature", "top_p", "num_beams", "length_penalty"} <= shared
    assert {name: plain[name] for name in shared} == {name: getattr(asked, name) for name in shared}
    assert (plain["skip_special_tokens"], plain["ignore_eos"], plain["num_beams"]) == (True, False, 3)
    assert not plain.keys() & {"max_tokens", "seed", "suppress_tokens", "stop"}
    greedy = plain_defaults(GenerationDefaults(values={"do_sample": False, "max_new_tokens": 7}))
    assert (greedy["temperature"], greedy["max_tokens"]) == (0.0, 7)
    assert plain_defaults(GenerationDefaults(values={"min_new_tokens": 9, "max_new_tokens": 7}))["min_tokens"] == 7


def test_the_model_s_own_ids_outside_the_vocabulary_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would index past the logits and fail whole steps."""
    stored(
        tmp_path,
        '{"eos_token_id": [7, 999, -1], "suppress_tokens": [-1, 5, 100], "begin_suppress_tokens": [-1], '
        '"forced_bos_token_id": 400, "forced_eos_token_id": [3, 100], "bad_words_ids": [[1, 2], [5, 300], [6]]}',
    )
    with caplog.at_level(logging.WARNING, "octavo.generation"):
        defaults = load_defaults(tmp_path, NO_CONFIG, 100)
    assert defaults.eos_ids == {7}
    assert defaults.values == {
        "suppress_tokens": [5],
        "forced_eos_token_id": [3],
        "bad_words_ids": [[1, 2], [6]],
    }
    assert "[999]" in caplog.text
    assert "[400]" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("top_k", "x"), ("top_p", 0), ("top_p", 2), ("repetition_penalty", 0),
        ("early_stopping", "maybe"), ("max_new_tokens", 0), ("num_beams", 0), ("suppress_tokens", ["a"]),
        ("forced_bos_token_id", "b"), ("max_length", -5), ("do_sample", 3), ("bad_words_ids", [3]),
        ("bad_words_ids", [[]]), ("bad_words_ids", "x"), ("encoder_repetition_penalty", 0), ("renormalize_logits", 2),
    ],
)  # fmt: skip
def test_impossible_values_of_the_model_are_refused_at_load(tmp_path: Path, name: str, value: Any) -> None:
    stored(tmp_path, json.dumps({name: value}))
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json sets {name} to"):
        load_defaults(tmp_path, NO_CONFIG, 100)
    assert load_defaults(tmp_path, NO_CONFIG, 100, honour=False).values == {}


class TestStops:
    def test_eos_and_stop_ids_together(self) -> None:
        decoding = completed(SamplingParams(stop_token_ids=[4]), eos=(2, 3))
        assert decoding.stop_ids == {2, 3, 4}
        assert decoding.eos_ids == {2, 3}

    def test_ignore_eos(self) -> None:
        decoding = completed(SamplingParams(stop_token_ids=[4], ignore_eos=True, min_length=20), eos=(2, 3))
        assert decoding.stop_ids == {4}
        assert decoding.min_length == 0, "what min_length would ban does not end anything"


class TestBeams:
    def test_default_number(self) -> None:
        assert completed(SamplingParams(), {"num_beams": 4}).num_beams == 4
        assert completed(SamplingParams(n=6), {"num_beams": 4}).num_beams == 6
        assert completed(SamplingParams(num_beams=1), {"num_beams": 4}).num_beams == 1
        assert completed(SamplingParams(num_beams=3)).num_beams == 3

    @pytest.mark.parametrize(
        "asked",
        [{"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}, {"typical_p": 0.5}, {"stop": "x"}],
        ids=str,
    )
    def test_asking_for_what_beams_cannot_do_turns_default_beams_off(self, asked: dict[str, Any]) -> None:
        assert completed(SamplingParams(**asked), {"num_beams": 4}).num_beams == 1

    @pytest.mark.parametrize("column", FILTERS, ids=lambda column: column.name)
    def test_a_filter_that_does_nothing_leaves_them_on(self, column: Column) -> None:
        assert column.nothing
        for value in column.nothing:
            assert completed(SamplingParams(**{column.name: value}), {"num_beams": 4}).num_beams == 4
        assert completed(SamplingParams(xtc_threshold=0.3), {"num_beams": 4}).num_beams == 4

    @pytest.mark.parametrize(("n", "beams", "width"), [(1, 1, 1), (3, 1, 3), (2, 4, 4)])
    def test_width(self, n: int, beams: int, width: int) -> None:
        assert completed(SamplingParams(n=n, num_beams=beams)).width == width


# ------------------------------------------------------------------ generation_config.json


def stored(path: Path, text: str, name: str = "generation_config.json") -> Path:
    (path / name).write_text(text, encoding="utf-8")
    return path


NO_CONFIG = SimpleNamespace(eos_token_id=None)


def test_defaults_are_read(tmp_path: Path) -> None:
    stored(tmp_path, '{"eos_token_id": [2, 3], "temperature": 0.5, "top_p": null, "transformers_version": "5"}')
    defaults = load_defaults(tmp_path, SimpleNamespace(eos_token_id=9), 1000)
    assert defaults.values == {"temperature": 0.5}
    assert defaults.eos_ids == {2, 3}
    assert defaults.ignored == ()
    ignored = load_defaults(tmp_path, SimpleNamespace(eos_token_id=9), 1000, honour=False)
    assert (ignored.values, ignored.eos_ids) == ({}, {2, 3})


def test_without_the_file_the_config_is_asked(tmp_path: Path) -> None:
    stored(tmp_path, '{"num_beams": 3, "hidden_size": 5}', "config.json")
    defaults = load_defaults(tmp_path, SimpleNamespace(eos_token_id=9), 1000)
    assert defaults.values == {"num_beams": 3}
    assert defaults.eos_ids == {9}


def test_fields_that_would_change_the_answer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(
        tmp_path,
        '{"typical_p": 0.9, "epsilon_cutoff": 0.0, "eta_cutoff": 0.5, "diversity_penalty": 0.5, "guidance_scale": 1.0, '
        '"do_sample": true, "num_beams": 4}',
    )
    with caplog.at_level(logging.WARNING, "octavo.generation"):
        defaults = load_defaults(tmp_path, NO_CONFIG, 1000)
    assert set(defaults.ignored) == {"eta_cutoff", "diversity_penalty", "do_sample with num_beams"}
    assert defaults.values["typical_p"] == 0.9
    assert "eta_cutoff=0.5" in caplog.text
    assert "epsilon_cutoff" not in caplog.text


def test_defaults_that_change_nothing_warn_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored(tmp_path, '{"typical_p": 1.0, "num_beam_groups": 1, "bad_words_ids": [], "renormalize_logits": false}')
    with caplog.at_level(logging.WARNING, "octavo.generation"):
        assert load_defaults(tmp_path, NO_CONFIG, 1000).ignored == ()
    assert not caplog.records


@pytest.mark.parametrize("text", ["[1]", "{", '"x"'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        load_defaults(stored(tmp_path, text), NO_CONFIG, 1000)
