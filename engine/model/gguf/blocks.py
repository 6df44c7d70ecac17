"""The number formats of a GGUF file: blocks of numbers with their scales.

ggml's reference (ggml-quants.c) defines the meaning of each bit. Products and sums are computed in float32 in the
reference's order, so that the numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from engine.backends import native
from engine.backends.native.gemm import FLOAT8, FLOAT8_GROUP, GROUP, BlockKind, Blocks, Quantised
from engine.backends.native.gguf import count_infinite, take_q4_1, take_q4_k, take_q8_0, widen_q6_k
from engine.errors import UnsupportedModelError
from engine.model.stored.bits import check_halves

Grouped = tuple[Tensor, Tensor, Tensor | None]
"""Integers (of e4m3, numbers) [..., groups, numbers], float32 scales [..., groups], and minima or None: a number is an
integer times its group's scale, plus the minimum."""

Decode = Callable[[Tensor], Grouped]
"""Makes the groups from blocks, whose bytes are [blocks, size]."""

Lines = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Converts bytes [blocks, size] to integers in the order of Octavo's 4-bit format, int32 [blocks, numbers / 32, 4],
with the scales and minima [blocks, numbers / 32] that turn them into numbers."""

_CHUNK = 1 << 20
"""Numbers decoded at once: intermediate results take some 20 bytes each."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format."""

    name: str  # ggml's name
    # numbers, size: the numbers and the bytes of a block
    numbers: int
    size: int
    plain: torch.dtype | None = None  # the equivalent torch format, if there is one
    decode: Decode | None = None  # None if the format is plain or not supported
    halves: tuple[int, ...] = ()  # positions of float16 numbers in a block
    # if numbers are 4-bit integers with a scale and a minimum for each 32, makes these from bytes [blocks, size]
    lines: Lines | None = None

    @property
    def kind(self) -> Literal["int8", "int4"] | None:
        """Our own format that represents the numbers exactly, with more bits if necessary; None if there is none."""
        return "int8" if self.name == "Q8_0" else None if self.lines is None else "int4"

    @property
    def own_kind(self) -> BlockKind | Literal["int8", "int4"] | None:
        """The kind of block that is multiplied with no more bits than the file's; None if there is none."""
        name = self.name.lower()
        return cast(BlockKind, name) if name in get_args(BlockKind) else self.kind


