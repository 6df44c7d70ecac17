"""Tensor layouts in a GGUF file that differ from those of transformers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Arrangement(ABC):
    """The change of a tensor's layout as it is read."""

    by_rows = False
    """Whether some rows can be read alone."""
    keeps_rows = False
    """Whether it only moves whole rows."""

    @abstractmethod
    def shape(self, stored: Shape) -> Shape:
        """The shape of the result."""

    @abstractmethod
    def arrange(self, stored: Tensor) -> Tensor:
        """The result."""


@dataclass(frozen=True)
class AsStored(Arrangement):
    """The same."""

    by_rows = keeps_rows = True

    def shape(self, stored: Shape) -> Shape:
        return stored

    def arrange(self, stored: Tensor) -> Tensor:
        return stored


@dataclass(frozen=True)
class Interleaved(Arrangement):
    """Rows of queries or keys in llama.cpp's order for rotating neighbours: the two halves of a head alternate."""

    heads: int
    keeps_rows = True

    def shape(self, stored: Shape) -> Shape:
        return stored

    def arrange(self, stored: Tensor) -> Tensor:
        split = stored.view(self.heads, -1, 2, *stored.shape[1:])
        return split.transpose(1, 2).reshape(stored.shape)


@dataclass(frozen=True)
class AboveOne(Arrangement):
    """Weights of norms that are deviations from 1 are stored with 1 added."""

    def shape(self, stored: Shape) -> Shape:
        return stored

    def arrange(self, stored: Tensor) -> Tensor:
        return stored.float() - 1


@dataclass(frozen=True)
class OneRow(Arrangement):
    """A matrix with one row that is stored without that dimension."""

    def shape(self, stored: Shape) -> Shape:
        return stored if len(stored) == 2 else (1, *stored)

    def arrange(self, stored: Tensor) -> Tensor:
        return stored.view(self.shape(tuple(stored.shape)))


@dataclass(frozen=True)
class Kernels(Arrangement):
    """Kernels of one feature each, [features, 1, taps], which are stored without the dimension in the middle."""

    def shape(self, stored: Shape) -> Shape:
        return stored if len(stored) == 3 else (stored[0], 1, *stored[1:])

    def arrange(self, stored: Tensor) -> Tensor:
        return stored.view(self.shape(tuple(stored.shape)))


@dataclass(frozen=True)
class Flat(Arrangement):
    """A vector that is stored as a matrix."""

    def shape(self, stored: Shape) -> Shape:
        return (math.prod(stored),)

    def arrange(self, stored: Tensor) -> Tensor:
        return stored.flatten()


@dataclass(frozen=True)
class Decays(Flat):
    """Logarithms that are stored as what the states decay by, -exp(x)."""

    def arrange(self, stored: Tensor) -> Tensor:
        return torch.log(-stored.float()).flatten()


@dataclass(frozen=True)
class ChannelDecays(AsStored):
    """The same, for each feature a row."""

    by_rows = keeps_rows = False

    def arrange(self, stored: Tensor) -> Tensor:
        return torch.log(-stored.float())


@dataclass(frozen=True)
class Frames(Arrangement):
    """The kernels of two frames, which are stored one after the other as [features, channels, height, width]. The axis
    of frames becomes the third."""

    def shape(self, stored: Shape) -> Shape:
        if len(stored) != 4 or stored[0] % 2:
            return stored  # no kernel has it
        return (stored[0] // 2, stored[1], 2, *stored[2:])

    def arrange(self, stored: Tensor) -> Tensor:
        return stored.view(2, -1, *stored.shape[1:]).movedim(0, 2)


@dataclass(frozen=True)
class Dimensions(Arrangement):
    """A tensor that may be stored without its first dimensions, which have the size 1."""

    count: int

    def shape(self, stored: Shape) -> Shape:
        return (1,) * (self.count - len(stored)) + stored

    def arrange(self, stored: Tensor) -> Tensor:
        return stored.view(self.shape(tuple(stored.shape)))
