"""Decodes image files to pixels, within limits that are checked before anything is decoded.

Nothing is ever fetched: a web address of an image is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
import warnings
from io import BytesIO
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_BYTES = 10 * 2**20
MAX_PIXELS = 32_000_000
PIXEL_BYTES = 24
"""Maximum bytes per pixel while decoding: WebP takes 16, because its decoder keeps two pictures; others take 4 to
12."""

# Modes with more than 8 bits, which no conversion to RGB keeps.
_DEEP = ("I", "F")
_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+)?((?:;[a-z0-9-]+=[^;,]*)*)(;base64)?,", re.IGNORECASE)
_ADDRESS = re.compile(r"\s*([a-z][a-z0-9+.-]*):", re.IGNORECASE)


def read_text(text: str, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The file in a `data:` URL or in base64. Raises InvalidRequestError if the text is another kind of address, is no
    valid base64, or exceeds `max_bytes`."""
    found = _DATA_URL.match(text[:256])
    if found is not None:
        if found[3] is None:
            raise _refused("a data: URL of an image must use base64: data:image/png;base64,...")
        text = text[found.end() :]
    elif (address := _ADDRESS.match(text[:64])) is not None:
        scheme = address[1].lower()
        if scheme == "data":
            raise _refused("a data: URL of an image must start like data:image/png;base64,...")
        raise _refused(
            f"images are not downloaded from URLs ({scheme}:). Send the file itself, as a data: URL or as base64.",
            code="image_url_not_fetched",
        )
    most = 4 * -(-max_bytes // 3) + 4
    if len(text) > most + len(text) // 32:  # lines may be broken
        raise _too_large(3 * len(text) // 4, max_bytes)
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"the image is not valid base64 ({error}).") from error
    if len(data) > max_bytes:
        raise _too_large(len(data), max_bytes)
    return data


def data_of(text: str, most: int) -> str:
    """The first base64 characters of an image, which is a `data:` URL or plain base64."""
    found = _DATA_URL.match(text[:256])
    start = 0 if found is None else found.end()
    return text[start : start + most]


def decode(data: bytes, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS) -> Image:
    """The first image of a file, in RGB, rotated as its EXIF data says. As `transformers` loads it. Raises
    InvalidRequestError if the image exceeds a limit, has an unsupported format, is damaged, or has more than 8 bits per
    channel."""
    import PIL.Image
    import PIL.ImageOps

    if len(data) > max_bytes:
        raise _too_large(len(data), max_bytes)
    if (size := webp_size(data)) is not None:  # Pillow allocates memory for all pixels when it opens such a file
        _check_size(*size, max_pixels)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit applies instead
            image: Any = PIL.Image.open(BytesIO(data), formats=FORMATS)
    except MemoryError:
        raise
    except PIL.Image.DecompressionBombError as error:
        found = re.search(r"(\d+) pixels", str(error))
        raise _too_many_pixels(found[0] if found else "far too many pixels", max_pixels) from error
    except Exception as error:  # a decoder may raise anything for a file of another format
        _check_unpacked(error)
        raise _refused(f"the image cannot be read: it is not {', '.join(FORMATS)}, or it is damaged.") from error
    check_pixels(image, max_pixels)
    try:
        image.load()
        _check_depth(image)
        PIL.ImageOps.exif_transpose(image, in_place=True)
        turned: Image = image if image.mode == "RGB" else image.convert("RGB")
        return turned
    except (MemoryError, InvalidRequestError):
        raise
    except Exception as error:
        _check_unpacked(error)
        raise _refused(f"the image is damaged: {str(error) or type(error).__name__}.") from error


def rgb(image: Image) -> Image:
    """A PIL image in RGB, rotated as its EXIF data says. Raises InvalidRequestError if it has more than 8 bits per
    channel."""
    import PIL.ImageOps

    _check_depth(image)
    return PIL.ImageOps.exif_transpose(image).convert("RGB")


def check_pixels(image: Image, max_pixels: int = MAX_PIXELS) -> None:
    """Refuse an image with too many pixels before they are decoded. Raises InvalidRequestError if it has too many."""
    _check_size(image.width, image.height, max_pixels)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if not width * height:
        raise _refused(f"the image is empty: its size is {width} x {height}.")
    if width * height > max_pixels:
        raise _too_many_pixels(f"{width} x {height} pixels", max_pixels)


def _check_depth(image: Image) -> None:
    if image.mode in _DEEP or image.mode.startswith("I;"):
        raise _refused(
            f"the image has more than 8 bits a channel (Pillow's mode {image.mode}), which is not implemented. "
            "Convert it to 8 bits."
        )


def _check_unpacked(error: Exception) -> None:
    """Refuse an image that exceeds Pillow's limit on compressed data beside the pixels of a PNG."""
    if "MAX_TEXT" not in str(error):
        return
    from PIL.PngImagePlugin import MAX_TEXT_CHUNK, MAX_TEXT_MEMORY

    raise _refused(
        f"a text or colour profile in the image unpacks to more than {MAX_TEXT_CHUNK} bytes, or all of them to more "
        f"than {MAX_TEXT_MEMORY}. Save the image without them.",
        code="image_too_large",
    ) from error


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height from a WebP file's first chunk (RFC 9649); None if it has none, or for other files."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
            return width, height
    return None


def _too_many_pixels(found: str, most: int) -> InvalidRequestError:
    return _refused(
        f"the image has {found}, but at most {most} are allowed (max_image_pixels). Make it smaller, or raise "
        "--max-image-pixels.",
        code="image_too_large",
    )


def _too_large(size: int, most: int) -> InvalidRequestError:
    return _refused(
        f"the image has {size} bytes, but at most {most} are allowed (max_image_bytes). Make it smaller, or raise "
        "--max-image-bytes.",
        code="image_too_large",
    )


def _refused(message: str, code: str = "invalid_image") -> InvalidRequestError:
    return InvalidRequestError(message, param="input", code=code)
