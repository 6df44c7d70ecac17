"""Quantises a checkpoint's weights, and computes their products where our own kernels are missing.

Norms keep their format, and so do embeddings that are not an output matrix. int8 has a scale for each `gemm.GROUP`
inputs of an output, int4 a scale and a minimum, int8-fast a scale for each output. On a CPU, activations become int8 in
the product, with a scale for each group of a row, or for each row. Groups of int8 weights that are quantised here, and
of their activations, are rotated first (`gemm.rotate`), so that a large activation costs its neighbours less precision.
On a CPU torch computes the same results as `engine.backends.native.gemm` from the same numbers: sums of integers are
exact, so a row's result depends only on that row here too. On a GPU, which has no int8-fast, activations keep their
format and weights are widened (`device_product`). FLOAT8 weights of a checkpoint are multiplied with activations in
bfloat16; on a GPU that multiplies FLOAT8, many activations become FLOAT8 too (`engine.backends.torch.float8`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends import native
from engine.backends import triton as gpu
from engine.backends.native import gemm
from engine.backends.native.gemm import FLOAT8, FLOAT8_GROUP, GROUP, BlockKind, Blocks, Form, Joined, Quantised
from engine.backends.torch import float8
from engine.errors import ConfigError
from engine.model.gguf.blocks import Grouped, groups_of, held_size, numbers_of

logger = logging.getLogger("octavo.model")

Quantization = Literal["int8", "int8-fast", "int4"]
Wanted = Quantization | Literal["stored"]
"""The format of matrices; "stored": the nearest to the checkpoint's format, for each."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Kinds of matrices that are multiplied as one, with the number of outputs of each."""

    kinds: tuple[Quantization | BlockKind, ...]
    lengths: tuple[int, ...]


Held = Quantization | BlockKind | Parts
"""The form in which a matrix is kept: one of our own kinds, GGUF's blocks unchanged, or parts of several kinds."""
ON_GPUS: tuple[Quantization, ...] = ("int8", "int4")
"""Kinds that weights may become on a GPU; those that a checkpoint stores as e4m3 stay so."""

_EXACT = 1024  # sums of this many products of two int8 are below 2^24: exact in float32, in any order
_TINY8, _TINY4 = 2.0**-100, 1e-17  # too small to affect a product: largest weights for 8 bits, differences for 4
_MOST = 255  # times the unit of the scales of rotated groups
_TRIED = 4  # candidates on either side of the plain scale
_ROWS = 4096  # groups quantised at a time


_PACKERS: dict[Quantization, Callable[..., gemm.Packed]] = {
    "int8": gemm.pack_int8,
    "int8-fast": gemm.pack_int8_fast,
    "int4": gemm.pack_int4,
}


