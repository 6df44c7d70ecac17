"""Images over HTTP: vectors and classes as transformers gives them, and every hostile upload a clear 4xx."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from support.image_text import LABELS, ImageModel, data_url, make_image_model, picture
from support.pooling_api import LocalApi
from test_images import bomb, file_of

from engine.text.processor import load_tokenizer
from server.answering import images as reading
from server.workers.pool import WorkerPool

EMBED, CLASSIFY = "/v1/embeddings", "/v1/classify"
POSITIONS = 10  # of an image in the models with a class token


class Api(LocalApi):
    """An app that serves a model of images."""

    def __init__(self, model: ImageModel, workers: WorkerPool | None = None, **settings: Any):
        self.model = model
        super().__init__(model.path, load_tokenizer(model.path), {}, allowed_hosts=("localhost",), **settings)
        self.workers = workers or WorkerPool()
        self.app.state.service.images._workers = self.workers

    def error(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 400, answer.text
        found = dict(answer.json()["error"])
        assert found["param"] == "input"
        assert 0 < len(found["message"]) < 400
        service = self.app.state.service
        assert service.pooling.num_prompts == 0  # its place is free again
        return found


@pytest.fixture(scope="module")
def apis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Api]]:
    """Apps by the kind of their model, made once."""
    found: dict[str, Api] = {}
    workers = WorkerPool()

    def get(kind: str) -> Api:
        if kind not in found:
            found[kind] = Api(make_image_model(kind, tmp_path_factory.mktemp("models")), workers)
        return found[kind]

    yield get
    workers.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_texts_and_images_in_one_request(apis: Callable[[str], Api], kind: str) -> None:
    """Vectors in the order of the inputs, equal to the reference's; images count as their positions."""
    api = apis(kind)
    images, texts = [picture(1), picture(2, 90, 30)], ["a cat", "ships at sea"]
    given = [{"image": data_url(images[0])}, texts[0], {"text": texts[1]}, {"image": data_url(images[1])}]
    body = api.ask(EMBED, input=given)
    of = api.model
    wanted = [of.of_image(images[0]), of.of_text(texts[0]), of.of_text(texts[1]), of.of_image(images[1])]
    assert [item["index"] for item in body["data"]] == [0, 1, 2, 3]
    for item, expected in zip(body["data"], wanted, strict=True):
        assert np.abs(np.array(item["embedding"]) - expected.numpy()).max() <= 1e-5
    count = 2 * POSITIONS + sum(len(text) + 2 for text in texts) if kind == "clip" else 2 * 9 + 2 * 40
    assert body["usage"]["prompt_tokens"] == count
    assert len(api.client.asked) == 4


@pytest.mark.parametrize(("kind", "inputs"), [("clip", ["text", "image"]), ("vit", ["image"])])
def test_the_card_says_that_images_are_read(apis: Callable[[str], Api], kind: str, inputs: list[str]) -> None:
    (card,) = apis(kind).send("GET", "/v1/models").json()["data"]
    assert card["inputs"] == inputs
    assert "decoding" not in card


def test_an_image_alone(apis: Callable[[str], Api]) -> None:
    """Not in a list; as plain base64; with fewer features, as base64."""
    api = apis("clip")
    image = picture(3)
    url = data_url(image)
    plain = url.partition(",")[2]
    vectors = [api.ask(EMBED, input={"image": content})["data"][0]["embedding"] for content in (url, plain)]
    assert vectors[0] == vectors[1]
    (item,) = api.ask(EMBED, input=[{"image": url}], dimensions=4, encoding_format="base64")["data"]
    found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    expected = np.array(vectors[0][:4])
    assert np.abs(found - expected / np.linalg.norm(expected)).max() <= 1e-5


@pytest.mark.parametrize(("kind", "positions"), [("vit", POSITIONS), ("deit", 11), ("deit-teacher", 11)])
def test_classes_of_images(kind: str, positions: int, apis: Callable[[str], Api]) -> None:
    api = apis(kind)
    images = [picture(1), picture(2)]
    body = api.ask(CLASSIFY, input=[{"image": data_url(image)} for image in images], top_k=2)
    for item, image in zip(body["data"], images, strict=True):
        expected = api.model.of_image(image).numpy()
        assert np.abs(np.array(item["probs"]) - expected).max() <= 1e-5
        assert item["label"] == LABELS[int(expected.argmax())]
        assert len(item["scores"]) == 2
    assert body["usage"]["prompt_tokens"] == 2 * positions


