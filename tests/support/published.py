"""Published checkpoints: the contents of `published/NAME.json`, a config.json, is the constant NAME; and the parts that
are read from one. DeBERTa v3's config names no architecture; saving the model adds it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.model import checkpoint, families
from engine.model.spec import ModelSpec, Stack, Tokens

Read = Callable[..., ModelSpec]  # of the fixture `read`
FOLDER = Path(__file__).with_suffix("")


def __getattr__(name: str) -> dict[str, Any]:
    file = FOLDER / f"{name.lower()}.json"
    if not (name.isupper() and file.is_file()):
        raise AttributeError(f"no config.json of {name} is in {FOLDER}")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def decoder(model: ModelSpec) -> Stack:
    """The stack that writes."""
    assert model.decoder is not None
    return model.decoder


def encoder(model: ModelSpec) -> Stack:
    """The stack that reads."""
    assert model.encoder is not None
    return model.encoder


def words(model: ModelSpec) -> Tokens:
    """The embedding of an encoder of texts."""
    embedding = encoder(model).embedding
    assert isinstance(embedding, Tokens)
    return embedding


def read(folder: Path, values: dict[str, Any], **changes: Any) -> ModelSpec:
    """The parts of a config.json with these contents, as they are read from a checkpoint's folder."""
    (folder / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")
    return families.build_spec(checkpoint.read_config(folder))
