"""How decoders with a classifier, or without any head, are stored, and what their engines refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from support.checkpoints import restore
from support.decoder_classes import logits, make_classifier
from support.driving import finish, make_engine
from support.families import FAMILY_SHAPES
from support.pages import close, load
from torch import Tensor

from engine import InvalidRequestError, ModelLoadError, PoolingParams, SamplingParams

Tensors = dict[str, Tensor]
SHAPE = FAMILY_SHAPES["mistral"]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A classifier of texts."""
    return make_classifier(SHAPE, transformers.MistralForSequenceClassification, tmp_path).path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A classifier of tokens."""
    return make_classifier(SHAPE, transformers.MistralForTokenClassification, tmp_path).path


def with_lm_head(held: Tensors) -> Tensors:
    return held | {"lm_head.weight": torch.zeros(SHAPE.vocab, 32)}


def older_name(held: Tensors) -> Tensors:
    return {name.replace("score.", "classifier."): tensor for name, tensor in held.items()}


def without_prefix(held: Tensors) -> Tensors:
    return {name.removeprefix("model."): tensor for name, tensor in held.items()}


@pytest.mark.parametrize("kind", ["texts", "tokens"])
@pytest.mark.parametrize("change", [with_lm_head, older_name, without_prefix])
def test_other_forms_load(kind: str, change: Callable[[Tensors], Tensors], request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    expected = load(folder).state_dict()
    assert {"head.output.weight", "head.output.bias"} - expected.keys() == (
        {"head.output.bias"} if kind == "texts" else set()
    )
    restore(folder, change)
    found = load(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_classifier_of_tokens_may_have_no_bias(tokens: Path) -> None:
    def unbiased(held: Tensors) -> Tensors:
        return {name: tensor for name, tensor in held.items() if name != "score.bias"}

    restore(tokens, unbiased)
    with pytest.raises(ModelLoadError, match=r"lacks tensors that its config requires: score\.bias"):
        load(tokens)
    restore(tokens, dict, token_classification_bias=False)
    assert "head.output.bias" not in load(tokens).state_dict()


def test_a_classifier_must_be_stored(texts: Path) -> None:
    restore(texts, lambda held: {name: tensor for name, tensor in held.items() if name != "score.weight"})
    with pytest.raises(ModelLoadError, match=r"lacks tensors that its config requires: score\.weight"):
        load(texts)


def test_heads_that_no_endpoint_asks_for_are_left_unused(texts: Path) -> None:
    """As transformers leaves them where the config names the model without a head."""
    restore(texts, with_lm_head, architectures=["MistralModel"], tie_word_embeddings=False)
    model = load(texts)
    assert model.head is None
    restore(texts, lambda held: held | {"other.weight": torch.zeros(1)})
    with pytest.raises(ModelLoadError, match=r"do not match its config: other\.weight"):
        load(texts)


def test_tasks_without_a_head_for_them_are_refused(texts: Path) -> None:
    engine = make_engine(texts, max_model_len=64)
    assert engine.info.tasks == ("classify",)
    with pytest.raises(InvalidRequestError, match=r"cannot serve generate: .* It serves classify\."):
        engine.add_request("1", [1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequestError, match=r"cannot serve embed: .* It serves classify\."):
        engine.add_request("1", [1, 2], PoolingParams())
    engine.close()
    restore(texts, dict, architectures=["MistralModel"], tie_word_embeddings=False)
    engine = make_engine(texts, max_model_len=64)
    assert engine.info.tasks == ("embed",)
    for task in ("classify", "token_classify", "fill_mask"):
        with pytest.raises(InvalidRequestError, match=rf"cannot serve {task}: .* It serves embed\."):
            engine.add_request("1", [1, 2], PoolingParams(task=task, positions=[0]))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"cannot serve generate: .* It serves embed\."):
        engine.add_request("1", [1, 2], SamplingParams(max_tokens=2))
    assert not engine.has_unfinished_requests()
    engine.close()


@pytest.mark.parametrize("padding", [None, -1, 4])
def test_the_token_that_is_classified(padding: int | None, tmp_path: Path) -> None:
    """The last, and before tokens of the padding's id where there is one."""
    model = make_classifier(SHAPE, transformers.MistralForSequenceClassification, tmp_path, pad_token_id=padding)
    engine = make_engine(model.path, max_model_len=64, max_num_batched_tokens=4)
    short, padded = [3, 9, 6, 2, 8], [3, 9, 6, 2, 8, 4, 4, 4, 4, 4, 4]
    found = []
    for prompt in (short, padded):
        engine.add_request("0", prompt, PoolingParams(task="classify", use_activation=False))
        pooled = finish(engine)["0"].pooled
        assert pooled is not None
        found.append(torch.tensor(pooled.values()))
        close(found[-1], logits(model, prompt))
    assert torch.allclose(*found, atol=1e-5) == (padding == 4)
    engine.close()


def test_names_of_classes(texts: Path) -> None:
    restore(texts, dict, id2label={"0": "bad", "1": "fair", "2": "good"}, problem_type="multi_label_classification")
    engine = make_engine(texts, max_model_len=64)
    assert engine.info.labels == ("bad", "fair", "good")
    assert engine.info.activation == "sigmoid"
    engine.close()
