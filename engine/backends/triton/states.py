"""Layers with a state on a GPU: a causal convolution, and the gated delta rule of Yang et al. (arXiv:2412.06464).

A program takes one row of a step and walks through its tokens, one after the other, with its part of the state in
registers. So a token's bits depend only on its row's tokens, not on how they are divided into steps or on other rows.
Results are rounded at the same points as by torch's operations (`engine.model.executors.reference`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata
from engine.backends.states import States

_FEATURES = 256  # of a program of a convolution
_LARGEST = 256  # features of a head


def serves(key_dim: int, value_dim: int) -> bool:
    """Whether a head's matrix fits into the registers of a program."""
    return max(key_dim, value_dim) <= _LARGEST and key_dim * value_dim <= _LARGEST * 128


def slots_of(metadata: AttentionMetadata, states: States | None) -> Tensor:
    """[4, rows] int32 on the device: each row's source, target and snapshot, and the tokens before the snapshot.
    Without states, rows begin as zeros, and nothing is written. Sent once a step."""
    found = metadata.cache.get(slots_of)
    if isinstance(found, Tensor):
        return found
    if states is None:
        made = torch.zeros(4, len(metadata.query_lens), dtype=torch.int32)
    else:
        made = torch.stack((states.sources, states.targets, states.snapshots, states.afters)).int()
    made = made.to(metadata.query_start.device)
    metadata.cache[slots_of] = made
    return made


@triton.jit
def _keep(memory, slot, size, begin, place, values, inside):
    """Write a state if its slot is not 0."""
    tl.store(memory + slot.to(tl.int64) * size + begin + place, values, mask=inside & (slot > 0))


