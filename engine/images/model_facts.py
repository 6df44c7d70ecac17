"""The facts of a vision-language model that preparing its images needs. Imports torch, unlike its neighbours."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModelError
from engine.images.crop_settings import Cropping
from engine.images.settings import Preprocessing
from engine.interface.vision import ImageTokens, VisionInfo
from engine.model.spec import Patches, Pooled, Shuffled, Vision


def vision_info(vision: Vision, cropping: Cropping, folder: Path) -> VisionInfo:
    """The images that a model reads among its tokens. Raises UnsupportedModelError if the processor makes crops of
    another size, or other tiles, than the model reads."""
    embedding, steps = vision.tower.embedding, cropping.steps
    assert isinstance(embedding, Patches)
    if vision.squares:
        return _own_sizes(vision, embedding, cropping, folder)
    if cropping.fitted is not None:
        raise UnsupportedModelError(f"{folder}: the image processor is one of another family than the model's.")
    output = steps.output or ((steps.size, steps.size) if cropping.square and isinstance(steps.size, int) else None)
    if output != embedding.image:
        raise UnsupportedModelError(
            f"{folder}: the processor makes crops of {output} pixels, but the model reads {embedding.image}. Correct "
            "size or crop_size in preprocessor_config.json."
        )
    wanted = () if vision.tiling is None else vision.tiling.sizes
    if set(cropping.sizes) != set(wanted):
        raise UnsupportedModelError(
            f"{folder}: image_grid_pinpoints of the processor are not those of config.json. Make them equal."
        )
    unlike = (vision.surrounds is None) != (not cropping.longest) or (vision.enclosed is None) != (not cropping.most)
    if unlike or (cropping.scans and vision.frame is None):
        raise UnsupportedModelError(f"{folder}: the image processor is one of another family than the model's.")
    projector = vision.projector
    factor = projector.factor if isinstance(projector, Shuffled | Pooled) else math.isqrt(projector.merge)
    rows, columns = (pixels // size // factor for pixels, size in zip(embedding.image, embedding.patch, strict=True))
    info = _info(vision, embedding, steps, crop=embedding.image, grid=(rows, columns))
    tiling = None if vision.tiling is None else replace(vision.tiling, sizes=cropping.sizes)
    return replace(info, first=embedding.first - vision.skip, tiling=tiling)


def _info(vision: Vision, embedding: Patches, steps: Preprocessing, **own: Any) -> VisionInfo:
    tokens = {field.name: getattr(vision, field.name) for field in fields(ImageTokens)}
    rescale, mean, std = steps.rescale, steps.mean, steps.std
    return VisionInfo(**tokens, **own, channels=embedding.channels, rescale=rescale, mean=mean, std=std)


def _own_sizes(vision: Vision, embedding: Patches, cropping: Cropping, folder: Path) -> VisionInfo:
    """The facts of images that keep their shape."""
    steps, fitted = cropping.steps, cropping.fitted
    unit = vision.squares * embedding.patch[0]
    if fitted is None or fitted.unit != unit or vision.axes == bool(fitted.longest):
        raise UnsupportedModelError(
            f"{folder}: the processor makes squares of {None if fitted is None else fitted.unit} pixels a side, but "
            f"the model reads {unit}. Correct patch_size and merge_size in preprocessor_config.json."
        )
    return _info(vision, embedding, steps, crop=(0, 0), grid=(0, 0), fitted=fitted)
