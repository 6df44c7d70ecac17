"""Images among the tokens of a prompt: what a model makes of one, and how requests bring them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequestError

Pixels = NDArray[np.uint8]
"""[crops, channels, height, width]."""
Size = tuple[int, int]
"""Height and width, in pixels."""
TwoWay = Literal["image", "prompt"]
"""The tokens that see each other in both directions: those of an image, or all of a prompt with images."""

KEY_BYTES = 20
MOST_RATIO = 200
"""Limits of an image's sides, if it keeps its shape."""
MOST_CROP_BYTES = 256 * 2**20
"""Most bytes of all crops of one request."""
_NORMALISED = 1 << 18  # numbers that are normalised at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """An image becomes a small version of the whole and tiles of a larger version (LLaVA-NeXT). The tiles' vectors form
    one large grid, without the rows or columns that show padding, and each row of it ends with a learned vector."""

    # heights and widths, in pixels, that an image may be fitted into, for as many tiles as they have
    sizes: tuple[Size, ...]
    most: int | None = None  # a grid with more vectors than this number of tiles has is made smaller; None: no limit

    def best(self, size: Size) -> Size:
        """The size that shows most of an image and wastes least (`select_best_resolution` of `transformers`)."""
        height, width = size
        found, most, least = self.sizes[0], 0, math.inf
        for rows, columns in self.sizes:
            scale = min(columns / width, rows / height)
            effective = min(int(width * scale) * int(height * scale), width * height)
            wasted = rows * columns - effective
            if effective > most or (effective == most and wasted < least):
                found, most, least = (rows, columns), effective, wasted
        return found


@dataclass(frozen=True, slots=True)
class Fitted:
    """An image keeps its shape: it is resized so that a whole number of squares of `unit` pixels a side fills it. Each
    square becomes a vector (Qwen2-VL).

    Attributes:
        least, most: pixels of the result.
        longest: maximum pixels of the longer side; replaces `least` and `most` (Pixtral). 0 for none.
        frames: an image counts against `least` and `most` as often as it is repeated.
        grows: an image with a side of less than a square is enlarged first: each such side, with the other one rounded,
            or both sides at once, rounded down. "": it is not.
    """

    unit: int
    least: int = 0
    most: int = 0
    longest: int = 0
    frames: int = 1
    grows: Literal["", "sides", "whole"] = ""

    def size(self, size: Size) -> Size:
        """Height and width after that (`smart_resize` and `get_resize_output_image_size` of `transformers`)."""
        height, width, unit = *size, self.unit
        if self.longest:
            shrink = max(height / self.longest, width / self.longest, 1.0)
            return (-(-max(int(height / shrink), 1) // unit) * unit, -(-max(int(width / shrink), 1) // unit) * unit)
        height, width = self._grown(size)
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        pixels = self.frames * rows * columns
        if pixels > self.most:
            shrink = math.sqrt(self.frames * height * width / self.most)
            rows, columns = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        elif pixels < self.least:
            growth = math.sqrt(self.least / (self.frames * height * width))
            rows, columns = (math.ceil(side * growth / unit) * unit for side in (height, width))
        return rows, columns

    def _grown(self, size: Size) -> Size:
        """Height and width of an image that has a whole square."""
        (height, width), unit = size, self.unit
        if self.grows == "sides":
            if height < unit:
                height, width = unit, round(width * unit / height)
            if width < unit:
                height, width = round(height * unit / width), unit
        elif self.grows == "whole" and min(size) < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        return height, width

    def grid(self, size: Size) -> Size:
        """Rows and columns of vectors."""
        height, width = self.size(size)
        return height // self.unit, width // self.unit

    @property
    def most_vectors(self) -> int:
        """No image has more."""
        if self.longest:
            return math.ceil(self.longest / self.unit) ** 2
        long, least, most = math.sqrt(MOST_RATIO), self.least / self.frames, self.most / self.frames
        grown = least + self.unit * (long + 1 / long) * math.sqrt(least) + self.unit**2
        return int(max(most, self.unit * long * math.sqrt(most), grown)) // self.unit**2


@dataclass(frozen=True, slots=True)
class Surrounds:
    """The texts around the crops of an image, each of which has image tokens of its own (Idefics 3)."""

    apart: str = "<fake_token_around_image>"  # stands before each crop, and after the last
    whole: str = "<global-img>"  # before the crop that shows the whole image, which is the last

    def text(self, token: str, tiles: Size) -> str:
        """An image's text, with one image token for each crop. `tiles`: rows and columns of crops before the one that
        shows the whole image."""
        rows, columns = tiles
        made = ""
        for row in range(1, rows + 1):
            made += "".join(f"{self.apart}<row_{row}_col_{column}>{token}" for column in range(1, columns + 1)) + "\n"
        return f"{made}{chr(10) if rows else ''}{self.apart}{self.whole}{token}{self.apart}"


@dataclass(frozen=True, slots=True)
class Framed:
    """The texts around the crops of an image, the first of which shows the whole image (Gemma 3)."""

    mark: str = "<start_of_image>"  # stands in a prompt for an image
    end: str = "<end_of_image>"  # stands after the vectors of a crop

    def text(self, token: str, tiles: Size) -> str:
        """An image's text, with one image token for each crop. `tiles`: rows and columns of crops after the one that
        shows the whole image."""
        one = f"\n\n{self.mark}{token}{self.end}\n\n"
        count = tiles[0] * tiles[1]
        if not count:
            return one
        return (
            f"Here is the original image {one} and here are some crops to help you see better {' '.join([one] * count)}"
        )


@dataclass(frozen=True, slots=True)
class Enclosed:
    """The texts around all crops of an image, the last of which shows the whole image (InternVL)."""

    before: str = "<img>"
    after: str = "</img>"

    def text(self, token: str, tiles: Size) -> str:
        """An image's text, with one image token for each crop. `tiles`: rows and columns of crops before the one that
        shows the whole image."""
        return self.before + token * (tiles[0] * tiles[1] + 1) + self.after


@dataclass(frozen=True, slots=True)
class Lined:
    """The texts among the vectors of an image of its own size: one after each row of them (Pixtral)."""

    apart: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"  # after the last row

    def text(self, token: str, tiles: Size) -> str:
        """An image's text, with an image token for each vector. `tiles`: their rows and columns."""
        rows, columns = tiles
        return self.apart.join([token * columns] * rows) + self.end


