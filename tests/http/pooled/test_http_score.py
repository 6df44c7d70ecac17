"""/v1/score against transformers' models: a cross-encoder's score is sigmoid of its one number, else it is a cosine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pooling_api import MODEL, PoolingApi
from support.text_encoders import MAX_LENGTH, TEXTS, make_text_encoder

QUERY, DOCUMENTS = TEXTS[0], TEXTS[1:]
LONG = " ".join(TEXTS)


def scores(body: dict[str, Any]) -> torch.Tensor:
    assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
    return torch.tensor([item["score"] for item in body["data"]])


# ---------------------------------------------------------------- cross-encoders


def test_one_text_with_many_in_vllms_shape(cross: PoolingApi) -> None:
    one = cross.checkpoint
    body = cross.ask("/v1/score", model=MODEL, text_1=QUERY, text_2=DOCUMENTS)
    assert set(body) == {"id", "object", "created", "model", "data", "usage"}
    assert body["id"].startswith("score-")
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert body["created"] > 1_700_000_000
    assert all(set(item) == {"index", "object", "score"} and item["object"] == "score" for item in body["data"])
    numbers = torch.stack([one.logits(QUERY, text)[0] for text in DOCUMENTS])
    torch.testing.assert_close(scores(body), 1 / (1 + torch.exp(-numbers)), rtol=1e-4, atol=1e-6)
    assert numbers.std() > 0.1
    tokens = sum(one.count(QUERY, text) for text in DOCUMENTS)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
    # The second text of a pair is a segment of its own, and the scores depend on it.
    alike = [one.tokenizer(QUERY, text, return_tensors="pt") for text in DOCUMENTS]
    without = torch.stack([one.model(input_ids=pair.input_ids).logits[0, 0].sigmoid() for pair in alike])
    assert (without - scores(body)).abs().max() > 0.01


def test_pair_by_pair(cross: PoolingApi) -> None:
    firsts = TEXTS[::-1]
    found = scores(cross.ask("/v1/score", text_1=firsts, text_2=TEXTS))
    expected = [cross.checkpoint.logits(a, b)[0].sigmoid() for a, b in zip(firsts, TEXTS, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-6)
    turned = scores(cross.ask("/v1/score", text_1=TEXTS, text_2=firsts))
    assert (turned - found).abs().max() > 0.01


@pytest.mark.parametrize("name", ["use_activation", "activation"])
def test_the_heads_own_numbers(cross: PoolingApi, name: str) -> None:
    found = scores(cross.ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS, **{name: False}))
    numbers = torch.stack([cross.checkpoint.logits(QUERY, text)[0] for text in DOCUMENTS])
    torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-5)
    assert found.min() < 0
    error = cross.refused("/v1/score", text_1="a", text_2="b", use_activation=True, activation=False)
    assert (error["param"], error["code"]) == ("activation", "invalid_value")


@pytest.mark.parametrize(
    "config",
    [
        {"problem_type": "regression"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0.0"}},
    ],
)
def test_a_config_that_wants_the_number_itself(config: dict[str, Any], tmp_path: Path) -> None:
    api = PoolingApi(make_text_encoder("cross", tmp_path, **config))
    found = scores(api.ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS))
    numbers = torch.stack([api.checkpoint.logits(QUERY, text)[0] for text in DOCUMENTS])
    torch.testing.assert_close(found, numbers, rtol=1e-4, atol=1e-5)


def test_alone_and_in_a_crowd(cross: PoolingApi) -> None:
    pairs, before = list(itertools.product(TEXTS, TEXTS)), cross.client.stats().num_steps
    firsts, seconds = [a for a, _ in pairs], [b for _, b in pairs]
    crowd = scores(cross.ask("/v1/score", text_1=firsts, text_2=seconds))
    steps = cross.client.stats().num_steps
    for place in range(0, len(pairs), 11):
        alone = scores(cross.ask("/v1/score", text_1=firsts[place], text_2=seconds[place]))
        torch.testing.assert_close(alone[0], crowd[place], rtol=1e-5, atol=1e-7)
    assert cross.client.stats().num_steps - steps == len(range(0, len(pairs), 11))
    assert steps - before < len(pairs)


# ---------------------------------------------------------------- cosines


def test_cosines_of_vectors(headless: PoolingApi) -> None:
    one = headless.checkpoint
    body = headless.ask("/v1/score", text_1=QUERY, text_2=[*DOCUMENTS, QUERY])
    vectors = [one.vector(text) for text in (*DOCUMENTS, QUERY)]
    expected = torch.stack([torch.cosine_similarity(vectors[-1], vector, dim=0) for vector in vectors])
    torch.testing.assert_close(scores(body), expected, rtol=1e-4, atol=1e-5)
    assert scores(body)[-1] == pytest.approx(1, abs=1e-6)
    assert scores(body)[:-1].max() < 0.999


def test_each_text_is_read_once(headless: PoolingApi) -> None:
    one = headless.checkpoint
    firsts, seconds = [QUERY, QUERY, "water", "water"], ["water", QUERY, "Snow!", "water"]
    body = headless.ask("/v1/score", text_1=firsts, text_2=seconds)
    assert [list(source.token_ids) for source in headless.client.sources()] == [
        one.tokenizer(text).input_ids for text in (QUERY, "water", "Snow!")
    ]
    assert body["usage"]["prompt_tokens"] == sum(one.count(text) for text in (QUERY, "water", "Snow!"))
    expected = [
        torch.cosine_similarity(one.vector(a), one.vector(b), dim=0) for a, b in zip(firsts, seconds, strict=True)
    ]
    torch.testing.assert_close(scores(body), torch.stack(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["masked", "decoder"])
def test_models_with_other_heads_give_cosines_too(kind: str, tmp_path: Path) -> None:
    api = PoolingApi(
        make_text_encoder(kind, tmp_path), **({"num_gpu_blocks_override": 64} if kind == "decoder" else {})
    )
    found = scores(api.ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS))
    vectors = []
    with torch.no_grad():
        for text in (QUERY, *DOCUMENTS):
            hidden = api.checkpoint.model.base_model(**api.checkpoint.tokenizer(text, return_tensors="pt"))
            states = hidden.last_hidden_state[0]
            vectors.append(states[-1] if kind == "decoder" else states.mean(0))
    expected = torch.stack([torch.cosine_similarity(vectors[0], vector, dim=0) for vector in vectors[1:]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.01


def test_the_models_default_prompt_stands_before_each_text(tmp_path: Path) -> None:
    checkpoint = make_text_encoder("headless", tmp_path)
    prompts = {"prompts": {"search": "find: "}, "default_prompt_name": "search", "similarity_fn_name": "cosine"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "include_prompt": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    api = PoolingApi(checkpoint)
    body = api.ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    skipped = checkpoint.count("find: ") - 1
    vectors = []
    for text in (QUERY, *DOCUMENTS):
        with torch.no_grad():
            hidden = checkpoint.model(**checkpoint.tokenizer(f"find: {text}", return_tensors="pt")).last_hidden_state[0]
        vectors.append(hidden[skipped:].mean(0))
    expected = torch.stack([torch.cosine_similarity(vectors[0], vector, dim=0) for vector in vectors[1:]])
    torch.testing.assert_close(scores(body), expected, rtol=1e-4, atol=1e-5)
    plain = [torch.cosine_similarity(checkpoint.vector(QUERY), checkpoint.vector(text), dim=0) for text in DOCUMENTS]
    assert (torch.stack(plain) - expected).abs().max() > 0.01


# ---------------------------------------------------------------- bodies


def test_the_other_names_and_paths(cross: PoolingApi) -> None:
    first = scores(cross.ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS)).tolist()
    for one, other in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        assert scores(cross.ask("/score", **{one: QUERY, other: DOCUMENTS})).tolist() == first


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text_1", "text_1 and text_2"),
        ({"text_1": "a"}, "text_2", "got text_1"),
        ({"text_2": "a"}, "text_1", "got text_2"),
        ({"text_1": "a", "text_2": None}, "text_2", "got text_1"),
        ({"text_1": "a", "documents": "a"}, "text_2", "documents, text_1"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "text_1", "nothing else"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "text_1 has 2 texts and text_2 3"),
        ({"queries": ["a", "b"], "items": "c"}, "queries", "queries has 2 texts and items 1"),
        ({"text_1": [], "text_2": "a"}, "text_1", "non-empty"),
        ({"text_1": "a", "text_2": []}, "text_2", "non-empty"),
        ({"text_1": "", "text_2": "a"}, "text_1", "must not be empty"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2", "item 1"),
        ({"text_1": 7, "text_2": "a"}, "text_1", "a string or a non-empty list of strings"),
        ({"text_1": "a", "text_2": [7]}, "text_2", "a string or a non-empty list of strings"),
        ({"text_1": "a", "text_2": ["b"] * 2049}, "text_2", "2048"),
        ({"text_1": "a", "text_2": "b", "use_activation": 1}, "use_activation", "boolean"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "48"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 49}, "truncate_prompt_tokens", "48"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "3"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": "9"}, "truncate_prompt_tokens", "integer"),
        ({"text_1": "a", "text_2": "b", "chat_template": "x"}, "chat_template", "not supported"),
    ],
)
def test_what_is_wrong_is_400_and_names_the_field(
    cross: PoolingApi, body: dict[str, Any], param: str, words: str
) -> None:
    error = cross.refused("/v1/score", **body)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "missing_required_parameter"),
        ({"text_1": "a"}, "missing_required_parameter"),
        ({"documents": "a"}, "missing_required_parameter"),
        ({"text_1": "a", "documents": "a"}, "invalid_value"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "invalid_value"),
    ],
)
def test_a_side_that_is_missing_is_told_from_one_too_many(cross: PoolingApi, body: dict[str, Any], code: str) -> None:
    assert cross.refused("/v1/score", **body)["code"] == code


def test_too_long_pairs_are_refused_with_the_limit_or_cut(cross: PoolingApi) -> None:
    one = cross.checkpoint
    error = cross.refused("/v1/score", text_1=QUERY, text_2=["water", LONG])
    assert (error["param"], error["code"]) == ("text_2", "context_length_exceeded")
    assert error["message"].startswith("the pair with text_2[1] is too long: ")
    assert f"{one.count(QUERY, LONG)} tokens" in error["message"]
    assert f"at most {MAX_LENGTH} (max_model_len)" in error["message"]
    first = cross.refused("/v1/score", text_1=LONG, text_2="water")  # the second text is not what is too long
    assert first["message"].startswith("the pair with text_2 is too long: ")
    for asked, length in ((-1, MAX_LENGTH), (48, 48), (20, 20), (3, 3)):
        body = cross.ask("/v1/score", text_1=LONG, text_2=[QUERY, LONG], truncate_prompt_tokens=asked)
        expected = [
            one.logits(LONG, text, truncation="longest_first", max_length=length)[0].sigmoid() for text in (QUERY, LONG)
        ]
        torch.testing.assert_close(scores(body), torch.stack(expected), rtol=1e-4, atol=1e-6)
        assert body["usage"]["prompt_tokens"] == 2 * length


def test_metrics(cross: PoolingApi) -> None:
    done = 'octavo_request_success_total{finished_reason="stop"}'
    before = cross.metric(done), cross.client.stats().prompt_tokens
    usage = cross.ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS)["usage"]
    assert cross.metric(done) - before[0] == len(DOCUMENTS)
    assert cross.client.stats().prompt_tokens - before[1] == usage["prompt_tokens"]
