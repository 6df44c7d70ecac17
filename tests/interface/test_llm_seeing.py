"""`LLM.chat` and `LLM.generate` with images, of whatever holds one, in any turn."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from support import reference
from support.reference import MIN_MARGIN
from support.seeing import EOS, SeeingModel, make_seeing_model, make_tokenizer, picture

from engine import LLM, InvalidRequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SeeingModel, LLM]]:
    model = make_seeing_model("llava", tmp_path_factory.mktemp("seeing"), seed=3)
    llm = LLM(str(model.path), device="cpu", dtype="float32", show_progress=False, num_gpu_blocks_override=256)
    yield model, llm
    llm.close()


def png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def expected(model: SeeingModel, text: str, images: list[PIL.Image.Image]) -> list[int]:
    """The reference's answer to a rendered prompt."""
    processed = model.whole_processor(text=text, images=images or None, add_special_tokens=False)["input_ids"]
    ids = processed[0] if isinstance(processed[0], list) else processed
    found = reference.greedy(model.model, ids, [EOS], 8, **(model.pixels(images) if images else {}))
    assert found.margin > MIN_MARGIN
    return found.answers[0].tokens


def test_images_in_any_turn(seeing: tuple[SeeingModel, LLM], tmp_path: Path) -> None:
    """Several images in a message and in a later one, between texts; of a path, bytes, a data: URL, PIL, an array."""
    model, llm = seeing
    images = [picture(40, 30, n) for n in range(5)]
    images[0].save(tmp_path / "one.png")
    url = "data:image/png;base64," + base64.b64encode(png(images[2])).decode()
    parts = [
        {"type": "text", "text": "look"},
        {"type": "image", "image": str(tmp_path / "one.png")},
        {"type": "text", "text": "and"},
        {"type": "image", "image": png(images[1])},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "I see"},
        {"role": "user", "content": [
            {"type": "image_pil", "image_pil": images[3]}, {"type": "text", "text": "now"},
            {"type": "image", "image": np.asarray(images[4])},
        ]},
    ]  # fmt: skip
    (found,) = llm.chat(messages, GREEDY)
    text = "user: look<image>and<image><image>\nassistant: I see\nuser: <image>now<image>\nassistant: "
    assert found.prompt == text
    assert found.outputs[0].token_ids == expected(model, text, images)


def test_texts_alone(seeing: tuple[SeeingModel, LLM]) -> None:
    """A template that walks through contents shows those that are texts, too."""
    model, llm = seeing
    (found,) = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert found.prompt == "user: hello\nassistant: "
    assert found.outputs[0].token_ids == expected(model, found.prompt, [])


def test_a_template_without_images_gets_image_tokens(seeing: tuple[SeeingModel, LLM]) -> None:
    model, llm = seeing
    image = picture(33, 20, 8)
    template = "{% for m in messages %}{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": image}]}
    (found,) = llm.chat([message], GREEDY, chat_template=template)
    assert found.prompt == "user> a<image>\n"
    assert found.outputs[0].token_ids == expected(model, found.prompt, [image])


def test_generate(seeing: tuple[SeeingModel, LLM]) -> None:
    model, llm = seeing
    images = [picture(40, 30, n) for n in range(3)]
    text = "x <image> y"
    one, two = (expected(model, text, [image]) for image in images[:2])
    (found,) = llm.generate(text, GREEDY, images=[images[0]])
    assert found.outputs[0].token_ids == one
    ids = make_tokenizer().encode(text)
    found_ids = llm.generate([ids, ids], GREEDY, images=[images[0], [images[1]]])
    assert [answer.outputs[0].token_ids for answer in found_ids] == [one, two]
    prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": images[1]}}
    (dictionary,) = llm.generate(prompt, GREEDY)
    assert dictionary.outputs[0].token_ids == two


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("no token", [picture(9, 9)], "the prompt has 0 image tokens for 1 images"),
        ("<image><image>", [picture(9, 9)], "the prompt has 2 image tokens for 1 images"),
        ("<image>", [b"nothing"], "image"),
        ("<image>", ["/no/such/file.png"], "cannot be read"),
        ("<image>", ["https://example.com/cat.png"], "images are not downloaded from URLs"),
        ("<image>", [7], "an image must be a path"),
        (["<image>", "<image>"], [picture(9, 9)], "images must have the images of each of the 2 prompts, got 1"),
    ],
)
def test_wrong_images(seeing: tuple[SeeingModel, LLM], prompt: Any, images: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        seeing[1].generate(prompt, GREEDY, images=images)
    assert not seeing[1].engine.has_unfinished_requests()


def test_a_prompt_with_images_is_not_cut(seeing: tuple[SeeingModel, LLM]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=5)
    with pytest.raises(InvalidRequestError, match="does not cut prompts with images"):
        seeing[1].generate("<image> what is it", params, images=[picture(9, 9)])
