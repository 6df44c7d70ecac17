"""Encoder-decoders that read an image, against `transformers`, on tiny random checkpoints: pixels and answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import PIL.Image
import pytest
from support import reference
from support.image_writers import SHAPES, WriterModel, make_writer
from support.pooling_api import LocalApi
from support.reference import MIN_MARGIN
from support.seeing import EOS, make_tokenizer, picture

from engine import LLM, InvalidRequestError, PixelInput, SamplingParams
from engine.images import ImageReader
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


@pytest.fixture(scope="module", params=SHAPES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    model = make_writer(request.param, tmp_path_factory.mktemp(request.param))
    llm = LLM(str(model.path), device="cpu", dtype="float32", block_size=4, num_gpu_blocks_override=256)
    yield Subject(model, llm)
    llm.close()


def test_greedy_answers_equal_the_reference(subject: Subject) -> None:
    """Images alone and with the beginning of an answer, all in one batch; and their pixels."""
    images = [picture(*size, number) for number, size in enumerate(SIZES)]
    texts = ["" if number % 3 else "ab"[: 1 + number % 2] for number in range(len(images))]
    found = subject.llm.generate(texts, GREEDY, images=images)
    clear, pixels = 0, subject.model.pixels(images)
    for number, (text, answer) in enumerate(zip(texts, found, strict=True)):
        begin = [EOS, *make_tokenizer().encode(text)]
        assert answer.prompt_token_ids == begin
        expected = reference.greedy(subject.model.model, pixels[number][None], [EOS], TOKENS, begin=begin)
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
        begin = [EOS, *make_tokenizer().encode(text)]
        model = subject.model.model
        expected = reference.beams(model, pixels[None], [EOS], TOKENS, num_beams=4, n=2, begin=begin)
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
    (theirs,) = subject.llm.generate(PixelInput(expected[0]), GREEDY)
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
    """The image of a single message; its text begins the answer."""
    image = picture(40, 30, 4)
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "ab"}]
    (found,) = subject.llm.chat([{"role": "user", "content": parts}], GREEDY)
    (expected,) = subject.llm.generate(["ab"], GREEDY, images=[image])
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match=r"one image.*got 1 messages with 0 images"):
        subject.llm.chat([{"role": "user", "content": "ab"}], GREEDY)
    with pytest.raises(InvalidRequestError, match="accepts images"):
        subject.llm.generate("ab", GREEDY)


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
        signal = subject.llm.engine.info.signal
        assert signal is not None
        assert found["usage"]["prompt_tokens"] == 2 + signal.positions
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
    assert api.ask("/tokenize", messages=[{"role": "user", "content": content}])["count"] == 2
    refused = api.post("/v1/chat/completions", messages=[{"role": "user", "content": content * 2}], **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    refused = api.post("/v1/completions", prompt="a")
    assert "/v1/chat/completions" in refused.json()["error"]["message"]
    workers.close()
