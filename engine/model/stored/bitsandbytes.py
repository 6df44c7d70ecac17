"""bitsandbytes' checkpoints: int8 by outputs (arXiv:2208.07339), and 4-bit codes by blocks (arXiv:2305.14314)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.stored.scheme import REALS, WHOLE, Packed, Scheme, Tensors, expect, matrices, matrix_shape

_STATE = ".weight.quant_state.bitsandbytes__"
_LONGEST_STATE = 1 << 16  # bytes; bitsandbytes writes some hundreds
_LAYOUT = ".weight_format"
_CODES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
"""Bytes per element of the formats in which codes are stored (bnb_4bit_quant_storage); the format has no other
meaning."""


class BitsAndBytes(Scheme):
    """The bitsandbytes scheme: int8 as `weight` and `SCB`; 4 bits as `weight`, with the data for the codes below its
    name."""

    unread = (_LAYOUT,)

    def __init__(self, config: Mapping[str, Any]):
        self.title = "4-bit bitsandbytes" if config.get("load_in_4bit") else "8-bit bitsandbytes"

    def find(self, tensors: Tensors) -> Iterator[Packed]:
        for module, name in matrices(tensors, ".weight"):
            if tensors.format(name) == "I8":
                shape = Size(matrix_shape(tensors, name, "I8"))
                peaks = expect(tensors, f"{module}.SCB", shape[:1], formats=REALS)
                _check_by_rows(tensors, f"{module}{_LAYOUT}")
                yield Packed(name, (name, peaks), shape, _of_bytes)
            elif states := [key for key in tensors.names if key.startswith(f"{module}{_STATE}")]:
                yield _codes(tensors, name, states[0])


def _check_by_rows(tensors: Tensors, name: str) -> None:
    """Refuse the layouts of old versions for one kind of GPU."""
    if name not in tensors.names:
        return
    layout = int(tensors.read(expect(tensors, name, (), (1,), formats=WHOLE)))
    if layout != 0:
        raise UnsupportedModelError(
            f"{name} is {layout}: this order of the matrix is made for one kind of GPU; only rows (0) are supported. "
            "Save the model again with bitsandbytes 0.45 or later."
        )


def _of_bytes(values: Tensor, peaks: Tensor) -> Tensor:
    return values.float() * peaks.float()[:, None] * (1 / 127)


def _codes(tensors: Tensors, name: str, state: str) -> Packed:
    """A matrix of codes. Its state is not trusted: it is compared with the stored data."""
    length = tensors.shape(state).numel()
    if length > _LONGEST_STATE:
        raise ModelLoadError(
            f"{tensors.path}: {state} is damaged: it has {length} bytes, but at most {_LONGEST_STATE} are allowed."
        )
    expect(tensors, state, (length,), formats=("U8",))
    try:
        said = json.loads(bytes(tensors.read(state).tolist()))
        shape, block = Size(said["shape"]), int(said["blocksize"])
        nested = (int(said["nested_blocksize"]), float(said["nested_offset"])) if "nested_blocksize" in said else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ModelLoadError(f"{tensors.path}: {state} is damaged: {error!r}.") from error
    count = math.prod(shape)
    stored = tensors.format(name)
    if stored not in _CODES:
        raise UnsupportedModelError(f"{name} is stored as {stored}; 4-bit codes must be {', '.join(_CODES)}.")
    held = tensors.shape(name).numel() * _CODES[stored] * 2
    if min(shape, default=0) < 1 or block < 1 or held != count + count % 2:
        raise ModelLoadError(
            f"{tensors.path}: {name} should hold {count} numbers of 4 bits, but is stored as "
            f"{list(tensors.shape(name))}, {stored}."
        )
    block = min(block, count)  # maxima are repeated as often as the state says
    blocks = -(-count // block)
    parts = [
        name,
        expect(tensors, f"{name}.absmax", (blocks,), formats=REALS if nested is None else ("U8",)),
        expect(tensors, f"{name}.quant_map", (16,), formats=REALS),
        state,
    ]
    if nested is not None:
        size, offset = nested
        if size < 1:
            raise ModelLoadError(f"{tensors.path}: {state} is damaged: its nested_blocksize is {size}.")
        nested = min(size, blocks), offset
        parts += [
            expect(tensors, f"{name}.nested_absmax", (-(-blocks // nested[0]),), formats=REALS),
            expect(tensors, f"{name}.nested_quant_map", (256,), formats=REALS),
        ]
    return Packed(name, tuple(parts), shape, partial(_of_codes, shape=shape, block=block, nested=nested))


def _of_codes(
    codes: Tensor,
    peaks: Tensor,
    table: Tensor,
    _state: Tensor,
    outer_peaks: Tensor | None = None,
    outer_table: Tensor | None = None,
    *,
    shape: Size,
    block: int,
    nested: tuple[int, float] | None,
) -> Tensor:
    octets = codes.flatten().view(torch.uint8)
    values = table.float()[torch.stack((octets >> 4, octets & 15), -1).flatten().int()][: shape.numel()]
    if nested is not None:
        assert outer_peaks is not None
        assert outer_table is not None
        size, offset = nested
        peaks = outer_table.float()[peaks.int()] * outer_peaks.float().repeat_interleave(size)[: len(peaks)] + offset
    return (values * peaks.float().repeat_interleave(block)[: len(values)]).view(shape)
