"""The place where the parameters of modules are made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Place:
    """The device and the format of parameters.

    Attributes:
        filled_on: where matrices are until they are packed; None: on the device.
    """

    device: torch.device
    dtype: torch.dtype
    filled_on: torch.device | None = None

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter that never asks for gradients."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype), requires_grad=False)

    def matrix(self, *shape: int) -> nn.Parameter:
        """The same of a matrix, or several, packed later."""
        return replace(self, device=self.filled_on or self.device).parameter(*shape)
