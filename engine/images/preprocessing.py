"""An encoder's input from an image's pixels, computed like the PIL backend of `transformers`' image processors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequestError
from engine.images.decoding import MAX_PIXELS
from engine.images.settings import Preprocessing

if TYPE_CHECKING:
    from PIL.Image import Image


def preprocess(image: Image, steps: Preprocessing, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.float32]:
    """float32 [3, height, width] of an image in RGB. Raises InvalidRequestError: as `shaped`."""
    pixels: NDArray[Any] = shaped(image, steps, max_pixels=max_pixels)
    if steps.rescale is not None:
        pixels = (pixels.astype(np.float64) * steps.rescale).astype(np.float32)
    pixels = pixels.astype(np.float32)
    if steps.mean is not None:
        mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (steps.mean, steps.std))
        pixels = (pixels - mean) / std
    return np.ascontiguousarray(pixels)


def shaped(image: Image, steps: Preprocessing, *, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """uint8 [3, height, width] of an image in RGB, resized and cropped. `max_pixels`: maximum pixels after resizing,
    because a very narrow image becomes very long. Raises InvalidRequestError if the resized image exceeds it."""
    if steps.turns and steps.fit is not None and _lies(steps.fit[::-1]) * _lies(image.size) < 0:
        image = image.rotate(-90, expand=True)
    if steps.size is not None:
        height, width = _resized(image.height, image.width, steps.size)
        if height * width > max(max_pixels, 1 << 20):
            raise InvalidRequestError(
                f"the image of {image.width} x {image.height} pixels would be resized to {width} x {height}, but at "
                f"most {max_pixels} pixels are allowed (max_image_pixels). Crop the longer side.",
                param="input",
                code="image_too_large",
            )
        image = image.resize((width, height), resample=steps.resample)
    if steps.fit is not None:
        image = _within(image, steps.fit, steps.resample)
    pixels: NDArray[np.uint8] = np.moveaxis(np.asarray(image), -1, 0)
    if steps.fit is not None:
        return _surrounded(pixels, steps.fit)
    return pixels if steps.crop is None else _middle(pixels, steps.crop)


def _resized(height: int, width: int, size: tuple[int, int] | int) -> tuple[int, int]:
    if isinstance(size, tuple):
        return size
    short, long = sorted((height, width))
    longer = int(size * long / short)
    return (longer, size) if width <= height else (size, longer)


def _lies(size: tuple[int, int]) -> int:
    """The orientation: 1 if the first side is longer, -1 if it is shorter, 0 for a square."""
    return (size[0] > size[1]) - (size[0] < size[1])


def _within(image: Image, size: tuple[int, int], resample: int) -> Image:
    """The image, reduced to fit into a height and a width if it is larger."""
    height, width = min(image.height, size[0]), min(image.width, size[1])
    if (height, width) == (image.height, image.width):
        return image
    if image.height > image.width:
        width = int(image.width * height / image.height)
    elif image.width > image.height:
        height = int(image.height * width / image.width)
    return image.resize((max(width, 1), max(height, 1)), resample=resample)


def _surrounded(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Pixels [channels, height, width], padded with zeros on all sides to a height and a width."""
    lacking = [wanted - have for wanted, have in zip(size, pixels.shape[1:], strict=True)]
    return np.pad(pixels, [(0, 0), *((number // 2, number - number // 2) for number in lacking)])


def _middle(pixels: NDArray[Any], crop: tuple[int, int]) -> NDArray[Any]:
    """[channels, *crop] of the middle; a smaller image is surrounded by zeros."""
    for axis, wanted in enumerate(crop, start=1):
        have = pixels.shape[axis]
        if have < wanted:
            before = math.ceil((wanted - have) / 2)
            widths = [(0, 0)] * 3
            widths[axis] = (before, wanted - have - before)
            pixels = np.pad(pixels, widths)
        else:
            first = (have - wanted) // 2
            pixels = pixels.take(range(first, first + wanted), axis=axis)
    return pixels
