"""The device and format in which modules' parameters are created."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from engine.backends.native.ranks import Ranks

_MOST_NUMBERS = 1 << 58  # of a parameter; more bytes do not fit into 64 bits


@dataclass(frozen=True, slots=True)
class Place:
    """The device and the format of parameters. `filled_on`: the device of matrices until they are packed; None for the
    final device. `ranks`: those that divide the model; None for none."""

    device: torch.device
    dtype: torch.dtype
    filled_on: torch.device | None = None
    ranks: Ranks | None = None

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter without gradients. Raises OutOfMemoryError if there is no room for it."""
        if math.prod(shape) > _MOST_NUMBERS:
            raise torch.OutOfMemoryError(f"a parameter has {' x '.join(map(str, shape))} numbers")
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype), requires_grad=False)

    def matrix(self, *shape: int) -> nn.Parameter:
        """The same for one or several matrices, which are packed later."""
        return replace(self, device=self.filled_on or self.device).parameter(*shape)
