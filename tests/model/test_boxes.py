"""Boxes of tokens on a page (LayoutLM): as `LLM` and HTTP take them, cut with their tokens, and refused by name."""

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
from support.encoder_shape import EncoderCheckpoint, make_encoder_checkpoint, random_boxes, run
from support.encoder_text import CORPUS, save_model, wordpiece
from support.encoders import ENCODER_SHAPES
from support.pages import close
from support.pooling_api import PoolingApi
from support.text_encoders import TextEncoder

from engine import LLM, InvalidRequestError, PoolingParams, TokenInput
from engine.model.families import describe
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
        ([[0, 0, 1, 1], [3, 0, 2, 1]], r"left at most right .*got \[3, 0, 2, 1\]"),
        ([[0, 0, 1, 1], [0, 3, 1, 2]], r"upper at most lower; got \[0, 3, 1, 2\]"),
        ([[0, 0, 1, 1], [0, 0, 1, True]], "four integers"),
        ([[0, 0, 1, 1], "0011"], "four integers"),
        ([[0, 0, 1, 1], b"\0\0\1\1"], "four integers"),
    ],
)
def test_what_is_no_box_is_refused(subject: Subject, boxes: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        subject.llm.engine.add_request("a", TokenInput([1, 2], bbox=boxes), PoolingParams(task="token_classify"))
    assert refusal.value.param == "bbox"
    assert not subject.llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("sides", "param", "message"),
    [
        ({"token_type_ids": 0}, "token_type_ids", "token_type_ids must be a list of integers, got 0"),
        ({"sides": ["boxes"]}, "sides", "sides must be a mapping of names to lists, got .'boxes'."),
        ({"sides": "boxes"}, "sides", "sides must be a mapping of names to lists, got 'boxes'"),
    ],
)
def test_what_is_no_side_is_refused(subject: Subject, sides: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refusal:
        subject.llm.classify(TokenInput(IDS, **sides))
    assert refusal.value.param == param


def test_models_that_read_no_boxes_refuse_them(tmp_path: Path) -> None:
    make_encoder_checkpoint(ENCODER_SHAPES["bert"], tmp_path)
    with (
        closing(LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu", dtype="float32")) as llm,
        pytest.raises(InvalidRequestError, match=r"does not read boxes\. Remove bbox"),
    ):
        llm.embed(TokenInput(IDS, bbox=BOXES))


def test_boxes_have_tables_of_their_own(subject: Subject) -> None:
    model = subject.llm.engine.runner.model.spec
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    assert model.encoder.embedding.boxes == subject.llm.engine.info.sides["boxes"] == 50


def test_a_decoder_may_read_boxes() -> None:
    model = describe(transformers.LlamaConfig(architectures=["LlamaForCausalLM"]))
    assert model.decoder is not None
    assert isinstance(model.decoder.embedding, Tokens)
    decoder = replace(model.decoder, embedding=replace(model.decoder.embedding, boxes=9))
    assert unsupported(replace(model, decoder=decoder)) == []
    assert decoder.sides == {"boxes": 9}


# ---------------------------------------------------------------- over HTTP


def http(name: str, folder: Path) -> PoolingApi:
    """The API over a shape, without a tokenizer."""
    made = make_encoder_checkpoint(ENCODER_SHAPES[name], folder)
    return PoolingApi(TextEncoder(made.path, made.model, None), tokenizer=False)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> PoolingApi:
    return http("layoutlm", tmp_path_factory.mktemp("layoutlm"))


def mean(api: PoolingApi, input: TokenInput) -> torch.Tensor:
    """The reference's vector of an input."""
    states = run(api.checkpoint.model.base_model, input).last_hidden_state[0].mean(0)
    return torch.nn.functional.normalize(states, dim=0)


def test_vectors_of_inputs_with_boxes_and_without(vectors: PoolingApi) -> None:
    body = {"input": [IDS, IDS[:7], IDS], "bbox": [BOXES, None, BOXES[::-1]]}
    found = [torch.tensor(item["embedding"]) for item in vectors.ask("/v1/embeddings", **body)["data"]]
    inputs = [TokenInput(IDS, bbox=BOXES), TokenInput(IDS[:7]), TokenInput(IDS, bbox=BOXES[::-1])]
    for answer, input in zip(found, inputs, strict=True):
        close(answer, mean(vectors, input))
    (alone,) = vectors.ask("/v1/embeddings", input=IDS, bbox=BOXES)["data"]
    close(torch.tensor(alone["embedding"]), found[0])
    (one,) = vectors.ask("/pooling", input=[IDS], bbox=[BOXES])["data"]
    assert one["data"] == alone["embedding"]
    (cut,) = vectors.ask("/v1/embeddings", input=IDS, bbox=BOXES, truncate_prompt_tokens=11)["data"]
    close(torch.tensor(cut["embedding"]), mean(vectors, TokenInput(IDS[:11], bbox=BOXES[:11])))


def test_entities_by_boxes(subject: Subject) -> None:
    """Those of `LLM`, which are the reference's."""
    api = PoolingApi(TextEncoder(subject.reference.path, None, None), tokenizer=False)
    data = api.ask("/v1/classify", input=[IDS, IDS], bbox=[BOXES, None], aggregation="none")["data"]
    found = subject.llm.classify([TokenInput(IDS, bbox=BOXES), TokenInput(IDS)], aggregation="none")
    for item, answer in zip(data, found, strict=True):
        assert [each["label"] for each in item["entities"]] == [span.label for span in answer.spans]
        assert [each["score"] for each in item["entities"]] == pytest.approx([span.score for span in answer.spans])
    assert data[0]["entities"] != data[1]["entities"]


def test_masks_by_boxes(tmp_path: Path) -> None:
    tokenizer = wordpiece()
    config = transformers.LayoutLMConfig(vocab_size=len(tokenizer), **ENCODER_SHAPES["layoutlm-masked"].settings)
    model = save_model(transformers.LayoutLMForMaskedLM, config, tokenizer, tmp_path)
    api = PoolingApi(TextEncoder(tmp_path, model, transformers.AutoTokenizer.from_pretrained(tmp_path)))
    ids = tokenizer(f"the small [MASK] boats: {CORPUS[0]}").input_ids
    boxes = random_boxes(50, len(ids))
    logits = run(model, TokenInput(ids, bbox=boxes)).logits[0, ids.index(tokenizer.mask_token_id)]
    (item,) = api.ask("/v1/fill-mask", input=ids, bbox=boxes)["data"]
    best = logits.softmax(-1).topk(5)
    assert [found["token"] for found in item["masks"][0]] == best.indices.tolist()
    assert [found["score"] for found in item["masks"][0]] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert api.ask("/v1/fill-mask", input=ids)["data"] != [item]
    text = api.refused("/v1/fill-mask", input=["a [MASK]", ids], bbox=[boxes, boxes])
    assert "bbox needs token ids, but input 0 is not" in text["message"]
    assert api.refused("/v1/score", text_1="a", text_2="b", bbox=boxes)["code"] == "unsupported_parameter"
    chat = api.refused("/v1/embeddings", messages=[{"role": "user", "content": "a"}], bbox=[[0, 0, 0, 0]])
    assert "bbox is only allowed with token ids in input" in chat["message"]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (7, "must be a list with one box"),
        ([], "must be a list with one box"),
        ([[0, 0, 1], [0, 0, 1, 1]], "must be a list with one box"),
        ([[0, 0, 1, 1.5]] * 2, "must be a list with one box"),
        ([[0, 0, 1, True]] * 2, "must be a list with one box"),
        ([[[0, 0, 1, 1]], 5], "must be a list with one box"),
        ([[0, 0, 1, 1]], "bbox has 1 boxes for 2 tokens"),
        (
            [[0, 0, 1, 1], [0, 0, 1, 50]],
            "from 0 to 49, left at most right and upper at most lower; got [0, 0, 1,",
        ),
        ([[0, 0, 1, 10**18]] * 2, "from 0 to 49"),
        ([None, None], "bbox has boxes for 2 inputs, but there are 1"),
    ],
)
def test_what_is_no_box_is_400(vectors: PoolingApi, boxes: Any, message: str) -> None:
    error = vectors.refused("/v1/embeddings", input=[1, 2], bbox=boxes)
    assert message in error["message"]
    assert error["param"] == "bbox"


def test_a_refusal_among_several_says_which(vectors: PoolingApi) -> None:
    error = vectors.refused("/v1/embeddings", input=[[1], [2]], bbox=[[[0, 0, 1, 1]], [[3, 0, 2, 1]]])
    assert error["message"].startswith("input[1]: bbox must hold boxes of four integers")


def test_a_model_that_reads_no_boxes(tmp_path: Path) -> None:
    error = http("bert", tmp_path).refused("/v1/embeddings", input=[1], bbox=[[0, 0, 1, 1]])
    assert (error["param"], error["code"]) == ("bbox", "unsupported_parameter")
    assert "tiny does not read boxes. Remove bbox" in error["message"]