@pytest.mark.parametrize("kind", ["vit-vectors", "deit-vectors"])
def test_vectors_of_images(kind: str, apis: Callable[[str], Api]) -> None:
    images = [picture(1), picture(2, 90, 30)]
    body = apis(kind).ask(EMBED, input=[{"image": data_url(image)} for image in images])
    for item, image in zip(body["data"], images, strict=True):
        assert np.abs(np.array(item["embedding"]) - apis(kind).model.of_image(image).numpy()).max() <= 1e-5


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("content", "problem", "code"),
    [
        ("http://127.0.0.1:9/cat.png", "images are not downloaded", "image_url_not_fetched"),
        ("https://example.org/cat.png", "images are not downloaded", "image_url_not_fetched"),
        ("file:///etc/hostname", "images are not downloaded", "image_url_not_fetched"),
        (as_base64(bomb(20_000, 20_000)), "max_image_pixels", "image_too_large"),
        (as_base64(bomb(2**31 - 1, 2**31 - 1)), "max_image_pixels", "image_too_large"),
        ("A" * (14 * 2**20), "max_image_bytes", "image_too_large"),
        (as_base64(b"GIF89a nothing of the kind"), "cannot be read", "invalid_image"),
        (as_base64(file_of(picture(1), "PNG")[:500]), "damaged", "invalid_image"),
        ("?", "not valid base64", "invalid_image"),
    ],
)
def test_uploads_that_are_refused(apis: Callable[[str], Api], content: str, problem: str, code: str) -> None:
    """By themselves, and among others that are not to blame."""
    api = apis("clip")
    found = api.error(EMBED, input={"image": content})
    assert problem in found["message"]
    assert found["code"] == code
    found = api.error(EMBED, input=["a text", {"image": data_url(picture(1))}, {"image": content}])
    assert "(image 1 of the request)" in found["message"]
    assert not api.client.asked  # the engine never heard of it


def test_no_address_is_fetched(apis: Callable[[str], Api]) -> None:
    """A server that would answer hears nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        heard = threading.Event()

        def listen() -> None:
            try:
                server.accept()[0].close()
            except TimeoutError:
                return
            heard.set()

        thread = threading.Thread(target=listen)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/cat.png"
        assert apis("clip").error(EMBED, input={"image": url})["code"] == "image_url_not_fetched"
        thread.join()
        assert not heard.is_set()


def test_a_narrow_image_that_would_become_very_long(apis: Callable[[str], Api]) -> None:
    content = as_base64(file_of(PIL.Image.new("RGB", (1, 60_000)), "PNG"))
    found = apis("clip").error(EMBED, input={"image": content})
    assert "would be resized to 24 x 1440000" in found["message"]


def test_limits_of_the_service(tmp_path: Path) -> None:
    """--max-image-bytes and --max-image-pixels, named where they are exceeded."""
    api = Api(make_image_model("vit", tmp_path), max_image_bytes=4000, max_image_pixels=1999)
    assert "50 x 40 pixels, but at most 1999" in api.error(CLASSIFY, input={"image": data_url(picture(1))})["message"]
    noise = PIL.Image.effect_noise((90, 90), 60.0)
    assert "at most 4000 are allowed" in api.error(CLASSIFY, input={"image": data_url(noise)})["message"]
    assert api.ask(CLASSIFY, input={"image": data_url(picture(1, 40, 40))})["data"]
    api.workers.close()


def test_a_decoder_that_takes_too_long(apis: Callable[[str], Api], monkeypatch: pytest.MonkeyPatch) -> None:
    api = apis("vit")
    monkeypatch.setattr(reading, "TIME_LIMIT", 0.001)
    noise = PIL.Image.effect_noise((1500, 1500), 60.0)
    found = api.error(CLASSIFY, input={"image": data_url(noise)})
    assert found["code"] == "image_too_costly"
    assert "took more than 0.001 seconds" in found["message"]
    monkeypatch.undo()
    assert api.ask(CLASSIFY, input={"image": data_url(picture(1))})["data"]


def test_images_that_take_too_long_together(apis: Callable[[str], Api], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each takes 50 seconds: the fourth finds nothing left."""
    clock = count(0, 50)
    monkeypatch.setattr(reading, "monotonic", lambda: float(next(clock)))
    image = {"image": data_url(picture(1))}
    assert len(apis("vit").ask(CLASSIFY, input=[image] * 3)["data"]) == 3
    found = apis("vit").error(CLASSIFY, input=[image] * 4)
    assert found["code"] == "image_too_costly"
    assert found["message"].endswith("images took more than 120 seconds (image 3 of the request).")


def test_too_many_images(apis: Callable[[str], Api], monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files become as many pixels as large ones."""
    monkeypatch.setattr(reading, "MOST_PIXEL_BYTES", 2 * 4 * 3 * 24 * 24)
    image = {"image": data_url(picture(1, 1, 1))}
    found = apis("vit").error(CLASSIFY, input=[image] * 3)
    assert found["code"] == "too_many_images"
    assert "has 3 images, but at most 2 images of this model's size" in found["message"]
    assert len(apis("vit").ask(CLASSIFY, input=[image] * 2)["data"]) == 2


def test_inputs_of_kinds_that_a_model_does_not_read(apis: Callable[[str], Api]) -> None:
    vit, clip = apis("vit"), apis("clip")
    for given in ("a text", [1, 2], ["a text", {"image": data_url(picture(1))}]):
        assert vit.error(CLASSIFY, input=given)["code"] == "unsupported_input"
    answer = clip.post(CLASSIFY, input={"image": data_url(picture(1))})
    assert answer.json()["error"]["code"] == "unsupported_endpoint"
    refused = clip.post(EMBED, input={"image": data_url(picture(1))}, pooling="mean")
    assert "has its own head for vectors" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "given",
    [
        {"image": 3},
        {"image": ""},
        {"image": "a", "text": "b"},
        {"image_url": "a"},
        [{"image": "a"}, [1, "x"]],
        [{"image": None}],
    ],
)
def test_bodies_that_are_no_inputs(apis: Callable[[str], Api], given: Any) -> None:
    assert "input" in apis("clip").error(EMBED, input=given)["message"]
