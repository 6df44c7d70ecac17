"""The modules of norms."""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import UnsupportedModelError
from engine.model.normalisation import Norm
from engine.model.place import Place
from engine.model.row_kernels import RowModule


class RmsNorm(RowModule):
    """Root-mean-square norm, computed in float32.

    The product with the weight is computed in the input's format, after rounding. With a unit offset, or if the part
    says so, it is computed in float32, before rounding. Half-precision results depend on that order.
    """

    def __init__(self, part: Norm, size: int, place: Place):
        super().__init__()
        self.weight = place.parameter(size) if part.weight else None
        self.shape = (size,)
        self.eps = part.eps
        self.unit_offset = part.unit_offset
        self.in_float32 = part.in_float32

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is not None:
            offset, exact = self.unit_offset, self.in_float32
            normed = self.kernels.rms_norm(x, self.weight, self.eps, unit_offset=offset, in_float32=exact)
            if normed is not None:
                return normed
        if self.weight is None:
            return F.rms_norm(x.float(), self.shape, None, self.eps).to(x.dtype)
        if self.unit_offset:
            return F.rms_norm(x.float(), self.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        if self.in_float32:
            return F.rms_norm(x.float(), self.shape, self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x.float(), self.shape, None, self.eps).to(x.dtype) * self.weight


class LayerNorm(RowModule):
    """Layer norm with or without a weight and a bias. `rows`: this many rows of x [..., rows, size] have separate
    weights and biases, in order."""

    def __init__(self, part: Norm, size: int, place: Place, rows: int = 1):
        super().__init__()
        self.weight = place.parameter(rows * size) if part.weight else None
        self.bias = place.parameter(rows * size) if part.bias else None
        self.shape = (size,)
        self.rows = rows
        self.eps = part.eps

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is not None:
            found = self.kernels.layer_norm(x, self.weight, self.bias, self.eps, self.rows)
            if found is not None:
                return found
        if self.rows == 1:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        normed = F.layer_norm(x.float(), self.shape, None, None, self.eps)
        if self.weight is not None:
            normed = normed * self.weight.float().view(self.rows, -1)
        if self.bias is not None:
            normed = normed + self.bias.float().view(self.rows, -1)
        return normed.to(x.dtype)


class AffineNorm(nn.Module):
    """weight * x + bias, in place of a norm; the bias may be absent."""

    def __init__(self, part: Norm, size: int, place: Place):
        super().__init__()
        self.weight = place.parameter(size)
        self.bias = place.parameter(size) if part.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.bias is None else x * self.weight + self.bias


@overload
def build_norm(part: Norm, size: int, place: Place, rows: int = 1) -> nn.Module: ...
@overload
def build_norm(part: Norm | None, size: int, place: Place, rows: int = 1) -> nn.Module | None: ...
def build_norm(part: Norm | None, size: int, place: Place, rows: int = 1) -> nn.Module | None:
    """The module of a norm over `size` features, or None for none; for `rows` see `LayerNorm`."""
    if part is None:
        return None
    if rows > 1 and part.kind != "layer":
        raise UnsupportedModelError(
            f"separate weights per head are allowed in a layer norm, not in a norm of kind {part.kind}."
        )
    match part.kind:
        case "rms":
            return RmsNorm(part, size, place)
        case "layer":
            return LayerNorm(part, size, place, rows)
        case "affine":
            return AffineNorm(part, size, place)
