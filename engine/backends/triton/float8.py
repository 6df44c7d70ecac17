"""Products of more than `FEW` rows with weights of FLOAT8 on a GPU that multiplies it (compute capability 8.9).

Activations become FLOAT8 first, by a kernel of their own: with a scale for each row if the weight has one for each
output, else with a scale for each `FLOAT8_GROUP` features. `engine.backends.torch.float8` defines both to the bit. In
the first case torch's library multiplies (`torch._scaled_mm`) if it takes the shape and the format. All other products
use `scaled_kernel`, which multiplies the sums of each group by both scales and adds them in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.native.gemm import FLOAT8, FLOAT8_GROUP, Quantised
from engine.backends.triton.norms import features_of

FEW = 8
"""Maximum rows that keep their format: the weight is widened in registers (`engine.backends.triton.few_bits`)."""

_LIBRARY = 16  # the library takes multiples of this many features and results
_BLOCK_OF_ROW, _BLOCK_OF_GROUPS = 4096, 1024  # features that a program quantises at a time
_MOST_TRIED = 8192
_PROGRAMS = 128  # about one for each of an H100's 132 multiprocessors
STAGES = 3


class Tiling(NamedTuple):
    """The part of a product that one program of `scaled_kernel` computes: rows and results, by this many warps."""

    rows: int
    outputs: int
    warps: int


def tiling(rows: int, outputs: int) -> Tiling:
    """The division of a product. With few rows, tiles have few results, so that there are enough programs to keep a GPU
    busy."""
    tall = 64 if rows <= 64 else 128
    lines = triton.cdiv(rows, tall)
    wide = next((each for each in (128, 64) if lines * triton.cdiv(outputs, each) >= _PROGRAMS), 32)
    return Tiling(tall, wide, 8 if tall * wide > 64 * 128 else 4)


def trial_rows(outputs: int) -> list[int]:
    """Numbers of rows above `FEW` that together use all tilings of a product, as far as steps have so many."""
    found: dict[Tiling, int] = {}
    for rows in (FEW + 1, *range(65, _MOST_TRIED + 1, 64)):
        found.setdefault(tiling(rows, outputs), rows)
    return list(found.values())


def serves(x: Tensor, weight: Quantised) -> bool:
    """Whether `product` multiplies these rows."""
    if not weight.is_float8 or len(x) <= FEW or x.element_size() > 2:
        return False
    return gpu.converts_float8(x.device) or (x.device.type == "cpu" and gpu.serves(x.device))


@triton.jit
def _rounded(x, scale):
    """FLOAT8 of x / scale as bytes, to the nearest, ties to even."""
    steps = tl.math.div_rn(x, scale)
    steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, -448.0), 448.0), 0.0)
    bits = steps.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # the exponent's bias is 7, not 127
    small = ((tl.abs(steps) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return (tl.where(tl.abs(steps) < 0.015625, small, normal) + ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def _scale(peak):
    """The scale that puts a largest absolute value at 448."""
    return tl.maximum(tl.math.div_rn(peak, 448.0), 1.1754943508222875e-38)


@triton.jit
def quantise_kernel(x, values, scales, stride, SIZE: tl.constexpr, GROUPED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (p, q): row p of x, as FLOAT8 with one scale; if GROUPED, the q-th BLOCK features, with a scale for each
    128 of them. Scales of numbers that are not finite are NaN."""
    row = tl.program_id(0).to(tl.int64)
    source, target = x + row * stride, values + row * SIZE
    if GROUPED:
        GROUPS: tl.constexpr = (SIZE + 127) // 128
        group = tl.program_id(1) * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
        at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        part = tl.load(source + at, mask=at < SIZE, other=0.0).to(tl.float32)
        bad = tl.sum((part - part != 0.0).to(tl.int32), 1)
        scale = _scale(tl.max(tl.where(part == part, tl.abs(part), 0.0), 1))
        tl.store(target + at, _rounded(part, scale[:, None]), mask=at < SIZE)
        tl.store(scales + row * GROUPS + group, tl.where(bad > 0, float("nan"), scale), mask=group < GROUPS)
    else:
        at = tl.arange(0, BLOCK)
        peaks = tl.zeros((BLOCK,), tl.float32)
        bad = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, SIZE, BLOCK):
            part = tl.load(source + begin + at, mask=begin + at < SIZE, other=0.0).to(tl.float32)
            bad += (part - part != 0.0).to(tl.int32)
            peaks = tl.maximum(peaks, tl.where(part == part, tl.abs(part), 0.0))
        scale = _scale(tl.max(peaks, 0))
        for begin in range(0, SIZE, BLOCK):
            part = tl.load(source + begin + at, mask=begin + at < SIZE, other=0.0).to(tl.float32)
            tl.store(target + begin + at, _rounded(part, scale), mask=begin + at < SIZE)
        tl.store(scales + row, tl.where(tl.sum(bad, 0) > 0, float("nan"), scale))


