"""The settings by which a checkpoint's processor cuts an image into the crops that a vision-language model reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import UnsupportedModelError
from engine.images.decoding import MAX_PIXELS
from engine.images.settings import (
    BICUBIC,
    BILINEAR,
    FILES,
    MEANT,
    OPENAI,
    STANDARD,
    Preprocessing,
    Settings,
    preprocessing_of,
    preprocessor_class,
    read_json,
    stored_settings,
)
from engine.interface.vision import MOST_RATIO, Fitted, Size, VisionInfo

_CLIP = {
    "size": {"shortest_edge": 224}, "resample": BICUBIC, "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224}, "image_mean": OPENAI[0], "image_std": OPENAI[1],
}  # fmt: skip
# What the classes of transformers do where the file does not say.
_CLASSES: dict[str, dict[str, Any]] = {
    "Llava": _CLIP,
    "LlavaNext": _CLIP | {
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "LlavaOnevision": {
        "size": {"height": 384, "width": 384}, "resample": BICUBIC, "image_mean": OPENAI[0], "image_std": OPENAI[1],
        "image_grid_pinpoints": [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)],
    },
}  # fmt: skip
_IDEFICS3 = {
    "size": {"longest_edge": 4 * 364}, "resample": 1, "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5),
}  # fmt: skip
_CLASSES |= {"Idefics3": _IDEFICS3, "SmolVLM": _IDEFICS3}
_CLASSES["Gemma3"] = {
    "size": {"height": 224, "width": 224}, "resample": BILINEAR, "image_mean": STANDARD, "image_std": STANDARD,
    # Of the processor of texts with images, which asks for this.
    "do_pan_and_scan": False, "pan_and_scan_min_crop_size": 256, "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}  # fmt: skip
_CLASSES["Qwen2VL"] = {
    "size": {"shortest_edge": 56**2, "longest_edge": 28**2 * 1280}, "resample": BICUBIC, "image_mean": OPENAI[0],
    "image_std": OPENAI[1], "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
}  # fmt: skip
_CLASSES["Glm46V"] = _CLASSES["Glm4v"] = _CLASSES["Qwen2VL"] | {
    "size": {"shortest_edge": 112**2, "longest_edge": 28**2 * 15000},
}
_CLASSES["PaddleOCRVL"] = _CLASSES["Qwen2VL"] | {
    "size": {"shortest_edge": 384**2, "longest_edge": 1536**2}, "temporal_patch_size": 1,
}  # fmt: skip
# Classes of images that keep their shape: how they enlarge small images, and whether they count frames.
_OWN_SIZE: dict[str, tuple[Literal["", "sides", "whole"], bool]] = {
    "Qwen2VL": ("", False), "Glm46V": ("whole", True), "Glm4v": ("whole", True), "PaddleOCRVL": ("sides", False),
}  # fmt: skip
_CLASSES["GotOcr2"] = {
    "size": {"height": 384, "width": 384}, "resample": BICUBIC, "image_mean": OPENAI[0], "image_std": OPENAI[1],
    "min_patches": 1, "max_patches": 12,
}  # fmt: skip
_CLASSES["Pixtral"] = {
    "size": {"longest_edge": 1024}, "resample": BICUBIC, "image_mean": OPENAI[0], "image_std": OPENAI[1],
    "patch_size": {"height": 16, "width": 16},
}  # fmt: skip
_SHORTEST = ("Llava", "LlavaNext")
_NAME = re.compile(rf"({'|'.join(sorted(_CLASSES, reverse=True))})ImageProcessor(Fast|Pil)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PanAndScan:
    """A long image gets crops of its parts, side by side, after the one that shows the whole (Gemma 3). `least`: pixels
    of a part's shorter side."""

    least: int
    most: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cropping:
    """The steps from an image to crops."""

    # of each crop; they end before its numbers are rescaled (`engine.interface.vision.normalised`)
    steps: Preprocessing
    # the colour of the bars that make an image a square first; None: it keeps its shape
    square: tuple[int, ...] | None = None
    # heights and widths that an image may be fitted into and then cut into tiles; (): it is one crop
    sizes: tuple[Size, ...] = ()
    tile: int = 0  # height and width of a tile
    # which images become tiles: all, or one that is the only one of its prompt; others become squares then
    tiles: Literal["all", "alone"] = "all"
    # the longer side that an image is resized to before it is cut into squares of `tile`, the last of which shows the
    # whole image; 0: the sizes say how it is cut. -1: it is not resized first.
    longest: int = 0
    splits: bool = True  # an image that is larger than a square is cut; else it becomes one
    scans: PanAndScan | None = None  # long images get crops of their parts; None: they get none
    # minimum and maximum of the tiles of `tile` that an image is cut into, after it is resized to their rows and
    # columns; several are followed by the whole image. 0: it is not cut so.
    least: int = 0
    most: int = 0
    fitted: Fitted | None = None  # an image keeps its shape, and is one crop; None: it does not

    @property
    def most_crops(self) -> int:
        """The maximum number of crops of an image, if each crop is an image among the tokens."""
        if self.scans is not None:
            return 1 + self.scans.most
        if self.most:
            return self.most + (self.most > 1)
        if not self.longest:
            return 1
        side = max(-(-self.longest // self.tile), 1) if self.splits else 0
        return side**2 + 1


def read_cropping(folder: Path) -> Cropping | None:
    """Read the settings from a checkpoint's folder; None if it has none. Raises UnsupportedModelError if a setting that
    is not implemented; names it."""
    values, file = stored_settings(folder)
    return None if values is None else _parse(values, file)


def _parse(values: Mapping[str, Any], file: Path) -> Cropping:
    kind = values.get("image_processor_type") or values.get("feature_extractor_type")
    named = _NAME.fullmatch(kind) if isinstance(kind, str) else None
    if named is None:  # one of an encoder of images, which makes one crop
        return Cropping(steps=preprocessing_of(values, file, preprocessor_class(values, file)))
    known = named[1]
    pads = values.get("do_pad")
    given = {name: value for name, value in values.items() if value is not None and name != "do_pad"}
    off = {name: False for name in MEANT if name in values}
    if known in ("Idefics3", "SmolVLM"):
        return _squares(_CLASSES[known] | given, file)
    if known == "Pixtral":
        return _lined(MEANT | _CLASSES[known] | off | given, file)
    if known in _OWN_SIZE:
        return _own_size(MEANT | _CLASSES[known] | off | given, file, *_OWN_SIZE[known])
    settings = Settings(MEANT | _CLASSES[known] | off | given | {"do_pad": False}, file)
    steps = preprocessing_of(settings.values, file, None, shortest=known in _SHORTEST)
    colour = tuple(int(value * 255) for value in steps.mean or (0.0, 0.0, 0.0))
    if known == "Gemma3":
        return Cropping(steps=steps, scans=_scans(settings.values, file))
    if known == "Llava":
        return Cropping(steps=steps, square=colour if pads else None)
    if known == "GotOcr2":
        return _arranged(settings.values, steps, file)
    crop = steps.crop or steps.size
    tile = crop[0] if isinstance(crop, tuple) else crop
    if tile is None:
        raise UnsupportedModelError(f"{file}: do_resize is false, which is not implemented for images in tiles.")
    sizes = settings.values["image_grid_pinpoints"]
    good = isinstance(sizes, list) and sizes and all(isinstance(each, list) and len(each) == 2 for each in sizes)
    if not good or not all(isinstance(n, int) and n > 0 and n % tile == 0 for each in sizes for n in each):
        raise UnsupportedModelError(
            f"{file}: image_grid_pinpoints must be a list of heights and widths that are multiples of {tile}."
        )
    found = tuple((each[0], each[1]) for each in sizes)
    if known == "LlavaNext":
        return Cropping(steps=steps, sizes=found, tile=tile)
    return Cropping(steps=steps, sizes=found, tile=tile, tiles="alone", square=colour)


def _squares(values: Mapping[str, Any], file: Path) -> Cropping:
    """The settings of Idefics 3's class."""
    size, tile = (_longest(values, name, file) for name in ("size", "max_image_size"))
    whole = {"height": tile, "width": tile}
    steps = preprocessing_of({**MEANT, **values, "size": whole, "do_resize": True, "do_pad": False}, file, None)
    resizes, splits = values.get("do_resize", True), values["do_image_splitting"]
    return Cropping(steps=steps, tile=tile, longest=size if resizes else -1, splits=bool(splits))


def _arranged(values: Mapping[str, Any], steps: Preprocessing, file: Path) -> Cropping:
    """The settings of GOT-OCR 2's class, as InternVL's processor of texts uses it: images are always cut."""
    least, most, size = values["min_patches"], values["max_patches"], steps.size
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (least, most))
    if not whole or not 1 <= least <= most <= 64 or not isinstance(size, tuple) or size[0] != size[1] or steps.crop:
        raise UnsupportedModelError(
            f"{file}: min_patches and max_patches must be from 1 to 64, size a square and do_center_crop false; got "
            f"{least!r}, {most!r}, {size!r}."
        )
    return Cropping(steps=steps, tile=size[0], least=least, most=most)


def _lined(values: Mapping[str, Any], file: Path) -> Cropping:
    """The settings of Pixtral's class. The number of patches per vector is in the file of the text processor;
    LightOnOCR has it in patch_size here."""
    whole, patch = file.with_name(FILES[1]), values["patch_size"]
    stored = read_json(whole) if whole.is_file() else {}
    merge = 1 if stored.get("processor_class") == "LightOnOcrProcessor" else stored.get("spatial_merge_size", 1)
    sides: list[Any] = [patch.get("height"), patch.get("width")] if isinstance(patch, dict) else [patch, patch]
    right = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= 1 << 8 for n in (*sides, merge))
    if not right or sides[0] != sides[1] or values["do_resize"] is not True:
        raise UnsupportedModelError(
            f"{file}: do_resize must be true, patch_size one number of pixels and spatial_merge_size a number, both up "
            f"to {1 << 8}; got {values['do_resize']!r}, {patch!r} and {merge!r}."
        )
    steps = preprocessing_of({**values, "do_resize": False, "do_pad": False}, file, None)
    unit: int = sides[0] * merge
    return Cropping(steps=steps, fitted=Fitted(unit, longest=_longest(values, "size", file)))


