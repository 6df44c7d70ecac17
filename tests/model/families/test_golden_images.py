"""Encoders of images, and of texts beside them, against `transformers`, on tiny random checkpoints in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.driving import finish, make_engine, watching
from support.image_shapes import SHAPES, ImageCheckpoint, make_image_checkpoint
from torch import Tensor

from engine import Engine, PixelInput, PoolingParams, TokenInput
from engine.errors import InvalidRequestError
from engine.model import families

# Of the largest value of an answer.
NEAR = 1e-5

Input = PixelInput | TokenInput


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and the engine that has loaded it."""

    model: ImageCheckpoint
    engine: Engine

    @property
    def task(self) -> Any:
        """What its head is for."""
        return "classify" if "ForImageClassification" in self.model.shape.architecture else "embed"

    def inputs(self) -> list[Input]:
        """Images and texts in turns, as far as it reads them."""
        images = [PixelInput(pixels) for pixels in self.model.images(5)]
        texts = [TokenInput(ids) for ids in self.model.texts()]
        mixed: list[Input] = []
        for place in range(max(len(images), len(texts))):
            mixed += [*images[place : place + 1], *texts[place : place + 1]]
        return mixed

    def expected(self, input: Input) -> Tensor:
        """The reference's answer."""
        if isinstance(input, PixelInput):
            return self.model.of_image(input.pixel_values)
        return self.model.of_text(input.token_ids)

    def answers(self, inputs: Sequence[Input]) -> list[Tensor]:
        """The engine's, to all inputs together."""
        plain = {"use_activation": False} if self.task == "classify" else {"normalize": False}
        for number, input in enumerate(inputs):
            self.engine.add_request(str(number), input, PoolingParams(task=self.task, **plain))
        finished = finish(self.engine)
        found = []
        for number in range(len(inputs)):
            pooled = finished[str(number)].pooled
            assert pooled is not None
            found.append(torch.tensor(pooled.values()[0]))
        return found


