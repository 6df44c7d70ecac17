"""Sizes in headers are those that Pillow decodes."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from support.seeing import picture

from engine.images import header_size, likely_tokens
from engine.images.crop_settings import Cropping
from engine.images.settings import Preprocessing
from engine.interface.vision import Fitted, VisionInfo

FORMATS: dict[str, dict[str, Any]] = {
    "PNG": {}, "GIF": {}, "BMP": {}, "JPEG": {"icc_profile": bytes(20_000)}, "WEBP": {"lossless": True},
}  # fmt: skip


def encoded(width: int, height: int, format: str, **options: Any) -> str:
    file = io.BytesIO()
    picture(width, height).save(file, format, **options)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("format", FORMATS)
def test_formats(format: str) -> None:
    for width, height in ((1, 1), (3, 5), (700, 3), (300, 257)):
        text = encoded(width, height, format, **FORMATS[format])
        url = f"data:image/{format.lower()};base64,{text}"
        assert header_size(text) == header_size(url) == (height, width)
    for kind in ({"progressive": True}, {"quality": 1}, {"exif": bytes(3000)}):
        assert header_size(encoded(21, 17, "JPEG", **kind)) == (17, 21)
    assert header_size(encoded(21, 17, "WEBP")) == (17, 21)


@pytest.mark.parametrize("order", [b"II*\0", b"MM\0*"])
def test_orientation(order: bytes) -> None:
    """A JPEG that its EXIF data turn has the size that it has afterwards."""
    for orientation in range(10):
        exif = PIL.Image.Exif()
        exif.endian = "<" if order[:1] == b"I" else ">"
        exif[0x010F], exif[0x0112] = "maker", orientation
        data = exif.tobytes()
        assert order in data
        text = encoded(21, 17, "JPEG", exif=data)
        found = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(base64.b64decode(text))))
        assert header_size(text) == (found.height, found.width)
        for cut in range(12, len(data)):
            assert header_size(encoded(21, 17, "JPEG", exif=data[:cut])) in ((17, 21), (21, 17))


def test_damage() -> None:
    """A header without a size is no error."""
    rng = np.random.default_rng(0)
    whole = base64.b64decode(encoded(30, 20, "JPEG"))
    for text in ("", "https://example.org/cat.png", "data:image/png,x", "%%%%", base64.b64encode(whole[:9]).decode()):
        assert header_size(text) is None
    png = base64.b64decode(encoded(30, 20, "PNG"))
    assert header_size(base64.b64encode(png.replace(b"IHDR", b"tEXt")).decode()) is None
    for start in (b"\xff\xd8\xff", b"RIFF....WEBPVP8 ", b"BM", b"GIF89a", b"\x89PNG\r\n\x1a\n"):
        for length in (0, 3, 20, 300):
            found = header_size(base64.b64encode(start + rng.bytes(length)).decode())
            assert found is None or min(found) > 0


def test_likely_tokens() -> None:
    """Those of a known size, at most those of any image."""
    steps = Preprocessing(size=None, resample=3, crop=None, rescale=None, mean=None, std=None)
    fitted = Fitted(28, 4 * 28**2, 100 * 28**2)
    info = VisionInfo(token_id=1, channels=3, crop=(0, 0), grid=(0, 0), fitted=fitted)
    cropping = Cropping(steps=steps, fitted=fitted)
    assert likely_tokens(info, cropping, (56, 84)) == 6
    assert likely_tokens(info, cropping, None) == likely_tokens(info, cropping, (1, 300)) == fitted.most_vectors
    assert likely_tokens(info, cropping, (9000, 9000)) == 100
