"""Weights of few bits made from those of a checkpoint, and their products where there are no kernels of our own.

Embeddings and norms keep their format. int8 and int4 have a scale for each `gemm.GROUP` inputs of an output, int8-fast
has one for each output. On a CPU activations become int8 in the product, with a scale for each group of a row, or for
each row. What torch computes there is what `engine.backends.native.gemm` computes, from the same numbers: sums of
integers are exact, so that a row's result depends on nothing but that row here as well. On a GPU, where there is no
int8-fast, activations keep their format and weights are widened (`device_product`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends import native
from engine.backends import triton as gpu
from engine.backends.native import gemm
from engine.backends.native.gemm import GROUP, Quantised
from engine.errors import ConfigError

logger = logging.getLogger("octavo.model")

Quantization = Literal["int8", "int8-fast", "int4"]
ON_GPUS: tuple[Quantization, ...] = ("int8", "int4")

_EXACT = 1024  # sums of so many products of two int8 are below 2^24: exact in float32, in any order
_TINY8, _TINY4 = 2.0**-100, 1e-17  # largest weights of a row or group below this are zeros
_TRIED, _STEP = 4, 0.25
_ROWS = 4096  # of groups, quantised at a time


_QUANTISERS: dict[Quantization, Callable[[Tensor], Quantised]] = {
    "int8": gemm.quantise_int8,
    "int8-fast": gemm.quantise_int8_fast,
    "int4": gemm.quantise_int4,
}
_PACKERS: dict[Quantization, Callable[[Quantised, Tensor | None], gemm.Packed]] = {
    "int8": gemm.pack_int8,
    "int8-fast": gemm.pack_int8_fast,
    "int4": gemm.pack_int4,
}


def size_of(outputs: int, inputs: int, kind: Quantization) -> int:
    """Bytes of a weight [outputs, inputs]."""
    if kind == "int8-fast":
        return outputs * (inputs + 4)
    if kind == "int8":
        return outputs * (inputs + 2 * -(-inputs // GROUP))
    return outputs * -(-inputs // GROUP) * (GROUP // 2 + 2)


def warn_if_slow(device: torch.device) -> None:
    """Say in the log what weights of few bits cost without kernels of our own."""
    if not (native.available() if device.type == "cpu" else gpu.serves(device)):
        logger.warning(
            "Weights of few bits are widened by torch at every product, which is slow: Octavo's own kernels are not "
            "there (see octavo doctor). Plain weights are faster here."
        )


def quantiser() -> str:
    """What quantises, in words: another may round otherwise."""
    return "native" if native.available() else f"torch {torch.__version__}"


def quantise(weight: Tensor, kind: Quantization) -> Quantised:
    """The weight [outputs, inputs] in few bits, on the CPU."""
    weight = weight.detach().cpu()
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    if not native.available():
        return quantise_by_torch(weight, kind)
    return _QUANTISERS[kind](weight)


def product(
    weight: Tensor | Quantised, bias: Tensor | None, kind: Quantization
) -> tuple[Callable[[Tensor], Tensor], gemm.Packed | None]:
    """x [..., inputs] to x @ weight.T + bias with a quantised weight, in x's format; and the weight as our own kernels
    read it, if those compute that.

    Args:
        weight: quantised here if it is plain; it is not needed any more.
    """
    made = weight if isinstance(weight, Quantised) else quantise(weight, kind)
    if not native.available():
        return torch_product(made, bias), None
    packed = _PACKERS[kind](made, bias)
    return (lambda x: _as_float32(packed, x) if x.dtype == torch.float16 else gemm.matmul(packed, x)), packed


def on_device(weight: Tensor | Quantised, kind: Quantization, device: torch.device) -> Quantised:
    """A weight in few bits on a device that is no CPU's; quantised on the CPU if it is plain.

    Raises:
        ConfigError: no device but a CPU multiplies with this kind.
    """
    if kind not in ON_GPUS:
        raise ConfigError(f"weights of {kind} are for CPUs; on {device} there are {' and '.join(ON_GPUS)}.")
    made = weight if isinstance(weight, Quantised) else quantise(weight, kind)
    return Quantised(made.values.to(device), made.scales.to(device), made.inputs)


def device_product(made: Quantised, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [..., inputs] to x @ weight.T + bias on the weight's device, in x's format. Activations keep it, too: the
    weight is widened, by our own kernels where they serve, else whole by torch at every product."""
    if not gpu.serves(made.values.device):
        return lambda x: F.linear(x, made.dense().to(x.dtype), bias)
    from engine.backends.triton import few_bits

    return lambda x: few_bits.product(x, made, bias)


def _as_float32(packed: gemm.Packed, x: Tensor) -> Tensor:
    return gemm.matmul(packed, x.float()).to(x.dtype)