@triton.jit(do_not_specialize=["rows"])
def scaled_kernel(
    x, scales, weight, factors, bias, out, rows, width,
    SIZE: tl.constexpr, GROUPED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p: a tile of the `width` results of rows x [rows, SIZE] with their scales, [rows] or, if GROUPED, [rows,
    groups]; factors are the weight's scales, [outputs] or [outputs, groups]. Programs of the same outputs are
    neighbours, because the weight takes the most memory."""
    GROUPS: tl.constexpr = (SIZE + 127) // 128
    lines = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % lines * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) // lines * OUTPUTS + tl.arange(0, OUTPUTS)
    some, there = row < rows, output < width
    at = tl.arange(0, 128)[None, :]
    left = x + row[:, None].to(tl.int64) * SIZE + at
    right = weight + output[:, None].to(tl.int64) * SIZE + at
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for group in tl.range(0, GROUPS, num_stages=STAGES):
        begin = group * 128
        if SIZE % 128 == 0:
            numbers = tl.load(left + begin, mask=some[:, None], other=0.0)
            weights = tl.load(right + begin, mask=there[:, None], other=0.0)
        else:
            numbers = tl.load(left + begin, mask=some[:, None] & (begin + at < SIZE), other=0.0)
            weights = tl.load(right + begin, mask=there[:, None] & (begin + at < SIZE), other=0.0)
        part = tl.dot(numbers, tl.trans(weights))
        if GROUPED:
            scale = tl.load(scales + row * GROUPS + group, mask=some, other=0.0)
            factor = tl.load(factors + output * GROUPS + group, mask=there, other=0.0)
            part = part * scale[:, None] * factor[None, :]
        total += part
    if not GROUPED:
        scale = tl.load(scales + row, mask=some, other=0.0)
        factor = tl.load(factors + output, mask=there, other=0.0)
        total = total * scale[:, None] * factor[None, :]
    addend = features_of(bias, output, there, 0.0)
    if addend is not None:
        total += addend[None, :]
    place = out + row[:, None].to(tl.int64) * width + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=some[:, None] & there[None, :])


def quantise(x: Tensor, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """FLOAT8 [rows, inputs] of activations [rows, inputs] with adjacent features, and float32 scales [rows, 1], or
    [rows, groups]."""
    rows, inputs = x.shape
    values = torch.empty(rows, inputs, dtype=torch.uint8, device=x.device)
    groups = triton.cdiv(inputs, FLOAT8_GROUP) if grouped else 1
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    block = min(max(triton.next_power_of_2(inputs), FLOAT8_GROUP), _BLOCK_OF_GROUPS if grouped else _BLOCK_OF_ROW)
    parts = triton.cdiv(inputs, block) if grouped else 1
    quantise_kernel[(rows, parts)](
        x, values, scales, x.stride(0), SIZE=inputs, GROUPED=grouped, BLOCK=block, num_warps=max(1, block // 512)
    )
    return values.view(FLOAT8), scales


def product(x: Tensor, weight: Quantised, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [rows, inputs] @ weight.T + bias as [rows, outputs] in a format, for rows that `serves` accepts."""
    outputs, by_output = len(weight.values), weight.by_output
    values, scales = quantise(x, grouped=by_output is None)
    if by_output is not None and _library_serves(x, weight, dtype):
        return torch._scaled_mm(
            values, weight.values.t(), scale_a=scales, scale_b=by_output[None], bias=bias, out_dtype=dtype
        )
    return multiply(values, scales, weight, bias, torch.empty(len(x), outputs, dtype=dtype, device=x.device))


def _library_serves(x: Tensor, weight: Quantised, dtype: torch.dtype) -> bool:
    whole = weight.inputs % _LIBRARY == 0 and len(weight.values) % _LIBRARY == 0
    return whole and x.is_cuda and x.dtype == dtype == torch.bfloat16


def multiply(x: Tensor, scales: Tensor, weight: Quantised, bias: Tensor | None, out: Tensor) -> Tensor:
    """The product of FLOAT8 rows with their scales, by our own kernel, in `out` [rows, outputs]."""
    rows, outputs = out.shape
    by_output = weight.by_output if scales.shape[1] == 1 else None
    how = tiling(rows, outputs)
    scaled_kernel[(triton.cdiv(rows, how.rows) * triton.cdiv(outputs, how.outputs),)](
        x, scales, weight.values, weight.scales if by_output is None else by_output, bias, out, rows, outputs,
        SIZE=weight.inputs, GROUPED=by_output is None, ROWS=how.rows, OUTPUTS=how.outputs, STAGES=STAGES,
        num_warps=how.warps,
    )  # fmt: skip
    return out
