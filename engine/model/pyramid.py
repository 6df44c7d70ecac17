"""A module that computes an image's vectors in stages of layers. Each stage has fewer positions than the one before
(Swin)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model import spec
from engine.model.activations import activate_by_name
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.row_kernels import RowModule

MOST_ROWS = 1 << 14  # maximum positions whose inner features are in memory at a time
_ELSEWHERE = -100.0  # added to scores of keys that only the shift has brought into a window


class PyramidEmbedding(nn.Module):
    """Turns images [channels, height, width] into vectors [positions, width] each, end to end."""

    def __init__(self, part: spec.Pyramid, place: Place):
        super().__init__()
        self.part = part
        self.patches = Linear(part.channels * math.prod(part.patch), part.stages[0].width, True, place)
        self.norm = build_norm(part.norm, part.stages[0].width, place)
        self.stages = nn.ModuleList(
            _Stage(part, number, grid, place) for number, grid in enumerate(part.grids[: len(part.stages)])
        )

    def forward(self, images: Sequence[Tensor], min_rows: int = 1) -> Tensor:
        """The vectors of images.

        Args:
            min_rows: has no effect. An image is computed alone, so its matrix products always have the same rows.
        """
        return torch.cat([self._vectors(image) for image in images])

    def _vectors(self, image: Tensor) -> Tensor:
        (height, width), (rows, columns) = self.part.patch, self.part.grids[0]
        split = image.reshape(len(image), rows, height, columns, width).permute(1, 3, 0, 2, 4)
        pixels = split.reshape(rows * columns, -1).to(self.patches.weight.dtype)
        x: Tensor = by_parts(self.patches, pixels)
        x = x if self.norm is None else self.norm(x)
        for stage in self.stages:
            x = stage(x)
        return x


class _Stage(nn.Module):
    """Layers over a grid of positions. Then each square of 2 x 2 positions becomes a position of the next stage."""

    def __init__(self, part: spec.Pyramid, number: int, grid: tuple[int, int], place: Place):
        super().__init__()
        own, last = part.stages[number], number + 1 == len(part.stages)
        self.blocks = nn.ModuleList(_Layer(part, own, grid, layer % 2 == 1, place) for layer in range(own.layers))
        self.norm = None if last else build_norm(part.norm, 4 * own.width, place)
        self.reduction = None if last else Linear(4 * own.width, 2 * own.width, False, place)
        self._grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """Results [positions of the next stage, its features] of x [positions, features]."""
        for block in self.blocks:
            x = block(x)
        if self.reduction is None or self.norm is None:
            return x
        rows, columns = self._grid
        grid = F.pad(x.view(rows, columns, -1), (0, 0, 0, columns % 2, 0, rows % 2))
        squares = torch.cat([grid[row::2, column::2] for column in range(2) for row in range(2)], dim=-1)
        reduced: Tensor = by_parts(self.reduction, self.norm(squares.flatten(0, 1)))
        return reduced


class _Layer(RowModule):
    """Attention within windows, then a feed-forward network. In every other layer, the windows are shifted by half a
    window."""

    def __init__(self, part: spec.Pyramid, stage: spec.PyramidStage, grid: tuple[int, int], shifts: bool, place: Place):
        super().__init__()
        self._grid, self._size, self._heads = grid, part.window, stage.heads
        self._shift = part.window // 2 if shifts and min(grid) > part.window else 0
        self._activation = part.activation
        self.before = build_norm(part.norm, stage.width, place)
        self.qkv = Linear(stage.width, 3 * stage.width, part.qkv_bias, place)
        self.out = Linear(stage.width, stage.width, True, place)
        self.distances = place.parameter((2 * part.window - 1) ** 2, stage.heads)
        self.after = build_norm(part.norm, stage.width, place)
        self.up = Linear(stage.width, stage.inner, True, place)
        self.down = Linear(stage.inner, stage.width, True, place)

    def forward(self, x: Tensor) -> Tensor:
        """Results [positions, features] of x [positions, features]."""
        assert self.before is not None
        assert self.after is not None
        x = x + self._attended(self.before(x))
        return x + by_parts(self._network, self.after(x))

    def _network(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(activate_by_name(self._activation, self.up(x), self.kernels))
        return found

    def _attended(self, x: Tensor) -> Tensor:
        (rows, columns), size, shift = self._grid, self._size, self._shift
        grid = F.pad(x.view(rows, columns, -1), (0, 0, 0, -columns % size, 0, -rows % size))
        height, width = grid.shape[:2]
        grid = grid.roll((-shift, -shift), (0, 1)) if shift else grid
        windows = windows_of(grid, size)
        bias = self._bias()
        places = self._places(height, width, x.device) if shift else None
        made, step = [], max(MOST_ROWS // size**2, 1)
        for first in range(0, len(windows), step):
            seen = bias
            if places is not None:
                own = places[first : first + step]
                apart = own[:, None, :] != own[:, :, None]
                seen = bias + torch.where(apart, _ELSEWHERE, 0.0).to(bias.dtype)[:, None]
            made.append(self._among(windows[first : first + step], seen))
        whole = joined_windows(torch.cat(made), height, width, size)
        whole = whole.roll((shift, shift), (0, 1)) if shift else whole
        return whole[:rows, :columns].reshape(rows * columns, -1)

    def _among(self, windows: Tensor, bias: Tensor) -> Tensor:
        """Results [windows, positions, features] of attention. `bias`: added to scores [windows or 1, heads, positions,
        positions]."""
        count, positions, width = windows.shape
        split = self.qkv(windows.reshape(count * positions, width)).view(count, positions, 3, self._heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(count * positions, width))
        return out.view(count, positions, width)

    def _bias(self) -> Tensor:
        """The biases [1, heads, positions, positions] of the scores, by the distance of two positions in a window."""
        size = self._size
        places = torch.arange(size, device=self.distances.device)
        row, column = (axis.flatten() for axis in torch.meshgrid(places, places, indexing="ij"))
        down, across = (axis[:, None] - axis[None, :] + size - 1 for axis in (row, column))
        return self.distances[down * (2 * size - 1) + across].permute(2, 0, 1)[None].contiguous()

    def _places(self, height: int, width: int, device: torch.device) -> Tensor:
        """Numbers [windows, positions]. If the shift joins several parts of the image in a window, their positions have
        different numbers."""
        parts = []
        for length in (height, width):
            places = torch.arange(length, device=device)
            parts.append((places >= length - self._size).long() + (places >= length - self._shift).long())
        numbers = parts[0][:, None] * 3 + parts[1]
        return windows_of(numbers[..., None], self._size)[..., 0]


def windows_of(grid: Tensor, size: int) -> Tensor:
    """The windows [windows, positions, features] of a grid [height, width, features]."""
    height, width, features = grid.shape
    split = grid.reshape(height // size, size, width // size, size, features)
    return split.transpose(1, 2).reshape(-1, size**2, features)


def joined_windows(windows: Tensor, height: int, width: int, size: int) -> Tensor:
    """The grid [height, width, features] of its windows [windows, positions, features]."""
    split = windows.view(height // size, width // size, size, size, -1)
    return split.transpose(1, 2).reshape(height, width, -1)


def by_parts(how: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The result of a function of rows, computed for at most `MOST_ROWS` of them at a time."""
    return how(x) if len(x) <= MOST_ROWS else torch.cat([how(part) for part in torch.split(x, MOST_ROWS)])
