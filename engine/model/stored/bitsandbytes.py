"""bitsandbytes' checkpoints: int8 by outputs (arXiv:2208.07339), and 4-bit codes by blocks (arXiv:2305.14314)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.stored.scheme import Packed, Scheme, Tensors, expect, matrices

_STATE = ".weight.quant_state.bitsandbytes__"


class BitsAndBytes(Scheme):
    """Of int8 `weight` and `SCB`; of 4 bits `weight` and, below its name, what belongs to the codes."""

    unread = (".weight_format",)

    def __init__(self, config: Mapping[str, Any]):
        self.title = "4-bit bitsandbytes" if config.get("load_in_4bit") else "8-bit bitsandbytes"

    def find(self, tensors: Tensors) -> Iterator[Packed]:
        for module, name in matrices(tensors, ".weight"):
            if tensors.format(name) == "I8":
                shape = tensors.shape(name)
                yield Packed(name, (name, expect(tensors, f"{module}.SCB", shape[:1])), shape, _of_bytes)
            elif states := [key for key in tensors.names if key.startswith(f"{module}{_STATE}")]:
                yield _codes(tensors, name, states[0])


def _of_bytes(values: Tensor, peaks: Tensor) -> Tensor:
    return values.float() * peaks.float()[:, None] * (1 / 127)


def _codes(tensors: Tensors, name: str, state: str) -> Packed:
    try:
        said = json.loads(bytes(tensors.read(state).tolist()))
        shape, block = Size(said["shape"]), int(said["blocksize"])
        nested = (int(said["nested_blocksize"]), float(said["nested_offset"])) if "nested_blocksize" in said else None
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{tensors.path}: {state} is damaged: {error!r}.") from error
    count = shape.numel()
    if min(shape, default=0) < 1 or block < 1 or tensors.shape(name).numel() * 2 != count + count % 2:
        raise ModelLoadError(
            f"{tensors.path}: {name} should hold {count} numbers of 4 bits, but is stored as "
            f"{list(tensors.shape(name))}."
        )
    if tensors.format(name) != "U8":
        raise UnsupportedModelError(f"{name} is stored as {tensors.format(name)}; codes of 4 bits are read from U8.")
    blocks = -(-count // block)
    parts = [name, expect(tensors, f"{name}.absmax", (blocks,)), expect(tensors, f"{name}.quant_map", (16,)), state]
    if nested is not None:
        more = -(-blocks // nested[0])
        parts += [
            expect(tensors, f"{name}.nested_absmax", (more,)),
            expect(tensors, f"{name}.nested_quant_map", (256,)),
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
    octets = codes.flatten()
    values = table.float()[torch.stack((octets >> 4, octets & 15), -1).flatten().int()][: shape.numel()]
    if nested is not None:
        assert outer_peaks is not None
        assert outer_table is not None
        size, offset = nested
        peaks = outer_table.float()[peaks.int()] * outer_peaks.float().repeat_interleave(size)[: len(peaks)] + offset
    return (values * peaks.float().repeat_interleave(block)[: len(values)]).view(shape)
