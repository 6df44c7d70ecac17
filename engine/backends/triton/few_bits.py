"""Products with 8-bit and 4-bit weights on a GPU, which reads them packed and widens them in registers.

A weight is an integer times the scale of its group, plus the group's minimum for 4 bits
(`engine.backends.native.gemm.Quantised`), stored as there: 8.5 bits per weight in plain groups, or 5; or it is a FLOAT8
number times the scale of its group of 128, 8.25 bits. A single row uses
the kernels of `engine.backends.triton.matvec`. Up to `FEW` rows use a kernel that reads each weight once for all of
them: a tile is widened, rounded to the rows' format, and multiplied by matrix instructions. For more rows, the product
is the library's: a piece of the matrix is widened to that format in memory and multiplied, then the next piece. A piece
has at most `SCRATCH` bytes, which are still in an H200's second-level cache when it multiplies. If the GPU multiplies
FLOAT8, more than a few rows become FLOAT8 to be multiplied by such weights (`engine.backends.triton.float8`).

The order of a sum depends on the matrix's shape and the number of rows; there are no atomic additions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.native.gemm import FLOAT8_GROUP, GROUP, Quantised
from engine.backends.triton import float8
from engine.backends.triton.norms import features_of

FEW = 64
"""Maximum rows for the kernel, in 16-bit formats; in 32 bits, which matrix instructions do not take, a quarter of
them."""
TRIAL = 16, 32, 64, 65
"""Numbers of rows that together use all kernels."""
SCRATCH = 32 * 2**20
"""Bytes of a matrix that are widened in memory at a time."""

STAGES = 3
_WIDENED = 32, 256  # rows and features that a program widens
_PROGRAMS = 256  # about two for each of an H200's 132 multiprocessors
_TILE = 8192  # weights, of which two tiles are loading while one is multiplied
_NUMBERS = 16 * 1024  # bytes of the rows that belong to a tile


class Tiling(NamedTuple):
    """The part of a product that one program of `rows_kernel` computes."""

    rows: int  # at least the number of rows
    outputs: int  # results per row
    block: int  # features read at a time
    warps: int  # warps per program


def tiling(rows: int, outputs: int, itemsize: int) -> Tiling:
    """The division of a product with this many rows, of numbers with this many bytes, among enough programs to keep a
    GPU busy. With more rows, each program has more results, because all programs read the rows."""
    tall = max(16, triton.next_power_of_2(rows))
    widest = 16 if itemsize > 2 else max(tall, 32)
    wide = next((each for each in (64, 32) if each <= widest and outputs >= each * _PROGRAMS), 16)
    block = GROUP if itemsize > 2 else min(_TILE // wide, _NUMBERS // (tall * itemsize))
    return Tiling(tall, wide, block, 4)


def trial_rows(weight: Quantised) -> list[int]:
    """Numbers of rows that together use all kernels for a weight."""
    more = float8.trial_rows(len(weight.values)) if weight.is_float8 else ()
    return sorted({*TRIAL, *more})


def _has_kernel(rows: int, itemsize: int) -> bool:
    return rows <= (FEW if itemsize <= 2 else FEW // 4)


@triton.jit
def bytes_of(weight, rows, begin, there, SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Integers of rows [R], the BLOCK features from `begin` on, where a group begins: [R, BLOCK] of 8 bits, or two of 4
    bits in each of [R, BLOCK / 2]; or FLOAT8 numbers, as bytes if the GPU does not know them. They are not read again
    in this step."""
    LENGTH: tl.constexpr = SIZE if BITS == 8 else (SIZE + 31) // 32 * 16
    at = begin * BITS // 8 + tl.arange(0, BLOCK * BITS // 8)
    mask = there[:, None] & (at < LENGTH)[None, :]
    return tl.load(
        weight + rows[:, None].to(tl.int64) * LENGTH + at[None, :],
        mask=mask,
        other=0.0 if weight.dtype.element_ty == tl.float8e4nv else 0,
        eviction_policy="evict_first",
    )


