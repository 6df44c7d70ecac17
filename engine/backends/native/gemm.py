"""Products with weights that were packed once, for any number of rows: y = x @ weight.T + bias on a CPU.

Weights are float32, bfloat16, int8 with a scale for each GROUP inputs of an output, 4 bits with a scale and a minimum
for each GROUP inputs, int8 with a scale for each output ("int8_fast"), or blocks of a GGUF file in their own format.
Sums are float32. With quantised weights, activations are quantised too, with a scale for each group, and the products
are summed as integers. If groups of int8 weights are `rotate`d, those of activations are too. The bits of a row
of y do not depend on the other rows or on the number of threads.

Intel's matrix tiles multiply plain weights if the caller asks for it. They multiply many rows by int8 and 4 bits if
they are faster than vectors on this machine, which is measured once and does not change results.

    packed = pack(weight, bias)                        # float32, bfloat16, by vectors or by Intel's matrix tiles
    packed = pack_int8(weight, bias)                   # or of what quantise_int8 made, which can be kept on disk
    packed = pack_blocks(blocks, bias)                 # of a GGUF file
    y = matmul(packed, x)
    vectors = look_up(packed, ids)                     # rows of the weight, as an embedding reads them
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.native.loading import Kernel, Library, current
from engine.backends.native.memory import Arena

logger = logging.getLogger("octavo.native")

BlockKind = Literal[
    "q4_0", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "int4_128", "e4m3"
]  # fmt: skip
"""GGUF formats that are multiplied in their own format (Q4_1 and Q8_0 equal int4 and int8); int4 with a scale and a
minimum for each 128 inputs, as in AWQ and GPTQ; float8_e4m3fn with a float32 scale for each 128 inputs."""
Kind = Literal[
    "float32", "bfloat16", "int8", "int8_rotated", "int8_fast", "int4",
    "amx_float32", "amx_bfloat16", "amx_int8", "amx_int8_rotated", "amx_int4",
    "q4_0", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "int4_128", "e4m3",
    "parts",
]  # fmt: skip
Form = Literal["plain", "portable", "rotated"]
"""The form of quantisation: groups in order; the same with scales that bfloat16 can represent, as other programs store
them; or groups that are `rotate`d first."""

GROUP = 32
"""The number of inputs that share a scale."""

FLOAT8 = torch.float8_e4m3fn
FLOAT8_GROUP = 128
"""The number of inputs that share a scale in weights of FLOAT8."""

PART_ROWS = 64
"""A multiple of this many outputs fills whole panels on any CPU."""

_FORMATS = {torch.bfloat16: 0, torch.float32: 1}
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}
_PRODUCTS = {kind: Kernel(f"gemm_{kind}", "ppppp i ii ii iii") for kind in get_args(Kind)}
_LAYOUTS = {kind: Kernel(f"gemm_layout_{kind}", "iip") for kind in get_args(Kind) if kind != "parts"}
_LOOK_UPS = {kind: Kernel(f"gemm_rows_{kind}", "ppp i ii") for kind in _LAYOUTS if not kind.startswith("amx_")}
_PACK_BLOCKS: dict[BlockKind, Kernel] = {kind: Kernel(f"gemm_pack_{kind}", "ppii") for kind in get_args(BlockKind)}
_ASK_FOR_AMX = Kernel("gemm_ask_for_amx", "p")
_PACK: dict[torch.dtype, Kernel] = {
    torch.float32: Kernel("gemm_pack_float32", "pipii"),
    torch.bfloat16: Kernel("gemm_pack_bfloat16", "pipii"),
}
_PACK_INT8 = Kernel("gemm_pack_int8", "pppii")
_PACK_INT8_ROTATED = Kernel("gemm_pack_int8_rotated", "pppii")
_PACK_INT8_FAST = Kernel("gemm_pack_int8_fast", "pppii")
_PACK_INT4 = Kernel("gemm_pack_int4", "pppii")
_QUANTISE = {
    (bits, dtype): Kernel(f"gemm_quantise_{bits}_{suffix}", "pi ppii")
    for bits in ("int8_plain", "int8_portable", "int8_rotated", "int8_fast", "int4_plain", "int4_portable")
    for dtype, suffix in _SUFFIXES.items()
}
_AMX_INPUTS = 32  # rows of a tile
_TRIED_SIZE, _TRIED_ROWS, _TRIED_MATRICES, _TRIES = 2048, 16, 3, 5  # sizes of the products that are measured
_UNIT = 4  # integers that one instruction multiplies and adds
_ALIGNED = 64
_THREADS = os.cpu_count() or 1
_weights = Arena()


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised weight [outputs, inputs] in a form that is the same on every machine and can be stored."""

    # int8 [outputs, inputs], for rotated groups [outputs, groups * GROUP]; for 4 bits, uint8 [outputs, groups, GROUP /
    # 2] with two `levels` in a byte: i in the lower half, i + 4 in the upper one, four bytes for every eight; on a GPU
    # also FLOAT8 [outputs, inputs]
    values: Tensor
    # for int8, float16 [outputs, groups] or float32 [outputs]; for rotated groups, uint8 [outputs, 4 + groups]: the
    # bytes of a float32, and each scale as a multiple of it; for 4 bits, float16 [outputs, groups, 2], a scale and a
    # minimum: a weight is level * scale + minimum; for FLOAT8, float32 [outputs, groups of FLOAT8_GROUP]
    scales: Tensor
    inputs: int  # the length of a row
    rotated: bool = False  # whether integers and scales are those of `rotate`d groups
    by_output: Tensor | None = None  # for FLOAT8 whose groups in a row have equal scales, float32 [outputs]

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors; each row of them is a row of the weight."""
        return self.values, self.scales

    def changed(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        """A copy with `change` applied to each tensor."""
        return replace(self, values=change(self.values), scales=change(self.scales))

    def dense(self) -> Tensor:
        """The weight that it represents, float32 [outputs, inputs]."""
        if self.scales.dim() == 1:
            return self.values.float() * self.scales[:, None]
        if self.is_float8:
            return self.values.float() * self.scales.repeat_interleave(FLOAT8_GROUP, 1)[:, : self.inputs]
        scales = self.factors()
        if self.has_minima:
            groups = self.levels().float() * scales[..., :1] + scales[..., 1:]
        else:
            groups = self.integers().float() * scales[..., None]
        if self.rotated:
            groups = rotate(groups) / GROUP
        return groups.flatten(1)[:, : self.inputs]

    def factors(self) -> Tensor:
        """Scales of groups, float32."""
        if not self.rotated:
            return self.scales.float()
        return self.scales[:, 4:].float() * self.counted()

    def counted(self) -> Tensor:
        """The unit of the scales of rotated groups, float32 [outputs, 1]."""
        return self.scales[:, :4].flatten().clone().view(torch.float32)[:, None]  # aligned

    @property
    def has_minima(self) -> bool:
        """Whether it has 4 bits."""
        return self.values.dtype == torch.uint8

    @property
    def is_float8(self) -> bool:
        """Whether its numbers are FLOAT8."""
        return self.values.dtype == FLOAT8

    def integers(self) -> Tensor:
        """For grouped scales, the integers [outputs, groups, GROUP] that they multiply; for int8, 0 past a row's
        end."""
        if self.has_minima:
            return self.levels()
        return F.pad(self.values, (0, -self.values.shape[1] % GROUP)).view(len(self.values), -1, GROUP)

    def levels(self) -> Tensor:
        """The 4-bit values, uint8 [outputs, groups, GROUP] from 0 to 15; values past a row's end have no meaning."""
        pairs = self.values.view(*self.values.shape[:2], -1, 1, _UNIT)
        return torch.cat((pairs & 15, pairs >> 4), -2).flatten(-3)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [outputs, inputs] as stored in a GGUF file (`engine.model.gguf.blocks` reads it); int4_128 in blocks of
    64 bytes in the order of `Quantised`, a scale and a minimum; or e4m3 in blocks of 128 FLOAT8 and a float32 scale."""

    kind: BlockKind
    values: Tensor  # uint8 [outputs, bytes of a row], blocks one after the other
    inputs: int  # the length of a row

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, as in `Quantised`."""
        return (self.values,)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        """A copy with `change` applied to each tensor."""
        return replace(self, values=change(self.values))


