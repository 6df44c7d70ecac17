"""Images in conversations: read from requests, decoded by workers, cut into crops, put among the prompt's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from engine import EngineInfo, InvalidRequestError, PlacedImage, VisionInfo, parse_bytes
from engine.images import (
    PIXEL_BYTES,
    CroppedImage,
    expand,
    header_size,
    likely_tokens,
    pixels_of_bytes,
    place,
    read_cropping,
)
from engine.text.pictures import Pictures
from server.answering.images import MOST_SECONDS, run_limited
from server.config.settings import ServerSettings
from server.workers.frames import MEMORY
from server.workers.images import ChatPicture, Crops
from server.workers.pool import WorkerPool, shared_workers

MOST_BYTES = 64 * 2**20  # of the crops of one request
_AT_ONCE = 2  # images in work for all requests


class ChatImages:
    """Reads the images of all conversations, a few at a time.

    Args:
        info: of a model that reads images among its tokens.
        settings: with the limits of an image, and of their number.
        workers: by default those that all jobs share.
    """

    def __init__(self, info: EngineInfo, settings: ServerSettings, workers: WorkerPool | None = None):
        cropping = read_cropping(Path(info.model_path))
        assert cropping is not None
        assert info.vision is not None
        self.vision: VisionInfo = info.vision
        self.most = settings.most_images
        self._cropping = cropping
        self._max_bytes = parse_bytes(settings.max_image_bytes, "max_image_bytes")
        self._max_pixels = settings.max_image_pixels
        self._memory = max(MEMORY, PIXEL_BYTES * self._max_pixels)
        self._workers = workers or shared_workers()
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def count_tokens(self, pictures: Pictures) -> int:
        """An estimate of the tokens of a conversation's images before they are decoded. It follows from the sizes in
        their files' headers, or is the most tokens that an image can have."""
        known, count = pictures.images[: self.most], len(pictures.images)
        sizes = [header_size(content) if self.vision.fitted is not None else None for content in known]
        sizes += [None] * (count - len(known))  # a request with too many images is refused
        return sum(likely_tokens(self.vision, self._cropping, size) for size in sizes)

    def check_count(self, pictures: Pictures) -> None:
        """Refuse a conversation with too many images, before any is decoded. Raises InvalidRequestError: names the
        limit."""
        count = len(pictures.images)
        if count > self.most:
            raise InvalidRequestError(
                f"the messages have {count} images, but at most {self.most} are allowed (limit_mm_per_prompt). Send "
                "fewer, or raise --limit-mm-per-prompt.",
                param="messages",
                code="too_many_images",
            )

    async def read(self, pictures: Pictures) -> list[CroppedImage]:
        """The images of a conversation as crops, in their order. Raises InvalidRequestError if an image cannot be read,
        is too large, or names an address (the message says which image), if there are too many images, or if decoding
        them takes too long in total."""
        self.check_count(pictures)
        found: list[CroppedImage] = []
        left, size, count = MOST_SECONDS, 0, len(pictures.images)
        for number, content in enumerate(pictures.images):
            where = "" if count == 1 else f" (image {number} of the messages)"
            picture = ChatPicture(content, self._cropping, count == 1, self._max_bytes, self._max_pixels)
            async with self._turns:  # to wait for others costs a request nothing
                began = monotonic()
                read = await run_limited(
                    self._workers, "crops", picture, Crops, where, left=left, memory=self._memory, param="messages"
                )
                left -= monotonic() - began
            size += len(read.data)
            if size > MOST_BYTES:
                raise InvalidRequestError(
                    f"the images of the messages become more than {MOST_BYTES} bytes of pixels, the most that is "
                    f"allowed, with image {number}. Send fewer images, or smaller ones.",
                    param="messages",
                    code="too_many_images",
                )
            found.append(CroppedImage(pixels_of_bytes(read.data, read.shape), read.size, read.tiles))
        return found

    def place(self, ids: Sequence[int], images: Sequence[CroppedImage]) -> tuple[list[int], list[PlacedImage]]:
        """A prompt's tokens with those of its images, and where these are. Raises InvalidRequestError if the prompt has
        more or fewer image tokens than images."""
        with _of_messages():
            return place(ids, images, self.vision)

    def expand(self, text: str, token: str, images: Sequence[CroppedImage]) -> str:
        """A rendered text with the texts around the crops of its images. Raises InvalidRequestError: as `place`."""
        with _of_messages():
            return expand(text, token, images, self.vision)


@contextmanager
def _of_messages() -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(str(error), param="messages", code=error.code) from error
