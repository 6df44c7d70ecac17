"""A prompt ready for the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for the engine; `text` is None where it came as token ids."""

    token_ids: list[int]
    text: str | None = None
