"""Images to pixels: as `transformers` makes them, and within limits."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import transformers
from support.bombs import webp_promise
from transformers.image_utils import load_image

from engine.errors import InvalidRequestError, UnsupportedModelError
from engine.images.decoding import decode, read_text
from engine.images.preprocessing import preprocess
from engine.images.settings import Preprocessing, read_preprocessing

PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessorPil", {}),
    "vit-small": (
        "ViTImageProcessorPil",
        {"size": {"height": 30, "width": 20}, "resample": 0, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 1]},
    ),
    "vit-number": ("ViTImageProcessorPil", {"size": 40, "do_normalize": False}),
    "vit-unscaled": ("ViTImageProcessorPil", {"do_rescale": False, "resample": 1}),
    "vit-factor": ("ViTImageProcessorPil", {"rescale_factor": 1 / 127.5, "do_normalize": False, "resample": 4}),
    "deit": ("DeiTImageProcessorPil", {}),
    "deit-odd": (
        "DeiTImageProcessorPil",
        {"size": {"height": 41, "width": 33}, "crop_size": {"height": 20, "width": 15}},
    ),
    "clip": ("CLIPImageProcessorPil", {}),
    "clip-number": ("CLIPImageProcessorPil", {"size": 50, "crop_size": 47}),
    "clip-padded": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 20}, "crop_size": {"height": 33, "width": 24}}),
    "clip-as-it-is": ("CLIPImageProcessorPil", {"do_resize": False, "crop_size": {"height": 60, "width": 61}}),
    "siglip": ("SiglipImageProcessorPil", {}),
    "siglip-hamming": ("SiglipImageProcessorPil", {"size": {"height": 17, "width": 19}, "resample": 5}),
}  # fmt: skip
SIZES = ((64, 48), (48, 65), (300, 200), (33, 31), (1, 1), (5, 90))


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> PIL.Image.Image:
    """Colours that change from pixel to pixel, and slowly."""
    rng = np.random.default_rng(seed)
    bands = len(PIL.Image.new(mode, (1, 1)).getbands())
    slopes = np.linspace(0, 180, width)[None, :, None] + np.linspace(0, 40, height)[:, None, None]
    noise = rng.integers(0, 35, (height, width, bands))
    pixels = (slopes + noise).astype(np.uint8)
    return (
        PIL.Image.fromarray(pixels if bands > 1 else pixels[..., 0]).convert(mode)
        if mode != "CMYK"
        else (PIL.Image.fromarray(pixels, mode="CMYK"))
    )


def file_of(image: PIL.Image.Image, kind: str, **settings: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **settings)
    return buffer.getvalue()


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("saved_as", ["preprocessor_config.json", "processor_config.json"])
def test_pixels_equal_reference(name: str, saved_as: str, tmp_path: Path) -> None:
    """Every setting, on images of several sizes."""
    kind, settings = PROCESSORS[name]
    reference: Any = getattr(transformers, kind)(**settings)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    if saved_as == "processor_config.json":
        whole = {"image_processor": json.loads(file.read_text()), "processor_class": "CLIPProcessor"}
        (tmp_path / saved_as).write_text(json.dumps(whole))
        file.unlink()
    steps = read_preprocessing(tmp_path)
    assert steps is not None
    for width, height in SIZES:
        image = picture(width, height)
        expected = reference(image, return_tensors="np")["pixel_values"][0]
        found = preprocess(image, steps)
        assert found.dtype == np.float32
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= 1e-5
        assert steps.output in (None, found.shape[1:])


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "CLIP", "Siglip"])
def test_what_a_file_leaves_out(kind: str, tmp_path: Path) -> None:
    """The class's own settings; older files name a feature extractor."""
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": f"{kind}FeatureExtractor"})
    )
    steps = read_preprocessing(tmp_path)
    assert steps is not None
    reference: Any = getattr(transformers, f"{kind}ImageProcessorPil")()
    image = picture(260, 300)
    assert np.abs(preprocess(image, steps) - reference(image, return_tensors="np")["pixel_values"][0]).max() <= 1e-5