@dataclass(frozen=True, slots=True)
class Leading:
    """The texts around a prompt's text after its images (PaliGemma)."""

    begin: str = "<bos>"  # stands after the last image
    end: str = "\n"  # stands at the end

    def text(self, token: str, tiles: Size) -> str:
        """An image's text."""
        return token

    def around(self, text: str) -> str:
        """The text after the last image, with the texts around it."""
        return self.begin + text + self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """The tokens that stand for images.

    Attributes:
        token_id: stands in a prompt wherever a vector of an image goes.
        newline: a learned vector ends rows (`Tiling`), and follows the vectors of an image that is one crop.
        tiling: how an image becomes several crops; None: it is one.
        surrounds: the texts around crops that are separate images among the tokens; None: there are none.
        frame, enclosed, leading: the same, for other families.
        lined: the texts among an image's vectors; None: there are none.
        two_way: the tokens that see each other in both directions in the decoder: those of an image, or of a prompt
            with images. One step computes all of them that are missing.
        axes: positions of tokens have three axes: in an image time, row and column.
    """

    token_id: int
    newline: bool = False
    tiling: Tiling | None = None
    surrounds: Surrounds | None = None
    frame: Framed | None = None
    enclosed: Enclosed | None = None
    lined: Lined | None = None
    leading: Leading | None = None
    two_way: TwoWay | None = None
    axes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInfo(ImageTokens):
    """The images that a model reads among its tokens.

    Attributes:
        channels, crop: of what the tower reads at a time.
        grid: rows and columns of the vectors of a crop.
        first: vectors before those of the grid.
        fitted: an image is one crop of its own size; None: crops have the size `crop`.
        rescale, mean, std: turn numbers from 0 to 255 into the tower's; None for a step that is left out.
    """

    channels: int
    crop: Size
    grid: Size
    first: int = 0
    fitted: Fitted | None = None
    rescale: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def texts(self) -> Surrounds | Framed | Enclosed | Lined | Leading | None:
        """The texts around crops that are separate images among the tokens, or among an image's vectors."""
        return self.surrounds or self.frame or self.enclosed or self.lined or self.leading

    def mark(self, token: str) -> str:
        """The text that stands for an image in a prompt; `token`: the image token's."""
        return token if self.frame is None else self.frame.mark

    def crops(self, size: Size) -> int:
        """The number of crops of an image that is cut into tiles."""
        if self.tiling is None:
            return 1
        rows, columns = self.tiles(size)
        return 1 + rows * columns

    def tiles(self, size: Size) -> Size:
        """Rows and columns of tiles of an image."""
        assert self.tiling is not None
        height, width = self.tiling.best(size)
        return height // self.crop[0], width // self.crop[1]

    def shown(self, size: Size) -> tuple[int, int, Size]:
        """The part of the grid of all tiles' vectors without padding: its first row, its first column, its size in
        rows and columns."""
        rows, columns = (count * each for count, each in zip(self.tiles(size), self.grid, strict=True))
        height, width = size
        if width / height > columns / rows:
            before = (rows - int(round(height * (columns / width), 7))) // 2
            return before, 0, (rows - 2 * before, columns)
        before = (columns - int(round(width * (rows / height), 7))) // 2
        return 0, before, (rows, columns - 2 * before)

    def reduced(self, grid: Size) -> Size:
        """The rows and columns that are left of a grid of all tiles' vectors."""
        if self.tiling is None or self.tiling.most is None:
            return grid
        ratio = math.sqrt(grid[0] * grid[1] / (self.tiling.most * self.grid[0] ** 2))
        return (int(grid[0] // ratio), int(grid[1] // ratio)) if ratio > 1.1 else grid

    def count(self, crops: int, size: Size) -> int:
        """The number of vectors of an image.

        Args:
            size: of the image as it was sent.
        """
        if self.fitted is not None:
            return math.prod(self.fitted.grid(size))
        one = self.first + self.grid[0] * self.grid[1]
        if crops == 1:
            return one + self.newline
        rows, columns = self.reduced(self.shown(size)[2])
        return one + rows * (columns + 1)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image of a prompt.

    Attributes:
        offset, length: the tokens among which its vectors go, in the places of those that stand for an image.
        pixels: uint8 [crops, channels, height, width], as `engine.images` makes them.
        size: height and width of the image as it was sent.
    """

    offset: int
    length: int
    pixels: Any
    size: Size


@dataclass(frozen=True, slots=True, eq=False)
class SeenImage:
    """An image of a prompt after all checks."""

    places: NDArray[np.int32]  # [vectors] the tokens that they take the places of, ascending
    # pixels, size: as of `PlacedImage`
    pixels: Pixels
    size: Size
    key: bytes  # a hash of these two
    # the tokens [first, end) that see each other in both directions; None: there are none
    two_way: tuple[int, int] | None = None
    of_prompt: bool = False  # whether these are all tokens of the prompt. They then see each other beyond windows, too
    grid: Size | None = None  # rows and columns of the vectors of an image of its own size; None for crops
    axes: bool = False  # positions of its tokens have three axes

    @property
    def pieces(self) -> int:
        """The number of crops, or of vectors if the image has its own size: the work of making them depends on it."""
        return len(self.pixels) if self.grid is None else len(self.places)

    @property
    def first(self) -> int:
        """The first token."""
        return int(self.places[0])

    def part(self, start: int, count: int) -> tuple[int, int]:
        """The vectors [first, end) whose places are among `count` tokens from `start` on."""
        low, high = np.searchsorted(self.places, (start, start + count))
        return int(low), int(high)


def read_images(
    images: Sequence[PlacedImage], tokens: Sequence[int], vision: VisionInfo | None
) -> tuple[SeenImage, ...]:
    """The images of a prompt. Raises InvalidRequestError if the model reads none, or one does not fit the model or the
    tokens."""
    if not images:
        return ()
    if vision is None:
        _refuse("this model reads no images among its tokens.", "unsupported_input")
    if sum(getattr(image.pixels, "nbytes", 0) for image in images) > MOST_CROP_BYTES:
        _refuse(f"the images of a prompt may have at most {MOST_CROP_BYTES} bytes of pixels.", "too_many_images")
    ids, found, end = np.array(tokens, dtype=np.int32), [], 0
    for number, image in enumerate(images):
        pixels = np.ascontiguousarray(image.pixels)
        height, width = image.size
        fitted, grid = vision.fitted, None
        if fitted is not None and height > 0 and width > 0:
            if vision.axes and max(image.size) > MOST_RATIO * min(image.size):
                _refuse(f"image {number}: its longer side must be at most {MOST_RATIO} times the shorter one.")
            grid = fitted.grid((height, width))
        shape = (vision.channels, *(vision.crop if grid is None or fitted is None else fitted.size((height, width))))
        if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[1:] != shape or not len(pixels):
            wanted = f"uint8 of the shape [crops, {', '.join(map(str, shape))}]"
            _refuse(f"image {number}: this model reads {wanted}, got {pixels.dtype} of {list(pixels.shape)}.")
        if height < 1 or width < 1 or len(pixels) not in (1, vision.crops((height, width))):
            _refuse(f"image {number}: {len(pixels)} crops are not those of an image of {width} x {height} pixels.")
        if not end <= image.offset < image.offset + image.length <= len(ids):
            _refuse(f"image {number}: its tokens lie outside the prompt, or among those of the image before it.")
        end = image.offset + image.length
        places = image.offset + np.flatnonzero(ids[image.offset : end] == vision.token_id).astype(np.int32)
        count = vision.count(len(pixels), (height, width))
        if len(places) != count:
            _refuse(
                f"image {number} has {count} vectors, but {len(places)} of its tokens are {vision.token_id}, the "
                "model's image token."
            )
        if vision.axes and places[-1] - places[0] >= count:
            _refuse(f"image {number}: its image tokens must follow each other, without other tokens among them.")
        digest = hashlib.blake2b(repr((pixels.shape, height, width)).encode(), digest_size=KEY_BYTES)
        digest.update(pixels.data)
        whole, seen = vision.two_way == "prompt", None
        if vision.two_way is not None:
            seen = (0, len(ids)) if whole else (int(places[0]), int(places[-1]) + 1)
        found.append(SeenImage(places, pixels, image.size, digest.digest(), seen, whole, grid, vision.axes))
    return tuple(found)


def image_positions(images: Sequence[SeenImage], count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The positions of a prompt's tokens on three axes, as `get_rope_index` of `transformers` computes them. Returns
    [count + 1] offsets of the first axis from a token's place in the prompt, and [count, 2] offsets of the other two
    axes from the first. All tokens of an image have the same first position; the other two are their row and column.
    The token after an image comes after all of these positions.

    Args:
        count: tokens of the prompt; the last offset is that of its answer's tokens.
    """
    offsets, axes = np.zeros(count + 1, dtype=np.int32), np.zeros((count, 2), dtype=np.int32)
    for image in images:
        assert image.grid is not None
        places, (rows, columns) = image.places, image.grid
        offsets[places] -= np.arange(len(places), dtype=np.int32)
        axes[places] = np.stack(np.divmod(np.arange(len(places)), columns), axis=1)
        offsets[places[-1] + 1 :] -= len(places) - max(rows, columns)
    return offsets, axes


def image_keys(images: Sequence[SeenImage], tokens: Sequence[int]) -> NDArray[np.int32]:
    """Keys [tokens, KEY_BYTES / 4] of a prompt's tokens: of a token in an image, the image's key; of other tokens,
    zeros. If all tokens see each other, each has the key of the whole prompt."""
    keys = np.zeros((len(tokens), KEY_BYTES // 4), dtype=np.int32)
    if any(image.of_prompt for image in images):
        digest = hashlib.blake2b(np.array(tokens, dtype=np.int32).tobytes(), digest_size=KEY_BYTES)
        for image in images:
            digest.update(image.key)
        keys[:] = np.frombuffer(digest.digest(), dtype=np.int32)
        return keys
    for image in images:
        keys[image.places] = np.frombuffer(image.key, dtype=np.int32)
    return keys


def normalised(pixels: Pixels, vision: VisionInfo) -> NDArray[np.float32]:
    """Crops as the numbers that the tower reads: float32 of the same shape. A few rows are computed at a time, because
    the steps between take several times their memory."""
    made = np.empty(pixels.shape, np.float32)
    step = max(_NORMALISED // pixels.shape[3], 1)
    for crop, channel in np.ndindex(pixels.shape[:2]):
        for row in range(0, pixels.shape[2], step):
            found: NDArray[Any] = pixels[crop, channel, row : row + step]
            if vision.rescale is not None:
                found = found.astype(np.float64) * vision.rescale
            found = found.astype(np.float32)
            if vision.mean is not None and vision.std is not None:
                found = (found - np.float32(vision.mean[channel])) / np.float32(vision.std[channel])
            made[crop, channel, row : row + step] = found
    return made


def _refuse(message: str, code: str = "invalid_value") -> NoReturn:
    raise InvalidRequestError(message, param="images", code=code)
