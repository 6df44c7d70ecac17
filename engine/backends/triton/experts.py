"""Mixtures of experts on a GPU: routing, grouping and the experts' products, without reading from the device.

A token together with one of its experts is a *pair*, numbered token * active + slot. Five kernels compute a layer: each
token's experts (`route`), pairs sorted by expert and divided into tiles (`align`; two kernels for many pairs), both
products over these tiles (`multiply`), and each token's sum (`add`). All grids and buffers depend only on the number of
tokens. The actual number of tiles is read on the device, and programs past it end at once. So a step can be captured in
a CUDA graph.

The weights are the left operand of the products and the tokens the right one. So a tile has 64 rows of weights or more
even if an expert has one token, as Hopper's and Blackwell's matrix instructions require; the number of tokens is the
width of the instruction, which can be as small as 16.

A token's result does not depend on the others. Each of its products is one chain of float32 additions along the inputs,
16 at a time (one by one for float32) and in order, whatever the size of the tile. The tile decides which tokens share
an instruction, not how a token is computed. Because of the 64 rows, all tile sizes use the same instruction: on Hopper
wgmma m64nNk16, of which only N differs. If it rounded differently at another N, results of steps of different size
classes would differ in the last bits of float32, before they are rounded to the model's format; within a class they
cannot differ.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.native.gemm import Quantised
from engine.backends.triton.activations import activated, sigmoid
from engine.backends.triton.few_bits import bits, bytes_of, scales_in, scales_of, values_in, widened
from engine.backends.triton.routing import align, counted_before, most_tiles, route

# Tiles whose programs run side by side for each block of weights, so that shared data comes from the L2 cache.
_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class Launch:
    """The division of the products among programs."""

    tokens: int  # tokens per tile
    outputs: int  # rows of weights per tile
    inputs: int  # features read at a time
    warps: int
    stages: int


def choose_launch(
    tokens: int, active: int, count: int, dtype: torch.dtype, capability: int, few_bits: bool = False
) -> Launch:
    """The launch for these sizes; it depends on nothing else.

    If experts have few tokens, the time is that of reading their weights: tiles are small, so that even one token's
    experts occupy all multiprocessors, with 60 KiB of weights in flight in each program. A tile holds about twice an
    expert's mean number of tokens, so that few experts are read twice. If experts have many tokens, tiles are as large
    as the registers allow: a byte that is read then serves 85 operations, or 64 if a program lacks the necessary 144
    KiB of shared memory: before Hopper, on sm_120, and for quantised weights, whose widening needs registers.

    Args:
        active, count: experts per token, and all experts.
        capability: compute capability of the GPU, as 80, 90, 100; 0 for the interpreter.
    """
    width = min(max(_power_of_2(2 * tokens * active / count), 16), 128)
    if dtype == torch.float32:  # no matrix instructions: their products would lose half of the digits
        return Launch(min(width, 64), 64, 32, 4, 2)
    if width < 64:
        return Launch(width, 64, 128, 4, 4)
    if width == 64:
        return Launch(64, 128, 64, 8, 4)
    if 90 <= capability < 120 and not few_bits:
        return Launch(128, 256, 64, 8, 3)
    return Launch(128, 128, 64, 8, 3)


def launch_class(tokens: int, active: int, *how: Any) -> tuple[Launch, bool]:
    """All compile-time parameters of the kernels that depend on a step: how products are divided, and how pairs are
    counted. Other numbers of a step are run-time arguments, for which Triton compiles nothing. `how`: further arguments
    of `choose_launch`."""
    return choose_launch(tokens, active, *how), counted_before(tokens * active)


def trial_sizes(most: int, active: int, *how: Any) -> list[int]:
    """The smallest number of tokens of each `launch_class`, for steps of 1 to `most` tokens."""
    found: dict[tuple[Launch, bool], int] = {}
    for tokens in range(1, most + 1):
        found.setdefault(launch_class(tokens, active, *how), tokens)
    return list(found.values())


def _power_of_2(least: float) -> int:
    return 1 << max(math.ceil(math.log2(least)), 0) if least > 0 else 1


@functools.cache
def capability_of(device: torch.device) -> int:
    """The compute capability of a GPU, as 80, 90, 100; 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@triton.jit(do_not_specialize=["bound"])
