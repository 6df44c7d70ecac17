"""All shapes of all encoder-only families: each module under `encoder_shapes` has its own, as `SHAPES`."""

from __future__ import annotations

import importlib
import pkgutil

from support import encoder_shapes
from support.encoder_shape import EncoderCheckpoint, EncoderShape, make_encoder_checkpoint

__all__ = ["ENCODER_SHAPES", "EncoderCheckpoint", "EncoderShape", "make_encoder_checkpoint"]


def _collect() -> dict[str, EncoderShape]:
    found: dict[str, EncoderShape] = {}
    for module in pkgutil.iter_modules(encoder_shapes.__path__):
        shapes = importlib.import_module(f"{encoder_shapes.__name__}.{module.name}").SHAPES
        assert not found.keys() & shapes.keys(), f"{module.name}: a shape of that name is there already"
        found |= shapes
    return found


ENCODER_SHAPES = _collect()