def quantise_by_torch(weight: Tensor, kind: Quantization) -> Quantised:
    """What the quantisers of `gemm` make, but for ties that round otherwise."""
    outputs, inputs = weight.shape
    if kind == "int8-fast":
        steps, scales = _steps(weight)
        return Quantised(steps.to(torch.int8), scales, inputs)
    groups = F.pad(weight.float(), (0, -inputs % GROUP)).view(-1, GROUP)
    if kind == "int8":
        steps, scales = _steps(groups, torch.bfloat16)
        values = steps.to(torch.int8).view(outputs, -1)[:, :inputs].contiguous()
        return Quantised(values, scales.view(outputs, -1), inputs)
    made = [_quantise_groups(part) for part in torch.split(groups, _ROWS)]
    values = torch.cat([part[0] for part in made]) if made else groups.new_empty(0, GROUP, dtype=torch.uint8)
    scales = torch.cat([part[1] for part in made]) if made else groups.new_empty(0, dtype=torch.bfloat16)
    return Quantised(gemm.join_levels(values.view(outputs, -1, GROUP)), scales.view(outputs, -1), inputs)


def _quantise_groups(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from 0 to 15 and scales of groups [N, GROUP]: of several scales the one with the least squared error."""
    most = weights.abs().amax(1)
    finite = most.isfinite()
    weights = torch.where(finite[:, None], weights, 0)
    extreme = torch.where((weights == -most[:, None]).any(1), -most, most)
    inverse = 1 / extreme
    best, highest = torch.zeros_like(most), torch.zeros_like(most)
    for i in range(-_TRIED, _TRIED + 1):
        levels = _levels(weights, (-8 + _STEP * i) * inverse)
        with_weights, with_themselves = (levels * weights).sum(1), levels.square().sum(1)
        # With these integers the best scale is a / b, and the squared error is that of 0 less a² / b.
        scale = torch.where(with_themselves > 0, with_weights / with_themselves, 0)
        explained = with_weights * scale
        better = explained > highest
        highest = torch.where(better, explained, highest)
        best = torch.where(better, scale, best)
    scales = torch.where(finite & (most > _TINY4), best, 0).bfloat16()
    used = scales.float()
    levels = torch.where(used[:, None] != 0, _levels(weights, 1 / used), 0)
    return (levels + 8).to(torch.uint8), torch.where(finite, scales, torch.nan)


def _levels(weights: Tensor, reciprocal: Tensor) -> Tensor:
    return (weights * reciprocal[:, None]).clamp(-8, 7).round().nan_to_num(0.0)


def _steps(x: Tensor, kept: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Integers -127 to 127 (float32) and scales of rows [N, size]; NaN is the scale of a row that is not finite.

    Args:
        kept: the scales' format. The integers count steps of what it holds.
    """
    x = x.float()
    peak = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
    finite = peak.isfinite()
    some = finite & (peak >= _TINY8)
    scales = (peak / 127).to(kept)
    # 127 / peak, a Python number, rounds twice.
    reciprocal = torch.full_like(peak, 127) / peak if kept == torch.float32 else 1 / scales.float()
    steps = torch.where(some[:, None], (x * torch.where(some, reciprocal, 0)[:, None]).round(), 0)
    return steps, torch.where(finite, torch.where(some, scales, 0), torch.nan)


def torch_product(made: Quantised, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product with a quantised weight by torch: the integers are widened each time, which is slow."""
    compute = _sums_of_rows if made.scales.dim() == 1 else _sums_of_groups
    added = None if bias is None else bias.detach().float()

    def product(x: Tensor) -> Tensor:
        sums = compute(made, x.reshape(-1, made.inputs))
        if added is not None:
            sums += added
        return sums.to(x.dtype).view(*x.shape[:-1], len(made.values))

    return product


def _sums_of_rows(made: Quantised, x: Tensor) -> Tensor:
    steps, scales = _steps(x)
    total = torch.zeros(len(x), len(made.values), dtype=torch.int32)
    parts = zip(torch.split(steps, _EXACT, dim=1), torch.split(made.values, _EXACT, dim=1), strict=True)
    for part, values in parts:
        total += (part @ values.float().T).int()
    return total.float() * (made.scales * scales[:, None])


def _sums_of_groups(made: Quantised, x: Tensor) -> Tensor:
    rows, (outputs, groups) = len(x), made.scales.shape
    steps, scales = _steps(F.pad(x, (0, -made.inputs % GROUP)).reshape(-1, GROUP))
    steps, scales = steps.view(rows, groups, GROUP), scales.view(rows, groups, 1)
    total, integers = torch.zeros(rows, outputs), made.integers()
    for group in range(groups):  # in order, as the kernels add them
        sums = steps[:, group] @ integers[:, group].float().T
        total += sums * scales[:, group] * made.scales[:, group].float()
    return total
