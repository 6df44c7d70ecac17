"""`LLM` over images: vectors and classes as transformers gives them, from whatever holds an image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from support.image_text import LABELS, ImageModel, make_image_model, picture

from engine import LLM, InvalidRequestError, PixelInput, UnsupportedModelError


@pytest.fixture(scope="module", params=["clip", "siglip"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ImageModel, LLM]]:
    """A model of texts and images, and its reference."""
    model = make_image_model(request.param, tmp_path_factory.mktemp("models"))
    llm = LLM(str(model.path), device="cpu", dtype="float32", show_progress=False)
    yield model, llm
    llm.close()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ImageModel, LLM]]:
    """A model of classes of images, and its reference."""
    model = make_image_model("vit", tmp_path_factory.mktemp("models"))
    llm = LLM(str(model.path), device="cpu", dtype="float32", show_progress=False)
    yield model, llm
    llm.close()


def test_texts_and_images_in_one_space(pair: tuple[ImageModel, LLM]) -> None:
    model, llm = pair
    images, texts = [picture(1), picture(2, 31, 90).convert("RGBA"), picture(3).convert("L")], ["a cat", "ships at sea"]
    inputs: list[Any] = [images[0], texts[0], images[1], texts[1], images[2]]
    found = llm.embed(inputs)
    wanted = [model.of_text(item) if isinstance(item, str) else model.of_image(item) for item in inputs]
    for answer, expected in zip(found, wanted, strict=True):
        assert torch.allclose(torch.tensor(answer.embedding), expected, atol=1e-5)
    assert [len(answer.prompt_token_ids) > 0 for answer in found] == [isinstance(item, str) for item in inputs]


def test_whatever_holds_an_image(pair: tuple[ImageModel, LLM]) -> None:
    """An image of PIL's alone, its array, and its pixels as the preprocessor leaves them."""
    model, llm = pair
    image = picture(1)
    pixels = model.processor(image, return_tensors="np").pixel_values[0]
    (expected,) = llm.embed(image)
    for same in (np.asarray(image), PixelInput(pixels)):
        (found,) = llm.embed(same)
        assert np.allclose(found.embedding, expected.embedding, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "least", "steps"),
    [
        ({"distributed_executor_backend": "mp"}, 0.99999, 1),
        ({"max_num_batched_tokens": 8}, 0.99999, 4),
        ({"dtype": "bfloat16"}, 0.999, 1),
        ({"quantization": "int8", "quantization_cache": "off"}, 0.998, 1),
    ],
)
def test_other_ways_to_compute(pair: tuple[ImageModel, LLM], settings: Any, least: float, steps: int) -> None:
    """In a runner's process, an input a step, in fewer bits: near the reference's vectors, all of norm 1."""
    model, _ = pair
    inputs: list[Any] = [picture(1), "a cat", picture(2), "ships"]
    llm = LLM(str(model.path), **({"device": "cpu", "dtype": "float32", "show_progress": False} | settings))
    try:
        found = llm.embed(inputs)
        assert llm.stats().num_steps == steps
    finally:
        llm.close()
    for answer, item in zip(found, inputs, strict=True):
        expected = model.of_text(item) if isinstance(item, str) else model.of_image(item)
        assert float(expected @ torch.tensor(answer.embedding)) >= least


def test_classes_of_images(classifier: tuple[ImageModel, LLM]) -> None:
    model, llm = classifier
    for found, image in zip(llm.classify([picture(1), picture(2)]), (picture(1), picture(2)), strict=True):
        expected = model.of_image(image)
        assert torch.allclose(torch.tensor(found.probs), expected, atol=1e-5)
        assert [label.label for label in found.labels] == LABELS  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros((4, 4), np.uint8), r"shape \[height, width, 3\] and the type uint8, got \[4, 4\] of uint8"),
        (np.zeros((4, 4, 3), np.float32), r"got \[4, 4, 3\] of float32"),
        (np.zeros((0, 5, 3), np.uint8), "empty: its size is 5 x 0"),
        (np.zeros((5, 0, 3), np.uint8), "empty: its size is 0 x 5"),
        (PIL.Image.new("RGB", (7, 0)), "empty: its size is 7 x 0"),
    ],
)
def test_arrays_that_are_no_images(classifier: tuple[ImageModel, LLM], array: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        classifier[1].classify(array)


def test_inputs_that_the_model_does_not_read(classifier: tuple[ImageModel, LLM], pair: tuple[ImageModel, LLM]) -> None:
    with pytest.raises(InvalidRequestError, match="an encoder and accepts images, not a"):
        classifier[1].classify([[1, 2, 3]])
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        classifier[1].classify("a text")
    with pytest.raises(InvalidRequestError, match="an input must be a text, a list of token ids or a TokenInput"):
        pair[1].score("a cat", picture(1))


def test_a_preprocessor_that_does_not_fit(tmp_path: Path) -> None:
    """It makes images of another size; or there is none."""
    model = make_image_model("vit", tmp_path)
    file = model.path / "preprocessor_config.json"
    text = file.read_text()
    file.write_text(text.replace('"height": 24', '"height": 32'))
    llm = LLM(str(model.path), device="cpu", dtype="float32", show_progress=False)
    with pytest.raises(UnsupportedModelError, match="makes images of 32 x 24 pixels, but the model reads 24 x 24"):
        llm.classify(picture(1))
    file.unlink()
    with pytest.raises(InvalidRequestError, match=r"has no preprocessor_config\.json"):
        llm.classify(picture(1))
    llm.close()
