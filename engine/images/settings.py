"""The settings of a checkpoint's image preprocessor: preprocessor_config.json, and the defaults of its class."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModelError

FILES = ("preprocessor_config.json", "processor_config.json")
_MOST_BYTES = 2**20
_MOST_PIXELS = 1 << 14  # maximum pixels of a side

STANDARD = (0.5, 0.5, 0.5)
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
BILINEAR, BICUBIC = 2, 3
_FILTERS = range(6)  # Pillow's numbers: nearest, Lanczos, bilinear, bicubic, box, Hamming

# Defaults of transformers' classes for settings that the file lacks, by the beginnings of their names.
_CLASSES: dict[str, dict[str, Any]] = {
    "ViT": {
        "size": {"height": 224, "width": 224}, "resample": BILINEAR, "image_mean": STANDARD, "image_std": STANDARD,
    },
    "DeiT": {
        "size": {"height": 256, "width": 256}, "resample": BICUBIC, "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224}, "image_mean": STANDARD, "image_std": STANDARD,
    },
    "CLIP": {
        "size": {"shortest_edge": 224}, "resample": BICUBIC, "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224}, "image_mean": OPENAI[0], "image_std": OPENAI[1],
    },
    "Donut": {
        "size": {"height": 2560, "width": 1920}, "resample": BILINEAR, "image_mean": STANDARD, "image_std": STANDARD,
        "do_thumbnail": True, "do_align_long_axis": False, "do_pad": True,
    },
    "Siglip": {
        "size": {"height": 224, "width": 224}, "resample": BICUBIC, "image_mean": STANDARD, "image_std": STANDARD,
    },
}  # fmt: skip
_NAME = re.compile(rf"({'|'.join(_CLASSES)})(ImageProcessor|FeatureExtractor)(Fast|Pil)?")
# Classes in which a single number sets the shorter side.
_SHORTEST = ("CLIP",)
MEANT = {"do_resize": True, "do_center_crop": False, "do_rescale": True, "do_normalize": True, "do_pad": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """The steps, in order; None for a step that is left out."""

    size: tuple[int, int] | int | None  # height and width to resize to, or a number for the shorter side
    resample: int  # Pillow's number of the filter
    crop: tuple[int, int] | None  # height and width of the middle part to keep; a smaller image is surrounded by zeros
    rescale: float | None  # factor of the numbers, which are from 0 to 255
    # mean, std: for each channel, the number to subtract and the number to divide by
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    # height and width to which an image is reduced after it is resized, and then padded with zeros
    fit: tuple[int, int] | None = None
    turns: bool = False  # whether an image is first rotated by 90 degrees if its orientation differs from that of `fit`

    @property
    def output(self) -> tuple[int, int] | None:
        """Height and width of the result; None if they depend on the image."""
        return self.crop or self.fit or (self.size if isinstance(self.size, tuple) else None)


def read_preprocessing(folder: Path) -> Preprocessing | None:
    """Read the settings from a checkpoint's folder; None if there are none. Raises UnsupportedModelError if a setting
    is not implemented, or has an invalid value; names it."""
    values, file = stored_settings(folder)
    return None if values is None else preprocessing_of(values, file, preprocessor_class(values, file))


def stored_settings(folder: Path) -> tuple[Mapping[str, Any] | None, Path]:
    """The settings of a checkpoint's image processor and their file; None if the folder has none."""
    for name in FILES:
        file = folder / name
        if file.is_file():
            values = read_json(file)
            own: Any = values.get("image_processor") if name == FILES[1] else values
            if isinstance(own, dict):
                return own, file
    return None, folder


def preprocessing_of(
    values: Mapping[str, Any], file: Path, known: str | None, *, shortest: bool = False
) -> Preprocessing:
    """The steps that settings of a file say. Raises UnsupportedModelError if a setting that is not implemented, or not
    right; names it.

    Args:
        known: the class whose defaults complete them; None: they are complete.
        shortest: one number as a size means the shorter side, as in some classes.
    """
    if known is None:
        settings = Settings(values, file)
    else:
        given = {name: value for name, value in values.items() if value is not None}
        off = {name: False for name in MEANT if name in values}  # a switch that is null is off
        settings, shortest = Settings(MEANT | _CLASSES[known] | off | given, file), known in _SHORTEST
    if known == "Donut":
        return _fitted(settings)
    if settings.switch("do_pad"):
        raise UnsupportedModelError(f"{file}: do_pad is true, which is not implemented.")
    normalizes = settings.switch("do_normalize")
    return Preprocessing(
        size=settings.size("size", shortest=shortest) if settings.switch("do_resize") else None,
        resample=settings.filter(),
        crop=settings.crop() if settings.switch("do_center_crop") else None,
        rescale=settings.factor() if settings.switch("do_rescale") else None,
        mean=settings.channels("image_mean") if normalizes else None,
        std=settings.channels("image_std") if normalizes else None,
    )


