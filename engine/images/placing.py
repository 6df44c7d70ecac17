"""Images of callers of `LLM`, read and put among the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import InvalidRequestError
from engine.images.crop_settings import Cropping, read_cropping
from engine.images.cropping import crop, expand, place
from engine.images.decoding import MAX_PIXELS, check_pixels, decode, read_text, rgb
from engine.interface.outputs import EngineInfo
from engine.interface.request import TokenInput
from engine.interface.values import brief
from engine.interface.vision import VisionInfo
from engine.text.tokenizer import Tokenizer

_KEYS = {"image_url": "image_url", "image": "image", "image_pil": "image_pil", "input_image": "image_url"}


class ImagePlacer:
    """Reads images and puts them into prompts of one model. `cropping`: the steps of its processor."""

    def __init__(self, info: VisionInfo, cropping: Cropping):
        self._info, self._cropping = info, cropping

    @classmethod
    def of(cls, info: EngineInfo) -> ImagePlacer | None:
        """For a model; None if it reads no images among its tokens."""
        if info.vision is None:
            return None
        cropping = read_cropping(Path(info.model_path))
        return None if cropping is None else cls(info.vision, cropping)

    def mark(self, tokenizer: Tokenizer) -> str:
        """The text that stands for an image in a prompt."""
        return self._info.mark(tokenizer.written(self._info.token_id))

    def input(
        self, ids: Sequence[int], images: Sequence[Any], text: str | None, tokenizer: Tokenizer | None, *, special: bool
    ) -> TokenInput:
        """A prompt with images. Raises InvalidRequestError if an image cannot be read, or there are more or fewer image
        tokens than images.

        Args:
            text: that the ids are of, if they are.
            images: paths, bytes of files, `data:` URLs, images of PIL's, or arrays [height, width, 3] of uint8.
        """
        crops = [crop(read_image(image), self._cropping, alone=len(images) == 1) for image in images]
        if self._info.texts is not None:
            if text is None or tokenizer is None:
                raise InvalidRequestError(
                    "this model's images need a prompt that is text: there are texts around their crops.",
                    param="prompt",
                    code="invalid_value",
                )
            whole = expand(text, tokenizer.written(self._info.token_id), crops, self._info)
            ids = tokenizer.encode(whole, add_special_tokens=special and self._info.leading is None)
        expanded, placed = place(ids, crops, self._info)
        return TokenInput(expanded, text, images=tuple(placed))


def image_part(part: Any) -> Any:
    """The image of a message's part, as a caller gives it; None if it is another part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = _KEYS.get(kind) if isinstance(kind, str) else None
    if name is None:
        return None
    value = part.get(name)
    return value.get("url") if kind == "image_url" and isinstance(value, Mapping) else value


def read_image(image: Any) -> Any:
    """An image of PIL's in RGB, of a path, bytes of a file, a `data:` URL, an image of PIL's, or an array. Raises
    InvalidRequestError if it is none of these, or cannot be read."""
    import PIL.Image

    if isinstance(image, str) and image.startswith(("data:", "http:", "https:", "file:")):
        return decode(read_text(image))
    if isinstance(image, str | Path):
        try:
            return decode(Path(image).read_bytes())
        except OSError as error:
            raise InvalidRequestError(f"{image} cannot be read: {error}.", param="images") from error
    if isinstance(image, bytes | bytearray):
        return decode(bytes(image))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        image = PIL.Image.fromarray(image)
    if not isinstance(image, PIL.Image.Image):
        raise InvalidRequestError(
            "an image must be a path, bytes of a file, an image of PIL's, or an array [height, width, 3] of uint8, got "
            f"{type(image).__name__}: {brief(image)}.",
            param="images",
            code="invalid_value",
        )
    check_pixels(image, MAX_PIXELS)
    return rgb(image)
