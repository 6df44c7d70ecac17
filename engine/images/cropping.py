"""An image's crops, as the PIL backends of `transformers`' processors of vision-language models cut them, and the
tokens that stand for them in a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from engine.errors import InvalidRequestError
from engine.images.crop_settings import Cropping, PanAndScan
from engine.images.decoding import MAX_PIXELS
from engine.images.preprocessing import shaped
from engine.images.settings import Preprocessing
from engine.interface.vision import MOST_RATIO, Fitted, Pixels, PlacedImage, Size, Tiling, VisionInfo

if TYPE_CHECKING:
    from PIL.Image import Image


_LONGEST = 4096  # pixels of a side


@dataclass(frozen=True, slots=True, eq=False)
class CroppedImage:
    """An image that has no place in a prompt yet."""

    pixels: Any  # uint8 [crops, 3, height, width]
    size: Size  # height and width of the image as it was sent
    # rows and columns of crops beside the one that shows the whole image, where crops have texts around them
    tiles: Size = (0, 0)


def crop(image: Image, cropping: Cropping, *, alone: bool, max_pixels: int = MAX_PIXELS) -> CroppedImage:
    """The crops of an image in RGB. `max_pixels`: that it may have after it is resized. Raises InvalidRequestError if
    it would have more."""
    size, steps = (image.height, image.width), cropping.steps
    if cropping.fitted is not None:
        return _keep_shape(image, steps, cropping.fitted)
    if cropping.most:
        return _arrange(image, cropping, max_pixels)
    if cropping.longest:
        return _cut(image, cropping, max_pixels)
    if cropping.scans is not None:
        return _scan(image, steps, cropping.scans, max_pixels)
    if not cropping.sizes or (cropping.tiles == "alone" and not alone):
        if cropping.square is not None:
            image = _squared(image, cropping.square, max_pixels)
        return CroppedImage(shaped(image, steps, max_pixels=max_pixels)[None], size)
    rows, columns = Tiling(sizes=cropping.sizes).best(size)
    height, width = _fitted(size, (rows, columns))
    inner = image.resize((width, height), resample=steps.resample)
    canvas = _canvas(inner, (rows, columns), (0, 0, 0))
    tile = cropping.tile
    small = steps.size if isinstance(steps.size, tuple) else (steps.size or tile, steps.size or tile)
    parts = [image.resize(small[::-1], resample=steps.resample)]
    parts += [
        canvas.crop((left, top, left + tile, top + tile))
        for top in range(0, rows, tile)
        for left in range(0, columns, tile)
    ]
    return CroppedImage(np.stack([shaped(part, steps, max_pixels=max_pixels) for part in parts]), size)


def _keep_shape(image: Image, steps: Preprocessing, fitted: Fitted) -> CroppedImage:
    """An image of its own size (`Qwen2VLImageProcessorPil`)."""
    size = image.height, image.width
    if max(size) > MOST_RATIO * min(size):
        raise InvalidRequestError(
            f"the image has {image.width} x {image.height} pixels, but this model reads images whose longer side is at "
            f"most {MOST_RATIO} times the shorter one. Crop the longer side.",
            param="input",
            code="invalid_image",
        )
    image = image.resize(fitted.size(size)[::-1], resample=steps.resample)
    return CroppedImage(shaped(image, steps)[None], size, fitted.grid(size))


def _arrange(image: Image, cropping: Cropping, max_pixels: int) -> CroppedImage:
    """The tiles of an image, and last the whole (`GotOcr2ImageProcessorPil.crop_image_to_patches`)."""
    size, steps, tile = (image.height, image.width), cropping.steps, cropping.tile
    columns, rows = _arrangement(size, cropping)
    if rows * columns == 1:
        return CroppedImage(shaped(image, steps, max_pixels=max_pixels)[None], size)
    large = image.resize((columns * tile, rows * tile), resample=steps.resample)
    parts = [
        large.crop((column * tile, row * tile, (column + 1) * tile, (row + 1) * tile))
        for row in range(rows)
        for column in range(columns)
    ]
    crops = np.stack([shaped(part, steps, max_pixels=max_pixels) for part in [*parts, image]])
    return CroppedImage(crops, size, (rows, columns))


def _arrangement(size: Size, cropping: Cropping) -> tuple[int, int]:
    """Columns and rows of tiles, of about the image's shape; of several that are as near, the last one that is less
    than twice as large as the image."""
    height, width = size
    most = cropping.most
    shapes = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    best, least = (1, 1), math.inf
    for columns, rows in sorted(shapes, key=math.prod):
        if not cropping.least <= columns * rows <= most:
            continue
        difference = abs(width / height - columns / rows)
        if difference < least:
            best, least = (columns, rows), difference
        elif difference == least and width * height > 0.5 * cropping.tile**2 * columns * rows:
            best = columns, rows
    return best


def _cut(image: Image, cropping: Cropping, max_pixels: int) -> CroppedImage:
    """The squares of an image, and last the whole (`Idefics3ImageProcessorPil`)."""
    size, steps, tile = (image.height, image.width), cropping.steps, cropping.tile
    if cropping.longest > 0:
        height, width = _rescaled(size, cropping.longest)
        image = image.resize((width, height), resample=steps.resample)
    if cropping.splits:
        height, width = _in_tiles((image.height, image.width), tile)
        if height * width > max(max_pixels, 1 << 20):
            _too_long(image, max(height, width), max_pixels)
        image = image.resize((width, height), resample=steps.resample)
    rows, columns = image.height // tile, image.width // tile
    if not cropping.splits or rows * columns <= 1:
        return CroppedImage(shaped(image, steps, max_pixels=max_pixels)[None], size)
    parts = [
        image.crop((column * tile, row * tile, (column + 1) * tile, (row + 1) * tile))
        for row in range(rows)
        for column in range(columns)
    ]
    crops = np.stack([shaped(part, steps, max_pixels=max_pixels) for part in [*parts, image]])
    return CroppedImage(crops, size, (rows, columns))


def _scan(image: Image, steps: Preprocessing, scans: PanAndScan, max_pixels: int) -> CroppedImage:
    """The whole of an image, and its parts if it is long (`Gemma3ImageProcessorPil.pan_and_scan`)."""
    size, short, long = (image.height, image.width), *sorted(image.size)
    parts, wide = [image], image.width >= image.height
    count = 0
    if long / short >= scans.ratio:
        count = min(max(2, min(math.floor(long / scans.least), math.floor(long / short + 0.5))), scans.most)
    each = math.ceil(long / count) if count else 0
    if min(each, short) < scans.least:
        count = 0
    for start in range(0, each * count, each or 1):
        end = min(start + each, long)
        parts.append(image.crop((start, 0, end, short) if wide else (0, start, short, end)))
    crops = np.stack([shaped(part, steps, max_pixels=max_pixels) for part in parts])
    return CroppedImage(crops, size, (1, count) if wide else (count, 1))


def _rescaled(size: Size, longest: int) -> Size:
    """Height and width of an image whose longer side becomes `longest`, at most 4096."""
    height, width = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LONGEST:
        width, height = _LONGEST, int(_LONGEST / ratio)
    elif height > width and height > _LONGEST:
        height, width = _LONGEST, int(_LONGEST * ratio)
    return max(height, 1), max(width, 1)


def _in_tiles(size: Size, tile: int) -> Size:
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / ratio) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * ratio) / tile) * tile


def expand(text: str, token: str, images: Sequence[CroppedImage], info: VisionInfo) -> str:
    """A prompt's text with an image token for each crop of its images, where each has a text around it. `text`: with
    one mark (`VisionInfo.mark`) for each image. Raises InvalidRequestError: as `place`. Image tokens of the text do not
    count as those of crops."""
    mark = info.mark(token)
    if info.texts is None:
        return text
    _check_marks(text.count(mark), len(images))
    before, *rest = text.split(mark)
    if info.leading is not None:
        rest[-1] = info.leading.around(rest[-1])
    return before + "".join(
        info.texts.text(token, image.tiles) + after for image, after in zip(images, rest, strict=True)
    )


def place(ids: Sequence[int], images: Sequence[CroppedImage], info: VisionInfo) -> tuple[list[int], list[PlacedImage]]:
    """A prompt's tokens with as many image tokens for each image as it has vectors, and where these are. Raises
    InvalidRequestError if there are more or fewer image tokens than images."""
    if info.lined is not None:
        return list(ids), _placed(ids, images, info)
    if info.texts is not None:
        images = [CroppedImage(one[None], info.crop) for image in images for one in image.pixels]
    marks = [index for index, token in enumerate(ids) if token == info.token_id]
    _check_marks(len(marks), len(images))
    expanded: list[int] = []
    placed: list[PlacedImage] = []
    before = 0
    for mark, image in zip(marks, images, strict=True):
        expanded += ids[before:mark]
        count = info.count(len(image.pixels), image.size)
        placed.append(PlacedImage(len(expanded), count, image.pixels, image.size))
        expanded += [info.token_id] * count
        before = mark + 1
    return [*expanded, *ids[before:]], placed


def _placed(ids: Sequence[int], images: Sequence[CroppedImage], info: VisionInfo) -> list[PlacedImage]:
    """The places of a prompt's images, if the prompt has an image token for each of their vectors."""
    marks = [index for index, token in enumerate(ids) if token == info.token_id]
    counts = [info.count(1, image.size) for image in images]
    if len(marks) != sum(counts):
        raise InvalidRequestError(
            f"the prompt has {len(marks)} image tokens for images of {sum(counts)}. Its own text must have none.",
            param="images",
            code="invalid_value",
        )
    placed, start = list[PlacedImage](), 0
    for image, count in zip(images, counts, strict=True):
        first, last = marks[start], marks[start + count - 1]
        placed.append(PlacedImage(first, last - first + 1, image.pixels, image.size))
        start += count
    return placed