@pytest.mark.parametrize("kind", ["vit", "deit", "clip", "siglip"])
@pytest.mark.parametrize("named", ["model_type", "image_processor_type"])
def test_a_file_without_a_class(kind: str, named: str, tmp_path: Path) -> None:
    """It is the one that config.json names, or that of the model's type."""
    config = transformers.AutoConfig.for_model(kind)
    if named == "image_processor_type":
        kind = "deit" if kind == "vit" else "vit"
        config.image_processor_type = {"deit": "DeiTImageProcessor", "vit": "ViTImageProcessor"}[kind]
    config.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": true, "image_mean": [0.1, 0.2, 0.3]}')
    steps = read_preprocessing(tmp_path)
    assert steps is not None
    reference = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert type(reference).__name__.lower() == f"{kind}imageprocessorpil"
    image = picture(260, 300)
    assert np.abs(preprocess(image, steps) - reference(image, return_tensors="np")["pixel_values"][0]).max() <= 1e-5


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "CLIP"])
@pytest.mark.parametrize("switch", ["do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_pad"])
def test_a_switch_that_is_null_is_off(kind: str, switch: str, tmp_path: Path) -> None:
    values = {"image_processor_type": f"{kind}ImageProcessor", switch: None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    steps = read_preprocessing(tmp_path)
    assert steps is not None
    reference: Any = getattr(transformers, f"{kind}ImageProcessorPil").from_pretrained(tmp_path)
    expected = reference(picture(260, 300), return_tensors="np")["pixel_values"][0]
    found = preprocess(picture(260, 300), steps)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"image_processor_type": "BeitImageProcessor"}, "image_processor_type is 'BeitImageProcessor'; supported"),
        ({}, "has no image_processor_type, and model_type in config.json is None"),
        ({"image_processor_type": "Siglip2ImageProcessor"}, "image_processor_type is 'Siglip2ImageProcessor'"),
        ({"image_processor_type": "ViTImageProcessor", "do_pad": True}, "do_pad is true"),
        ({"image_processor_type": "ViTImageProcessor", "do_resize": 1}, "do_resize must be true or false; got 1"),
        ({"image_processor_type": "ViTImageProcessor", "size": {"longest_edge": 3}}, "size must be a number of pixels"),
        ({"image_processor_type": "ViTImageProcessor", "size": 10**9}, "up to 16384"),
        ({"image_processor_type": "CLIPImageProcessor", "crop_size": {"shortest_edge": 3}}, "crop_size must be"),
        ({"image_processor_type": "ViTImageProcessor", "resample": 9}, "resample must be one of .*, 0 to 5"),
        ({"image_processor_type": "ViTImageProcessor", "rescale_factor": "a"}, "rescale_factor must be a number"),
        ({"image_processor_type": "ViTImageProcessor", "image_mean": [1, 2]}, "image_mean must be a number for each"),
        ({"image_processor_type": "ViTImageProcessor", "image_std": [1, 0, 1]}, "image_std .*none 0"),
    ],
)  # fmt: skip
def test_settings_that_are_not_implemented(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match=problem):
        read_preprocessing(tmp_path)


def test_a_folder_without_settings(tmp_path: Path) -> None:
    assert read_preprocessing(tmp_path) is None


