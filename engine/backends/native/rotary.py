"""Rotary positions (arXiv:2104.09864), and the writing of new keys and values to pages, in one pass over the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.attention.base import Paged
from engine.backends.native.loading import Kernel

_SIGNATURE = "pppp p pp pp p iiiiii ii i ii"
_ROTATE = {
    (torch.float32, torch.float32): Kernel("rotate_f32", _SIGNATURE),
    (torch.bfloat16, torch.bfloat16): Kernel("rotate_bf16", _SIGNATURE),
    (torch.bfloat16, torch.float32): Kernel("rotate_bf16_exact", _SIGNATURE),
}
# These numbers equal those in src/pages.h.
PAGES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_NOWHERE = (None,) * 6
LONGEST_HEAD = 1024


class Rotation(NamedTuple):
    """The angles of a rotation."""

    cos: Tensor  # [T, 1, head_dim], in the format of the rotation
    sin: Tensor  # [T, 1, dim / 2] in the same format
    interleaved: bool  # features 2i and 2i + 1 are rotated together, not i and dim / 2 + i


def rotate_(heads: Tensor, rotation: Rotation) -> None:
    """Rotate heads [T, n, head_dim] in place."""
    _call(heads, None, rotation, _NOWHERE, 0, heads.shape[1], 0, -1, False)


def rotate_and_store(turning: Tensor, values: Tensor, rotation: Rotation | None, cache: Paged, slots: Tensor) -> None:
    """Rotate queries in place, and store rotated keys and values in pages, like `Paged.write`.

    Args:
        turning: [T, heads + kv_heads, head_dim], queries first; the keys are not changed.
        values: [T, kv_heads, head_dim].
        rotation: None for no rotation.
        slots: [S] int64, S <= T: the slots of the first S tokens.
    """
    pages = cache.keys
    _, _, kv_heads, head_dim = pages.shape
    tokens, heads, _ = turning.shape
    stored = slots.shape[0]
    if values.shape != (tokens, kv_heads, head_dim) or heads < kv_heads or stored > tokens:
        raise ValueError(f"{_said(turning)}, {_said(values)} and {stored} slots do not go with {_said(pages)}")
    if turning.dtype != values.dtype:
        raise ValueError(f"{_said(turning)} and {_said(values)} have different formats")
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous and int64, got {_said(slots)}")
    if (cache.key_scales is None or cache.value_scales is None) != (pages.dtype != torch.int8):
        raise ValueError(f"only int8 pages have scales, got pages of {pages.dtype}")
    addresses = (
        slots.data_ptr(),
        _whole(pages),
        _whole(cache.values),
        _whole(cache.key_scales),
        _whole(cache.value_scales),
        _whole(cache.key_centre),
    )
    kind = PAGES[pages.dtype]
    _call(turning, values, rotation, addresses, stored, heads - kv_heads, kv_heads, kind, pages.dtype == values.dtype)


def _whole(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"{_said(tensor)} must be contiguous")
    return tensor.data_ptr()


def _call(
    turning: Tensor,
    values: Tensor | None,
    rotation: Rotation | None,
    addresses: tuple[int | None, ...],
    stored: int,
    heads: int,
    kv_heads: int,
    pages: int,
    same: bool,
) -> None:
    tokens, _, head_dim = turning.shape
    if head_dim > LONGEST_HEAD:
        raise ValueError(f"a head may have at most {LONGEST_HEAD} features, got {head_dim}")
    dim, cos, sin, interleaved, kind = 0, None, None, False, turning.dtype
    if rotation is not None:
        angles, sines, interleaved = rotation
        dim, kind = 2 * sines.shape[2], angles.dtype
        if angles.shape != (tokens, 1, head_dim) or sines.shape[0] != tokens or dim > head_dim or sines.dtype != kind:
            raise ValueError(f"{_said(angles)} and {_said(sines)} do not turn {_said(turning)}")
        cos, sin = _whole(angles), _whole(sines)
    kernel = _ROTATE.get((turning.dtype, kind))
    if kernel is None:
        raise ValueError(f"heads of {turning.dtype} are not turned in {kind}")
    kernel.call(
        turning.data_ptr(),
        None if values is None else values.data_ptr(),
        cos,
        sin,
        *addresses,
        tokens,
        stored,
        heads,
        kv_heads,
        head_dim,
        dim,
        _token_stride(turning),
        0 if values is None else _token_stride(values),
        interleaved,
        pages,
        same,
    )


def _token_stride(heads: Tensor) -> int:
    """The stride between tokens of heads [T, n, head_dim], which are contiguous within a token."""
    stride, between, within = heads.stride()
    if within != 1 or (between != heads.shape[2] and heads.shape[1] > 1) or not heads.is_cpu:
        raise ValueError(f"the heads of a token must be contiguous on a CPU, got {_said(heads)}")
    return stride


def _said(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype}"
