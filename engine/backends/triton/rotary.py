"""The work between the projection of queries, keys and values and attention on a GPU, in one launch: norms of heads,
rotary positions (arXiv:2104.09864), and the writing of keys and values to their pages (docs/kernels.md, "Layers on a
GPU").

A program processes one token and about 1024 numbers of its queries, keys or values: one token of a large model has some
six programs, which wait for memory in parallel, and a few hundred tokens fill a GPU. Numbers that are rotated together
are in two tiles of the same shape, so that a thread has both and rotates them in place. A token's slot is computed here
if each row has one token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.backends.attention.base import Paged
from engine.backends.attention.formats import FP8, LARGEST
from engine.backends.triton.norms import Norm, features_of, kind, scaled
from engine.backends.triton.overlap import overlapping
from engine.backends.triton.pages import store_vectors

LONGEST_HEAD = 1024
_PLAIN, _INT8, _FP8 = range(3)
_SLOTS, _TABLES = 1, 2


class Angles(NamedTuple):
    """The angles for each position."""

    # [length, ..., head_dim], equal for two features that are rotated together, and not read for features that are not
    # rotated; sin: [length, ..., dim / 2]. Whole tables; each token reads one row.
    cos: Tensor
    sin: Tensor
    interleaved: bool  # features 2i and 2i + 1 are rotated together, not i and dim / 2 + i
    # heads are rotated in float32 and rounded once; otherwise the angles and each product and sum are rounded
    in_float32: bool


class HeadNorms(NamedTuple):
    """Norms of each query and each key over its features, all of one kind and with one eps. `own`: weights and biases
    are [heads * head_dim], separate for each head."""

    queries: Norm
    keys: Norm
    own: bool = False


@triton.jit
def _limited(x, CLIP: tl.constexpr):
    """Numbers as float32, limited to [-CLIP, CLIP] as rounded to their own format."""
    FORMAT: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    if CLIP is not None:
        x = tl.where(x > CLIP, CLIP, tl.where(x < -CLIP, -CLIP, x)).to(FORMAT).to(tl.float32)  # NaN stays
    return x


@triton.jit(
    do_not_specialize=["length", "stored", "all_slots", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["positions", "slots", "tables"],
)
def rotate_kernel(
    turning, values, cos, sin, positions, query_weight, query_bias, key_weight, key_bias, slots, tables,
    key_pages, value_pages, key_scales, value_scales, centre,
    turning_stride, values_stride, length, stored, all_slots, table_stride, table_width, eps,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROUNDED: tl.constexpr, NORM: tl.constexpr, OWN: tl.constexpr, CLIP: tl.constexpr,
    WHERE: tl.constexpr, PAGE: tl.constexpr, STEPS: tl.constexpr,
    HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (t, c): HEADS of token t's queries, keys or values, in this order.

    The heads of a token are contiguous; tokens are a stride apart. Features are in three tiles: two of HALF features
    each that are rotated together, and the rest.
    """
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    QUERY_CHUNKS: tl.constexpr = (QUERIES + HEADS - 1) // HEADS
    KV_CHUNKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    FORMAT: tl.constexpr = turning.dtype.element_ty
    of_queries = chunk < QUERY_CHUNKS
    of_values = chunk >= QUERY_CHUNKS + KV_CHUNKS

    source = turning + token * turning_stride
    weight = query_weight
    bias = query_bias
    count = QUERIES
    if KV_HEADS > 0:  # noqa: SIM102 (known when the kernel is compiled)
        if not of_queries:
            count = KV_HEADS
            weight = key_weight
            bias = key_bias
            if of_values:
                chunk -= QUERY_CHUNKS + KV_CHUNKS
                source = values + token * values_stride
            else:
                chunk -= QUERY_CHUNKS
                source += QUERIES * HEAD_DIM
    head = chunk * HEADS + tl.arange(0, HEADS)[:, None]
    there = head < count

    pair = tl.arange(0, HALF_BLOCK)[None, :]
    paired = pair < HALF
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else HALF + pair
    third = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    single = third < HEAD_DIM
    heads = source + head * HEAD_DIM
    # Everything is loaded before anything is waited for, except what depends on the position. Weights of norms are
    # never written; the previous kernel may write everything else.
    if NORM > 0:
        OFFSET: tl.constexpr = 1.0 if NORM == 3 else 0.0
        at = 0
        in_pair = paired
        in_rest = single
        if OWN:
            at = head * HEAD_DIM
            in_pair = there & paired
            in_rest = there & single
        factor_a = features_of(weight, at + first, in_pair, OFFSET)
        factor_b = features_of(weight, at + second, in_pair, OFFSET)
        factor_rest = features_of(weight, at + third, in_rest, OFFSET)
        shift_a = features_of(bias, at + first, in_pair, 0.0)
        shift_b = features_of(bias, at + second, in_pair, 0.0)
        shift_rest = features_of(bias, at + third, in_rest, 0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    position = token
    if positions is not None:
        position = tl.load(positions + token).to(tl.int64)
    a = tl.load(heads + first, mask=there & paired, other=0.0)
    b = tl.load(heads + second, mask=there & paired, other=0.0)
    rest = tl.load(heads + third, mask=there & single, other=0.0)
    if HALF > 0:
        # A position without angles gives NaN, which ends the request.
        known = paired & (position >= 0) & (position < length)
        c = tl.load(cos + position * HEAD_DIM + first, mask=known, other=float("nan")).to(tl.float32)
        s = tl.load(sin + position * HALF + pair, mask=known, other=float("nan")).to(tl.float32)
    slot = token * 0
    if KV_HEADS > 0:
        stores = token < stored
        if WHERE == 1:
            slot = tl.load(slots + token, mask=stores, other=0).to(tl.int64)
        else:
            number = position // PAGE
            listed = stores & (position >= 0) & (number < table_width)
            page = tl.load(tables + token * table_stride + number, mask=listed, other=0).to(tl.int64)
            slot = tl.where(listed, page * PAGE + position % PAGE, 0)

    a = _limited(a, CLIP)
    b = _limited(b, CLIP)
    rest = _limited(rest, CLIP)
    if not of_values:
        if NORM > 0:
            if NORM == 4:
                total = tl.sum(a, 1, keep_dims=True) + tl.sum(b, 1, keep_dims=True) + tl.sum(rest, 1, keep_dims=True)
                mean = total / HEAD_DIM
                a = tl.where(paired, a - mean, 0.0)
                b = tl.where(paired, b - mean, 0.0)
                rest = tl.where(single, rest - mean, 0.0)
            squares = tl.sum(a * a, 1, keep_dims=True) + tl.sum(b * b, 1, keep_dims=True)
            squares += tl.sum(rest * rest, 1, keep_dims=True)
            scale = tl.rsqrt(squares / HEAD_DIM + eps)
            a = scaled(a, scale, factor_a, shift_a, NORM, FORMAT)
            b = scaled(b, scale, factor_b, shift_b, NORM, FORMAT)
            rest = scaled(rest, scale, factor_rest, shift_rest, NORM, FORMAT)
        if HALF > 0:
            if ROUNDED:
                c = c.to(FORMAT).to(tl.float32)
                s = s.to(FORMAT).to(tl.float32)
            left = a * c
            right = b * c
            if ROUNDED:
                left = left.to(FORMAT).to(tl.float32)
                right = right.to(FORMAT).to(tl.float32)
            left -= b * s
            right += a * s
            a = tl.where(paired, left, 0.0).to(FORMAT).to(tl.float32)
            b = tl.where(paired, right, 0.0).to(FORMAT).to(tl.float32)

    if of_queries:
        # Several warps hold a small tile: none may overwrite numbers that another has still to read.
        tl.debug_barrier()
        tl.store(heads + first, a.to(FORMAT), mask=there & paired)
        tl.store(heads + second, b.to(FORMAT), mask=there & paired)
        tl.store(heads + third, rest.to(FORMAT), mask=there & single)
    elif KV_HEADS > 0:
        there = there & (slot >= PAGE) & (slot < all_slots)
        if of_values:
            store_vectors(
                a, b, rest, first, second, third, paired, single, head, there, slot, value_pages, value_scales, None,
                KV_HEADS, HEAD_DIM, FORMAT, STEPS,
            )  # fmt: skip
        else:
            store_vectors(
                a, b, rest, first, second, third, paired, single, head, there, slot, key_pages, key_scales, centre,
                KV_HEADS, HEAD_DIM, FORMAT, STEPS,
            )  # fmt: skip


def rotate_(heads: Tensor, angles: Angles, positions: Tensor | None = None) -> None:
    """Rotate heads [T, n, head_dim] in place. `positions`: [T]; None: token t uses row t of the angles. Raises
    ValueError if shapes do not match."""
    _launch(heads, None, angles, positions, None, None, None, None, {"EARLY": False})


def rotate_and_store(
    turning: Tensor,
    values: Tensor,
    cache: Paged,
    *,
    angles: Angles | None = None,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
    norms: HeadNorms | None = None,
    clip: float | None = None,
    overlap: bool = False,
) -> None:
    """Clip, normalise and rotate queries in place, and store keys (likewise) and clipped values in pages, like
    `Paged.write`, except that data for block 0 or outside the pages is not written. Raises ValueError if shapes or
    formats do not match.

    Args:
        turning: [T, heads + kv_heads, head_dim], queries first; the keys are not changed.
        values: [T, kv_heads, head_dim].
        angles: None if nothing rotates.
        positions: [T] int32 or int64. None: token t uses row t of the angles.
        slots: [S] int64, S <= T: the slots of the first S tokens. None: token t is the only one of row t of
            `cache.block_tables`, and its slot follows from that table and its position; tokens past the last row are
            not written.
        clip: limit numbers to [-clip, clip] first.
        overlap: begin before the previous kernel ends, on a device that supports it (`engine.backends.triton.overlap`).
    """
    _launch(turning, values, angles, positions, cache, slots, norms, clip, overlapping(overlap))


def _launch(
    turning: Tensor,
    values: Tensor | None,
    angles: Angles | None,
    positions: Tensor | None,
    cache: Paged | None,
    slots: Tensor | None,
    norms: HeadNorms | None,
    clip: float | None,
    early: dict[str, bool],
) -> None:
    tokens, heads, head_dim = turning.shape
    kv_heads, page, all_slots, stored, steps = 0, 1, 0, 0, _PLAIN
    keys, held, key_scales, value_scales, centre, tables = None, None, None, None, None, None
    if cache is not None:
        assert values is not None
        keys, held = _bytes(_whole(cache.keys)), _bytes(_whole(cache.values))
        key_scales, value_scales, centre = cache.key_scales, cache.value_scales, cache.key_centre
        blocks, page, kv_heads, size = keys.shape
        all_slots = blocks * page
        if values.shape != (tokens, kv_heads, size) or size != head_dim or heads < kv_heads:
            raise ValueError(f"{_said(turning)} and {_said(values)} do not go with pages {_said(keys)}")
        if values.dtype != turning.dtype:
            raise ValueError(f"{_said(turning)} and {_said(values)} have different formats")
        if (key_scales is None or value_scales is None) != (cache.keys.dtype not in LARGEST):
            raise ValueError(f"only pages of 8 bits have scales, got pages of {cache.keys.dtype}")
        if key_scales is not None and value_scales is not None:
            _whole(key_scales), _whole(value_scales)
            steps = _FP8 if cache.keys.dtype == FP8 else _INT8
        else:
            centre = None
        if slots is None:
            tables = cache.block_tables
            stored = min(tokens, tables.shape[0]) if tables.shape[1] else 0
            if positions is None:
                raise ValueError("slots and positions exclude each other: slots follow from positions")
        else:
            stored = slots.shape[0]
            if stored > tokens:
                raise ValueError(f"{stored} slots are too many for {_said(turning)}")
    if head_dim > LONGEST_HEAD:
        raise ValueError(f"a head may have at most {LONGEST_HEAD} features, got {head_dim}")
    if positions is not None and positions.shape != (tokens,):
        raise ValueError(f"positions {_said(positions)} are not those of {_said(turning)}")
    half, length = 0, 0
    if angles is not None:
        half, length = angles.sin.shape[-1], angles.cos.shape[0]
        if angles.cos.shape[-1] != head_dim or 2 * half > head_dim or angles.sin.shape[0] != length:
            raise ValueError(f"{_said(angles.cos)} and {_said(angles.sin)} do not turn {_said(turning)}")
        _whole(angles.cos), _whole(angles.sin)
    if not tokens:
        return
    query_heads = heads - kv_heads
    widest = triton.next_power_of_2(head_dim)
    together = max(1, min(1024 // widest, triton.next_power_of_2(max(query_heads, kv_heads))))
    chunks = triton.cdiv(query_heads, together) + 2 * triton.cdiv(kv_heads, together)
    how = None if norms is None else norms.queries
    rotate_kernel[(tokens, chunks)](
        turning,
        values,
        None if angles is None else angles.cos,
        None if angles is None else angles.sin,
        None if positions is None else positions.contiguous(),
        None if norms is None else norms.queries.weight,
        None if norms is None else norms.queries.bias,
        None if norms is None else norms.keys.weight,
        None if norms is None else norms.keys.bias,
        slots,
        tables,
        keys,
        held,
        key_scales,
        value_scales,
        centre,
        _token_stride(turning),
        0 if values is None else _token_stride(values),
        length,
        stored,
        all_slots,
        0 if tables is None else tables.stride(0),
        0 if tables is None else tables.shape[1],
        0.0 if how is None else how.eps,
        QUERIES=query_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        INTERLEAVED=angles is not None and angles.interleaved,
        ROUNDED=angles is not None and not angles.in_float32 and turning.dtype != torch.float32,
        NORM=kind(how),
        OWN=norms is not None and norms.own,
        CLIP=clip,
        WHERE=_TABLES if slots is None else _SLOTS,
        PAGE=page,
        STEPS=steps,
        HEADS=together,
        HALF_BLOCK=triton.next_power_of_2(max(half, 1)),
        REST_BLOCK=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        num_warps=max(1, min(4, together * widest // 256)),
        **early,
    )


def _bytes(pages: Tensor) -> Tensor:
    return pages.view(torch.uint8) if pages.dtype == FP8 else pages


def _whole(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{_said(tensor)} must be contiguous")
    return tensor


def _token_stride(heads: Tensor) -> int:
    """The stride between tokens of heads [T, n, head_dim], which are contiguous within a token."""
    stride, between, within = heads.stride()
    if within != 1 or (between != heads.shape[2] and heads.shape[1] > 1):
        raise ValueError(f"the heads of a token must be contiguous, got {_said(heads)}")
    return stride


def _said(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype}"