@pytest.fixture(scope="module", params=SHAPES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """Each shape in turn, made and loaded once for all tests."""
    model = make_image_checkpoint(SHAPES[request.param], tmp_path_factory.mktemp(request.param))
    engine = make_engine(model.path, max_num_batched_tokens=1024, max_num_seqs=32)
    yield Subject(model, engine)
    engine.close()


def test_answers_equal_reference(subject: Subject) -> None:
    """Images and texts in one step, and each alone: equal to the reference, and to each other to the bit."""
    inputs = subject.inputs()
    with watching(subject.engine) as plans:
        crowd = subject.answers(inputs)
    assert [plan.num_rows for plan in plans] == [len(inputs)]
    kinds = {type(input) for input in inputs}
    assert kinds == {PixelInput} or bool(subject.model.reads_texts)
    assert len(kinds) == 2 or not hasattr(subject.model.model.config, "text_config")
    for input, together in zip(inputs, crowd, strict=True):
        expected = subject.expected(input)
        assert together.shape == expected.shape
        assert float((together - expected).abs().max()) <= NEAR * float(expected.abs().max())
        (alone,) = subject.answers([input])
        assert torch.equal(alone, together)
    assert not torch.equal(crowd[0], crowd[-1])


def test_what_images_are(subject: Subject) -> None:
    """The shape and number of positions that the engine tells are the reference's."""
    info, config = subject.engine.info, subject.model.image_config
    if config is None:
        assert info.signal is None
        return
    assert info.signal is not None
    (pixels,) = subject.model.images(1)
    assert (info.signal.kind, info.signal.shape) == ("image", pixels.shape)
    embeddings = subject.model.model.base_model
    for name in ("vision_model", "embeddings"):
        embeddings = getattr(embeddings, name, embeddings)
    with torch.no_grad():
        assert info.signal.positions == embeddings(torch.from_numpy(pixels)[None]).shape[1]
    assert bool(info.vocab_size) == subject.model.reads_texts


def test_what_is_no_input(subject: Subject) -> None:
    """Each kind of input that the model does not read, and pixels that are not what it reads."""
    engine, params = subject.engine, PoolingParams(task=subject.task)
    if not subject.model.reads_texts:
        with pytest.raises(InvalidRequestError, match="is an encoder and accepts images, not a list of token ids"):
            engine.add_request("a", [1, 2], params)
    if subject.engine.info.signal is None:
        with pytest.raises(InvalidRequestError, match="is an encoder and accepts token ids, not a PixelInput"):
            engine.add_request("a", PixelInput(np.zeros((3, 8, 8))), params)
        return
    (pixels,) = subject.model.images(1)
    with pytest.raises(InvalidRequestError, match=r"as numbers of shape \[.*\], got \[.*\]: its preprocessor"):
        engine.add_request("a", PixelInput(pixels[:, 1:]), params)
    for value in (np.nan, np.inf):
        broken = pixels.copy()
        broken[0, 3, 4] = value
        with pytest.raises(InvalidRequestError, match="finite numbers"):
            engine.add_request("a", PixelInput(broken), params)
    with pytest.raises(InvalidRequestError, match="an array of numbers"):
        engine.add_request("a", PixelInput("pixels"), params)
    assert not engine.has_unfinished_requests()


def test_classes_are_probabilities(subject: Subject) -> None:
    """What transformers' pipeline makes of the numbers."""
    if subject.task != "classify":
        assert subject.engine.info.tasks == ("embed",)
        return
    (pixels,) = subject.model.images(1)
    subject.engine.add_request("a", PixelInput(pixels), PoolingParams(task="classify"))
    pooled = finish(subject.engine)["a"].pooled
    assert pooled is not None
    numbers = subject.model.of_image(pixels)
    several = subject.model.model.config.problem_type == "multi_label_classification"
    expected = numbers.sigmoid() if several else numbers.softmax(-1)
    assert torch.allclose(torch.tensor(pooled.values()[0]), expected, atol=NEAR)


def test_vectors_as_they_are_asked_for(subject: Subject) -> None:
    """Norm one by default, fewer features, and no pooling of the caller's where a head makes vectors."""
    if subject.task != "embed":
        assert subject.engine.info.embedding_size == 0
        return
    input, engine = subject.inputs()[0], subject.engine
    vector = subject.expected(input)[:7]
    engine.add_request("a", input, PoolingParams(task="embed", dimensions=7))
    pooled = finish(engine)["a"].pooled
    assert pooled is not None
    assert torch.allclose(torch.tensor(pooled.values()[0]), vector / vector.norm(), atol=NEAR)
    if not engine.info.pooling_modes:
        with pytest.raises(InvalidRequestError, match="has its own head for vectors"):
            engine.add_request("a", input, PoolingParams(task="embed", pooling="mean"))
        return
    engine.add_request("a", input, PoolingParams(task="embed", pooling="max"))
    assert finish(engine)["a"].pooled is not None


@pytest.mark.parametrize("name", ["vit-classes", "deit-classes", "deit-teacher"])
def test_features_of_a_classifier(name: str, tmp_path: Path) -> None:
    """Where config.json names the model without its head, what the class token has become is the answer."""
    model = make_image_checkpoint(SHAPES[name], tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": [type(model.model.base_model).__name__]}))
    engine = make_engine(tmp_path)
    (pixels,) = model.images(1)
    engine.add_request("a", PixelInput(pixels), PoolingParams(task="embed", normalize=False))
    pooled = finish(engine)["a"].pooled
    assert pooled is not None
    with torch.no_grad():
        expected = model.model.base_model(torch.from_numpy(pixels)[None]).last_hidden_state[0, 0]
    assert torch.allclose(torch.tensor(pooled.values()[0]), expected, atol=NEAR * float(expected.abs().max()))
    engine.close()


def test_every_architecture_has_shapes() -> None:
    """Each architecture of each family of images is compared here; those that write are elsewhere."""
    shapes = {shape.architecture for shape in SHAPES.values()}
    for family in families.FAMILIES:
        writes = family.name in ("TrOCR, Donut", "Florence-2")
        if not writes and any("Vision" in name or "Image" in name for name in family.architectures):
            assert set(family.architectures) <= shapes