def _fitted(settings: Settings) -> Preprocessing:
    """The settings of Donut's class. Raises UnsupportedModelError: as `preprocessing_of`."""
    for name, meant in (("do_resize", True), ("do_thumbnail", True), ("do_pad", True), ("do_center_crop", False)):
        if settings.switch(name) != meant:
            raise UnsupportedModelError(f"{settings.file}: {name} must be {str(meant).lower()} for this processor.")
    size, listed = settings.size("size"), isinstance(settings.values["size"], list | tuple)
    if isinstance(size, int):
        raise UnsupportedModelError(f"{settings.file}: size must be a height and a width, got {size}.")
    size = size[::-1] if listed else size  # a list is width, height
    normalizes = settings.switch("do_normalize")
    return Preprocessing(
        size=min(size),
        resample=settings.filter(),
        crop=None,
        rescale=settings.factor() if settings.switch("do_rescale") else None,
        mean=settings.channels("image_mean") if normalizes else None,
        std=settings.channels("image_std") if normalizes else None,
        fit=size,
        turns=settings.switch("do_align_long_axis"),
    )


def preprocessor_class(values: Mapping[str, Any], file: Path) -> str:
    """The beginning of the class name; as in `transformers`, that of the model's type if the file names none."""
    known = ", ".join(_CLASSES)
    kind = values.get("image_processor_type") or values.get("feature_extractor_type")
    if not kind:
        config = file.with_name("config.json")
        model = read_json(config) if config.is_file() else {}
        kind, model_type = model.get("image_processor_type"), model.get("model_type")
        if not kind:
            found = next((name for name in _CLASSES if model_type == name.lower()), None)
            if found is None:
                raise UnsupportedModelError(
                    f"{file} has no image_processor_type, and model_type in config.json is {model_type!r}; "
                    f"supported are the image processors of {known}."
                )
            return found
    named = _NAME.fullmatch(kind) if isinstance(kind, str) else None
    if named is None:
        raise UnsupportedModelError(
            f"{file}: image_processor_type is {kind!r}; supported are the image processors of {known}."
        )
    return named[1]


class Settings:
    """Values of a file, each checked when it is read. `values`: the file's values, with the defaults of a class."""

    def __init__(self, values: Mapping[str, Any], file: Path):
        self.values = values
        self.file = file

    def switch(self, name: str) -> bool:
        value = self.values[name]
        if not isinstance(value, bool):
            raise self._refused(name, "true or false")
        return value

    def size(self, name: str, *, shortest: bool = False) -> tuple[int, int] | int:
        """Height and width, or the shorter side, which a single number means if `shortest` is set."""
        value = self.values.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            value = {"shortest_edge": value} if shortest else {"height": value, "width": value}
        if isinstance(value, list | tuple) and len(value) == 2:
            value = {"height": value[0], "width": value[1]}
        if isinstance(value, Mapping):
            sides = {k: v for k, v in value.items() if v is not None}
            if all(_is_side(side) for side in sides.values()):
                if set(sides) == {"height", "width"}:
                    return sides["height"], sides["width"]
                if set(sides) == {"shortest_edge"}:
                    return int(sides["shortest_edge"])
        wanted = f"a number of pixels up to {_MOST_PIXELS}, or height and width, or shortest_edge"
        raise self._refused(name, wanted)

    def crop(self) -> tuple[int, int]:
        """Height and width."""
        size = self.size("crop_size")
        if isinstance(size, int):
            raise self._refused("crop_size", "a number of pixels, or height and width")
        return size

    def filter(self) -> int:
        """A filter's number."""
        value = self.values["resample"]
        if isinstance(value, bool) or value not in _FILTERS:
            raise self._refused("resample", f"one of Pillow's filters, {_FILTERS.start} to {_FILTERS.stop - 1}")
        return int(value)

    def factor(self) -> float:
        """The factor by which pixel values are multiplied."""
        value = self.values.get("rescale_factor", 1 / 255)
        if not _is_number(value):
            raise self._refused("rescale_factor", "a number")
        return float(value)

    def channels(self, name: str) -> tuple[float, ...]:
        """A number for each of three channels; a single one applies to all."""
        value = self.values[name]
        values = [value] * 3 if _is_number(value) else value
        good = isinstance(values, list | tuple) and len(values) == 3 and all(map(_is_number, values))
        if not good or (name == "image_std" and 0 in values):
            raise self._refused(name, "a number for each of the three channels" + (", none 0" * (name == "image_std")))
        return tuple(float(number) for number in values)

    def _refused(self, name: str, wanted: str) -> UnsupportedModelError:
        shown = ascii(self.values.get(name))[:80]
        return UnsupportedModelError(f"{self.file}: {name} must be {wanted}; got {shown}.")


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_PIXELS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_json(file: Path) -> dict[str, Any]:
    """The settings of a file. Raises UnsupportedModelError if it cannot be read."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise UnsupportedModelError(f"{file} cannot be read: it has more than {_MOST_BYTES} bytes.")
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{file} cannot be read: {error}.") from error
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{file} cannot be read: it contains a {type(values).__name__}, not an object.")
    return values
