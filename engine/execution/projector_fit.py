"""Compares the tensors of an image projector with the model that its metadata describe, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.backends.attention.selection import select
from engine.model.families import stored_scheme, weight_table
from engine.model.gguf.folder import PROJECTOR_LINK
from engine.model.spec import ModelSpec
from engine.model.transformer import Transformer
from engine.model.weight_files import Checkpoint

_SEES = ("tower.", "vision.")  # the beginnings of our names


def misfit(path: Path, config: Any, spec: ModelSpec, device: torch.device) -> str | None:
    """The tensor of the projector beside a GGUF file that does not fit its metadata, with the projector's path; None if
    all fit, or there is no projector. `path`: the folder that represents the files."""
    link = path / PROJECTOR_LINK
    if spec.vision is None or not link.is_symlink():
        return None
    backend = select(device, spec.trunk.attentions)
    ours = dict(Transformer(spec, backend, 1, device="meta", dtype=torch.float32).named_parameters())
    file, read = link.resolve(), set[str]()
    with Checkpoint(path, stored_scheme(config)) as checkpoint:
        table = weight_table(config, spec)
        checkpoint.rename(table)
        for entry in table.chosen(checkpoint.names):
            if not entry.target.startswith(_SEES):
                continue
            shapes = entry.transform.shapes(ours[entry.target].shape)
            for name, shape in zip(entry.sources, shapes, strict=True):
                if name not in checkpoint.names:
                    return f"{file} lacks a tensor: {name} in the original checkpoint."
                if checkpoint.shape(name) != shape:
                    return (
                        f"{file}: the tensor {name} should have the shape {list(shape)}, but is "
                        f"stored as {list(checkpoint.shape(name))}."
                    )
                read.add(name)
        for name, (place, _) in checkpoint.names.items():
            if place.name == PROJECTOR_LINK and name not in read and not table.ignores(name):
                return f"{file} has a tensor that its metadata do not explain: {name}."
    return None