def dequantise(data: Tensor, format: BlockFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers [n] of bytes [n / numbers * size], rounded to a format, or unchanged if they are plain. Raises
    UnsupportedModelError if the format is not supported."""
    if format.plain is not None:
        return data.view(format.plain)
    if format.decode is None:
        raise UnsupportedModelError(
            f"the format {format.name} is not supported. Supported: {', '.join(readable_formats())}."
        )
    blocks = data.view(-1, format.size)
    out = torch.empty(len(blocks), format.numbers, dtype=dtype)
    if format.name == "Q6_K" and native.available() and dtype == torch.float32:
        widen_q6_k(blocks.contiguous(), out)
        return out.view(-1)
    step = _CHUNK // format.numbers
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        if format.name == "Q6_K" and native.available():
            numbers = torch.empty(len(part), format.numbers)
            widen_q6_k(part.contiguous(), numbers)
        else:
            numbers = numbers_of(format.decode(part)).flatten(1)
        out[start : start + step] = numbers
    return out.view(-1)


def numbers_of(grouped: Grouped) -> Tensor:
    """Float32 numbers, in the shape of the integers."""
    integers, scales, minima = grouped
    numbers = integers.float().mul_(scales[..., None])
    return numbers if minima is None else numbers.add_(minima[..., None])


def as_blocks(data: Tensor, format: BlockFormat, rows: int) -> Blocks:
    """A matrix of a format whose `own_kind` is a `BlockKind`, unchanged. `data`: bytes of its rows, which are not
    copied. Raises ModelLoadError if a scale is not a finite number."""
    blocks = data.view(-1, format.size)
    _check_blocks(blocks, format)
    kind = cast(BlockKind, format.own_kind)
    return Blocks(kind, data.view(rows, -1), len(blocks) // rows * format.numbers)


def groups_of(weight: Blocks) -> Grouped:
    """The groups of each row, integers [outputs, groups, numbers]."""
    format = format_of(weight.kind)
    assert format.decode is not None
    rows = len(weight.values)
    integers, scales, minima = format.decode(weight.values.view(-1, format.size))
    size = integers.shape[-1]
    return integers.view(rows, -1, size), scales.reshape(rows, -1), None if minima is None else minima.reshape(rows, -1)


def held_size(kind: BlockKind, numbers: int) -> int:
    """Bytes of this many numbers in the kernels' form: in K formats, 6-bit scales and minima take a byte each."""
    format = format_of(kind)
    more = {"Q3_K": 4, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}.get(format.name, 0)
    return numbers // format.numbers * (format.size + more)


def as_quantised(data: Tensor, format: BlockFormat, rows: int) -> Quantised:
    """A matrix of a format with a `kind`, in that kind; scales and minima of Q4_K are rounded to float16, which those
    of the other formats already are. `data`: bytes of its rows."""
    blocks = data.view(-1, format.size)
    if format.kind == "int8":
        if native.available():
            values = torch.empty(len(blocks), format.numbers, dtype=torch.int8)
            scales = torch.empty(len(blocks), dtype=torch.float16)
            take_q8_0(blocks, values, scales)
        else:
            values, scales = blocks[:, 2:].contiguous().view(torch.int8), blocks[:, :2].contiguous().view(torch.float16)
        return Quantised(values.view(rows, -1), scales.view(rows, -1), len(blocks) // rows * format.numbers)
    assert format.lines is not None
    groups = format.numbers // GROUP
    values = torch.empty(len(blocks), groups, 4, dtype=torch.int32)
    lines = torch.empty(len(blocks), groups, 2, dtype=torch.float16)
    if format.name in ("Q4_K", "Q4_1") and native.available():
        take = take_q4_k if format.name == "Q4_K" else take_q4_1
        take(blocks.contiguous(), values, lines)
    else:
        step = _CHUNK // format.numbers
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            values[part], lines[part, :, 0], lines[part, :, 1] = format.lines(blocks[part])
    columns = len(blocks) // rows * format.numbers
    check_halves(lines)
    return Quantised(values.view(torch.uint8).view(rows, -1, GROUP // 2), lines.view(rows, -1, 2), columns)


def _check_blocks(blocks: Tensor, format: BlockFormat) -> None:
    """`check_halves` of those in blocks [count, size]."""
    for place in format.halves:
        if not native.available() or count_infinite(blocks, place):
            check_halves(blocks[:, place : place + 2].contiguous().view(torch.float16))


def _half(octets: Tensor) -> Tensor:
    """float16 numbers [blocks, 1] of bytes [blocks, 2]."""
    return octets.contiguous().view(torch.float16).float()


def _fields(octets: Tensor, width: int, bits: int) -> Tensor:
    """Integers [blocks, groups, 8 / bits, width] with this many bits: a group is `width` bytes, whose lowest bits are
    the first `width` integers."""
    grouped = octets.reshape(len(octets), -1, width)
    shifts = range(0, 8, bits)
    return torch.stack([grouped >> shift & (1 << bits) - 1 for shift in shifts], dim=2)


def _halves_as_ours(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [blocks, runs, width] whose lower halves are the integers of one group (or its beginning) and whose upper
    halves are those of the next (or its end): both as our own 4 bits, int32 [blocks, runs, width / 8]."""
    words = octets.clone(memory_format=torch.contiguous_format).view(torch.int32)  # a copy is aligned
    first, second = words[..., 0::2], words[..., 1::2]
    lower, upper = 0x0F0F0F0F, -0x0F0F0F10  # of each byte
    return first & lower | (second & lower) << 4, first >> 4 & lower | second & upper


def _q4_0_lines(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _half(blocks[:, :2])
    return torch.cat(_halves_as_ours(blocks[:, None, 2:]), -1), scales, -8 * scales


def _q4_0(blocks: Tensor) -> Grouped:
    q = _fields(blocks[:, 2:], 16, 4).view(-1, 1, 32)
    return q.char() - 8, _half(blocks[:, :2]), None


def _q4_1_lines(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.cat(_halves_as_ours(blocks[:, None, 4:]), -1), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q4_1(blocks: Tensor) -> Grouped:
    return _fields(blocks[:, 4:], 16, 4).view(-1, 1, 32), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _int4_128(blocks: Tensor) -> Grouped:
    """Activations have scales for 32 inputs, so scales and minima are repeated four times."""
    q = _fields(blocks[:, :64], 4, 4).view(-1, 4, 32)
    return q, _half(blocks[:, 64:66]).expand(-1, 4), _half(blocks[:, 66:]).expand(-1, 4)


def _fifth_bits(octets: Tensor) -> Tensor:
    """16, or 0, for each bit [blocks, 1, 32] of bytes [blocks, 4]."""
    return (octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1, 1, 32) << 4


def _q5_0(blocks: Tensor) -> Grouped:
    q = _fields(blocks[:, 6:], 16, 4).view(-1, 1, 32) | _fifth_bits(blocks[:, 2:6])
    return q.char() - 16, _half(blocks[:, :2]), None


def _q5_1(blocks: Tensor) -> Grouped:
    q = _fields(blocks[:, 8:], 16, 4).view(-1, 1, 32) | _fifth_bits(blocks[:, 4:8])
    return q, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> Grouped:
    return blocks[:, None, 2:].view(torch.int8), _half(blocks[:, :2]), None


def _q2_k(blocks: Tensor) -> Grouped:
    """16 groups of 16, with a scale and a minimum of 4 bits each."""
    scales, scale, minimum = blocks[:, :16], _half(blocks[:, 80:82]), _half(blocks[:, 82:])
    q = _fields(blocks[:, 16:80], 32, 2).view(-1, 16, 16)
    return q, scale * (scales & 15).float(), -(minimum * (scales >> 4).float())


def _q3_k(blocks: Tensor) -> Grouped:
    """16 groups of 16, with a 6-bit scale each. If the third bit of a number is set, 4 is not subtracted."""
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    sixths = _fields(packed[:, :8], 8, 4).view(-1, 16) | _fields(packed[:, 8:], 4, 2).view(-1, 16) << 4
    scales = _half(blocks[:, 108:]) * (sixths.float() - 32)
    q = _fields(low, 32, 2).view(-1, 16, 16) | _fields(high, 32, 1).view(-1, 16, 16) << 2
    return q.char() - 4, scales, None


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight minima [blocks, 8], of 6 bits each times a float16, from the first 16 bytes of a block."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    return _half(blocks[:, :2]) * scales.float(), -(_half(blocks[:, 2:4]) * minima.float())


def _q4_k_lines(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.stack(_halves_as_ours(blocks[:, 16:].view(-1, 4, 32)), 2).flatten(1, 2), *_scales_and_minima(blocks)


def _q4_k(blocks: Tensor) -> Grouped:
    return _fields(blocks[:, 16:], 32, 4).view(-1, 8, 32), *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> Grouped:
    high = _fields(blocks[:, 16:48], 32, 1).view(-1, 8, 32) << 4
    return _fields(blocks[:, 48:], 32, 4).view(-1, 8, 32) | high, *_scales_and_minima(blocks)


def _q6_k(blocks: Tensor) -> Grouped:
    low, high = _fields(blocks[:, :128], 64, 4).view(-1, 16, 16), _fields(blocks[:, 128:192], 32, 2).view(-1, 16, 16)
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8).float()
    return (low | high << 4).char() - 32, scales, None


def _e4m3(blocks: Tensor) -> Grouped:
    numbers = blocks[:, :FLOAT8_GROUP].contiguous().view(FLOAT8).float().view(-1, 1, FLOAT8_GROUP)
    return numbers, blocks[:, FLOAT8_GROUP:].contiguous().view(torch.float32), None


_UNEVEN = torch.tensor((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=torch.int8)
"""The values of IQ4's integers."""


def _iq4_nl(blocks: Tensor) -> Grouped:
    return _UNEVEN[_fields(blocks[:, 2:], 16, 4).view(-1, 1, 32).int()], _half(blocks[:, :2]), None


def _iq4_xs(blocks: Tensor) -> Grouped:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).view(-1, 8)
    high = (blocks[:, 2:4, None] >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8) & 3).view(-1, 8)
    scales = _half(blocks[:, :2]) * ((low | high << 4).float() - 32)
    return _UNEVEN[_fields(blocks[:, 8:], 16, 4).view(-1, 8, 32).int()], scales, None


_FP4 = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
"""The values of MXFP4's integers, doubled."""


def _mxfp4(blocks: Tensor) -> Grouped:
    powers = torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 128)
    return _FP4[_fields(blocks[:, 1:], 16, 4).view(-1, 1, 32).int()], powers, None


_FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, plain=torch.float32),
    1: BlockFormat("F16", 1, 2, plain=torch.float16),
    2: BlockFormat("Q4_0", 32, 18, decode=_q4_0, halves=(0,), lines=_q4_0_lines),
    3: BlockFormat("Q4_1", 32, 20, decode=_q4_1, halves=(0, 2), lines=_q4_1_lines),
    6: BlockFormat("Q5_0", 32, 22, decode=_q5_0, halves=(0,)),
    7: BlockFormat("Q5_1", 32, 24, decode=_q5_1, halves=(0, 2)),
    8: BlockFormat("Q8_0", 32, 34, decode=_q8_0, halves=(0,)),
    9: BlockFormat("Q8_1", 32, 40),
    10: BlockFormat("Q2_K", 256, 84, decode=_q2_k, halves=(80, 82)),
    11: BlockFormat("Q3_K", 256, 110, decode=_q3_k, halves=(108,)),
    12: BlockFormat("Q4_K", 256, 144, decode=_q4_k, halves=(0, 2), lines=_q4_k_lines),
    13: BlockFormat("Q5_K", 256, 176, decode=_q5_k, halves=(0, 2)),
    14: BlockFormat("Q6_K", 256, 210, decode=_q6_k, halves=(208,)),
    15: BlockFormat("Q8_K", 256, 292),
    16: BlockFormat("IQ2_XXS", 256, 66),
    17: BlockFormat("IQ2_XS", 256, 74),
    18: BlockFormat("IQ3_XXS", 256, 98),
    19: BlockFormat("IQ1_S", 256, 50),
    20: BlockFormat("IQ4_NL", 32, 18, decode=_iq4_nl, halves=(0,)),
    21: BlockFormat("IQ3_S", 256, 110),
    22: BlockFormat("IQ2_S", 256, 82),
    23: BlockFormat("IQ4_XS", 256, 136, decode=_iq4_xs, halves=(0,)),
    24: BlockFormat("I8", 1, 1),
    25: BlockFormat("I16", 1, 2),
    26: BlockFormat("I32", 1, 4),
    27: BlockFormat("I64", 1, 8),
    28: BlockFormat("F64", 1, 8, plain=torch.float64),
    29: BlockFormat("IQ1_M", 256, 56),
    30: BlockFormat("BF16", 1, 2, plain=torch.bfloat16),
    34: BlockFormat("TQ1_0", 256, 54),
    35: BlockFormat("TQ2_0", 256, 66),
    39: BlockFormat("MXFP4", 32, 17, decode=_mxfp4),
    40: BlockFormat("NVFP4", 64, 36),
    41: BlockFormat("Q1_0", 128, 18),
}
"""By ggml's number."""


_OWN = (
    BlockFormat("INT4_128", 128, 68, decode=_int4_128, halves=(64, 66)),
    BlockFormat("E4M3", FLOAT8_GROUP, FLOAT8_GROUP + 4, decode=_e4m3),
)
"""Not formats of a file."""


def format_of(kind: BlockKind) -> BlockFormat:
    return next(format for format in (*_FORMATS.values(), *_OWN) if format.own_kind == kind)


def find_format(number: int) -> BlockFormat | None:
    """The format with this name in ggml; None if there is none."""
    return _FORMATS.get(number)


def readable_formats() -> tuple[str, ...]:
    """The names of the supported formats."""
    return tuple(format.name for format in _FORMATS.values() if format.plain is not None or format.decode is not None)
