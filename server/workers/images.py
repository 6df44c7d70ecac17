"""Decodes clients' images into the model's input. This is a worker's job, because a small file may contain a large
image, and decoders are the code that hostile files attack."""

from __future__ import annotations

import msgspec

from engine import InvalidRequestError
from engine.images import Cropping, Preprocessing, crop, decode, preprocess, read_text


def load_decoders() -> None:
    """Load the decoders before a worker is forked."""
    import PIL.Image

    PIL.Image.init()
    PIL.Image.MAX_IMAGE_PIXELS = None  # the image's own limit is checked before its pixels are decoded


class ImageInput(msgspec.Struct, array_like=True):
    """The input."""

    content: str  # a data: URL, or base64
    steps: Preprocessing  # the steps of the model's preprocessor
    max_bytes: int
    max_pixels: int


class Pixels(msgspec.Struct, array_like=True):
    """The result."""

    shape: tuple[int, int, int] = (0, 0, 0)  # channels, height, width
    data: bytes = b""  # float32, in this machine's byte order
    # problem, code: why it was refused, if it was
    problem: str | None = None
    code: str | None = None


def read_picture(picture: ImageInput) -> Pixels:
    """The pixels in the form that the model reads, or the reason why the image cannot be read."""
    try:
        image = decode(
            read_text(picture.content, max_bytes=picture.max_bytes),
            max_bytes=picture.max_bytes,
            max_pixels=picture.max_pixels,
        )
        pixels = preprocess(image, picture.steps, max_pixels=picture.max_pixels)
    except InvalidRequestError as refusal:
        return Pixels(problem=str(refusal), code=refusal.code)
    channels, height, width = pixels.shape
    return Pixels((channels, height, width), pixels.tobytes())


class ChatPicture(msgspec.Struct, array_like=True):
    """An image of a conversation."""

    content: str  # a data: URL, or base64
    cropping: Cropping  # of the model's processor
    alone: bool
    max_bytes: int
    max_pixels: int


class Crops(msgspec.Struct, array_like=True):
    """The crops of an image of a conversation."""

    shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # crops, channels, height, width
    size: tuple[int, int] = (0, 0)  # height and width of the image as it was sent
    tiles: tuple[int, int] = (0, 0)  # as of `CroppedImage`
    data: bytes = b""
    # problem, code: why it was refused, if it was
    problem: str | None = None
    code: str | None = None


def read_crops(picture: ChatPicture) -> Crops:
    """The crops that the model reads, or the reason why the image cannot be read."""
    try:
        image = decode(
            read_text(picture.content, max_bytes=picture.max_bytes),
            max_bytes=picture.max_bytes,
            max_pixels=picture.max_pixels,
        )
        made = crop(image, picture.cropping, alone=picture.alone, max_pixels=picture.max_pixels)
    except InvalidRequestError as refusal:
        return Crops(problem=str(refusal), code=refusal.code)
    count, channels, height, width = made.pixels.shape
    return Crops((count, channels, height, width), made.size, made.tiles, made.pixels.tobytes())
