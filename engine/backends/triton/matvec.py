"""Products of matrices with a single row on a GPU, combined with the operations before and after them (docs/kernels.md,
"Layers on a GPU").

To keep some 5 TB/s busy, each of a GPU's 132 or so multiprocessors must have 40 KB or more in flight. A program
processes several rows of the matrix, and a thread loads 16 bytes at once. From a small matrix, a program loads all of
its 16 or 32 KB before it waits for anything, even before the norm is computed; two or three programs share a
multiprocessor. From a large one, it loads tile after tile: the first is also loaded before it waits for anything, and
two more are loading to shared memory while one is summed up. The input row comes from the cache: each program
normalises it again, which is cheaper than a kernel, and in return has many rows of the matrix (`tiling`).

8-bit and 4-bit weights (`engine.backends.triton.few_bits`) are widened to float32 where they are summed up, and not
rounded again. A tile of them has twice the weights of a 16-bit tile, because a thread must read at least 4 bytes of
scales for these to be loaded to shared memory as well.

The order of a sum depends only on the matrix's shape; there are no atomic additions. Numbers are rounded at the same
points as in the modules. Results in float32 are only rounded after the norm.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.backends.native.gemm import GROUP, Quantised
from engine.backends.triton import few_bits
from engine.backends.triton.activations import FUNCTIONS, activated
from engine.backends.triton.few_bits import bytes_of, scales_of, widened
from engine.backends.triton.norms import Norm, features_of, kind, normalised
from engine.backends.triton.overlap import overlapping

# Features that a program holds as float32 for all of its rows; longer rows are read in pieces with each tile.
_HELD, _HELD_WITHOUT_NORM = 8192, 4096
_PROGRAMS = 256  # about two for each of an H200's 132 multiprocessors, for a small matrix
_LEAST = 4096  # bytes per program
_TILE = 16 * 1024  # bytes; for a small matrix up to twice as many
STAGES = 3  # tiles that are loaded before the first has arrived, plus one


class Tiling(NamedTuple):
    """The division of a matrix among programs."""

    rows: int  # results per tile
    steps: int  # tiles per program, one after the other
    block: int  # features per tile, a power of two
    held: bool  # whether a tile has all features
    warps: int  # warps per program


def tiling(outputs: int, features: int, itemsize: int, *, gated: bool = False, normed: bool = False) -> Tiling:
    """The division of a matrix with this many results and features; a result of a gate has two rows.

    A small matrix is one tile for each of about two programs per multiprocessor, and is loaded all at once. From a
    large one, a program takes 64 KB, or 128 if each has a norm to compute. 8-bit and 4-bit weights count as one byte.
    """
    vector = 512 // max(itemsize, 2)  # features that a warp reads at once, 16 bytes per thread (quantised: 8 or 4)
    if features > (_HELD if normed or gated else _HELD_WITHOUT_NORM):
        return Tiling(_power(min(8 if itemsize == 1 else 4, outputs // 256)), 1, 8 * vector, False, 8)
    block = max(triton.next_power_of_2(features), GROUP)
    one = block * itemsize * (1 + gated)
    share = min(max(_power(outputs * one // _PROGRAMS), _LEAST), 8 * _TILE if normed else 4 * _TILE)
    rows = max(1, (share if share <= 2 * _TILE else _TILE) // one)
    # Threads of other warps would hold the same features.
    return Tiling(rows, max(1, share // (rows * one)), block, True, max(1, min(8, block // vector)))


def _power(number: int) -> int:
    """The largest power of two up to a number, at least 1."""
    return 1 << max(number, 1).bit_length() - 1


@triton.jit
def _weights(weight, scales, row, begin, there, SIZE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The BLOCK features from `begin` on of rows [R] of a matrix, in the form for `_numbers`: quantised, or (BITS is 0)
    in x's format; they are not read again in this step."""
    if BITS > 0:
        tile = bytes_of(weight, row, begin, there, SIZE, BLOCK, BITS)
        factors = scales_of(scales, row, begin, there, SIZE, BLOCK)
    else:
        at = begin + tl.arange(0, BLOCK)[None, :]
        source = weight + row[:, None].to(tl.int64) * SIZE + at
        tile = tl.load(source, mask=there[:, None] & (at < SIZE), other=0.0, eviction_policy="evict_first")
        factors = tile  # never read
    return tile, factors


@triton.jit
def _numbers(tile, BITS: tl.constexpr):
    if BITS > 0:
        numbers = widened(tile[0], tile[1], BITS)
    else:
        numbers = tile[0].to(tl.float32)
    return numbers