def _own_size(values: Mapping[str, Any], file: Path, grows: Literal["", "sides", "whole"], timed: bool) -> Cropping:
    """The settings of Qwen2-VL's class, and of those that follow it (`Fitted.grows`; `timed`: frames count)."""
    size = values["size"] if isinstance(values["size"], dict) else {}
    least = values.get("min_pixels", size.get("shortest_edge"))
    most = values.get("max_pixels", size.get("longest_edge"))
    patch, merge = values["patch_size"], values["merge_size"]
    frames = values["temporal_patch_size"] if timed else 1
    counts = (least, most, patch, merge, frames)
    right = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    if not right or least > most or most > MAX_PIXELS or patch * merge > 1 << 10 or values["do_resize"] is not True:
        raise UnsupportedModelError(
            f"{file}: do_resize must be true, shortest_edge and longest_edge of size numbers of pixels up to "
            f"{MAX_PIXELS}, and patch_size times merge_size at most {1 << 10}; got {values['do_resize']!r}, {least!r}, "
            f"{most!r}, {patch!r} and {merge!r}."
        )
    steps = preprocessing_of({**values, "do_resize": False, "do_pad": False}, file, None)
    return Cropping(steps=steps, fitted=Fitted(patch * merge, least, most, frames=frames, grows=grows))