def _check_marks(marks: int, images: int) -> None:
    if marks != images:
        raise InvalidRequestError(
            f"the prompt has {marks} image tokens for {images} images. The chat template, or the text, must "
            "have one for each image, and no others.",
            param="images",
            code="invalid_value",
        )


def pixels_of_bytes(data: bytes, shape: Sequence[int]) -> Pixels:
    """Crops that another process has made."""
    return np.frombuffer(data, np.uint8).reshape(shape)


def _fitted(size: Size, target: Size) -> Size:
    """The largest size of the same shape within the target (`get_patch_output_size` of `transformers`)."""
    height, width = size
    across, down = target[1] / width, target[0] / height
    if across < down:
        return min(math.ceil(height * across), target[0]), target[1]
    return target[0], min(math.ceil(width * down), target[1])


def _squared(image: Image, colour: tuple[int, ...], max_pixels: int) -> Image:
    side = max(image.size)
    if side == min(image.size):
        return image
    if side * side > max(max_pixels, 1 << 20):
        _too_long(image, side, max_pixels)
    return _canvas(image, (side, side), colour)


def _canvas(image: Image, size: Size, colour: tuple[int, ...]) -> Image:
    import PIL.Image

    canvas = PIL.Image.new("RGB", size[::-1], colour)
    canvas.paste(image, ((size[1] - image.width) // 2, (size[0] - image.height) // 2))
    return canvas


def _too_long(image: Image, side: int, most: int) -> NoReturn:
    raise InvalidRequestError(
        f"the image of {image.width} x {image.height} pixels would be a square of {side} x {side}, but at most {most} "
        "pixels are allowed (max_image_pixels). Crop the longer side.",
        param="input",
        code="image_too_large",
    )
