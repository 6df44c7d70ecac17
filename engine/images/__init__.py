"""From clients' images to an encoder's input: decoded within limits, resized, cropped, normalised."""

from engine.images.crop_settings import Cropping, likely_tokens, most_tokens, read_cropping
from engine.images.cropping import CroppedImage, crop, expand, pixels_of_bytes, place
from engine.images.decoding import PIXEL_BYTES, decode, read_text
from engine.images.headers import header_size
from engine.images.preprocessing import preprocess
from engine.images.reader import ImageReader, is_image, need_steps, pixels_of, steps_for
from engine.images.settings import Preprocessing

__all__ = [
    "PIXEL_BYTES", "CroppedImage", "Cropping", "ImageReader", "Preprocessing", "crop", "decode", "expand",
    "header_size", "is_image", "likely_tokens", "most_tokens", "need_steps", "pixels_of", "pixels_of_bytes", "place",
    "preprocess", "read_cropping", "read_text", "steps_for",
]  # fmt: skip