def _scans(values: Mapping[str, Any], file: Path) -> PanAndScan | None:
    if values["do_pan_and_scan"] is False:
        return None
    names = ("do_pan_and_scan", *(f"pan_and_scan_{name}" for name in ("min_crop_size", "max_num_crops")))
    asked, least, most = (values[name] for name in names)
    ratio = values["pan_and_scan_min_ratio_to_activate"]
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (least, most))
    if asked is not True or not whole or not 1 <= most <= min(least, 64) or not isinstance(ratio, int | float):
        raise UnsupportedModelError(
            f"{file}: do_pan_and_scan must be true or false, pan_and_scan_max_num_crops from 1 to 64 and at most "
            f"pan_and_scan_min_crop_size, pan_and_scan_min_ratio_to_activate a number; got {asked!r}, {most!r}, "
            f"{least!r}, {ratio!r}."
        )
    return PanAndScan(least=least, most=most, ratio=float(ratio))


def _longest(values: Mapping[str, Any], name: str, file: Path) -> int:
    given = values[name]
    found = given.get("longest_edge") if isinstance(given, dict) else None
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= 1 << 14:
        raise UnsupportedModelError(f"{file}: {name} must have a longest_edge from 1 to {1 << 14}, got {given!r}.")
    return found


def likely_tokens(info: VisionInfo, cropping: Cropping, size: Size | None) -> int:
    """The number of tokens of an image of this height and width. If it depends on crops, or the size is unknown:
    `most_tokens`."""
    most, fitted = most_tokens(info, cropping), info.fitted
    if fitted is None or size is None or max(size) > MOST_RATIO * min(size):
        return most
    return min(math.prod(fitted.grid(size)), most)


def most_tokens(info: VisionInfo, cropping: Cropping) -> int:
    """The most tokens of an image, without the texts around its crops."""
    if info.fitted is not None:
        return info.fitted.most_vectors
    sizes = [info.crop] if info.tiling is None else info.tiling.sizes
    return max(info.count(info.crops(size), size) for size in sizes) * cropping.most_crops
