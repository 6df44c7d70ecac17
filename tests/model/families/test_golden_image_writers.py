"""Encoder-decoders that read an image, against `transformers`, on tiny random checkpoints: pixels and answers."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from support import reference
from support.image_writers import SHAPES, WriterModel, make_writer
from support.pooling_api import LocalApi
from support.reference import MIN_MARGIN
from support.seeing import EOS, IMAGE, make_tokenizer, picture
from transformers import Florence2Processor

from engine import LLM, InvalidRequestError, PixelInput, SamplingParams, UnsupportedModelError
from engine.images import ImageReader
from engine.text.image_tasks import encode_task
from engine.text.processor import load_tokenizer
from server.workers.pool import WorkerPool

TOKENS = 10
SIZES = [(40, 31), (90, 20), (13, 70), (30, 30), (1, 1), (120, 117), (5, 9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS)


@dataclass(frozen=True)
class Subject:
    """A model, and what serves it."""

    model: WriterModel
    llm: LLM

    @property
    def positions(self) -> int:
        """The encoder positions that an image has."""
        signal = self.llm.engine.info.signal
        assert signal is not None
        return signal.positions


@pytest.fixture(scope="module", params=SHAPES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    model = make_writer(request.param, tmp_path_factory.mktemp(request.param))
    llm = LLM(str(model.path), device="cpu", dtype="float32", block_size=4, num_gpu_blocks_override=256)
    yield Subject(model, llm)
    llm.close()


def test_greedy_answers_equal_the_reference(subject: Subject) -> None:
    """Images alone and with a text, all in one batch."""
    images = [picture(*size, number) for number, size in enumerate(SIZES)]
    texts = ["" if number % 3 else "ab"[: 1 + number % 2] for number in range(len(images))]
    found = subject.llm.generate(texts, GREEDY, images=images)
    clear, pixels = 0, subject.model.pixels(images)
    for number, (text, answer) in enumerate(zip(texts, found, strict=True)):
        begin = subject.model.begin(text)
        assert answer.prompt_token_ids == begin
        given, more = subject.model.asked(pixels[number], text, subject.positions)
        expected = reference.greedy(subject.model.model, given, [EOS], TOKENS, begin=begin, **more)
        if expected.margin > MIN_MARGIN:
            clear += 1
            assert answer.outputs[0].token_ids == expected.answers[0].tokens
    assert clear >= 5
    assert len({tuple(answer.outputs[0].token_ids) for answer in found}) >= 4


def test_beams_equal_the_reference(subject: Subject) -> None:
    images, clear = [picture(50, 33, 1), picture(20, 77, 2)], 0
    params = SamplingParams(num_beams=4, n=2, max_tokens=TOKENS, temperature=0.0)
    found = subject.llm.generate(["", "a"], params, images=images)
    for pixels, text, answer in zip(subject.model.pixels(images), ("", "a"), found, strict=True):
        begin, model = subject.model.begin(text), subject.model.model
        given, more = subject.model.asked(pixels, text, subject.positions)
        expected = reference.beams(model, given, [EOS], TOKENS, num_beams=4, n=2, begin=begin, **more)
        if expected.margin > MIN_MARGIN:
            clear += 1
            assert [one.token_ids for one in answer.outputs] == [one.tokens for one in expected.answers]
    assert clear


def test_pixels_are_those_of_the_processor(subject: Subject) -> None:
    """Clients may send pixels instead of an image."""
    images = [picture(*size, number) for number, size in enumerate(SIZES)]
    reader, expected = ImageReader(subject.llm.engine.info), subject.model.pixels(images).numpy()
    for image, pixels in zip(images, expected, strict=True):
        assert np.abs(np.asarray(reader.read(image).pixel_values) - pixels).max() < 1e-5
    (ours,) = subject.llm.generate({"prompt": "", "multi_modal_data": {"image": images[0]}}, GREEDY)
    (theirs,) = subject.llm.generate(PixelInput(expected[0], encoder_token_ids=subject.model.beside("")), GREEDY)
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_int8_answers(subject: Subject) -> None:
    """Matrices in int8 give nearly the same distribution of the first token."""
    image = picture(40, 31, 0)
    path = str(subject.model.path)
    llm = LLM(path, device="cpu", dtype="float32", block_size=4, num_gpu_blocks_override=64, quantization="int8")
    params, found = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20), []
    for one in (subject.llm, llm):
        (shown,) = one.generate([""], params, images=[image])[0].outputs[0].logprobs or ()
        found.append({token: value.logprob for token, value in shown.items()})
    llm.close()
    both = found[0].keys() & found[1].keys()
    assert len(both) >= 15
    assert 0 < max(abs(found[0][token] - found[1][token]) for token in both) < 0.4


def test_chats(subject: Subject) -> None:
    """The image of a single message, and its text."""
    image = picture(40, 30, 4)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "ab"}]
    (found,) = subject.llm.chat([{"role": "user", "content": parts}], GREEDY)
    (expected,) = subject.llm.generate(["ab"], GREEDY, images=[image])
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match=r"one image.*got 1 messages with 0 images"):
        subject.llm.chat([{"role": "user", "content": "ab"}], GREEDY)
    with pytest.raises(InvalidRequestError, match="accepts images"):
        subject.llm.generate("ab", GREEDY)


@pytest.mark.parametrize("subject", ["florence2"], indirect=True)
def test_texts_beside_images_are_those_of_the_processor(subject: Subject) -> None:
    """Each task's name, with further text where the task takes one, and other texts."""
    model, tokenizer = subject.model, make_tokenizer()
    image_processor = model.processor
    image_processor.image_seq_length = subject.positions
    processor = Florence2Processor(image_processor, tokenizer)
    tasks = [*processor.task_prompts_without_inputs, *(f" {name} a <b>" for name in processor.task_prompts_with_input)]
    assert len(tasks) == 15
    ours, image = load_tokenizer(model.path), picture(9, 9)
    assert ours is not None
    for text in [*tasks, "", "What is <s>this?", "<CAPTION_TO_PHRASE_GROUNDING><OD_>"]:
        (expected,) = processor(text=text, images=image)["input_ids"]
        assert [IMAGE] * subject.positions + encode_task(ours, text) == list(expected)
    with pytest.raises(InvalidRequestError, match="<OD> must be the whole text"):
        subject.llm.generate(["<OD> cats"], GREEDY, images=[image])
    with pytest.raises(InvalidRequestError, match=r"it has 15\d tokens.*encoder is 120 tokens"):
        subject.llm.generate(["a" * 130], GREEDY, images=[image])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"window_size": 0}, "window_size, .* must be positive, got 3, 0"),
        ({"num_heads": [2, 3]}, "num_groups must divide embed_dim; got 3, 2, 3, 4 and 20"),
        ({"depths": [1, 2, 1]}, "one number from 0 to 4096 for each of up to 8 stages"),
        ({"projection_dim": 20}, "must be d_model of text_config, 24, got 20"),
        ({"max_position_embeddings": 4}, "becomes 5 x 4 positions, but max_position_embeddings .* 1 to 4 a side"),
        ({"patch_size": [7, 30]}, "becomes -?[0-9]+ x -?[0-9]+ positions"),
    ],
)
def test_towers_that_cannot_be(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_writer("florence2", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"] |= settings
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=problem):
        LLM(str(tmp_path), device="cpu")


def test_text_beside_an_image_that_is_not_read(subject: Subject) -> None:
    if not subject.model.shape.reads_texts:
        pixels = subject.model.pixels([picture(9, 9)])[0].numpy()
        with pytest.raises(InvalidRequestError, match="reads no text beside an image"):
            subject.llm.generate(PixelInput(pixels, encoder_token_ids=[4]), GREEDY)


def test_chats_over_http(subject: Subject) -> None:
    """Beams too; usage counts the image's positions."""

    def url_of(image: PIL.Image.Image) -> str:
        file = io.BytesIO()
        image.save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    path, workers = subject.model.path, WorkerPool()
    api = LocalApi(path, load_tokenizer(path), {"num_gpu_blocks_override": 256}, allowed_hosts=("localhost",))
    api.app.state.service.images._workers = workers
    image = picture(40, 30, 4)
    content = [{"type": "image_url", "image_url": {"url": url_of(image)}}, {"type": "text", "text": "a"}]
    body = {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    for beams in (1, 4):
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, num_beams=beams)
        (expected,) = subject.llm.generate(["a"], params, images=[image])
        found = api.ask(
            "/v1/chat/completions", messages=[{"role": "user", "content": content}], num_beams=beams, **body
        )
        assert found["choices"][0]["token_ids"] == expected.outputs[0].token_ids
        texts = len(subject.model.begin("a")) + len(subject.model.beside("a"))
        assert found["usage"]["prompt_tokens"] == texts + subject.positions
    count, data = found["usage"]["prompt_tokens"], url_of(image).partition(",")[2]
    image_of = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    asked = [{"role": "user", "content": [image_of, content[1]]}]
    assert api.ask("/v1/messages/count_tokens", messages=asked)["input_tokens"] == count
    usage = api.ask("/v1/messages", messages=asked, max_tokens=1)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    image_of = {"type": "input_image", "image_url": url_of(image)}
    asked = [{"role": "user", "content": [image_of, {"type": "input_text", "text": "a"}]}]
    assert api.ask("/v1/responses/input_tokens", input=asked)["input_tokens"] == count
    assert api.ask("/v1/responses", input=asked, max_output_tokens=1)["usage"]["input_tokens"] == count
    asked = [{"role": "user", "content": "a", "images": [data]}]
    assert api.ask("/api/chat", model="tiny", messages=asked, stream=False)["prompt_eval_count"] == count
    found = api.ask("/api/generate", model="tiny", prompt="a", images=[data], stream=False)
    assert (found["prompt_eval_count"], "context" in found) == (count, False)
    assert api.ask("/api/generate", model="tiny", images=[data], stream=False)["prompt_eval_count"] < count
    assert "one image" in api.post("/api/generate", model="tiny", prompt="a").json()["error"]
    assert api.ask("/tokenize", messages=[{"role": "user", "content": content}])["count"] == len(
        subject.model.begin("a")
    )
    refused = api.post("/v1/chat/completions", messages=[{"role": "user", "content": content * 2}], **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    refused = api.post("/v1/completions", prompt="a")
    assert "/v1/chat/completions" in refused.json()["error"]["message"]
    workers.close()
