"""Reads a model's config for the engine. A worker does this because it has `transformers`, which neither the engine nor
the process that answers HTTP then needs."""

from __future__ import annotations

from engine.process.known import encode, find_known


def find_config(model: str) -> bytes:
    """The known facts about a model, encoded."""
    return encode(find_known(model))
