"""The size of images for an encoder that reads images of any size before a text: its config does not set one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.errors import UnsupportedModelError
from engine.images.settings import read_preprocessing
from engine.model.spec import ModelSpec, Tokens


def with_image_size(model: ModelSpec, folder: Path) -> ModelSpec:
    """The model with the image size that its folder's preprocessor makes. Raises UnsupportedModelError if the encoder
    has no positions for an image of that size, or a setting of the preprocessor is not implemented."""
    encoder = model.encoder
    if encoder is None or not isinstance(encoder.embedding, Tokens) or encoder.embedding.image is None:
        return model
    steps, part = read_preprocessing(folder), encoder.embedding.image
    if steps is not None and steps.output is not None:
        part = replace(part, image=steps.output)
    rows, columns = part.grids[-1]
    if min(map(min, part.grids)) < 1 or max(rows, columns) > part.places:
        raise UnsupportedModelError(
            f"{folder}: an image of {part.image[0]} x {part.image[1]} pixels becomes {rows} x {columns} positions, but "
            f"max_position_embeddings of vision_config allows 1 to {part.places} a side. Correct size in "
            "preprocessor_config.json."
        )
    return replace(model, encoder=replace(encoder, embedding=replace(encoder.embedding, image=part)))