@triton.jit
def _results(total, addend, before, then, FUNCTION: tl.constexpr, GATED: tl.constexpr, FORMAT: tl.constexpr):
    """Results from sums of products [rows], as float32; for a gate, one of each two."""
    if addend is not None:
        total += addend
    total = total.to(FORMAT).to(tl.float32)
    if GATED:
        total, second = tl.split(tl.reshape(total, (total.shape[0] // 2, 2)))
    if FUNCTION is not None:
        total = activated(total, FUNCTION).to(FORMAT).to(tl.float32)
    if GATED:
        total = (total * second).to(FORMAT).to(tl.float32)
    if before is not None:
        if then is not None:
            before = (before + then).to(FORMAT).to(tl.float32)
        total = (before + total).to(FORMAT).to(tl.float32)
    return total


@triton.jit
def _finish(
    tile, numbers, begin, bias, stream, also, out,
    WIDTH: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Write the ROWS results from `begin` on, for a tile of weights and the input row."""
    EACH: tl.constexpr = 2 if GATED else 1
    number = tl.arange(0, ROWS * EACH)
    pair = begin + number // EACH
    result = begin + tl.arange(0, ROWS)
    stays = result < WIDTH
    addend = features_of(bias, pair + number % EACH * WIDTH, pair < WIDTH, 0.0)
    before = features_of(stream, result, stays, 0.0)
    then = features_of(also, result, stays, 0.0)
    total = tl.sum(_numbers(tile, BITS) * numbers, 1)
    total = _results(total, addend, before, then, FUNCTION, GATED, out.dtype.element_ty)
    tl.store(out + result, total.to(out.dtype.element_ty), mask=stays)


@triton.jit
def held_kernel(
    x, factors, shifts, weight, scales, bias, stream, also, out, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program p: STEPS times ROWS of the WIDTH results of a row x [SIZE], which it normalises and holds.

    x, factors and shifts are the row and its norm's weight and bias; scales belong to a quantised weight; the results
    are added to stream and also. The two rows of a gate's result are side by side in a tile.
    """
    FORMAT: tl.constexpr = x.dtype.element_ty
    EACH: tl.constexpr = 2 if GATED else 1
    first = tl.program_id(0).to(tl.int64) * (ROWS * STEPS)
    number = tl.arange(0, ROWS * EACH)
    at = tl.arange(0, BLOCK)[None, :]
    inside = at < SIZE
    row = number // EACH + number % EACH * WIDTH
    tile = _weights(weight, scales, first + row, 0, first + number // EACH < WIDTH, SIZE, BLOCK, BITS)
    tl.debug_barrier()  # otherwise the compiler delays loads of weights until the row has arrived
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    numbers = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if KIND > 0:
        factor = features_of(factors, at, inside, 1.0 if KIND == 3 else 0.0)
        shift = features_of(shifts, at, inside, 0.0)
        numbers = normalised(numbers, inside, factor, shift, eps, SIZE, KIND, FORMAT)
    _finish(tile, numbers, first, bias, stream, also, out, WIDTH, FUNCTION, GATED, ROWS, BITS)
    for step in tl.range(1, STEPS, num_stages=STAGES):
        begin = first + step * ROWS
        tile = _weights(weight, scales, begin + row, 0, begin + number // EACH < WIDTH, SIZE, BLOCK, BITS)
        _finish(tile, numbers, begin, bias, stream, also, out, WIDTH, FUNCTION, GATED, ROWS, BITS)


@triton.jit
def pieces_kernel(
    x, weight, scales, bias, stream, also, out,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program p: ROWS of the WIDTH results of a row x [SIZE], which it reads in pieces of BLOCK."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < WIDTH
    at = tl.arange(0, BLOCK)[None, :]
    tile = _weights(weight, scales, row, 0, there, SIZE, BLOCK, BITS)
    tl.debug_barrier()  # as above
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    addend = features_of(bias, row, there, 0.0)
    before = features_of(stream, row, there, 0.0)
    then = features_of(also, row, there, 0.0)
    total = _numbers(tile, BITS) * tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32)
    for begin in tl.range(BLOCK, SIZE, BLOCK, num_stages=STAGES):
        tile = _weights(weight, scales, row, begin, there, SIZE, BLOCK, BITS)
        numbers = tl.load(x + begin + at, mask=begin + at < SIZE, other=0.0)
        total += _numbers(tile, BITS) * numbers.to(tl.float32)
    results = _results(tl.sum(total, 1), addend, before, then, None, False, out.dtype.element_ty)
    tl.store(out + row, results.to(out.dtype.element_ty), mask=there)


def serves(weight: Tensor | Quantised, *, alone: bool = True) -> bool:
    """Whether `product` supports a weight [outputs, features]. `alone`: whether there is neither a norm before the
    product nor an activation after it."""
    if isinstance(weight, Quantised):
        whole = weight.values.numel() > 0
    else:
        whole = weight.dim() == 2 and weight.is_contiguous() and weight.numel() > 0
    return whole and (alone or _shape(weight)[1] <= _HELD)


def _shape(weight: Tensor | Quantised) -> tuple[int, int]:
    if isinstance(weight, Quantised):
        return len(weight.values), weight.inputs
    return weight.shape[0], weight.shape[1]


def product(
    x: Tensor,
    weight: Tensor | Quantised,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    function: str | None = None,
    gated: bool = False,
    stream: Tensor | None = None,
    also: Tensor | None = None,
    dtype: torch.dtype | None = None,
    overlap: bool = False,
) -> Tensor:
    """The product norm(x) @ weight.T + bias of one row x [1, features], as [1, outputs]. Raises ValueError if shapes,
    formats or devices do not match.

    Args:
        weight: [outputs, features], in x's format or quantised with scales for groups; bias [outputs].
        function: an activation of the results; with `gated`, of their first half, times the second half.
        stream: [1, outputs] to which the results are added in place; they are first added to `also`.
        dtype: format of the results; sums and activations are rounded to at least this format; with a stream it is the
            stream's.
        overlap: begin before the previous kernel ends, on a device that supports it.
    """
    _check(x, weight, bias, norm, function, gated, stream, also)
    outputs, features = _shape(weight)
    width = outputs // (1 + gated)
    values, scales, bits = weight, None, 0
    if isinstance(weight, Quantised):
        values, scales, bits = few_bits.values_in(weight), few_bits.scales_in(weight), few_bits.bits(weight)
    out = stream
    if out is None:
        out = torch.empty(1, width, dtype=dtype or x.dtype, device=x.device)
    alone = norm is None and function is None
    how = tiling(width, features, 1 if bits else x.element_size(), gated=gated, normed=not alone)
    programs = (triton.cdiv(width, how.rows * how.steps),)
    options: dict[str, int] = {"num_warps": how.warps, **overlapping(overlap)}
    if not how.held:
        pieces_kernel[programs](
            x, values, scales, bias, stream, also, out,
            SIZE=features, WIDTH=width, BITS=bits, ROWS=how.rows, BLOCK=how.block, STAGES=STAGES, **options,
        )  # fmt: skip
        return out
    none = Norm(None, 0.0)
    held_kernel[programs](
        x, (norm or none).weight, (norm or none).bias, values, scales, bias, stream, also, out, (norm or none).eps,
        SIZE=features, WIDTH=width, BITS=bits, KIND=kind(norm), FUNCTION=function, GATED=gated,
        ROWS=how.rows, STEPS=how.steps, BLOCK=how.block, STAGES=STAGES, **options,
    )  # fmt: skip
    return out


def _check(
    x: Tensor,
    weight: Tensor | Quantised,
    bias: Tensor | None,
    norm: Norm | None,
    function: str | None,
    gated: bool,
    stream: Tensor | None,
    also: Tensor | None,
) -> None:
    alone = norm is None and function is None
    if not serves(weight, alone=alone):
        raise ValueError(
            f"a weight {list(_shape(weight))} cannot be multiplied: it must be contiguous"
            + ("" if alone else f", and have {_HELD} features at most beside a norm or an activation")
        )
    outputs, features = _shape(weight)
    if isinstance(weight, Quantised):
        few_bits.check(x, weight, bias)
    elif x.dtype != weight.dtype:
        raise ValueError(f"a row of {x.dtype} is not multiplied by a weight of {weight.dtype}")
    if x.shape != (1, features) or x.stride(1) != 1:
        raise ValueError(f"{list(x.shape)} of {x.dtype} is not multiplied by {[outputs, features]}")
    if gated and (outputs % 2 or function is None):
        raise ValueError(f"{outputs} results cannot be gated: their number must be even, and they need an activation")
    if function is not None and function not in FUNCTIONS:
        raise ValueError(f"there is no activation {function!r}, only {', '.join(FUNCTIONS)}")
    if also is not None and stream is None:
        raise ValueError("to add the parts of a layer, the product needs the stream")
    for part, size in ((bias, outputs), (stream, outputs // (1 + gated)), (also, outputs // (1 + gated))):
        if part is not None and (part.numel() != size or part.dtype != x.dtype or not part.is_contiguous()):
            raise ValueError(f"{list(part.shape)} of {part.dtype} is not added to {size} results in {x.dtype}")
    for part in () if norm is None else (norm.weight, norm.bias):
        if part is not None and (part.numel() != features or part.dtype != x.dtype or not part.is_contiguous()):
            raise ValueError(f"a norm of {list(part.shape)} in {part.dtype} is not one of {features} in {x.dtype}")
    if stream is not None and stream.data_ptr() == x.data_ptr():
        raise ValueError("a stream that a product reads cannot take its results: other programs still read it")
