"""Products with weights of FLOAT8 in torch: for any device, and the reference for the kernels.

A weight is a FLOAT8 number times the float32 scale of its group of `FLOAT8_GROUP` inputs. There are two products:

- `product`: activations keep 16 bits. Sums of a group are float32, and are multiplied by its scale.
- `scaled_product`: activations become FLOAT8 too, with a scale for each row, or for each group of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.native.gemm import FLOAT8, FLOAT8_GROUP

LARGEST = 448.0


def quantise(x: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """FLOAT8 [rows, inputs] of activations [rows, inputs], and float32 scales [rows, 1], or [rows, groups].

    A scale puts the largest number of its row or group at 448; if all are 0, or a scale would be subnormal, it is the
    smallest normal number. If a number is not finite, the result of its row or group is not a number.
    """
    rows, inputs = x.shape
    wide = x.float()
    groups = F.pad(wide, (0, -inputs % FLOAT8_GROUP)).view(rows, -1, FLOAT8_GROUP) if grouped else wide[:, None]
    # A GPU would multiply by the reciprocal of a Python number.
    peaks = groups.abs().amax(-1) if inputs else wide.new_zeros(rows, groups.shape[1])
    scales = (peaks / torch.full_like(peaks, LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
    steps = (groups / scales[..., None]).clamp(-LARGEST, LARGEST).flatten(1)[:, :inputs]
    return steps.to(FLOAT8), torch.where(peaks.isfinite(), scales, torch.nan)


def scaled_product(x: Tensor, scales: Tensor, weight: Tensor, factors: Tensor) -> Tensor:
    """x @ weight.T of FLOAT8 [rows, inputs] and [outputs, inputs] with their scales, in float64.

    Args:
        scales: [rows, 1] or [rows, groups].
        factors: [outputs, 1] or [outputs, groups].
    """
    return _spread(x, scales) @ _spread(weight, factors).T


def _spread(values: Tensor, scales: Tensor) -> Tensor:
    inputs = values.shape[1]
    times = inputs if scales.shape[1] == 1 else FLOAT8_GROUP
    return values.float().double() * scales.double().repeat_interleave(times, 1)[:, :inputs]


def product(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """x [rows, inputs], rounded to bfloat16, times the weight, in float32 [rows, outputs].

    Args:
        numbers: float32 [outputs, groups, FLOAT8_GROUP], 0 past a row's end.
        scales: float32 [outputs, groups].
    """
    outputs, groups, size = numbers.shape
    taken = F.pad(x, (0, groups * size - x.shape[1])).bfloat16().float().view(len(x), groups, size)
    total = x.new_zeros(len(x), outputs, dtype=torch.float32)
    for group in range(groups):  # in order, as the kernels add them
        total += taken[:, group] @ numbers[:, group].T * scales[:, group]
    return total