@pytest.mark.parametrize(
    ("mode", "kind", "settings"),
    [
        ("RGB", "PNG", {}),
        ("RGB", "JPEG", {"quality": 80}),
        ("L", "JPEG", {}),
        ("CMYK", "JPEG", {}),
        ("RGBA", "PNG", {}),
        ("LA", "PNG", {}),
        ("P", "GIF", {}),
        ("P", "PNG", {"transparency": 3}),
        ("1", "PNG", {}),
        ("RGBA", "WEBP", {"lossless": True}),
        ("RGB", "BMP", {}),
    ],
)
def test_files_as_the_reference_loads_them(mode: str, kind: str, settings: dict[str, Any]) -> None:
    """Grey, palettes, CMYK and what is transparent: as base64, and as a data: URL."""
    data = file_of(picture(21, 13, mode), kind, **settings)
    text = base64.b64encode(data).decode()
    for sent in (text, f"data:image/{kind.lower()};base64,{text}"):
        assert read_text(sent) == data
    expected = load_image(text)
    assert np.array_equal(np.asarray(decode(data)), np.asarray(expected))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_what_exif_says_of_the_way_up(orientation: int) -> None:
    exif = PIL.Image.Exif()
    exif[274] = orientation
    data = file_of(picture(20, 12), "JPEG", exif=exif, quality=95)
    found, expected = decode(data), load_image(base64.b64encode(data).decode())
    assert found.size == expected.size == ((12, 20) if orientation > 4 else (20, 12))
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_the_first_of_several_pictures() -> None:
    first, second = picture(9, 9, seed=1).convert("P"), picture(9, 9, seed=2).convert("P")
    data = file_of(first, "GIF", save_all=True, append_images=[second])
    assert np.array_equal(np.asarray(decode(data)), np.asarray(first.convert("RGB")))


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, all in a few bytes."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack("!I", len(content)) + name + content + struct.pack("!I", zlib.crc32(name + content))

    head = struct.pack("!IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "problem", "code"),
    [
        (bomb(10_000, 9_000), "10000 x 9000 pixels, but at most 32000000 are allowed", "image_too_large"),
        (
            bomb(2**31 - 1, 2**31 - 1),
            r"has (4611686014132420609|2147483647 x 2147483647) pixels, but at most 32000000",
            "image_too_large",
        ),
        (webp_promise(b"VP8X", 2**24), "has 16777216 x 16777216 pixels", "image_too_large"),
        (webp_promise(b"VP8L", 2**14), "has 16384 x 16384 pixels", "image_too_large"),
        (webp_promise(b"VP8 ", 2**14 - 1), "has 16383 x 16383 pixels", "image_too_large"),
        (b"no image at all", "not JPEG, PNG, WEBP, GIF, BMP, or it is damaged", "invalid_image"),
        (b"", "not JPEG", "invalid_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not JPEG", "invalid_image"),
        (file_of(picture(9, 9), "TIFF"), "not JPEG", "invalid_image"),
        (file_of(picture(90, 90), "PNG")[:900], "damaged", "invalid_image"),
        (file_of(picture(90, 90), "JPEG")[:700], "damaged", "invalid_image"),
        (file_of(PIL.Image.new("I;16", (9, 9)), "PNG"), "more than 8 bits a channel", "invalid_image"),
        (b"\0" * (10 * 2**20 + 1), "10485761 bytes, but at most 10485760", "image_too_large"),
    ],
)
def test_files_that_are_refused(data: bytes, problem: str, code: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as refused:
        decode(data)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("text", "problem", "code"),
    [
        (
            "http://127.0.0.1/a.png",
            r"not downloaded from URLs \(http:\)",
            "image_url_not_fetched",
        ),
        (" HTTPS://example.org/a.png", r"URLs \(https:\)", "image_url_not_fetched"),
        ("file:///etc/passwd", r"URLs \(file:\)", "image_url_not_fetched"),
        ("ftp://a/b", r"URLs \(ftp:\)", "image_url_not_fetched"),
        ("data:image/png,abc", "must use base64", "invalid_image"),
        ("data:text/html;base64,AAAA", "must start like data:image/png", "invalid_image"),
        ("not base64!", "not valid base64", "invalid_image"),
        ("AAA", "not valid base64", "invalid_image"),
        ("A" * (2**24), "bytes, but at most 10485760 are allowed", "image_too_large"),
    ],
)
def test_texts_that_hold_no_image(text: str, problem: str, code: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as refused:
        read_text(text)
    assert refused.value.code == code


def test_a_narrow_image_that_would_become_very_long() -> None:
    """The shorter side is enlarged, and the longer with it."""
    steps = Preprocessing(size=224, resample=3, crop=(224, 224), rescale=1 / 255, mean=None, std=None)
    with pytest.raises(InvalidRequestError, match=r"1 x 20000 pixels would be resized to 224 x 4480000"):
        preprocess(PIL.Image.new("RGB", (1, 20_000)), steps)
    assert preprocess(PIL.Image.new("RGB", (1, 300)), steps).shape == (3, 224, 224)
