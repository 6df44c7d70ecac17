"""A residual stream of several versions (AltUp, arXiv:2301.13310): its beginning, its end, and each layer's predictions
and corrections.

Versions lie side by side in rows of `count` times hidden features.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from engine.model import spec
from engine.model.layers import Linear
from engine.model.norms import build_norm
from engine.model.place import Place

_LEAST = 1e-5  # of a mean square that is divided by


class VersionEnds(nn.Module):
    """Two kinds of matrices: some make versions of an embedding, the others join versions into one stream."""

    def __init__(self, part: spec.Versions, hidden_size: int, place: Place):
        super().__init__()
        self.part = part
        others = range(part.count - 1)
        self.enter = nn.ModuleList(Linear(hidden_size, hidden_size, False, place) for _ in others)
        self.leave = nn.ModuleList(Linear(hidden_size, hidden_size, False, place) for _ in others)

    def expand(self, x: Tensor) -> Tensor:
        """[Tp, count * hidden] versions of an embedding [Tp, hidden]: it comes first, the others have its magnitude."""
        return torch.cat([x, *(_as_large(matrix(x), x) for matrix in self.enter)], dim=1)

    def merge(self, versions: Tensor) -> Tensor:
        """[Tp, hidden], the mean of versions that have the first one's magnitude."""
        first, *others = versions.chunk(self.part.count, dim=1)
        first = first.contiguous()
        made = (matrix(own.contiguous()) for matrix, own in zip(self.leave, others, strict=True))
        return torch.stack([first, *(_as_large(own, first) for own in made)]).mean(dim=0)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """Rows x with the mean square of another tensor's rows."""
    target = like.square().mean(dim=-1, keepdim=True).sqrt()
    return x * target / x.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST).sqrt()


class LayerVersions(nn.Module):
    """A layer's predictions of the versions, and its corrections."""

    def __init__(self, part: spec.Versions, hidden_size: int, place: Place):
        super().__init__()
        self.part, self.hidden_size = part, hidden_size
        # A few numbers for each token: they keep float32.
        exact = replace(place, dtype=torch.float32)
        self.norm = build_norm(part.norm, hidden_size, place)
        self.router = place.parameter(part.count, hidden_size)
        self.predictions = exact.parameter(part.count * part.count, part.count)
        self.corrections = exact.parameter(part.count, part.count)
        self.scale = place.parameter(hidden_size)

    def predict(self, versions: Tensor) -> tuple[Tensor, Tensor]:
        """(predictions [Tp, count * hidden]: each version plus a sum of all; the active one [Tp, hidden])."""
        apart = versions.view(len(versions), self.part.count, self.hidden_size)
        odds = self._odds(apart[:, self.part.active].contiguous())
        factors = _product(odds, self.predictions).view(len(odds), self.part.count, self.part.count)
        summed = sum(
            (factors[:, :, p, None] * apart[:, p, None].float() for p in range(self.part.count)), apart.float()
        )
        predicted = summed.to(versions.dtype)
        return predicted.view_as(versions), predicted[:, self.part.active].contiguous()

    def correct(self, predicted: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        """Correct the predicted versions by the layer's output for the active one. Returns (versions [Tp, count *
        hidden], the vector [Tp, hidden] that is read beside them)."""
        apart = predicted.view(len(predicted), self.part.count, self.hidden_size)
        news = (made - apart[:, self.part.active]).float()
        factors = _product(self._odds(made), self.corrections) + 1.0
        versions = (apart.float() + factors[:, :, None] * news[:, None]).to(predicted.dtype)
        active = versions[:, self.part.active]
        read = active * self.scale if self.part.scaled else active
        return versions.view_as(predicted), read.contiguous()

    def add(self, versions: Tensor, x: Tensor) -> Tensor:
        """Versions plus rows x [Tp, hidden], except for the first one."""
        apart = versions.view(len(versions), self.part.count, self.hidden_size)
        return torch.cat((apart[:, :1], apart[:, 1:] + x[:, None]), dim=1).view_as(versions)

    def _odds(self, x: Tensor) -> Tensor:
        """[Tp, count] float32 numbers from -1 to 1 of rows x."""
        return _product(self.norm(x) * (1.0 / self.hidden_size), self.router).tanh()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32, for which no row's bits depend on the others."""
    return (x.float()[:, None] * weight.float()).sum(dim=-1)
