"""The facts of a vision-language model that preparing its images needs. Imports torch, unlike its neighbours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.errors import UnsupportedModelError
from engine.images.crop_settings import Cropping
from engine.interface.vision import VisionInfo
from engine.model.spec import Patches, Pooled, Shuffled, Vision


def vision_info(vision: Vision, cropping: Cropping, folder: Path) -> VisionInfo:
    """The images that a model reads among its tokens. Raises UnsupportedModelError if the processor makes crops of
    another size, or other tiles, than the model reads."""
    embedding, steps = vision.tower.embedding, cropping.steps
    assert isinstance(embedding, Patches)
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
    if (vision.surrounds is None) != (not cropping.longest) or (cropping.scans and vision.frame is None):
        raise UnsupportedModelError(f"{folder}: the image processor is one of another family than the model's.")
    factor = vision.projector.factor if isinstance(vision.projector, Shuffled | Pooled) else 1
    rows, columns = (pixels // size // factor for pixels, size in zip(embedding.image, embedding.patch, strict=True))
    return VisionInfo(
        token_id=vision.token_id,
        channels=embedding.channels,
        crop=embedding.image,
        grid=(rows, columns),
        first=embedding.first - vision.skip,
        newline=vision.newline,
        tiling=None if vision.tiling is None else replace(vision.tiling, sizes=cropping.sizes),
        surrounds=vision.surrounds,
        frame=vision.frame,
        two_way=vision.two_way,
        rescale=steps.rescale,
        mean=steps.mean,
        std=steps.std,
    )