@dataclass(frozen=True, slots=True)
class Joined:
    """Several weights with the same inputs, whose outputs follow each other."""

    parts: tuple[Quantised | Blocks, ...]


Weight = Quantised | Blocks | Joined
"""A quantised weight."""


def rotate(groups: Tensor) -> Tensor:
    """Groups [..., GROUP] times Sylvester's Hadamard matrix; doing it twice multiplies the groups by GROUP.

    Numbers are added in the kernels' order (src/rotation.h), which gives the same bits.
    """
    shape, step = groups.shape, GROUP // 2
    while step:
        first, second = groups.reshape(*shape[:-1], GROUP // (2 * step), 2, step).unbind(-2)
        groups = torch.stack((first + second, first - second), -2).view(shape)
        step //= 2
    return groups


def join_levels(levels: Tensor) -> Tensor:
    """The `Quantised.values` of `Quantised.levels`."""
    pairs = levels.view(*levels.shape[:2], -1, 2, _UNIT)
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(2)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [outputs, inputs] in the form that the kernels of this machine read."""

    kind: Kind
    data: Tensor  # uint8, in panels (see `src/gemm_*.cpp`)
    bias: Tensor | None  # float32 [outputs], which is added before a result is rounded
    outputs: int
    inputs: int
    # tile_rows, tile_bytes: rows of activations that are laid out together, and their bytes
    tile_rows: int
    tile_bytes: int
    panel: int  # outputs per panel
    # the parts of a weight joined from several matrices; `data` contains their addresses
    parts: tuple[Packed, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return sum(part.nbytes for part in self.parts) or self.data.nbytes


def has_amx() -> bool:
    """Whether weights can be packed for matrix tiles: the CPU has them and the system permits them."""
    given = ctypes.c_int64()
    _ASK_FOR_AMX.call(ctypes.addressof(given))
    return bool(given.value)


def pack(weight: Tensor, bias: Tensor | None = None, amx: bool = False, into: Tensor | None = None) -> Packed:
    """Pack a weight [outputs, inputs] of float32 or bfloat16 in its own format. Raises ValueError if it is not such a
    matrix, or the bias does not match it.

    Args:
        amx: multiply with matrix tiles if `has_amx` and the inputs fill them. With tiles, many rows of float32 take
            about half as long, and of bfloat16 a fifth; few rows take as long as with vectors.
        into: uint8, the memory for it; None for new memory.
    """
    weight = _matrix(weight)
    packed = _room(plain_kind(weight.dtype, weight.shape[1], amx), weight.shape[0], weight.shape[1], bias, into)
    _PACK[weight.dtype].call(weight.data_ptr(), weight.stride(0), packed.data.data_ptr(), *weight.shape)
    return packed


def plain_kind(dtype: torch.dtype, inputs: int, amx: bool) -> Kind:
    """The kind of `pack`'s result for a weight of float32 or bfloat16. `amx`: see `pack`."""
    tiles = amx and inputs > 0 and inputs % _AMX_INPUTS == 0 and has_amx()
    if dtype == torch.float32:
        return "amx_float32" if tiles else "float32"
    return "amx_bfloat16" if tiles else "bfloat16"


def quantised_kind(bits: Literal["int8", "int8-fast", "int4"], rotated: bool, amx: bool | None = None) -> Kind:
    """The kind of the result of `pack_int8`, `pack_int8_fast` or `pack_int4`. `amx`: see `pack_int8`."""
    if bits == "int8-fast":
        return "int8_fast"
    if bits == "int4":
        return "amx_int4" if _goes_by_tiles("int4", amx) else "int4"
    tiles = _goes_by_tiles("int8", amx)
    if rotated:
        return "amx_int8_rotated" if tiles else "int8_rotated"
    return "amx_int8" if tiles else "int8"


def size_of(kind: Kind, outputs: int, inputs: int) -> int:
    """Bytes of `Packed.data` for a weight [outputs, inputs]."""
    return _layout(kind, outputs, inputs)[0]


def packed_from(kind: Kind, data: Tensor, outputs: int, inputs: int) -> Packed:
    """A weight that the same library has packed before. `data`: its `Packed.data`, aligned to 64 bytes; more may
    follow."""
    return _room(kind, outputs, inputs, None, data)


def with_bias(packed: Packed, bias: Tensor | None) -> Packed:
    """The weight with this bias, or without one. Raises ValueError if the bias does not match it."""
    return replace(packed, bias=_bias_of(bias, packed.outputs))


def quantise_int8(weight: Tensor, form: Form = "plain") -> Quantised:
    """8-bit integers and, for each GROUP inputs of an output, the scale that puts the largest weight at about 127.
    `form`: a CPU can use rotated groups unless another form is stored. Raises ValueError if it is not a matrix of
    float32 or bfloat16 on a CPU."""
    weight = _matrix(weight)
    outputs, inputs = weight.shape
    groups, rotated = _groups(inputs), form == "rotated"
    values = torch.empty(outputs, groups * GROUP if rotated else inputs, dtype=torch.int8)
    if rotated:
        scales = torch.empty(outputs, 4 + groups, dtype=torch.uint8)
    else:
        scales = torch.empty(outputs, groups, dtype=torch.float16)
    return _quantised(f"int8_{form}", weight, Quantised(values, scales, inputs, rotated))


def quantise_int8_fast(weight: Tensor) -> Quantised:
    """8-bit integers and, for each output, the scale that puts its largest weight at 127. Raises ValueError if it is
    not a matrix of float32 or bfloat16 on a CPU."""
    weight = _matrix(weight)
    made = Quantised(torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0]), weight.shape[1])
    return _quantised("int8_fast", weight, made)