def _multiply(
    x,
    weights,
    scales,
    biases,
    shares,
    out,
    order,
    tiles,
    features,
    width,
    bound,
    limit,
    slope,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):
    """out [pairs, width] of x [pairs / SHARED, features]: the product with the weights of each pair's expert, [experts,
    width, features], or twice the width if GATED; then the activation or the pair's weight is applied. BITS of a weight
    and SIZE (equal to `features`) are 0 for plain weights."""
    # Tiles of a group, which often belong to one expert, then blocks of outputs, then groups.
    WIDTH: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    blocks = tl.cdiv(width, WIDTH)
    group = tl.program_id(0) // (NEIGHBOURS * blocks)
    within = tl.program_id(0) % (NEIGHBOURS * blocks)
    members = tl.minimum(bound - group * NEIGHBOURS, NEIGHBOURS)
    tile = group * NEIGHBOURS + within % members
    if tile >= tl.load(tiles):
        return
    expert = tl.load(tiles + 1 + 3 * tile).to(tl.int64)
    first = tl.load(tiles + 2 + 3 * tile)
    size = tl.load(tiles + 3 + 3 * tile)

    places = tl.arange(0, TOKENS)
    real = places < size
    pair = tl.load(order + first + places, mask=real, other=0).to(tl.int64)
    rows = tl.arange(0, OUTPUTS)
    begin = (within // members) * WIDTH
    # Rows of the gate, then the same rows of its counterpart.
    outputs = begin + rows % WIDTH
    some = outputs < width
    lines = expert * (2 * width if GATED else width) + (rows // WIDTH) * width + outputs
    left = weights + lines[:, None] * features
    right = x + (pair // SHARED)[None, :] * features
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for start in range(0, features, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        if EVEN:
            b = tl.load(right + inputs[:, None], mask=real[None, :], other=0.0)
        else:
            b = tl.load(right + inputs[:, None], mask=real[None, :] & (inputs < features)[:, None], other=0.0)
        if BITS:
            integers = bytes_of(weights, lines, start, some, SIZE, INPUTS, BITS)
            factors = scales_of(scales, lines, start, some, SIZE, INPUTS)
            a = widened(integers, factors, BITS).to(b.dtype)
        elif EVEN:
            a = tl.load(left + inputs[None, :], mask=some[:, None], other=0.0)
        else:
            a = tl.load(left + inputs[None, :], mask=some[:, None] & (inputs < features)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIASED:
        total += tl.load(biases + lines, mask=some, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, opened = tl.split(tl.permute(tl.reshape(total, (2, WIDTH, TOKENS)), (1, 2, 0)))
        if ACTIVATION == "clamped":
            gate = tl.where(gate > limit, limit, gate)  # NaN stays
            opened = tl.where(opened > limit, limit, tl.where(opened < -limit, -limit, opened)) + 1.0
            result = gate * sigmoid(slope * gate) * opened
        else:
            result = activated(gate, ACTIVATION) * opened
    else:
        result = total
        if ACTIVATION != "":
            result = activated(result, ACTIVATION)
    if WEIGHTED:
        result = result * tl.load(shares + pair, mask=real, other=0.0)[None, :]
    columns = begin + tl.arange(0, WIDTH)
    kept = (columns < width)[:, None] & real[None, :]
    tl.store(out + pair[None, :] * width + columns[:, None], result.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["tokens"])
def _add(answers, out, tokens, width, ACTIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of each token's results, in the order of its experts; zeros for padding."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(ACTIVE):
        mask = (at < width) & (token < tokens)
        total += tl.load(answers + (token * ACTIVE + slot) * width + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


def multiply(
    x: Tensor,
    weights: Tensor | Quantised,
    order: Tensor,
    tiles: Tensor,
    launch: Launch,
    *,
    activation: str = "",
    gated: bool = False,
    biases: Tensor | None = None,
    clamp: tuple[float, float] = (0.0, 0.0),
    shares: Tensor | None = None,
) -> Tensor:
    """Products of all pairs with their experts' matrices, [pairs, out] in x's format.

    Args:
        x: [pairs, in], or [T, in] if all pairs of a token have the same input.
        weights: [count, out, in]; [count, 2 * out, in] if gated, the gate's rows first. Quantised weights are widened
            in registers and rounded to x's format; numbers and scales begin with [count, out].
        order, tiles: the results of `align` for `launch.tokens`.
        activation: activation of the product, or of the gate; "" for none, "clamped" for the gate of
            `engine.model.spec.Clamped`.
        biases: [count, out] biases of the products.
        clamp: limit and slope of that gate.
        shares: [pairs] float32 factor of each product.
    """
    numbers, scales, features, few = _as_read(weights)
    pairs, (count, outputs) = order.numel(), numbers.shape[:2]
    width = outputs // 2 if gated else outputs
    out = x.new_empty(pairs, width)
    bound = most_tiles(pairs, count, launch.tokens)
    blocks = triton.cdiv(width, launch.outputs // 2 if gated else launch.outputs)
    _multiply[(bound * blocks,)](
        x,
        numbers,
        scales,
        x if biases is None else biases,
        x if shares is None else shares,
        out,
        order,
        tiles,
        features,
        width,
        bound,
        *clamp,
        SHARED=pairs // x.shape[0],
        GATED=gated,
        ACTIVATION=activation,
        BIASED=biases is not None,
        WEIGHTED=shares is not None,
        EVEN=features % launch.inputs == 0,
        SIZE=features if few else 0,
        BITS=few,
        TOKENS=launch.tokens,
        OUTPUTS=launch.outputs,
        INPUTS=launch.inputs,
        NEIGHBOURS=_NEIGHBOURS,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out


def _as_read(weights: Tensor | Quantised) -> tuple[Tensor, Tensor | None, int, int]:
    """Numbers, scales, features per row, and bits, in the kernel's form: 0 and no scales for plain weights."""
    if isinstance(weights, Quantised):
        return values_in(weights), scales_in(weights), weights.inputs, bits(weights)
    return weights.contiguous(), None, weights.shape[2], 0


def add(answers: Tensor, out: Tensor, tokens: int) -> Tensor:
    """Fill out [Tp, width] with the sums of answers [tokens * active, width], and zeros past the tokens."""
    width = out.shape[1]
    block = min(triton.next_power_of_2(width), 1024)
    grid = (out.shape[0], triton.cdiv(width, block))
    _add[grid](answers, out, tokens, width, ACTIVE=answers.shape[0] // tokens, BLOCK=block, num_warps=4)
    return out


def mix(
    x: Tensor,
    logits: Tensor,
    up: Tensor | Quantised,
    down: Tensor | Quantised,
    *,
    tokens: int,
    active: int,
    activation: str,
    gated: bool,
    normalize: bool,
    launch: Launch | None = None,
    **how: Any,
) -> Tensor:
    """The weighted sum of the results of each token's likeliest experts, [Tp, hidden]; zeros past the tokens.

    Args:
        x: [Tp, hidden], float32, float16 or bfloat16 like the matrices.
        logits: [Tp, count] logits of the router.
        up: [count, width, hidden]; [count, 2 * width, hidden] if gated, the gate's rows first; see `multiply`.
        down: [count, hidden, width].
        tokens: the number of tokens, the first of Tp.
        active, normalize: see `route`.
        activation, gated: see `multiply`.
        launch: how the products are divided; None chooses.
        how: see `spread`.
    """
    if not tokens:
        return torch.zeros_like(x)
    shares, chosen = route(logits[:tokens], active, normalize=normalize)
    return spread(x, shares, chosen, up, down, tokens=tokens, activation=activation, gated=gated, launch=launch, **how)


def spread(
    x: Tensor,
    shares: Tensor,
    chosen: Tensor,
    up: Tensor | Quantised,
    down: Tensor | Quantised,
    *,
    tokens: int,
    activation: str,
    gated: bool,
    launch: Launch | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    clamp: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """The same as `mix` for experts that are already chosen.

    Args:
        shares, chosen: [tokens, active] float32 and int32: weights and experts, in the order of the experts' numbers.
        biases: biases of both products, [count, out] each.
        clamp: see `multiply`.
    """
    if not tokens:
        return torch.zeros_like(x)
    count, active = len(up.values if isinstance(up, Quantised) else up), chosen.shape[1]
    if launch is None:
        few_bits = isinstance(up, Quantised) or isinstance(down, Quantised)
        launch = choose_launch(tokens, active, count, x.dtype, capability_of(x.device), few_bits)
    x, shares, chosen = x.contiguous(), shares.contiguous(), chosen.contiguous()
    order, tiles = align(chosen, count, launch.tokens)
    act: dict[str, Any] = {"activation": activation, "gated": gated, "clamp": clamp}
    inner = multiply(x[:tokens], up, order, tiles, launch, biases=biases[0], **act)
    answers = multiply(inner, down, order, tiles, launch, biases=biases[1], shares=shares)
    return add(answers, torch.empty_like(x), tokens)
