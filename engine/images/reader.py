"""Images for one model: the settings in its folder, and the pixels made with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import InvalidRequestError, UnsupportedModelError
from engine.images.decoding import MAX_PIXELS, check_pixels, rgb
from engine.images.preprocessing import preprocess
from engine.images.settings import FILES, Preprocessing, read_preprocessing
from engine.interface.outputs import EngineInfo, SignalInfo
from engine.interface.request import PixelInput
from engine.interface.values import brief


def steps_for(signal: SignalInfo | None, folder: Path) -> Preprocessing | None:
    """The preprocessing of images for a model; None if it takes no images, or its folder does not describe it. Raises
    UnsupportedModelError if a setting is not implemented, or the image size differs from the model's. `signal`: the
    model's input other than token ids."""
    if signal is None or signal.kind != "image" or signal.shape[0] != 3:
        return None
    steps = read_preprocessing(folder)
    if steps is None or steps.output in (None, signal.shape[1:]):
        return steps
    made, read = (" x ".join(map(str, size)) for size in (steps.output, signal.shape[1:]))
    raise UnsupportedModelError(
        f"{folder}: the preprocessor makes images of {made} pixels, but the model reads {read}. Correct size or "
        f"crop_size in preprocessor_config.json."
    )


def need_steps(steps: Preprocessing | None, info: EngineInfo) -> Preprocessing:
    """The preprocessing of images. Raises InvalidRequestError if the model takes no images, or its folder does not
    describe it."""
    if steps is not None:
        return steps
    if info.signal is None or info.signal.kind != "image":
        why, code = "this model does not read images", "unsupported_input"
    elif info.signal.shape[0] != 3:
        why, code = f"this model reads images of {info.signal.shape[0]} channels, not of three", "no_preprocessor"
    else:
        why, code = f"this model has no {FILES[0]}, which says how to prepare images", "no_preprocessor"
    raise InvalidRequestError(f"{why}.", param="input", code=code)


def pixels_of(data: bytes, shape: tuple[int, ...]) -> PixelInput:
    """Pixels made by another process: float32 in this machine's byte order."""
    return PixelInput(np.frombuffer(data, np.float32).reshape(shape))


class ImageReader:
    """Turns callers' images into inputs of the engine. Raises UnsupportedModelError: see `steps_for`."""

    def __init__(self, info: EngineInfo):
        self._info = info
        self._steps = steps_for(info.signal, Path(info.model_path))

    def read(self, image: Any) -> PixelInput:
        """Read a PIL image, an array [height, width, 3] of uint8, or a `PixelInput`, which is used unchanged. Raises
        InvalidRequestError if an array has another form, or this model cannot read the image, or the image is too
        large."""
        if isinstance(image, PixelInput):
            return image
        steps = need_steps(self._steps, self._info)
        if isinstance(image, np.ndarray):
            import PIL.Image

            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise InvalidRequestError(
                    "an image's array must have the shape [height, width, 3] and the type uint8, got "
                    f"{brief(list(image.shape))} of {image.dtype}.",
                    param="inputs",
                    code="invalid_value",
                )
            image = PIL.Image.fromarray(image)
        check_pixels(image, MAX_PIXELS)
        return PixelInput(preprocess(rgb(image), steps))


def is_image(item: Any) -> bool:
    """Whether it is a single image in a form that `ImageReader.read` takes."""
    if isinstance(item, PixelInput | np.ndarray):
        return True
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(item).__mro__)
