"""Boxes of tokens on a page (LayoutLM): as `LLM` takes them, cut with their tokens, and refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import random_prompt
from support.encoder_shape import EncoderCheckpoint, make_encoder_checkpoint, random_boxes
from support.encoders import ENCODER_SHAPES
from support.pages import close

from engine import LLM, InvalidRequestError, PoolingParams, TokenInput
from engine.model.families import llama
from engine.model.missing import unsupported
from engine.model.spec import Tokens

IDS = random_prompt(61, 5, 30)
BOXES = random_boxes(50, 30)


@dataclass(frozen=True)
class Subject:
    reference: EncoderCheckpoint
    llm: LLM


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("layoutlm")
    reference = make_encoder_checkpoint(ENCODER_SHAPES["layoutlm-tokens"], folder)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "show_progress": False}
    with closing(LLM(str(folder), skip_tokenizer_init=True, **settings)) as llm:
        yield Subject(reference, llm)


def expected(subject: Subject, input: TokenInput) -> torch.Tensor:
    return subject.reference.logits(input).softmax(-1)


def test_inputs_with_boxes_and_without_in_one_call(subject: Subject) -> None:
    """What one input says of its boxes is nothing to the others."""
    inputs = [TokenInput(IDS, bbox=BOXES), TokenInput(IDS), TokenInput(IDS[:7], bbox=BOXES[:7])]
    found = subject.llm.classify(inputs)
    for input, answer in zip(inputs, found, strict=True):
        close(torch.tensor(answer.probs), expected(subject, input))
    assert found[0].probs != found[1].probs


def test_no_boxes_are_boxes_of_zeros(subject: Subject) -> None:
    zeros, none = subject.llm.classify([TokenInput(IDS, bbox=[[0, 0, 0, 0]] * 30), TokenInput(IDS)])
    assert zeros.probs == none.probs


def test_boxes_are_cut_with_their_tokens(subject: Subject) -> None:
    (found,) = subject.llm.classify(TokenInput(IDS, bbox=BOXES), truncate_prompt_tokens=11)
    close(torch.tensor(found.probs), expected(subject, TokenInput(IDS[:11], bbox=BOXES[:11])))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (7, "bbox must be a list of boxes, got 7"),
        ([[0, 0, 1, 1]], "bbox has 1 boxes for 2 tokens"),
        ([[0, 0, 1, 1], [0, 0, 1]], r"four integers, .* from 0 to 49, .*got \[0, 0, 1\]"),
        ([[0, 0, 1, 1], [0, 0, 1, 50]], r"from 0 to 49, .*got \[0, 0, 1, 50\]"),
        ([[0, 0, 1, 1], [-1, 0, 1, 1]], r"from 0 to 49, .*got \[-1, 0, 1, 1\]"),
        ([[0, 0, 1, 1], [3, 0, 2, 1]], r"left not beyond right .*got \[3, 0, 2, 1\]"),
        ([[0, 0, 1, 1], [0, 3, 1, 2]], r"upper not beyond lower; got \[0, 3, 1, 2\]"),
        ([[0, 0, 1, 1], [0, 0, 1, True]], "four integers"),
        ([[0, 0, 1, 1], "0011"], "four integers"),
    ],
)
def test_what_is_no_box_is_refused(subject: Subject, boxes: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        subject.llm.engine.add_request("a", TokenInput([1, 2], bbox=boxes), PoolingParams(task="token_classify"))
    assert refusal.value.param == "bbox"
    assert not subject.llm.engine.has_unfinished_requests()


def test_models_that_read_no_boxes_refuse_them(tmp_path: Path) -> None:
    make_encoder_checkpoint(ENCODER_SHAPES["bert"], tmp_path)
    with (
        closing(LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu", dtype="float32")) as llm,
        pytest.raises(InvalidRequestError, match="reads no boxes: leave bbox out"),
    ):
        llm.embed(TokenInput(IDS, bbox=BOXES))


def test_boxes_have_tables_of_their_own(subject: Subject) -> None:
    model = subject.llm.engine.runner.model.spec
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    assert model.encoder.embedding.boxes == subject.llm.engine.info.boxes == 50


def test_a_decoder_has_no_boxes() -> None:
    model = llama.spec(transformers.LlamaConfig())
    assert model.decoder is not None
    assert isinstance(model.decoder.embedding, Tokens)
    decoder = replace(model.decoder, embedding=replace(model.decoder.embedding, boxes=9))
    assert unsupported(model) == []
    assert unsupported(replace(model, decoder=decoder)) == ["boxes of a decoder's tokens"]
