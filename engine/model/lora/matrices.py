"""The contents of an adapter's files, before they are matched with a model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Matrices:
    """The two matrices by which an adapter changes one matrix of a checkpoint."""

    module: str  # the matrix's module in transformers
    scale: float  # the factor of their product
    sizes: tuple[tuple[int, ...], tuple[int, ...]]  # shapes [rank, in] and [out, rank]
    read: Callable[[], tuple[Tensor, Tensor]]
    alternate: bool = False  # the order of a delta rule's value heads, see `DeltaRule`


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of an adapter that replaces the model's."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def octets(file: BufferedReader, begin: int, size: int) -> Tensor:
    """Bytes of a file. It is not mapped, because reading a mapped file that is shortened meanwhile ends the process.
    Raises ValueError if the file is too short."""
    content = bytearray(os.pread(file.fileno(), size, begin))
    if len(content) < size:
        raise ValueError(f"it ends before byte {begin + size}")
    return torch.frombuffer(content, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
