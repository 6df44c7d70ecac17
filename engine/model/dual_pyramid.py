"""A module that computes an image's vectors in stages, in which positions attend within windows and features within
groups (DaViT)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model import spec
from engine.model.activations import activate_by_name
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.place import Place
from engine.model.pyramid import MOST_ROWS, by_parts, joined_windows, windows_of
from engine.model.row_kernels import RowModule


class DualPyramidEmbedding(nn.Module):
    """Turns an image [channels, height, width] into vectors [positions, width]."""

    def __init__(self, part: spec.DualPyramid, place: Place):
        super().__init__()
        width = part.stages[-1].width
        before = (part.channels, *(stage.width for stage in part.stages))
        self.stages = nn.ModuleList(
            _Stage(part, stage, inputs, grid, place)
            for stage, inputs, grid in zip(part.stages, before, part.grids, strict=False)
        )
        self.rows = place.parameter(part.places, width // 2)
        self.columns = place.parameter(part.places, width - width // 2)
        self.times = place.parameter(part.times, width)
        self.projection = Linear(width, part.projection, False, place)
        self.norm = build_norm(part.norm, part.projection, place)
        self._grid = part.grids[-1]

    def forward(self, image: Tensor) -> Tensor:
        """The vectors of an image."""
        x = image.permute(1, 2, 0).to(self.rows.dtype)
        for stage in self.stages:
            x = stage(x)
        rows, columns = self._grid
        across = self.columns[:columns].expand(rows, -1, -1)
        down = self.rows[:rows, None].expand(-1, columns, -1)
        placed = (x + torch.cat([across, down], dim=-1)).flatten(0, 1) + self.times[0]
        projected: Tensor = self.projection(torch.cat([placed.mean(0, keepdim=True), placed]))
        normed: Tensor = projected if self.norm is None else self.norm(projected)
        return normed


class _Stage(nn.Module):
    """A convolution, and pairs of layers over its results."""

    def __init__(self, part: spec.DualPyramid, own: spec.DualStage, inputs: int, grid: tuple[int, int], place: Place):
        super().__init__()
        self._own, self._grid = own, grid
        self.convolution = Linear(inputs * own.kernel**2, own.width, True, place)
        self.norm = build_norm(part.norm, inputs if own.norm_first else own.width, place)
        self.blocks = nn.ModuleList(
            _Layer(part, own, attention(part, own, place), place)
            for _ in range(own.layers)
            for attention in (_WindowAttention, _FeatureAttention)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Results [rows, columns, features] of x [rows, columns, features of the stage before]."""
        own = self._own
        if own.norm_first and self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view_as(x)
        # The window of each position is a row: its features, and the kernel's rows and columns of each.
        taps = F.unfold(x.permute(2, 0, 1)[None], own.kernel, padding=own.padding, stride=own.stride)[0].T
        made: Tensor = by_parts(self.convolution, taps.contiguous())
        if not own.norm_first and self.norm is not None:
            made = self.norm(made)
        x = made.view(*self._grid, -1)
        for block in self.blocks:
            x = block(x)
        return x


class _Layer(RowModule):
    """Attention and a feed-forward network, and a convolution of each feature with its neighbours before both."""

    def __init__(self, part: spec.DualPyramid, own: spec.DualStage, attention: nn.Module, place: Place):
        super().__init__()
        self._activation = part.activation
        self.attention = attention
        self.near = _Neighbourhood(own.width, place)
        self.before = build_norm(part.norm, own.width, place)
        self.second_near = _Neighbourhood(own.width, place)
        self.after = build_norm(part.norm, own.width, place)
        self.up = Linear(own.width, own.inner, True, place)
        self.down = Linear(own.inner, own.width, True, place)

    def forward(self, x: Tensor) -> Tensor:
        """Results [rows, columns, features] of x [rows, columns, features]."""
        assert self.before is not None
        assert self.after is not None
        x = self.near(x)
        x = x + self.attention(self.before(x.flatten(0, 1)).view_as(x))
        x = self.second_near(x)
        return x + by_parts(self._network, self.after(x.flatten(0, 1))).view_as(x)

    def _network(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(activate_by_name(self._activation, self.up(x), self.kernels))
        return found


class _Neighbourhood(nn.Module):
    """Adds to each position a convolution of each feature over the 3 x 3 positions around it."""

    def __init__(self, width: int, place: Place):
        super().__init__()
        self.weight = place.parameter(width, 1, 3, 3)
        self.bias = place.parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        """Results [rows, columns, features] of x [rows, columns, features]."""
        near = F.conv2d(x.permute(2, 0, 1)[None], self.weight, self.bias, padding=1, groups=len(self.weight))
        return x + near[0].permute(1, 2, 0)


class _WindowAttention(nn.Module):
    """Positions attend within windows. Zeros fill the windows at the right and the bottom, and are attended to."""

    def __init__(self, part: spec.DualPyramid, own: spec.DualStage, place: Place):
        super().__init__()
        self._size, self._heads = part.window, own.heads
        self.qkv = Linear(own.width, 3 * own.width, part.qkv_bias, place)
        self.out = Linear(own.width, own.width, True, place)

    def forward(self, x: Tensor) -> Tensor:
        """Results [rows, columns, features] of x [rows, columns, features]."""
        (rows, columns, _), size = x.shape, self._size
        filled = F.pad(x, (0, 0, 0, -columns % size, 0, -rows % size))
        windows = torch.split(windows_of(filled, size), max(MOST_ROWS // size**2, 1))
        found = torch.cat([self._among(part) for part in windows])
        height, width, _ = filled.shape
        return joined_windows(found, height, width, size)[:rows, :columns]

    def _among(self, windows: Tensor) -> Tensor:
        count, positions, width = windows.shape
        split = self.qkv(windows.reshape(count * positions, width)).view(count, positions, 3, self._heads, -1)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(count * positions, width))
        return out.view(count, positions, width)


class _FeatureAttention(nn.Module):
    """Features attend to the features of their group, by their values at all positions."""

    def __init__(self, part: spec.DualPyramid, own: spec.DualStage, place: Place):
        super().__init__()
        self._groups = own.groups
        self.qkv = Linear(own.width, 3 * own.width, part.qkv_bias, place)
        self.out = Linear(own.width, own.width, True, place)

    def forward(self, x: Tensor) -> Tensor:
        """Results [rows, columns, features] of x [rows, columns, features]."""
        rows = x.flatten(0, 1)
        split = by_parts(self.qkv, rows).view(len(rows), 3, self._groups, -1)
        queries, keys, values = split.permute(1, 2, 3, 0)
        scores = (queries @ keys.mT).float() * len(rows) ** -0.5
        mixed = scores.softmax(-1).to(values.dtype) @ values
        out: Tensor = by_parts(self.out, mixed.permute(2, 0, 1).reshape(len(rows), -1))
        return out.view_as(x)
