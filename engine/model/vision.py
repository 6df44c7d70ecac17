"""The module that makes vectors of images for a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.interface.vision import Size, VisionInfo
from engine.model import spec
from engine.model.activations import activate_by_name, gate_by_name
from engine.model.layers import GatedFeedForward, Linear
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.row_kernels import RowModule

Tower = Callable[[Tensor], Tensor]
"""[positions, features] of a crop [channels, height, width]; the hidden states that are `kept` come after the last."""


def _squares_of(x: Tensor, factor: int) -> Tensor:
    """[N / factor^2, factor^2 * features] of the hidden states x [N, features] of a square grid."""
    side = math.isqrt(len(x)) // factor
    return x.view(side, factor, side, factor, -1).transpose(1, 2).reshape(side**2, -1)


class Projector(RowModule):
    """The tower's hidden states [N, features] to the decoder's vectors [N, hidden]."""

    def __init__(self, part: spec.Projector, features: int, hidden: int, place: Place):
        super().__init__()
        inner = part.inner or hidden
        self.norm = build_norm(part.norm, features * (1 if part.each else part.merge), place)
        self.merged = Linear(features * part.merge, features, False, place) if part.merged else None
        self.first = Linear(features * (1 if part.merged else part.merge), inner, part.bias, place)
        self.second = Linear(inner, hidden, part.bias, place)
        self._activation = part.activation
        self._factor = math.isqrt(part.merge) if part.shuffles else 0
        self._each = part.each

    def forward(self, x: Tensor) -> Tensor:
        x = _squares_of(x, self._factor) if self._factor else x
        if self.merged is not None:
            x = self.merged(x.reshape(-1, self.merged.inputs))
        if self._each and self.norm is not None:
            x = self.norm(x)
        x = x.reshape(-1, self.first.inputs)
        if not self._each and self.norm is not None:
            x = self.norm(x)
        projected: Tensor = self.second(activate_by_name(self._activation, self.first(x), self.kernels))
        return projected


class GatedProjector(RowModule):
    """The tower's hidden states [N, features], square by square, to the decoder's vectors [N / merge, hidden]."""

    def __init__(self, part: spec.GatedProjector, features: int, hidden: int, place: Place):
        super().__init__()
        self.merged = Linear(features * part.merge, hidden, True, place)
        self.first = Linear(hidden, hidden, False, place)
        self.norm = build_norm(part.norm, hidden, place)
        self.network = GatedFeedForward(part.network, hidden, place)

    @property
    def second(self) -> Linear:
        """The last matrix."""
        return self.network.down

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm is not None
        x = self.norm(self.first(self.merged(x.reshape(-1, self.merged.inputs))))
        wide = self.network.gate_up(activate_by_name("gelu", x, self.kernels))
        projected: Tensor = self.network.down(gate_by_name(self.network.activation, wide, self.kernels))
        return projected


class ShuffledProjector(nn.Module):
    """The tower's hidden states [N, features] of a square grid to the decoder's vectors [N / factor^2, hidden]."""

    def __init__(self, part: spec.Shuffled, features: int, hidden: int, place: Place):
        super().__init__()
        self.second = Linear(features * part.factor**2, hidden, part.bias, place)
        self._factor = part.factor

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.second(_squares_of(x, self._factor))
        return projected


class PooledProjector(nn.Module):
    """The tower's hidden states [N, features] of a square grid to the decoder's vectors [N / factor^2, hidden]."""

    def __init__(self, part: spec.Pooled, features: int, hidden: int, place: Place):
        super().__init__()
        self.norm = build_norm(part.norm, features, place)
        self.second = Linear(features, hidden, False, place)
        self._factor = part.factor

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm is not None
        side, factor = math.isqrt(len(x)), self._factor
        means = x.view(side // factor, factor, side // factor, factor, -1).float().mean((1, 3)).to(x.dtype)
        projected: Tensor = self.second(self.norm(means.flatten(0, 1)))
        return projected


def _projector(
    part: spec.Vision, hidden: int, place: Place
) -> Projector | GatedProjector | ShuffledProjector | PooledProjector:
    features = part.tower.output_size * (1 + len(part.tower.kept) * part.joined)
    match part.projector:
        case spec.Projector() as mapped:
            return Projector(mapped, features, hidden, place)
        case spec.GatedProjector() as gated:
            return GatedProjector(gated, features, hidden, place)
        case spec.Shuffled() as shuffled:
            return ShuffledProjector(shuffled, features, hidden, place)
        case spec.Pooled() as pooled:
            return PooledProjector(pooled, features, hidden, place)


class ImageEmbedding(nn.Module):
    """A tower, which is a separate model, and a projector. They turn crops of an image into vectors of a decoder.
    `hidden`: features of the decoder's vectors."""

    def __init__(self, part: spec.Vision, hidden: int, place: Place):
        super().__init__()
        self.part = part
        self.projector = _projector(part, hidden, place)
        features = part.tower.output_size
        self.deep = nn.ModuleList(
            [] if part.deep is None else [Projector(part.deep, features, hidden, place) for _ in part.tower.kept]
        )
        self.newline = place.parameter(hidden) if part.newline else None

    def forward(self, crops: Iterable[Tensor], size: Size, tower: Tower, info: VisionInfo) -> Tensor:
        """[vectors, hidden] of an image; with further vectors beside each, if there are `deep` ones.

        Args:
            crops: float32 [channels, height, width] each.
            size: height and width of the image as it was sent.
            tower: computes one crop. One at a time: that bounds the memory, and no crop's bits depend on another.
        """
        found = [self._projected(tower(crop)[self.part.skip :]) for crop in crops]
        whole, end = found[0], None if self.newline is None else self.newline * self.part.scale
        if len(found) == 1:
            return whole if end is None else torch.cat((whole, end[None].to(whole.dtype)))
        rows, columns = info.tiles(size)
        tiles = torch.stack([tile[info.first :] for tile in found[1:]])
        grid = tiles.view(rows, columns, *info.grid, -1).transpose(1, 2)
        grid = grid.reshape(rows * info.grid[0], columns * info.grid[1], -1)
        top, left, (height, width) = info.shown(size)
        grid = grid[top : top + height, left : left + width]
        if (small := info.reduced((height, width))) != (height, width):
            grid = F.interpolate(grid.movedim(-1, 0)[None], small, mode="bilinear")[0].movedim(0, -1)
        if end is not None:
            ends = end.to(grid.dtype).expand(len(grid), 1, -1)
            grid = torch.cat((grid, ends), dim=1)
        return torch.cat((whole, grid.flatten(0, 1)))

    def _projected(self, states: Tensor) -> Tensor:
        """The vectors of a crop; `states`: the tower's hidden states, with those that are kept beside them."""
        own, *kept = torch.split(states, self.part.tower.output_size, dim=1)
        if self.part.joined:
            vectors: Tensor = self.projector(torch.cat([*kept, own], dim=1))
        else:
            deep = (part(one) for part, one in zip(self.deep, kept, strict=True))
            vectors = torch.cat([self.projector(own), *deep], dim=1)
        return vectors if self.part.scale == 1.0 else vectors * self.part.scale
