"""Vision-language models against `transformers`, on tiny random checkpoints: crops, tokens, vectors, answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support import reference
from support.checkpoints import random_prompt
from support.driving import finish, make_engine
from support.reference import MIN_MARGIN
from support.seeing import EOS, IMAGE, SHAPES, VOCAB, SeeingModel, make_seeing_model, make_tokenizer, picture

from engine import Engine, SamplingParams
from engine.images import crop, read_cropping
from engine.interface.vision import VisionInfo, normalised
from engine.model.grids import grid_of, patches_of

TOKENS = 12
# Of images: larger and smaller than a crop, wide, high, of one pixel.
SIZES = [(40, 31), (90, 20), (13, 70), (28, 28), (1, 1), (120, 117), (5, 9)]


@dataclass(frozen=True)
class Subject:
    """A model, and the engine that has loaded it."""

    model: SeeingModel
    engine: Engine

    @property
    def info(self) -> VisionInfo:
        """Of its images."""
        vision = self.engine.info.vision
        assert vision is not None
        return vision


@pytest.fixture(scope="module", params=SHAPES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    model = make_seeing_model(request.param, tmp_path_factory.mktemp(request.param))
    engine = make_engine(model.path, block_size=4)
    yield Subject(model, engine)
    engine.close()


def words(seed: int, count: int) -> list[int]:
    return [token for token in random_prompt(VOCAB, seed, 3 * count) if token > 4][:count]


def test_crops_are_those_of_the_processor(subject: Subject) -> None:
    cropping = read_cropping(subject.model.path)
    assert cropping is not None
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, number)
        ours = normalised(crop(image, cropping, alone=True).pixels, subject.info)
        expected = np.asarray(subject.model.pixels([image])["pixel_values"])
        if subject.info.axes:
            part = subject.engine.runner.model.spec.vision
            embedding = part.tower.embedding
            size = ours.shape[2] // embedding.patch[0], ours.shape[3] // embedding.patch[1]
            # PaddleOCR-VL's reference puts the patches of squares together only after the tower.
            order = 1 if subject.model.shape.architecture.startswith("Paddle") else part.squares
            ours = patches_of(torch.from_numpy(ours[0]), embedding, grid_of(size, order, 0)).numpy()
            expected = expected.reshape(len(expected), -1)
        else:
            expected = expected.reshape(-1, *expected.shape[-3:])
        assert ours.shape == expected.shape
        assert np.abs(ours - expected).max() < 1e-5


def test_tokens_are_those_of_the_processor(subject: Subject) -> None:
    for number, (width, height) in enumerate(SIZES):
        image = picture(width, height, number)
        before, after = (make_tokenizer().encode(text) for text in ("ab ", " c"))
        ours = subject.model.prompt([*before, image, *after], subject.info)
        assert list(ours.token_ids) == subject.model.processed("ab <image> c", image)


def prompts(subject: Subject) -> list[list[Any]]:
    # The reference of Mistral 3 cannot read a prompt whose images have a single vector together.
    least = 16 if subject.model.shape.whole in ("PixtralProcessor", "LightOnOcrProcessor") else 0
    sizes = [size for size in SIZES if max(size) > least]
    one = [[*words(n, 3 + n), picture(*size, n), *words(50 + n, 4)] for n, size in enumerate(sizes)]
    several = [[picture(30, 44, 70), *words(71, 5), picture(61, 20, 72), picture(8, 8, 73), *words(74, 2)]]
    return [*one, *several, words(80, 9)]


def test_greedy_answers_equal_the_reference(subject: Subject) -> None:
    given = prompts(subject)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    inputs = [subject.model.prompt(parts, subject.info) for parts in given]
    for number, prompt in enumerate(inputs):
        subject.engine.add_request(str(number), prompt, params)
    answers, clear = finish(subject.engine), 0
    for number, (parts, prompt) in enumerate(zip(given, inputs, strict=True)):
        images = [part for part in parts if not isinstance(part, int)]
        seen = subject.model.seen(images, prompt.token_ids)
        expected = reference.greedy(subject.model.model, prompt.token_ids, [EOS], TOKENS, **seen)
        if expected.margin > MIN_MARGIN:
            clear += 1
            assert answers[str(number)].outputs[0].token_ids == expected.answers[0].tokens
    assert clear >= 6


def test_beams_equal_the_reference(subject: Subject) -> None:
    parts = [*words(1, 3), picture(50, 33, 1), *words(2, 3), picture(20, 77, 2)]
    if subject.model.shape.architecture.startswith("GlmOcr"):
        parts.pop()  # its reference mixes up several images of several beams
    prompt = subject.model.prompt(parts, subject.info)
    subject.engine.add_request("beams", prompt, SamplingParams(num_beams=3, n=2, max_tokens=TOKENS, temperature=0.0))
    found = finish(subject.engine)["beams"].outputs
    images = [part for part in parts if not isinstance(part, int)]
    expected = reference.beams(
        subject.model.model,
        prompt.token_ids,
        [EOS],
        TOKENS,
        num_beams=3,
        n=2,
        **subject.model.seen(images, prompt.token_ids),
    )
    assert expected.margin > MIN_MARGIN
    assert [answer.token_ids for answer in found] == [answer.tokens for answer in expected.answers]


def test_image_tokens_without_an_image_are_words(subject: Subject) -> None:
    """A prompt of token ids may hold the model's image token, as it may hold any other."""
    prompt = [*words(5, 4), IMAGE, *words(6, 3)]
    subject.engine.add_request("plain", prompt, SamplingParams(temperature=0.0, max_tokens=4))
    ours = finish(subject.engine)["plain"].outputs[0].token_ids
    language = subject.model.model
    expected = reference.greedy(language, prompt, [EOS], 4)
    assert expected.margin > MIN_MARGIN
    assert ours == expected.answers[0].tokens
