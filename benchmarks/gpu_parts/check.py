"""A check of a kernel, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.native.gemm import GROUP, Quantised
from engine.model.quantisation import Quantization

# What a kernel gave, and what it should have been, in float64; or an error in units of its own.
Outcome = tuple[Tensor, Tensor] | float


class SkippedError(Exception):
    """A check that cannot be made here, and why."""


@dataclass(frozen=True)
class Setting:
    """The device and the data on which kernels are checked.

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

    def quantised(self, outputs: int, inputs: int, bits: Quantization, seed: int = 1) -> Quantised:
        """Random integers and scales, whose weights have a deviation of about inputs**-0.5. Nothing is quantised, which
        takes long without compiled kernels."""
        generator = torch.Generator(self.device).manual_seed(seed + outputs + inputs)
        groups = -(-inputs // GROUP)

        def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randint(low, high, shape, dtype=dtype, device=self.device, generator=generator)

        some = 0.5 + torch.rand(outputs, groups, device=self.device, generator=generator)
        if bits == "int8":
            values = integers(-127, 128, outputs, inputs, dtype=torch.int8)
            return Quantised(values, (some * inputs**-0.5 / 73).half(), inputs)
        values = integers(0, 256, outputs, groups, GROUP // 2, dtype=torch.uint8)
        scales = some * inputs**-0.5 / 4.6
        return Quantised(values, torch.stack((scales, -7.5 * scales), -1).half(), inputs)


@dataclass(frozen=True)
class Check:
    """One kernel on one kind of work.

    Attributes:
        kernel: its name in the report.
        run: gives pairs of a result and what it should have been, or errors.
        bound: the largest error of a single number that a right kernel makes: of millions, a few are some roundings
            off.
        spread: the largest root mean square error. A key that is left out or read twice shows here.
        served: it is made with whatever serves models on the device: on a CPU that is not these kernels.
    """

    kernel: str
    run: Callable[[Setting], Iterator[Outcome]]
    bound: float = 6.0
    spread: float = 0.75
    served: bool = False
