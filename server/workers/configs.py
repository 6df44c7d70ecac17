"""Reads a model's config for the engine. This is a worker's job, because a worker has `transformers`, so that neither
the engine nor the process that answers HTTP needs it."""

from __future__ import annotations

from engine.process.known import encode, find_known


def find_config(model: str) -> bytes:
    """The known facts about a model, encoded."""
    return encode(find_known(model))