@triton.jit
def _input(x, token, feature, width, stride, GATED: tl.constexpr, inside):
    """The convolution's input [features] of a token."""
    at = x + token.to(tl.int64) * stride + feature
    value = tl.load(at, mask=inside, other=0.0)
    if GATED:
        value = value * tl.load(at + 2 * width, mask=inside, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _keep_inputs(
    x, known, memory, slot, end, start, feature, width, stride, size, TAPS: tl.constexpr, GATED: tl.constexpr, inside
):  # fmt: skip
    """Write the TAPS - 1 inputs before token `end` of a row."""
    for index in tl.static_range(TAPS - 1):
        at = end + index - (TAPS - 1)
        value = _input(x, start + at, feature, width, stride, GATED, inside & (at >= 0))
        value += tl.load(known + (end + index) * width + feature, mask=inside & (at < 0), other=0.0)
        _keep(memory, slot, size, 0, index * width + feature, value, inside)


@triton.jit(do_not_specialize=["rows"])
def convolve_kernel(
    x, out, memory, slots, query_start, weight, bias, rows, width, stride, size,
    TAPS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Arguments as of `convolve`; `rows`: of the step; stride: of x; size: numbers of a slot."""
    row = tl.program_id(0)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < width
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    source, target = tl.load(slots + row), tl.load(slots + rows + row)
    snapshot, after = tl.load(slots + 2 * rows + row), tl.load(slots + 3 * rows + row)
    known = memory + source.to(tl.int64) * size
    for token in range(0, count):
        total = tl.zeros((FEATURES,), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            at = token + tap - (TAPS - 1)
            value = _input(x, start + at, feature, width, stride, GATED, inside & (at >= 0))
            value += tl.load(known + (token + tap) * width + feature, mask=inside & (at < 0), other=0.0)
            part = value * tl.load(weight + feature * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            total = part if tap == 0 else total + part
        if BIASED:
            total += tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        if GATED:
            later = tl.load(x + (start + token).to(tl.int64) * stride + width + feature, mask=inside, other=0.0)
            result = rounded * later
        else:
            wide = rounded.to(tl.float32)
            result = (wide / (1.0 + tl.exp(-wide))).to(out.dtype.element_ty)
        tl.store(out + (start + token).to(tl.int64) * width + feature, result, mask=inside)
    _keep_inputs(x, known, memory, target, count, start, feature, width, stride, size, TAPS, GATED, inside)
    _keep_inputs(x, known, memory, snapshot, after, start, feature, width, stride, size, TAPS, GATED, inside)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    memory: Tensor | None,
    slots: Tensor,
    query_start: Tensor,
) -> Tensor:
    """[T, width]: b * convolution(a * x) of [a | b | x], or silu(convolution(x)).

    Args:
        x: [T, 3 width] if gated, else [T, width].
        weight: [width, taps]; bias: [width].
        memory: [slots + 1, numbers] float32; a slot begins with the last [taps - 1, width] inputs.
        slots: as of `slots_of`; query_start: [rows + 1] int32.
    """
    width, taps = weight.shape
    rows = slots.shape[1]
    memory = x.new_zeros(1, (taps - 1) * width, dtype=torch.float32) if memory is None else memory
    assert x.stride(1) == 1
    out = torch.zeros(len(x), width, dtype=x.dtype, device=x.device)
    features = min(_FEATURES, triton.next_power_of_2(width))
    convolve_kernel[(rows, triton.cdiv(width, features))](
        x, out, memory, slots, query_start, weight, weight if bias is None else bias, rows, width, x.stride(0),
        memory.shape[1], TAPS=taps, GATED=gated, BIASED=bias is not None, FEATURES=features, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _length(x):
    return 1.0 / tl.sqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    x, rates, opening, out, memory, slots, query_start, decay, offset, norm,
    rows, x_stride, rates_stride, opening_stride, size, begin, scale, eps, most,
    HEADS: tl.constexpr, EACH: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, ALTERNATE: tl.constexpr,
):  # fmt: skip
    """Arguments as of `apply_delta`; HEADS: of values; EACH: heads of values for each head of keys; KEY, VALUE:
    features of a head; KEYS, VALUES: the same, rounded up."""
    row, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    has_key, has_value = key < KEY, value < VALUE
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    source, target = tl.load(slots + row), tl.load(slots + rows + row)
    snapshot, after = tl.load(slots + 2 * rows + row), tl.load(slots + 3 * rows + row)
    place = head * KEY * VALUE + key[:, None] * VALUE + value[None, :]
    inside = has_key[:, None] & has_value[None, :]
    state = tl.load(memory + source.to(tl.int64) * size + begin + place, mask=inside, other=0.0)
    key_head = head % (HEADS // EACH) if ALTERNATE else head // EACH
    strength = tl.exp(tl.load(decay + head).to(tl.float32))
    shift = tl.load(offset + head).to(tl.float32)
    weights = tl.load(norm + value, mask=has_value, other=0.0)
    kind = out.dtype.element_ty
    for token in range(0, count):
        if (token == after) & (snapshot > 0):
            _keep(memory, snapshot, size, begin, place, state, inside)
        at = (start + token).to(tl.int64)
        queries = x + at * x_stride + key_head * KEY
        keys = queries + (HEADS // EACH) * KEY
        values = x + at * x_stride + 2 * (HEADS // EACH) * KEY + head * VALUE
        q = tl.load(queries + key, mask=has_key, other=0.0).to(tl.float32)
        k = tl.load(keys + key, mask=has_key, other=0.0).to(tl.float32)
        v = tl.load(values + value, mask=has_value, other=0.0).to(tl.float32)
        q, k = q * _length(q) * scale, k * _length(k)
        share = tl.load(rates + at * rates_stride + head).to(tl.float32)
        share = most / (1.0 + tl.exp(-share))
        speed = tl.load(rates + at * rates_stride + HEADS + head).to(tl.float32) + shift
        speed = tl.where(speed > 20.0, speed, tl.log(1.0 + tl.exp(tl.minimum(speed, 20.0))))
        state *= tl.exp(-strength * speed)
        change = (v - tl.sum(state * k[:, None], 0)) * share
        state += k[:, None] * change[None, :]
        attended = tl.sum(state * q[:, None], 0).to(kind).to(tl.float32)
        normed = (attended / tl.sqrt(tl.sum(attended * attended, 0) / VALUE + eps)).to(kind) * weights
        gate = tl.load(opening + at * opening_stride + head * VALUE + value, mask=has_value, other=0.0).to(tl.float32)
        result = (normed.to(tl.float32) * (gate / (1.0 + tl.exp(-gate)))).to(kind)
        tl.store(out + (at * HEADS + head) * VALUE + value, result, mask=has_value)
    if (after == count) & (snapshot > 0):
        _keep(memory, snapshot, size, begin, place, state, inside)
    _keep(memory, target, size, begin, place, state, inside)


def apply_delta(
    x: Tensor,
    rates: Tensor,
    opening: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, int, int, int],
    eps: float,
    memory: Tensor | None,
    begin: int,
    slots: Tensor,
    query_start: Tensor,
    alternate: bool = False,
    most: float = 1.0,
) -> Tensor:
    """[T, value heads * value_dim]: silu(opening) * norm of what each head's matrix gives for its query.

    Args:
        x: [T, features] queries, keys and values; rates: [T, 2 value heads]; opening: [T, value heads * value_dim].
        parameters: `decay`, `offset` and `norm` of `engine.model.state_layers.DeltaRuleAttention`.
        sizes: heads of keys and of values, key_dim, value_dim.
        memory: [slots + 1, numbers] float32; the matrices [value heads, key_dim, value_dim] lie from `begin` on.
        slots: as of `slots_of`; query_start: [rows + 1] int32.
        alternate, most: as of `engine.model.spec.DeltaRule`.
    """
    key_heads, heads, key_dim, value_dim = sizes
    if memory is None:
        memory = x.new_zeros(1, begin + heads * key_dim * value_dim, dtype=torch.float32)
    assert x.stride(1) == rates.stride(1) == opening.stride(1) == 1
    out = torch.zeros(len(x), heads * value_dim, dtype=x.dtype, device=x.device)
    rows = slots.shape[1]
    decay, offset, norm = parameters
    keys, values = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    delta_kernel[(rows, heads)](
        x, rates, opening, out, memory, slots, query_start, decay, offset, norm, rows, x.stride(0), rates.stride(0),
        opening.stride(0), memory.shape[1], begin, key_dim**-0.5, eps, most, HEADS=heads, EACH=heads // key_heads,
        KEY=key_dim, VALUE=value_dim, KEYS=keys, VALUES=values, ALTERNATE=alternate,
        num_warps=8 if keys * values > 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
