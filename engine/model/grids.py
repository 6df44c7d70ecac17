"""Images of any size as a tower reads them: their patches, in squares that become one vector each, and the windows that
the squares form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.interface.vision import Size
from engine.model import spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """An image's patches in the order in which a tower reads them.

    Attributes:
        size: rows and columns of patches.
        places: [patches, 2] the row and the column of each patch.
        windows: the number of patches in each window.
        original: [squares] the index of each square of patches, which are in windows, in the order of rows.
    """

    size: Size
    places: Tensor
    windows: list[int]
    original: Tensor


def grid_of(size: Size, merge: int, window: int) -> Grid:
    """The patches of an image.

    Args:
        size: rows and columns of patches.
        merge: patches of a square's side.
        window: squares of a window's side; 0: the whole image is one.
    """
    rows, columns = (count // merge for count in size)
    squares = torch.arange(rows * columns, device="cpu").view(rows, columns)
    counts = [rows * columns]
    if window:
        parts = [part for band in torch.split(squares, window) for part in torch.split(band, window, dim=1)]
        squares, counts = torch.cat([part.flatten() for part in parts]), [part.numel() for part in parts]
    order = squares.flatten()
    within = torch.arange(merge, device="cpu")
    down = (order // columns * merge)[:, None, None] + within[:, None]
    across = (order % columns * merge)[:, None, None] + within
    shape = (len(order), merge, merge)
    places = torch.stack([down.expand(shape), across.expand(shape)], dim=-1).view(-1, 2)
    return Grid(size=size, places=places, windows=[count * merge**2 for count in counts], original=order.argsort())


def patches_of(image: Tensor, part: spec.Patches, grid: Grid) -> Tensor:
    """[patches, pixels] of an image [channels, height, width]."""
    patches = F.unfold(image[None], part.patch, stride=part.patch)[0].T
    rows, columns = grid.places.to(image.device).unbind(1)
    found = patches[rows * (image.shape[2] // part.patch[1]) + columns]
    if part.frames == 1:
        return found
    each = found.view(len(found), part.channels, 1, -1).expand(-1, -1, part.frames, -1)
    return each.reshape(len(found), -1)


def blend_of(grid: Grid, side: int, device: torch.device, *, cells: bool) -> tuple[Tensor, Tensor]:
    """[patches, 4] rows of a table of side x side positions, and the share of each in a patch's position: the table is
    stretched to the image, so that the centres of their corners meet, or the outer edges of their `cells`."""
    counts, places = torch.tensor(grid.size, device="cpu"), grid.places.float()
    if cells:
        spots = ((places + 0.5) * side / counts - 0.5).clamp(min=0)
    else:
        spots = places * (side - 1) / (counts - 1).clamp(min=1)
    before = spots.floor()
    taps = before.long()[:, :, None] + torch.arange(2, device="cpu")  # [patches, axes, 2]
    shares = (1 - (spots[:, :, None] - taps).abs()).clamp(min=0)
    taps = taps.clamp(max=side - 1)
    rows = (taps[:, 0, :, None] * side + taps[:, 1, None, :]).flatten(1)
    weights = (shares[:, 0, :, None] * shares[:, 1, None, :]).flatten(1)
    return rows.to(device), weights.to(device)
