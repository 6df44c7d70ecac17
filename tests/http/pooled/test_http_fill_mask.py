"""/v1/fill-mask against transformers' fill-mask pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from support.pooling_api import MODEL, PoolingApi
from support.text_encoders import MAX_LENGTH, TEXTS

ONE = ["the [MASK] poet sings of the sea", "[MASK]", "caf\u00e9 by the [MASK], \U0001f642 naive!"]
SEVERAL = "we [MASK] down the [MASK] road [MASK]."


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The pipeline's tokens for one mask."""
    assert len(found) == len(expected)
    for item, other in zip(found, expected, strict=True):
        assert {**item, "score": 0} == {**other, "score": 0}
        assert item["score"] == pytest.approx(other["score"], rel=1e-4)


def test_the_values_are_the_pipelines(masked: PoolingApi) -> None:
    body = masked.ask("/v1/fill-mask", model=MODEL, input=ONE)
    assert set(body) == {"id", "object", "created", "model", "data", "usage"}
    assert (body["object"], body["model"]) == ("list", MODEL)
    reference = masked.checkpoint.pipeline("fill-mask")
    for index, (item, text) in enumerate(zip(body["data"], ONE, strict=True)):
        assert item["index"] == index
        (mask,) = item["masks"]
        assert set(mask[0]) == {"token", "token_str", "score", "sequence"}
        close(mask, reference(text))
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(map(masked.checkpoint.count, ONE))
    assert len({item["masks"][0][0]["token"] for item in body["data"]}) > 1
    assert masked.ask("/fill-mask", input=ONE)["data"] == body["data"]


@pytest.mark.parametrize("top_k", [1, 7, 164, 1000])
def test_several_masks(masked: PoolingApi, top_k: int) -> None:
    (item,) = masked.ask("/v1/fill-mask", input=SEVERAL, top_k=top_k)["data"]
    expected = masked.checkpoint.pipeline("fill-mask", top_k=min(top_k, 164))(SEVERAL)
    assert len(item["masks"]) == len(expected) == 3
    for found, row in zip(item["masks"], expected, strict=True):
        close(found, row)
    assert all("[MASK]" in found["sequence"] for row in item["masks"] for found in row)


def test_token_ids(masked: PoolingApi) -> None:
    ids = [masked.checkpoint.tokenizer(text).input_ids for text in [*ONE, SEVERAL]]
    assert masked.ask("/v1/fill-mask", input=ids)["data"] == masked.ask("/v1/fill-mask", input=[*ONE, SEVERAL])["data"]
    assert masked.ask("/v1/fill-mask", input=ids[0])["data"][0]["masks"]
    assert (
        masked.ask("/v1/fill-mask", input=[ids[0], *ONE[1:], SEVERAL])["data"]
        == masked.ask("/v1/fill-mask", input=ids)["data"]
    )


@pytest.mark.parametrize(
    ("body", "param", "code", "words"),
    [
        ({}, "input", "missing_required_parameter", "required"),
        ({"input": ""}, "input", "invalid_value", "must not be empty"),
        ({"input": []}, "input", "invalid_type", "none empty"),
        ({"input": {"word": "[MASK]"}}, "input", "invalid_type", "must be a string"),
        ({"input": {"image": "[MASK]"}}, "input", "unsupported_input", "does not read images"),
        ({"input": "no mask"}, "input", "no_mask_token", "[MASK]"),
        ({"input": "the <mask> poet"}, "input", "no_mask_token", "[MASK]"),
        ({"input": ["a [MASK]", "none"]}, "input", "no_mask_token", "input[1]"),
        ({"input": [5, 6]}, "input", "no_mask_token", "token id 4"),
        ({"input": [4, 164]}, "input", "invalid_value", "from 0 to 163"),
        ({"input": "[MASK]", "top_k": 0}, "top_k", "invalid_type", "greater than or equal to 1"),
        ({"input": "[MASK]", "top_k": 1001}, "top_k", "invalid_type", "less than or equal to 1000"),
        ({"input": "[MASK]", "top_k": "5"}, "top_k", "invalid_type", "integer"),
        ({"input": "[MASK]", "targets": ["a"]}, "targets", "unsupported_parameter", "not supported"),
        ({"input": ["[MASK] " * 46] * 12, "top_k": 1000}, "top_k", "invalid_value", "552 masks with 164 tokens"),
        ({"input": "a [MASK]", "truncate_prompt_tokens": 3}, "input", "no_mask_token", "truncate_prompt_tokens"),
        ({"input": "[MASK]", "truncate_prompt_tokens": 99}, "truncate_prompt_tokens", "invalid_value", "48"),
    ],
)
def test_what_is_wrong_is_400_and_names_the_field(
    masked: PoolingApi, body: dict[str, Any], param: str, code: str, words: str
) -> None:
    error = masked.refused("/v1/fill-mask", **body)
    assert (error["param"], error["code"]) == (param, code)
    assert words in error["message"]


def test_too_long_inputs(masked: PoolingApi) -> None:
    long = "the [MASK] poet " + " ".join(TEXTS)
    error = masked.refused("/v1/fill-mask", input=long)
    assert error["code"] == "context_length_exceeded"
    assert f"at most {MAX_LENGTH}" in error["message"]
    (item,) = masked.ask("/v1/fill-mask", input=long, truncate_prompt_tokens=-1)["data"]
    settings = {"truncation": True, "max_length": MAX_LENGTH}
    close(item["masks"][0], masked.checkpoint.pipeline("fill-mask", tokenizer_kwargs=settings)(long))


def test_a_client_that_leaves_ends_the_work(masked: PoolingApi) -> None:
    submitted, given_up = masked.left("/v1/fill-mask", input=ONE)
    assert submitted == given_up == len(ONE)
    assert masked.metric("octavo_num_requests_in_service") == 0
    masked.client.engine.check_integrity()