def size_of(outputs: int, inputs: int, kind: Held) -> int:
    """Bytes of a weight [outputs, inputs]; for int8, in plain groups. Rotated groups take about as much."""
    if isinstance(kind, Parts):
        return sum(size_of(length, inputs, part) for part, length in zip(kind.kinds, kind.lengths, strict=True))
    if kind == "int8-fast":
        return outputs * (inputs + 4)
    if kind == "int8":
        return outputs * (inputs + 2 * -(-inputs // GROUP))
    if kind == "int4":
        return outputs * -(-inputs // GROUP) * (GROUP // 2 + 4)
    if kind == "e4m3":
        return outputs * (inputs + 4 * -(-inputs // FLOAT8_GROUP))
    return held_size(kind, outputs * inputs)


def warn_if_slow(device: torch.device) -> None:
    """Log the cost of quantised weights without our own kernels."""
    if not (native.available() if device.type == "cpu" else gpu.serves(device)):
        logger.warning(
            "Octavo's own kernels are missing (see octavo doctor), so torch expands the quantized weights in every "
            "step, which is slow. Unquantized weights are faster here."
        )


def quantiser() -> str:
    """The name of the code that quantises, because other code may round differently."""
    return "native" if native.available() else f"torch {torch.__version__}"


def form_on(device: torch.device, kind: Quantization) -> Form:
    """The form of a quantised weight for products on a device."""
    return "rotated" if kind == "int8" and device.type == "cpu" and not gpu.serves(device) else "plain"


def quantise(weight: Tensor, kind: Quantization, form: Form = "plain") -> Quantised:
    """The weight [outputs, inputs], quantised, on the CPU. `form`: only int8 can be rotated; int8-fast is plain in any
    form."""
    weight = weight.detach().cpu()
    if weight.dtype not in (torch.float32, torch.bfloat16):
        weight = weight.float()
    if not native.available():
        return quantise_by_torch(weight, kind, form)
    if kind == "int8-fast":
        return gemm.quantise_int8_fast(weight)
    if kind == "int8":
        return gemm.quantise_int8(weight, form)
    return gemm.quantise_int4(weight, "portable" if form == "portable" else "plain")


def made_of(weight: Tensor | gemm.Weight, kind: Held) -> gemm.Weight:
    if not isinstance(weight, Tensor):
        return weight
    assert kind in _PACKERS, "plain weights cannot become blocks of a file"
    return quantise(weight, kind, form_on(weight.device, kind))


def rows(made: gemm.Weight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ids [N] of a weight in a format, [N, inputs]."""
    assert not isinstance(made, Joined), "a table is one matrix"
    found = made.changed(lambda tensor: tensor[ids])
    if isinstance(found, Blocks):
        return numbers_of(groups_of(found)).flatten(1)[:, : found.inputs].to(dtype)
    return found.dense().to(dtype)


def product(
    weight: Tensor | gemm.Weight, bias: Tensor | None, kind: Held
) -> tuple[Callable[[Tensor], Tensor], gemm.Packed | None]:
    """x [..., inputs] to x @ weight.T + bias with a quantised weight, in x's format; and the weight in the form of our
    own kernels, if they compute the product. `weight`: quantised here if it is plain; not needed afterwards."""
    made = made_of(weight, kind)
    if not native.available():
        return torch_product(made, bias), None
    packed = _pack(made, bias, kind)
    return native_product(packed), packed


def pack_parts(parts: Iterator[Any], outputs: int, bias: Tensor | None, kind: Held) -> gemm.Packed:
    """A weight in the form of our own kernels. It is quantised some rows at a time (see `gemm.pack_parts`)."""
    return gemm.pack_parts(parts, outputs, bias, lambda part, into: _pack(part, None, kind, into))


def native_product(packed: gemm.Packed) -> Callable[[Tensor], Tensor]:
    """The product with such a weight, for activations of any format."""
    return lambda x: _as_float32(packed, x) if x.dtype == torch.float16 else gemm.matmul(packed, x)


def _pack(weight: gemm.Weight, bias: Tensor | None, kind: Held, into: Tensor | None = None) -> gemm.Packed:
    match weight, kind:
        case Joined(parts), Parts(kinds):
            return gemm.join([_pack(part, None, its) for part, its in zip(parts, kinds, strict=True)], bias)
        case Blocks(), _:
            return gemm.pack_blocks(weight, bias, into)
        case Quantised(), "int8" | "int8-fast" | "int4":
            return _PACKERS[kind](weight, bias, into=into)
    raise TypeError(f"{type(weight).__name__} is not {kind}")


def on_device(weight: Tensor | gemm.Weight | gemm.Packed, kind: Held, device: torch.device) -> Quantised:
    """A quantised weight on a device other than a CPU; a plain one is quantised on the CPU first. Raises ConfigError:
    only a CPU multiplies with this kind."""
    if kind == "e4m3" and isinstance(weight, Blocks):
        return _float8_on(weight, device)
    if kind not in ("int8", "int4"):
        raise ConfigError(f"weights of {kind} are for CPUs; on {device} there are {' and '.join(ON_GPUS)}.")
    made = quantise(weight, kind) if isinstance(weight, Tensor) else weight
    assert isinstance(made, Quantised)
    assert not made.rotated, "activations keep their format there, and are not rotated"
    return Quantised(made.values.to(device), made.scales.to(device), made.inputs)


def _float8_on(weight: Blocks, device: torch.device) -> Quantised:
    """Numbers and scales apart, each in one piece."""
    blocks = weight.values.view(len(weight.values), -1, FLOAT8_GROUP + 4)
    numbers = blocks[..., :FLOAT8_GROUP].flatten(1)[:, : weight.inputs].contiguous().view(FLOAT8).to(device)
    scales = blocks[..., FLOAT8_GROUP:].contiguous().view(torch.float32).squeeze(-1)
    alike = scales.shape[1] > 0 and bool((scales == scales[:, :1]).all())
    by_output = scales[:, 0].to(device) if alike else None
    return Quantised(numbers, scales.to(device), weight.inputs, by_output=by_output)


def device_product(made: Quantised, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [..., inputs] to x @ weight.T + bias on the weight's device, in x's format. Activations keep their format too:
    the weight is widened, by our own kernels if available, otherwise as a whole by torch for every product. Many rows
    may become FLOAT8 to be multiplied by such a weight (`engine.backends.triton.float8`)."""
    if not gpu.serves(made.values.device):
        return lambda x: F.linear(x, made.dense().to(x.dtype), bias)
    from engine.backends.triton import few_bits

    return lambda x: few_bits.product(x, made, bias)


def _as_float32(packed: gemm.Packed, x: Tensor) -> Tensor:
    return gemm.matmul(packed, x.float()).to(x.dtype)


def quantise_by_torch(weight: Tensor, kind: Quantization, form: Form = "plain") -> Quantised:
    """The result of the quantisers of `gemm`, except for ties that round differently."""
    outputs, inputs = weight.shape
    if kind == "int8-fast":
        steps, scales = _steps(weight)
        return Quantised(steps.to(torch.int8), scales, inputs)
    if kind == "int8":
        groups = F.pad(weight.float(), (0, -inputs % GROUP)).view(-1, GROUP)
        if form == "rotated":
            return _quantise_rotated(gemm.rotate(groups), outputs, inputs)
        steps, scales = _steps(groups, _portable_scales if form == "portable" else _kept_scales)
        values = steps.to(torch.int8).view(outputs, -1)[:, :inputs].contiguous()
        return Quantised(values, scales.view(outputs, -1), inputs)
    if not weight.numel():
        values = torch.empty(outputs, -(-inputs // GROUP), GROUP // 2, dtype=torch.uint8)
        return Quantised(values, torch.empty(*values.shape[:2], 2, dtype=torch.float16), inputs)
    places = torch.arange(-(-inputs // GROUP) * GROUP).clamp(max=inputs - 1)  # past the end the last one again
    groups = weight.float()[:, places].view(-1, GROUP)
    made = [_quantise_groups(part, form == "portable") for part in torch.split(groups, _ROWS)]
    levels, lines = (torch.cat(parts) for parts in zip(*made, strict=True))
    return Quantised(gemm.join_levels(levels.view(outputs, -1, GROUP)), lines.view(outputs, -1, 2), inputs)


def _quantise_rotated(groups: Tensor, outputs: int, inputs: int) -> Quantised:
    """int8 of rotated groups [N, GROUP], see `Quantised.scales`."""
    wanted = _steps(groups)[1].view(outputs, -(-inputs // GROUP))
    counted = wanted.amax(1, keepdim=True) / _MOST if inputs else wanted.new_zeros(outputs, 1)
    times = torch.where(counted > 0, (wanted / counted).ceil().clamp(max=_MOST), 0)
    kept = (times * counted).view(-1, 1)
    steps = torch.where(kept > 0, (groups * (1 / kept)).round(), 0)
    scales = torch.cat((counted.view(torch.uint8), times.to(torch.uint8)), 1)
    return Quantised(steps.to(torch.int8).view(outputs, wanted.shape[1] * GROUP), scales, inputs, rotated=True)


def _quantise_groups(weights: Tensor, portable: bool) -> tuple[Tensor, Tensor]:
    """Integers from 0 to 15 of groups [N, GROUP], and float16 scales and minima [N, 2]: of several candidates, the ones
    with the least squared error."""
    finite = weights.isfinite().all(1)
    weights = torch.where(finite[:, None], weights, 0)
    found = _best_symmetric(weights) if portable else _best_lines(weights)
    lines = torch.stack(found, 1).half()
    lines[lines.isinf()] = torch.nan
    scales, minima = lines.float().unbind(1)
    levels = torch.where(scales[:, None] != 0, _levels(weights, minima, 1 / scales), 0)
    lines[~finite] = torch.nan
    return torch.where(finite[:, None], levels, 0).to(torch.uint8), lines


def _best_lines(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [N]. For the integers that a scale near the plain one gives, linear regression determines the
    line through the weights. Weights are measured from the lowest, so that nothing cancels."""
    lowest, highest = weights.aminmax(dim=1)
    spread = highest - lowest
    counted = weights - lowest[:, None]
    total = counted.sum(1)
    best_scale, best_least, most = torch.zeros_like(lowest), torch.zeros_like(lowest), torch.zeros_like(lowest)
    for i in range(-_TRIED, _TRIED + 1):
        levels = _levels(weights, lowest, (15 + 0.2 * i) / spread)
        integers, squares, products = levels.sum(1), levels.square().sum(1), (levels * counted).sum(1)
        scale = (GROUP * products - integers * total) / (GROUP * squares - integers.square())
        least = (total - scale * integers) / GROUP
        explained = scale * products + least * total  # the squared error is that of 0 minus this
        better = explained > most
        best_scale, best_least, most = (
            torch.where(better, new, old) for new, old in ((scale, best_scale), (least, best_least), (explained, most))
        )
    some = spread > _TINY4
    return torch.where(some, best_scale, 0), lowest + torch.where(some, best_least, spread / 2)


def _best_symmetric(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [N] that bfloat16 represents exactly, and -8 times these: the weight of the largest magnitude is near that
    integer."""
    lowest, highest = weights.aminmax(dim=1)
    extreme = torch.where(-lowest >= highest, lowest, highest)
    best, most = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for i in range(-_TRIED, _TRIED + 1):
        reciprocal = (0.25 * i - 8) / extreme
        levels = _levels(weights, -8 / reciprocal, reciprocal) - 8
        products = (levels * weights).sum(1)
        scale = products / levels.square().sum(1)
        explained = products * scale
        better = explained > most
        best, most = torch.where(better, scale, best), torch.where(better, explained, most)
    scales = torch.where(extreme.abs() > _TINY4, best, 0).bfloat16().float()
    return scales, -8 * scales


def _levels(weights: Tensor, minima: Tensor, reciprocals: Tensor) -> Tensor:
    return ((weights - minima[:, None]) * reciprocals[:, None]).clamp(0, 15).round().nan_to_num(0.0)


def _kept_scales(scales: Tensor) -> Tensor:
    """The nearest float16 numbers; for scales so small that float16 numbers are far apart, the next larger ones."""
    near = scales.half()
    near[near.isinf()] = torch.nan
    larger = (near.view(torch.int16) + 1).view(torch.float16)
    return torch.where((scales < 2.0**-14) & (near.float() < scales), larger, near)


def _portable_scales(scales: Tensor) -> Tensor:
    return _kept_scales(scales.bfloat16().float())


def _steps(x: Tensor, keep: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Integers -127 to 127 (float32) and scales of rows [N, size]; a row that is not finite has a NaN scale. `keep`:
    rounds scales to their stored form. The integers count steps of the rounded scales."""
    x = x.float()
    peak = x.abs().amax(1) if x.shape[1] else x.new_zeros(len(x))
    finite = peak.isfinite()
    some = finite & (peak >= _TINY8)
    scales = peak / 127 if keep is None else keep(peak / 127)
    # 127 / peak, with a Python number, rounds twice.
    reciprocal = torch.full_like(peak, 127) / peak if keep is None else 1 / scales.float()
    some &= reciprocal.isfinite()
    steps = torch.where(some[:, None], (x * torch.where(some, reciprocal, 0)[:, None]).round(), 0)
    return steps, torch.where(finite & ~scales.isnan(), torch.where(some, scales, 0), torch.nan)


def torch_product(made: gemm.Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product with a quantised weight in torch, which widens the integers each time and is slow."""
    added = None if bias is None else bias.detach().float()
    if isinstance(made, Joined):
        parts = [torch_product(part, None) for part in made.parts]

        def joined(x: Tensor) -> Tensor:
            sums = torch.cat([part(x.float()) for part in parts], -1)
            return (sums if added is None else sums + added).to(x.dtype)

        return joined
    if isinstance(made, Blocks):
        made = made.changed(Tensor.clone)  # which were a file's pages
    inputs, outputs = made.inputs, len(made.values)

    def product(x: Tensor) -> Tensor:
        rows = x.reshape(-1, inputs)
        if isinstance(made, Blocks) and made.kind == "e4m3":
            numbers, scales, _ = groups_of(made)
            sums = float8.product(rows, numbers, scales)
        elif isinstance(made, Quantised) and made.scales.dim() == 1:
            sums = _sums_of_rows(made, rows)
        else:
            sums = _sums_of_groups(made, rows)
        if added is not None:
            sums += added
        return sums.to(x.dtype).view(*x.shape[:-1], outputs)

    return product


def _sums_of_rows(made: Quantised, x: Tensor) -> Tensor:
    steps, scales = _steps(x)
    total = torch.zeros(len(x), len(made.values), dtype=torch.int32)
    parts = zip(torch.split(steps, _EXACT, dim=1), torch.split(made.values, _EXACT, dim=1), strict=True)
    for part, values in parts:
        total += (part @ values.float().T).int()
    return total.float() * (made.scales * scales[:, None])


def _sums_of_groups(made: Quantised | Blocks, x: Tensor) -> Tensor:
    integers, factors, minima = groups_of(made) if isinstance(made, Blocks) else _groups_of(made)
    rows, (outputs, groups, size) = len(x), integers.shape
    rotated = isinstance(made, Quantised) and made.rotated
    taken = F.pad(x, (0, -made.inputs % size)).reshape(-1, size)
    steps, scales = _steps(gemm.rotate(taken.float() / GROUP) if rotated else taken)
    steps, scales = steps.view(rows, groups, size), scales.view(rows, groups, 1)
    total = torch.zeros(rows, outputs)
    for group in range(groups):  # in order, as the kernels add them
        total += steps[:, group] @ integers[:, group].float().T * scales[:, group] * factors[:, group]
        if minima is not None:
            total += steps[:, group].sum(1, keepdim=True) * scales[:, group] * minima[:, group]
    return total * made.counted().T if isinstance(made, Quantised) and made.rotated else total


def _groups_of(made: Quantised) -> Grouped:
    """Scales of rotated groups are multiples of `Quantised.counted`."""
    if made.has_minima:
        lines = made.scales.float()
        return made.integers(), lines[..., 0], lines[..., 1]
    return made.integers(), (made.scales[:, 4:] if made.rotated else made.scales).float(), None
