"""Images in requests, decoded by workers with limited memory and time. The server never fetches an image."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TypeVar

from engine import EngineInfo, InvalidRequestError, PixelInput, parse_bytes
from engine.images import PIXEL_BYTES, need_steps, pixels_of, steps_for
from server.config.settings import ServerSettings
from server.workers.frames import MEMORY
from server.workers.images import ChatPicture, Crops, ImageInput, Pixels
from server.workers.pool import WorkerLostError, WorkerPool, shared_workers

logger = logging.getLogger("octavo.server")

TIME_LIMIT = 20.0  # seconds; the largest allowed image takes about one
MOST_SECONDS = 120.0  # maximum pixels of all images of one request
MOST_PIXEL_BYTES = 64 * 2**20  # maximum images of one request, because a small file may become large
_Read = TypeVar("_Read", Pixels, Crops)
_AT_ONCE = 2  # images decoded at once for all requests: the largest allowed image takes 250 MB, a WebP 600 MB


class ImageReading:
    """Decodes the images of all requests, a few at a time. Raises UnsupportedModelError if the model's preprocessor is
    not implemented.

    Args:
        info: facts about the model.
        settings: contains the limits for an image.
        workers: the pool (default: the shared pool).
    """

    def __init__(self, info: EngineInfo, settings: ServerSettings, workers: WorkerPool | None = None):
        self._info = info
        self._steps = steps_for(info.signal, Path(info.model_path))
        self._max_bytes = parse_bytes(settings.max_image_bytes, "max_image_bytes")
        self._max_pixels = settings.max_image_pixels
        self._memory = max(MEMORY, PIXEL_BYTES * self._max_pixels)
        self._workers = workers or shared_workers()
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def read(self, images: Sequence[str], param: str = "input") -> list[PixelInput]:
        """The images in the engine's form, in order. Raises InvalidRequestError if an image cannot be read, is too
        large or is a web address (the error names the image), or if there are too many images or they take too long
        together.

        Args:
            images: `data:` URLs, or base64.
            param: the field that holds them.
        """
        steps = need_steps(self._steps, self._info)
        assert self._info.signal is not None
        most = max(MOST_PIXEL_BYTES // (4 * math.prod(self._info.signal.shape)), 1)
        if len(images) > most:
            raise InvalidRequestError(
                f"the request has {len(images)} images, but at most {most} images of this model's size are allowed "
                f"({MOST_PIXEL_BYTES} bytes of pixels). Send them in several requests.",
                param=param,
                code="too_many_images",
            )
        found, left = [], MOST_SECONDS
        for place, content in enumerate(images):
            where = "" if len(images) == 1 else f" (image {place} of the request)"
            picture = ImageInput(content, steps, self._max_bytes, self._max_pixels)
            async with self._turns:  # waiting for other requests does not count against a request
                began = monotonic()
                read = await run_limited(
                    self._workers, "image", picture, Pixels, where, left=left, memory=self._memory, param=param
                )
                left -= monotonic() - began
                found.append(pixels_of(read.data, read.shape))
        return found


async def run_limited(
    workers: WorkerPool,
    job: str,
    picture: ImageInput | ChatPicture,
    kind: type[_Read],
    where: str,
    *,
    left: float,
    memory: int,
    param: str,
) -> _Read:
    """A worker's result for an image. Raises InvalidRequestError if it cannot be read, or takes too long or too much
    memory.

    Args:
        where: follows the reason if it is refused.
        left: seconds that the request's images may still take.
        memory: bytes that the worker may take.
        param: the field that holds the image.
    """
    problem, code = "", "image_too_costly"
    try:
        if left <= 0:
            raise TimeoutError
        read = await workers.run(job, picture, kind, min(TIME_LIMIT, left), memory)
    except TimeoutError:
        problem = f"decoding the image took more than {TIME_LIMIT:g} seconds."
        if left < TIME_LIMIT:
            problem = f"decoding the request's images took more than {MOST_SECONDS:g} seconds."
    except WorkerLostError:
        problem = f"decoding the image took more than {memory >> 20} MiB. Make it smaller."
    else:
        if read.problem is None:
            return read
        problem, code = read.problem, read.code or "invalid_image"
    if code == "image_too_costly":
        logger.warning("An image of %d characters was not decoded: %s", len(picture.content), problem)
    raise InvalidRequestError(f"{problem.removesuffix('.')}{where}.", param=param, code=code)
