"""What a check of a kernel is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# What a kernel gave, and what it should have been, in float64; or an error in units of its own.
Outcome = tuple[Tensor, Tensor] | float


class SkippedError(Exception):
    """A check that cannot be made here, and why."""


@dataclass(frozen=True)
class Setting:
    """Where and on what kernels are checked.

    Attributes:
        dtype: of what they read and write.
        full: the shapes of served models; else such as an interpreter can afford.
    """

    device: torch.device
    dtype: torch.dtype
    full: bool

    def normal(self, *shape: int, deviation: float = 1.0, seed: int = 0) -> Tensor:
        """Random numbers in the format."""
        generator = torch.Generator(self.device).manual_seed(seed + sum(shape))
        return (torch.randn(*shape, device=self.device, generator=generator) * deviation).to(self.dtype)


@dataclass(frozen=True)
class Check:
    """One kernel on one kind of work.

    Attributes:
        kernel: its name in the report.
        run: gives pairs of a result and what it should have been, or errors.
        bound: the largest error that a right kernel makes.
        served: it is made with whatever serves models on the device: on a CPU that is not these kernels.
    """

    kernel: str
    run: Callable[[Setting], Iterator[Outcome]]
    bound: float = 2.0
    served: bool = False
