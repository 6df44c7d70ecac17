"""Rotary positions (arXiv:2104.09864) and the way of new keys and values into pages, in one walk over the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.base import Paged
from engine.native.loading import Kernel

_SIGNATURE = "pppp p pp pp p iiiiii ii i ii"
_TURN = {
    (torch.float32, torch.float32): Kernel("turn_f32", _SIGNATURE),
    (torch.bfloat16, torch.bfloat16): Kernel("turn_bf16", _SIGNATURE),
    (torch.bfloat16, torch.float32): Kernel("turn_bf16_exact", _SIGNATURE),
}
# The numbers are those of src/pages.h.
_PAGES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
LONGEST_HEAD = 1024


class Rotation(NamedTuple):
    """How far each token is turned.

    Attributes:
        cos: [T, 1, head_dim]; its format is the one that rotation happens in.
        sin: [T, 1, dim / 2] in the same format.
        interleaved: features 2i and 2i + 1 are turned together, not i and dim / 2 + i.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


def rotate_(heads: Tensor, rotation: Rotation) -> None:
    """Turn heads [T, n, head_dim] where they lie."""
    tokens, count, _ = heads.shape
    _call(heads, None, rotation, (None,) * 6, tokens, 0, count, 0, -1, False)


def rotate_and_store(turning: Tensor, values: Tensor, rotation: Rotation | None, cache: Paged, slots: Tensor) -> None:
    """Turn queries where they lie, and store keys, turned, and values in pages, as `Paged.write` would.

    Args:
        turning: [T, heads + kv_heads, head_dim], queries first; the keys stay as they were.
        values: [T, kv_heads, head_dim].
        rotation: None where nothing turns.
        slots: [S] int64, S <= T: where the first S tokens go.
    """
    kv_heads, head_dim = cache.keys.shape[2:]
    tokens, stored = values.shape[0], slots.shape[0]
    if values.shape != (tokens, kv_heads, head_dim) or turning.dtype != values.dtype or stored > tokens:
        raise ValueError(f"{_said(values)} and {stored} slots do not go with pages of {_said(cache.keys)}")
    if turning.shape[0] != tokens or turning.shape[1] < kv_heads:
        raise ValueError(f"{_said(turning)} does not go with {_said(values)}")
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots are int64, side by side, not {_said(slots)}")
    pages = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    if any(tensor is not None and not tensor.is_contiguous() for tensor in (*pages, cache.key_centre)):
        raise ValueError("pages must lie side by side")
    if (cache.key_scales is None or cache.value_scales is None) != (cache.keys.dtype != torch.int8):
        raise ValueError(f"scales belong to pages of int8, not of {cache.keys.dtype}")
    _call(
        turning,
        values,
        rotation,
        tuple(None if tensor is None else tensor.data_ptr() for tensor in (slots, *pages, cache.key_centre)),
        tokens,
        stored,
        turning.shape[1] - kv_heads,
        kv_heads,
        _PAGES[cache.keys.dtype],
        cache.keys.dtype == values.dtype,
    )


def _call(
    turning: Tensor,
    values: Tensor | None,
    rotation: Rotation | None,
    addresses: tuple[int | None, ...],
    tokens: int,
    stored: int,
    heads: int,
    kv_heads: int,
    pages: int,
    same: bool,
) -> None:
    head_dim = turning.shape[2]
    for tensor in (turning, values):
        if tensor is not None and (
            tensor.device.type != "cpu"
            or tensor.stride(2) != 1
            or (tensor.shape[1] > 1 and tensor.stride(1) != head_dim)
        ):
            raise ValueError(f"the heads of a token must lie side by side on a CPU, not as in {_said(tensor)}")
    if head_dim > LONGEST_HEAD:
        raise ValueError(f"a head has {LONGEST_HEAD} features at most, not {head_dim}")
    dim, cos, sin, interleaved, kind = 0, None, None, False, turning.dtype
    if rotation is not None:
        cos, sin, interleaved = rotation
        dim, kind = 2 * sin.shape[-1], cos.dtype
        if cos.shape != (tokens, 1, head_dim) or sin.shape[:2] != (tokens, 1) or dim > head_dim or sin.dtype != kind:
            raise ValueError(f"{_said(cos)} and {_said(sin)} do not turn {_said(turning)}")
        if not cos.is_contiguous() or not sin.is_contiguous():
            raise ValueError("cosines and sines must lie side by side")
    kernel = _TURN.get((turning.dtype, kind))
    if kernel is None:
        raise ValueError(f"heads of {turning.dtype} are not turned in {kind}")
    kernel.call(
        turning.data_ptr(),
        None if values is None else values.data_ptr(),
        None if cos is None else cos.data_ptr(),
        None if sin is None else sin.data_ptr(),
        *addresses,
        tokens,
        stored,
        heads,
        kv_heads,
        head_dim,
        dim,
        turning.stride(0),
        0 if values is None else values.stride(0),
        interleaved,
        pages,
        same,
    )


def _said(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype}"
