"""Padded batches of token ids, and means over the tokens that are not padding, for the workers of encoders.

This module needs numpy alone: it runs in every peer's own environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Batch = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""ids and mask [rows, longest], int64, to vectors [rows, features]."""


def encode(inputs: list[list[int]], size: int, batch: Batch) -> dict[str, Any]:
    """The vectors of all inputs, batched by length, which wastes the least on padding.

    Returns:
        seconds, and the first numbers of each vector.
    """
    started = time.perf_counter()
    order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i]))
    made: dict[int, np.ndarray] = {}
    for part in _parts(order, size):
        longest = len(inputs[part[0]])
        ids = np.zeros((len(part), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, number in enumerate(part):
            ids[row, : len(inputs[number])] = inputs[number]
            mask[row, : len(inputs[number])] = 1
        made.update(zip(part, batch(ids, mask), strict=True))
    return answer(time.perf_counter() - started, [made[number] for number in range(len(inputs))])


def answer(seconds: float, vectors: list[np.ndarray]) -> dict[str, Any]:
    """The answer to an order to encode."""
    return {"seconds": seconds, "vectors": [vector[:16].astype(float).tolist() for vector in vectors]}


def mean(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """hidden [rows, longest, features] to means [rows, features] over what is not padding."""
    weights = mask[:, :, None].astype(np.float32)
    found: np.ndarray = (hidden * weights).sum(1) / weights.sum(1)
    return found


def _parts(order: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(order), size):
        yield order[first : first + size]
