"""From clients' images to an encoder's input: decoded within limits, resized, cropped, normalised."""

from engine.images.decoding import PIXEL_BYTES, decode, read_text
from engine.images.preprocessing import preprocess
from engine.images.reader import ImageReader, is_image, need_steps, pixels_of, steps_for
from engine.images.settings import Preprocessing

__all__ = [
    "PIXEL_BYTES", "ImageReader", "Preprocessing", "decode", "is_image", "need_steps", "pixels_of", "preprocess",
    "read_text", "steps_for",
]  # fmt: skip