def quantise_int4(weight: Tensor, form: Literal["plain", "portable"] = "plain") -> Quantised:
    """4-bit integers and, for each GROUP inputs, the scale and minimum with the least squared error among 9 candidates.
    Raises ValueError if it is not a matrix of float32 or bfloat16 on a CPU."""
    weight = _matrix(weight)
    outputs, groups = weight.shape[0], _groups(weight.shape[1])
    values = torch.empty(outputs, groups, GROUP // 2, dtype=torch.uint8)
    made = Quantised(values, torch.empty(outputs, groups, 2, dtype=torch.float16), weight.shape[1])
    return _quantised(f"int4_{form}", weight, made)


def _quantised(bits: str, weight: Tensor, made: Quantised) -> Quantised:
    _QUANTISE[bits, weight.dtype].call(
        weight.data_ptr(), weight.stride(0), made.values.data_ptr(), made.scales.data_ptr(), *weight.shape
    )
    return made


def pack_int8(
    weight: Tensor | Quantised, bias: Tensor | None = None, amx: bool | None = None, into: Tensor | None = None
) -> Packed:
    """Pack a weight as int8 with scales for groups; it may already be quantised. Raises ValueError if the matrix cannot
    be quantised, is quantised in another form, or the bias does not match it.

    Args:
        amx: multiply many rows with matrix tiles if `has_amx`; None: if they are faster. The results are the same.
        into: see `pack`.
    """
    made = weight if isinstance(weight, Quantised) else quantise_int8(weight)
    outputs, groups = made.values.shape[0], _groups(made.inputs)
    if made.rotated:
        _check(made.values, torch.int8, (outputs, groups * GROUP))
        _check(made.scales, torch.uint8, (outputs, 4 + groups))
        return _laid_out(quantised_kind("int8", True, amx), _PACK_INT8_ROTATED, made, bias, into)
    _check(made.values, torch.int8, (outputs, made.inputs))
    _check(made.scales, torch.float16, (outputs, groups))
    return _laid_out(quantised_kind("int8", False, amx), _PACK_INT8, made, bias, into)


def pack_int8_fast(weight: Tensor | Quantised, bias: Tensor | None = None, into: Tensor | None = None) -> Packed:
    """Pack a weight as int8 with a scale for each output; it may already be quantised. `into`: see `pack`. Raises
    ValueError if the matrix cannot be quantised, is quantised in another form, or the bias does not match it."""
    made = weight if isinstance(weight, Quantised) else quantise_int8_fast(weight)
    outputs = made.values.shape[0]
    _check(made.values, torch.int8, (outputs, made.inputs))
    _check(made.scales, torch.float32, (outputs,))
    return _laid_out("int8_fast", _PACK_INT8_FAST, made, bias, into)


def pack_int4(
    weight: Tensor | Quantised, bias: Tensor | None = None, amx: bool | None = None, into: Tensor | None = None
) -> Packed:
    """Pack a weight as 4 bits; it may already be quantised. `amx`, `into`: see `pack_int8`. Raises ValueError if the
    matrix cannot be quantised, does not have 4 bits, or the bias does not match it."""
    made = weight if isinstance(weight, Quantised) else quantise_int4(weight)
    outputs, groups = made.values.shape[0], _groups(made.inputs)
    _check(made.values, torch.uint8, (outputs, groups, GROUP // 2))
    _check(made.scales, torch.float16, (outputs, groups, 2))
    return _laid_out(quantised_kind("int4", False, amx), _PACK_INT4, made, bias, into)


def pack_parts(
    parts: Iterator[Any], outputs: int, bias: Tensor | None, pack: Callable[[Any, Tensor | None], Packed]
) -> Packed:
    """Pack a weight that arrives some rows at a time, so that only its packed form takes memory.

    Args:
        parts: the rows in order, in the form that `pack` takes; each part but the last has a multiple of `PART_ROWS`
            rows.
        pack: packs a part into given or new memory, without a bias.
    """
    first = pack(next(parts), None)
    if first.outputs == outputs:
        return replace(first, bias=_bias_of(bias, outputs))
    panel_bytes = len(first.data) // -(-first.outputs // first.panel)
    data = _weights.take(-(-outputs // first.panel) * panel_bytes)
    whole = replace(first, data=data, outputs=outputs, bias=_bias_of(bias, outputs))
    done = len(first.data)
    whole.data[:done] = first.data
    for part in parts:
        done += len(pack(part, whole.data[done:]).data)
    return whole


def pack_blocks(weight: Blocks, bias: Tensor | None = None, into: Tensor | None = None) -> Packed:
    """Pack the blocks of a GGUF file in their own format. `into`: see `pack`. Raises ValueError if they are not whole
    rows, or the bias does not match them."""
    values = weight.values
    if values.dtype != torch.uint8 or values.dim() != 2 or not values.is_contiguous():
        raise ValueError(f"blocks must be contiguous rows of bytes, got {list(values.shape)} of {values.dtype}")
    packed = _room(weight.kind, len(values), weight.inputs, bias, into)
    _PACK_BLOCKS[weight.kind].call(values.data_ptr(), packed.data.data_ptr(), packed.outputs, packed.inputs)
    return packed


def join(parts: Sequence[Packed], bias: Tensor | None = None) -> Packed:
    """Join several matrices with the same inputs into one, each in its own format; outputs of the first come first.
    Biases of the single matrices are not added."""
    first = parts[0]
    if any(part.inputs != first.inputs for part in parts):
        raise ValueError(
            f"matrices of {[part.inputs for part in parts]} inputs cannot be joined: they must have the same number"
        )
    kinds = get_args(Kind)
    table = [number for part in parts for number in (kinds.index(part.kind), part.outputs, part.data.data_ptr())]
    outputs = sum(part.outputs for part in parts)
    return Packed(
        "parts", torch.tensor([len(parts), *table]), _bias_of(bias, outputs), outputs, first.inputs,
        min(part.tile_rows for part in parts), max(part.tile_bytes for part in parts), first.panel, tuple(parts),
    )  # fmt: skip


def look_up(packed: Packed, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of the weight, [*ids.shape, inputs]: the numbers used in products, rounded to float32 or bfloat16. `ids`:
    int64 or int32 indices of outputs. Raises ValueError if an output does not exist, or the format is not supported."""
    ids = ids.long().contiguous()
    if dtype not in _FORMATS or ids.device.type != "cpu":
        raise ValueError(f"rows must be float32 or bfloat16 on a CPU, got {dtype} on {ids.device}")
    if ids.numel():
        least, most = (int(end) for end in ids.aminmax())
        if not 0 <= least <= most < packed.outputs:
            raise ValueError(f"rows from 0 to {packed.outputs - 1} can be looked up, got {least} to {most}")
    out = torch.empty(*ids.shape, packed.inputs, dtype=dtype)
    first = 0
    for part in packed.parts:
        own = (ids >= first) & (ids < first + part.outputs)
        out[own] = look_up(part, ids[own] - first, dtype)
        first += part.outputs
    if not packed.parts:
        kernel = _LOOK_UPS[packed.kind.removeprefix("amx_")]
        data, to = packed.data.data_ptr(), out.data_ptr()
        kernel.call(data, ids.data_ptr(), to, _FORMATS[dtype], ids.numel(), packed.inputs)
    return out


def _goes_by_tiles(bits: Literal["int8", "int4"], wanted: bool | None) -> bool:
    if wanted is False or not has_amx():
        return False
    library = current()
    assert library is not None
    return wanted or _tiles_are_faster(library, bits)


@functools.cache
def _tiles_are_faster(library: Library, bits: Literal["int8", "int4"]) -> bool:
    """Compare products with the fewest rows that use tiles, for some milliseconds. The products use several matrices in
    turn, more than a core's caches hold, as the layers of a model do."""
    weight, x = torch.ones(_TRIED_SIZE, _TRIED_SIZE), torch.ones(_TRIED_ROWS, _TRIED_SIZE)
    made, pack = (quantise_int8(weight, "rotated"), pack_int8) if bits == "int8" else (quantise_int4(weight), pack_int4)
    ways = [[pack(made, amx=amx) for _ in range(_TRIED_MATRICES)] for amx in (True, False)]
    best = [float("inf"), float("inf")]
    for _ in range(_TRIES):
        for way, matrices in enumerate(ways):
            begun = time.perf_counter()
            for packed in matrices:
                matmul(packed, x)
            best[way] = min(best[way], time.perf_counter() - begun)
    tiles, vectors = (seconds * 1e6 for seconds in best)
    message = "%s: %d rows take %.0f us with matrix tiles and %.0f us with vectors; the faster way serves large batches"
    logger.debug(message, bits, _TRIED_ROWS, tiles, vectors)
    return tiles < vectors


def _laid_out(kind: Kind, kernel: Kernel, made: Quantised, bias: Tensor | None, into: Tensor | None) -> Packed:
    packed = _room(kind, made.values.shape[0], made.inputs, bias, into)
    kernel.call(made.values.data_ptr(), made.scales.data_ptr(), packed.data.data_ptr(), packed.outputs, packed.inputs)
    return packed


def matmul(packed: Packed, x: Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., inputs] @ weight.T + bias, [..., outputs]. Raises ValueError if shapes or formats do not match.

    Args:
        x: float32 or bfloat16; rows may have gaps between them. With bfloat16 weights, float32 is rounded to bfloat16
            first.
        out: memory for the result, of two dimensions if its rows have gaps; None for new memory.
        dtype: the result's format if `out` is None; None is x's.
    """
    if x.shape[-1:] != (packed.inputs,) or x.dtype not in _FORMATS or x.device.type != "cpu":
        raise ValueError(
            f"inputs must be rows of {packed.inputs} float32 or bfloat16 numbers on a CPU, "
            f"got {list(x.shape)} of {x.dtype} on {x.device}"
        )
    if x.dim() != 2 or (x.stride(1) != 1 and packed.inputs != 1):
        x = x.contiguous()
    shape = (*x.shape[:-1], packed.outputs)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype if dtype is None else dtype)
    if out.shape != shape or out.dtype not in _FORMATS or out.device.type != "cpu" or not _has_rows(out):
        raise ValueError(
            f"a result of {list(shape)} in float32 or bfloat16 cannot go to {list(out.shape)} of {out.dtype}, "
            f"strides {list(out.stride())}"
        )
    rows = x.numel() // packed.inputs if packed.inputs else out.numel() // max(packed.outputs, 1)
    tiles = -(-rows // packed.tile_rows) + _THREADS
    _PRODUCTS[packed.kind].call(
        x.data_ptr(),
        out.data_ptr(),
        packed.data.data_ptr(),
        None if packed.bias is None else packed.bias.data_ptr(),
        _workspace.address(tiles * packed.tile_bytes),
        tiles,
        _FORMATS[x.dtype],
        _FORMATS[out.dtype],
        x.stride(0) if x.dim() == 2 else packed.inputs,
        out.stride(0) if out.dim() == 2 else packed.outputs,
        rows,
        packed.outputs,
        packed.inputs,
    )
    return out


def unpack(packed: Packed) -> Tensor:
    """The weight as the kernels multiply it, float32 [outputs, inputs]; for tests."""
    return matmul(packed, torch.eye(packed.inputs), dtype=torch.float32).T.contiguous()


class _Workspace(threading.local):
    """Memory that the products of a thread use one after another."""

    _memory: Tensor | None = None
    _bytes = 0
    _address = 0

    def address(self, size: int) -> int:
        """The address of at least `size` bytes, aligned; earlier addresses are no longer valid."""
        if size > self._bytes or self._memory is None:
            self._memory = torch.empty(size + _ALIGNED, dtype=torch.uint8)
            self._bytes = size
            self._address = -(-self._memory.data_ptr() // _ALIGNED) * _ALIGNED
        return self._address


_workspace = _Workspace()


def scratch(size: int) -> int:
    """The address of working memory for this thread's products, which use it one after another."""
    return _workspace.address(size)


def _room(kind: Kind, outputs: int, inputs: int, bias: Tensor | None, into: Tensor | None = None) -> Packed:
    size, tile_rows, tile_bytes, panel = _layout(kind, outputs, inputs)
    data = _weights.take(size) if into is None else into[:size]
    return Packed(kind, data, _bias_of(bias, outputs), outputs, inputs, tile_rows, tile_bytes, panel)


def _layout(kind: Kind, outputs: int, inputs: int) -> tuple[int, int, int, int]:
    """The bytes of a packed weight, and `Packed`'s tile_rows, tile_bytes and panel."""
    sizes = (ctypes.c_int64 * 4)()
    _LAYOUTS[kind].call(outputs, inputs, ctypes.addressof(sizes))
    size, tile_rows, tile_bytes, panel = sizes
    return size, tile_rows, tile_bytes, panel


def _bias_of(bias: Tensor | None, outputs: int) -> Tensor | None:
    if bias is None:
        return None
    if bias.shape != (outputs,) or bias.device.type != "cpu":
        raise ValueError(
            f"the bias must have {outputs} numbers and be on a CPU, got {list(bias.shape)} on {bias.device}"
        )
    return bias.detach().float().contiguous()


def _groups(inputs: int) -> int:
    return -(-inputs // GROUP)


def _has_rows(out: Tensor) -> bool:
    return out.is_contiguous() or (out.dim() == 2 and (out.stride(1) == 1 or out.shape[1] == 1))


def _matrix(weight: Tensor) -> Tensor:
    weight = weight.detach()
    if weight.dim() != 2 or weight.dtype not in _FORMATS or weight.device.type != "cpu":
        raise ValueError(
            f"a weight must be a matrix of float32 or bfloat16 on a CPU, got {list(weight.shape)} of {weight.dtype} on "
            f"{weight.device}"
        )
    return weight if weight.stride(1) == 1 else weight.contiguous()


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"expected {list(shape)} of {dtype}, contiguous, got {list(tensor.shape)} of {tensor.dtype}")