@triton.jit
def scales_of(scales, rows, begin, there, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Scales [R, BLOCK / 32] of the same; for 4 bits, scales and minima in the lower and upper half of 32 bits. 0 past
    a row's end. Scales of FLOAT8, in float32, are those of four groups each."""
    TIMES: tl.constexpr = 4 if scales.dtype.element_ty == tl.float32 else 1
    GROUPS: tl.constexpr = (SIZE + 32 * TIMES - 1) // (32 * TIMES)
    group = (begin // 32 + tl.arange(0, BLOCK // 32)) // TIMES
    mask = there[:, None] & (group < GROUPS)[None, :]
    return tl.load(scales + rows[:, None].to(tl.int64) * GROUPS + group[None, :], mask=mask, other=0)


@triton.jit
def widened(integers, scales, BITS: tl.constexpr):
    """Weights [R, BLOCK] in float32 from the results of `bytes_of` and `scales_of`; a product with a float16 scale is
    exact, one with a float32 scale and the sum with a minimum are rounded."""
    ROWS: tl.constexpr = scales.shape[0]
    GROUPS: tl.constexpr = scales.shape[1]
    if BITS == 4:  # of every eight values, four are in lower halves and the next four in upper ones
        fours = tl.reshape(integers, (ROWS, GROUPS * 4, 4))
        pairs = tl.permute(tl.join(fours & 15, fours >> 4), (0, 1, 3, 2))
        levels = tl.reshape(pairs, (ROWS, GROUPS * 32)).to(tl.float32)
        numbers = levels * _each(_half_of(scales)) + _each(_half_of(scales >> 16))
    elif integers.dtype == tl.uint8:  # the bits of FLOAT8, read as float16, are 2^-8 of the value; none is NaN
        halves = ((integers & 0x80).to(tl.uint16) << 8) | ((integers & 0x7F).to(tl.uint16) << 7)
        numbers = halves.to(tl.float16, bitcast=True).to(tl.float32) * _each(scales * 256.0)
    else:
        numbers = integers.to(tl.float32) * _each(scales.to(tl.float32))
    return numbers


@triton.jit
def _half_of(words):
    """float32 of the float16 in the lower halves of words."""
    return (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _each(factors):
    """The values of groups [R, GROUPS], repeated for each of their features: [R, GROUPS * 32]."""
    ROWS: tl.constexpr = factors.shape[0]
    GROUPS: tl.constexpr = factors.shape[1]
    return tl.reshape(tl.broadcast_to(factors[:, :, None], (ROWS, GROUPS, 32)), (ROWS, GROUPS * 32))


@triton.jit(do_not_specialize=["rows"])
def rows_kernel(
    x, weight, scales, bias, out, rows, width,
    SIZE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program p: OUTPUTS of the `width` results of rows x [rows, SIZE], at most ROWS of them."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = output < width
    row = tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    source = x + row.to(tl.int64) * SIZE + at
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for begin in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        integers = bytes_of(weight, output, begin, there, SIZE, BLOCK, BITS)
        factors = scales_of(scales, output, begin, there, SIZE, BLOCK)
        numbers = tl.load(source + begin, mask=(row < rows) & (begin + at < SIZE), other=0.0)
        tile = widened(integers, factors, BITS).to(numbers.dtype)
        total = tl.dot(numbers, tl.trans(tile), total, input_precision="ieee")
    addend = features_of(bias, output, there, 0.0)
    if addend is not None:
        total += addend[None, :]
    place = out + row.to(tl.int64) * width + output[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows) & there[None, :])


@triton.jit(do_not_specialize=["first", "width"])
def widen_kernel(
    weight, scales, out, first, width,
    SIZE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, q): the q-th BLOCK features of ROWS of the `width` rows from `first` on, to out [width, SIZE]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < width
    begin = tl.program_id(1) * BLOCK
    integers = bytes_of(weight, first + row, begin, there, SIZE, BLOCK, BITS)
    factors = scales_of(scales, first + row, begin, there, SIZE, BLOCK)
    at = begin + tl.arange(0, BLOCK)
    place = out + row[:, None].to(tl.int64) * SIZE + at[None, :]
    tile = widened(integers, factors, BITS).to(out.dtype.element_ty)
    tl.store(place, tile, mask=there[:, None] & (at < SIZE)[None, :])


def bits(weight: Quantised) -> int:
    """The number of bits of an integer: 8 or 4."""
    return 4 if weight.has_minima else 8


def scales_in(weight: Quantised) -> Tensor:
    """Scales in the kernels' form, [outputs, groups]: float16; for 4 bits int32, with the minimum in the upper half."""
    return weight.scales.view(torch.int32).squeeze(-1) if weight.has_minima else weight.scales


def values_in(weight: Quantised) -> Tensor:
    """Numbers in the kernels' form: FLOAT8 as bytes if the GPU has no instructions for it."""
    plain = not weight.is_float8 or gpu.converts_float8(weight.values.device)
    return weight.values if plain else weight.values.view(torch.uint8)


def product(x: Tensor, weight: Quantised, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., inputs] @ weight.T + bias as [..., outputs], in x's format or another. Raises ValueError if shapes,
    formats or devices do not match.

    Args:
        weight: with scales for groups, on x's device; bias [outputs], in x's format.
        dtype: format of the results, which are not rounded to x's format first.
    """
    check(x, weight, bias)
    outputs = len(weight.values)
    rows = x.reshape(-1, weight.inputs).contiguous()
    out = torch.empty(len(rows), outputs, dtype=dtype or x.dtype, device=x.device)
    if not rows.numel() or not outputs:
        out = out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    elif float8.serves(rows, weight):
        out = float8.product(rows, weight, bias, out.dtype)
    elif _has_kernel(len(rows), x.element_size()):
        how = tiling(len(rows), outputs, x.element_size())
        rows_kernel[(triton.cdiv(outputs, how.outputs),)](
            rows, values_in(weight), scales_in(weight), bias, out, len(rows), outputs,
            SIZE=weight.inputs, BITS=bits(weight), ROWS=how.rows, OUTPUTS=how.outputs, BLOCK=how.block, STAGES=STAGES,
            num_warps=how.warps,
        )  # fmt: skip
    else:
        most = max(1, SCRATCH // (weight.inputs * x.element_size()))
        for first in range(0, outputs, most):
            last = min(first + most, outputs)
            part = None if bias is None else bias[first:last]
            _multiply(rows, widen(weight, x.dtype, first, last), part, out[:, first:last])
    return out.view(*x.shape[:-1], outputs)


def widen(weight: Quantised, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """The weight's rows from `first` up to (not including) `last`, [rows, inputs]."""
    out = torch.empty(last - first, weight.inputs, dtype=dtype, device=weight.values.device)
    rows, block = _WIDENED
    widen_kernel[(triton.cdiv(last - first, rows), triton.cdiv(weight.inputs, block))](
        values_in(weight), scales_in(weight), out, first, last - first,
        SIZE=weight.inputs, BITS=bits(weight), ROWS=rows, BLOCK=block,
    )  # fmt: skip
    return out


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x @ weight.T + bias, written to the given results; results in float32 are not rounded to x's format first."""
    if out.dtype == x.dtype:
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)
        return
    if x.is_cuda:
        out.copy_(torch.mm(x, weight.t(), out_dtype=out.dtype))
    else:  # torch has no such product
        torch.mm(x.to(out.dtype), weight.t().to(out.dtype), out=out)
    if bias is not None:
        out += bias


def check(x: Tensor, weight: Quantised, bias: Tensor | None) -> None:
    """Refuse arguments that do not match. Raises ValueError if shapes, formats or devices do not match."""
    values, scales, inputs = weight.values, weight.scales, weight.inputs
    groups = -(-inputs // (FLOAT8_GROUP if weight.is_float8 else GROUP))
    shape = (groups, GROUP // 2) if weight.has_minima else (inputs,)
    lines = (2,) if weight.has_minima else ()
    if values.shape[1:] != shape or scales.shape != (len(values), groups, *lines):
        raise ValueError(
            f"a weight of {inputs} features is not {list(values.shape)} of {values.dtype} with scales "
            f"{list(scales.shape)}"
        )
    if not values.is_contiguous() or not scales.is_contiguous():
        raise ValueError("a weight's numbers, and its scales, must be contiguous")
    if x.shape[-1:] != (inputs,) or x.device != values.device:
        raise ValueError(
            f"{list(x.shape)} on {x.device} is not multiplied by {[len(values), inputs]} on {values.device}"
        )
    if bias is not None and (bias.shape != (len(values),) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"{list(bias.shape)} of {bias.dtype} is not added to {len(values)} results in {x.dtype}")
