"""Functions of rows that several parts use, for `Apply`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.model.inputs import RunningPass
from engine.model.positions import Temperature


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    """[x | y]."""
    return torch.cat([x.flatten(1), y.flatten(1)], dim=1)


def scale(x: Tensor, y: Tensor) -> Tensor:
    """x * y, element by element."""
    return x * y.reshape(x.shape)


def add_vector(vector: nn.Parameter, x: Tensor) -> Tensor:
    """x + vector, in each row."""
    return x + vector


def multiply_all(factor: nn.Parameter | float, x: Tensor) -> Tensor:
    """x * factor, a learned number or a constant."""
    return x * factor


def temper(part: Temperature, state: RunningPass, queries: Tensor) -> Tensor:
    """Queries times a number that depends on their position."""
    steps = ((state.inputs.positions + part.first).float() / part.every).floor()
    factors = steps.log1p() * part.growth + 1.0
    return (queries * factors.view(-1, *[1] * (queries.dim() - 1))).to(queries.dtype)


def keep(state: RunningPass, x: Tensor) -> None:
    """Append x to the pass's `kept`."""
    state.inputs.kept.append(x.clone())
