"""Images in conversations over HTTP: all endpoints that take messages, and every hostile image a clear 4xx."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from support import reference
from support.pooling_api import LocalApi
from support.reference import MIN_MARGIN
from support.seeing import EOS, IMAGE, SeeingModel, make_seeing_model, picture

from engine import LLM, InvalidRequestError, SamplingParams
from engine.text.processor import load_tokenizer
from server.workers.pool import WorkerPool

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PER_IMAGE = 16


class Api(LocalApi):
    """An app that serves a model that sees."""

    def __init__(self, model: SeeingModel, **settings: Any):
        self.model = model
        pages = {"num_gpu_blocks_override": 512}
        super().__init__(model.path, load_tokenizer(model.path), pages, allowed_hosts=("localhost",), **settings)
        self.workers = WorkerPool()
        service = self.app.state.service
        service.renderer._workers = self.workers
        if service.chat_images is not None:
            service.chat_images._workers = self.workers

    def chat(self, *content: Any, **more: Any) -> dict[str, Any]:
        body = {"temperature": 0, "max_tokens": 6, "return_token_ids": True} | more
        return self.ask(CHAT, messages=[{"role": "user", "content": list(content)}], **body)

    def refused(self, *content: Any) -> dict[str, Any]:
        answer = self.post(CHAT, messages=[{"role": "user", "content": list(content)}], max_tokens=1)
        assert answer.status_code == 400, answer.text
        found = dict(answer.json()["error"])
        assert 0 < len(found["message"]) < 400
        return found


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    made = Api(make_seeing_model("llava", tmp_path_factory.mktemp("seeing"), seed=3))
    yield made
    made.workers.close()


def file_of(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def url_of(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def shown(image: PIL.Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(file_of(image)), "detail": "auto"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def expected(model: SeeingModel, prompt: str, images: list[PIL.Image.Image], count: int = 6) -> list[int]:
    processed = model.whole_processor(text=prompt, images=images, add_special_tokens=False)["input_ids"]
    ids = processed[0] if isinstance(processed[0], list) else processed
    found = reference.greedy(model.model, ids, [EOS], count, **model.pixels(images))
    assert found.margin > MIN_MARGIN
    return found.answers[0].tokens


def test_chat(api: Api) -> None:
    one, two = picture(40, 30, 1), picture(20, 50, 2)
    found = api.chat(text("what"), shown(one), text("or"), shown(two))
    prompt = "user: what<image>or<image>\nassistant: "
    assert found["choices"][0]["token_ids"] == expected(api.model, prompt, [one, two])
    assert found["usage"]["prompt_tokens"] == len(prompt.replace("<image>", "")) + 2 * PER_IMAGE
    again = api.chat(text("what"), shown(one), text("or"), shown(two))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2 * PER_IMAGE


def test_the_same_over_other_endpoints(api: Api) -> None:
    image = picture(40, 30, 1)
    data = base64.b64encode(file_of(image)).decode()
    tokens = expected(api.model, "user: see<image>\nassistant: ", [image])
    (choice,) = api.chat(text("see"), shown(image))["choices"]
    assert choice["token_ids"] == tokens
    said = choice["message"]["content"]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages = [{"role": "user", "content": [text("see"), block]}]
    found = api.ask(MESSAGES, messages=messages, max_tokens=6, temperature=0)
    assert "".join(part["text"] for part in found["content"]) == said
    counted = api.ask(f"{MESSAGES}/count_tokens", messages=messages)
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
    assert counted["input_tokens"] == len("user: see\nassistant: ") + PER_IMAGE
    part = {"type": "input_image", "image_url": url_of(file_of(image))}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "see"}, part]}]
    made = api.ask(RESPONSES, input=items, max_output_tokens=6, temperature=0, store=False)
    assert made["output"][-1]["content"][0]["text"] == said
    assert made["usage"]["input_tokens"] == counted["input_tokens"]


def test_results_of_tools_hold_images(api: Api) -> None:
    """As agents that use a computer send them."""
    image = picture(30, 30, 4)
    data = base64.b64encode(file_of(image)).decode()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [block]}]},
    ]
    without = [
        *messages[:2],
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": ""}]},
    ]
    counts = [api.ask(f"{MESSAGES}/count_tokens", messages=one)["input_tokens"] for one in (messages, without)]
    assert counts[0] == counts[1] + PER_IMAGE


def test_ollama(api: Api) -> None:
    image = picture(44, 20, 6)
    data = base64.b64encode(file_of(image)).decode()
    whole = api.chat(shown(image), text("a"))["choices"][0]["message"]["content"]
    options = {"temperature": 0, "num_predict": 6}
    messages = [{"role": "user", "content": "a", "images": [data]}]
    found = api.ask("/api/chat", model="tiny", messages=messages, stream=False, options=options)
    assert found["message"]["content"] == whole
    found = api.ask("/api/generate", model="tiny", prompt="a", images=[data], stream=False, options=options)
    assert found["response"] == whole
    assert "vision" in api.ask("/api/show", model="tiny")["capabilities"]
    refused = api.post("/api/generate", model="tiny", prompt="a", images=[data], raw=True)
    assert refused.status_code == 400
    assert "images cannot be used with raw" in refused.text


def test_tokenize(api: Api) -> None:
    image = picture(30, 30, 4)
    found = api.ask("/tokenize", messages=[{"role": "user", "content": [shown(image), text("x")]}])
    assert found["count"] == len("user: x\nassistant: ") + PER_IMAGE
    assert found["tokens"].count(3) == PER_IMAGE


def test_streams_beams_and_grammars(api: Api) -> None:
    image = picture(44, 20, 6)
    whole = api.chat(text("a"), shown(image))["choices"][0]["message"]["content"]
    body = {"messages": [{"role": "user", "content": [text("a"), shown(image)]}], "max_tokens": 6, "temperature": 0}
    answer = api.post(CHAT, **body, stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == whole
    beams = api.chat(text("a"), shown(image), use_beam_search=True, n=2, best_of=3)
    assert len(beams["choices"]) == 2
    (bound,) = api.chat(text("a"), shown(image), structured_outputs={"choice": ["yes", "no"]})["choices"]
    assert bound["message"]["content"] in ("yes", "no")


ANIMATION = [picture(12, 12, n) for n in range(3)]


@pytest.mark.parametrize(
    ("url", "message", "code"),
    [
        ("https://example.com/cat.png", "not downloaded from URLs", "image_url_not_fetched"),
        ("file:///etc/passwd", "not downloaded from URLs", "image_url_not_fetched"),
        (url_of(file_of(picture(30, 30))[:60]), "damaged|cut off|truncated", "invalid_image"),
        (url_of(b"not an image"), "image", "invalid_image"),
        (url_of(b"%PDF-1.7 nothing", "application/pdf"), "image", "invalid_image"),
        ("data:image/png;base64,####", "base64", "invalid_image"),
        ("data:image/png,plain", "base64", "invalid_image"),
        ("", "image", "invalid_image"),
    ],
)
def test_images_that_cannot_be_read(api: Api, url: str, message: str, code: str) -> None:
    found = api.refused(text("a"), {"type": "image_url", "image_url": {"url": url}})
    assert re.search(message, found["message"])
    assert (found["param"], found["code"]) == ("messages", code)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "image_url must be an object such as"),
        ({"type": "image_url", "image_url": {"url": 5}}, "image_url must be an object such as"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio', which is not supported"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "'video_url', which is not supported"),
    ],
)
def test_parts_that_are_no_images(api: Api, part: dict[str, Any], message: str) -> None:
    assert message in api.refused(part)["message"]


def test_ten_thousand_images(api: Api) -> None:
    """Their number is looked at before anything is decoded."""
    one = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    found = api.refused(*[one] * 10_000)
    assert found["code"] == "too_many_images"
    assert "10000 images, but at most 64 are allowed (limit_mm_per_prompt)" in found["message"]


def test_one_pixel_and_animations(api: Api) -> None:
    """An image of one pixel is an image; of an animation the first frame counts, as in transformers."""
    assert api.chat(shown(picture(1, 1, 1)))["usage"]["prompt_tokens"] == len("user: \nassistant: ") + PER_IMAGE
    moving = file_of(ANIMATION[0], "GIF", save_all=True, append_images=ANIMATION[1:])
    still = PIL.Image.open(io.BytesIO(moving)).convert("RGB")
    part = {"type": "image_url", "image_url": {"url": url_of(moving, "image/gif")}}
    both = [api.chat(text("a"), one)["choices"][0]["token_ids"] for one in (part, shown(still))]
    assert both[0] == both[1]


def test_an_image_token_in_a_text(api: Api) -> None:
    found = api.refused(text("a <image> b"), shown(picture(9, 9)))
    assert "the prompt has 2 image tokens for 1 images" in found["message"]


def test_a_prompt_with_images_is_not_rendered(api: Api) -> None:
    """Token ids alone would be answered without the image."""
    messages = [{"role": "user", "content": [text("a"), shown(picture(9, 9))]}]
    answer = api.post(f"{CHAT}/render", messages=messages)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "token ids do not carry images" in answer.json()["error"]["message"]
    assert api.post(f"{CHAT}/render", messages=[{"role": "user", "content": "a"}]).status_code == 200


@pytest.mark.parametrize("source", ["x", None, {"type": "gopher"}])
def test_a_source_that_is_none(source: Any, api: Api) -> None:
    messages = [{"role": "user", "content": [text("a"), {"type": "image", "source": source}]}]
    answer = api.post(MESSAGES, messages=messages, max_tokens=1)
    assert answer.status_code == 400
    assert "must be an object of the type base64, url or file" in answer.json()["error"]["message"]


def test_a_prompt_that_is_too_long(api: Api) -> None:
    found = api.refused(*[shown(picture(9, 9, n)) for n in range(40)])
    assert found["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", ["smolvlm", "gemma3-scans"])
def test_texts_around_crops(name: str, tmp_path: Path) -> None:
    """Texts stand around the crops of an image, over HTTP and in `LLM`."""
    model = make_seeing_model(name, tmp_path, seed=1)
    image = picture(90, 40, 5)
    ids = model.processed("user: a<image>\nassistant: ", image)
    expected = reference.greedy(model.model, ids, [EOS], 6, **model.seen([image], ids))
    assert expected.margin > MIN_MARGIN
    own = Api(model)
    found = own.chat(text("a"), shown(image))
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert found["choices"][0]["token_ids"] == expected.answers[0].tokens
    crops = ids.count(IMAGE) // 4  # a text's image tokens are not taken for them
    refused = own.refused(text("<image>" * (crops - 1)), shown(image))
    counted = f"{crops} image tokens for 1 images" if name == "smolvlm" else f"{2 * crops - 1} image tokens for {crops}"
    assert f"the prompt has {counted}" in refused["message"]
    assert refused["param"] == "messages"
    own.workers.close()
    llm = LLM(str(model.path), device="cpu", dtype="float32", show_progress=False, num_gpu_blocks_override=256)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    content = [{"type": "text", "text": "a"}, {"type": "image", "image": image}]
    answers = [
        llm.chat([{"role": "user", "content": content}], params),
        llm.generate(f"user: a{model.mark}\nassistant: ", params, images=[image]),
    ]
    assert [answer[0].outputs[0].token_ids for answer in answers] == [expected.answers[0].tokens] * 2
    with pytest.raises(InvalidRequestError, match="need a prompt that is text"):
        llm.generate([[9, 3, 9]], params, images=[image])
    llm.close()
