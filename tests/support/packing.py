"""Matrices in the layouts of quantised checkpoints, as their papers and tools describe them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Stored:
    """What a matrix is stored as, by the ends of the tensors' names, and what it holds [outputs, inputs]."""

    parts: dict[str, Tensor]
    holds: Tensor


Packing = Callable[[int, int, int], Stored]
"""Makes one of outputs, inputs and a seed."""


def words_of(numbers: list[int], bits: int) -> list[int]:
    """32-bit words (signed, as torch has them) of integers, the first in the lowest bits."""
    whole = sum(number << bits * place for place, number in enumerate(numbers))
    count = -(-len(numbers) * bits // 32)
    words = [whole >> 32 * place & 0xFFFFFFFF for place in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def packed(matrix: Tensor, bits: int, dim: int) -> Tensor:
    """Integers [rows, columns] in words along a dimension."""
    if dim == 0:
        return packed(matrix.t(), bits, 1).t().contiguous()
    return torch.tensor([words_of(row, bits) for row in matrix.tolist()], dtype=torch.int32)


def _drawn(outputs: int, inputs: int, seed: int, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [outputs, inputs], scales and zeros [outputs, groups]."""
    generator = torch.Generator().manual_seed(seed)
    most = 1 << bits
    values = torch.randint(0, most, (outputs, inputs), generator=generator)
    zeros = torch.randint(0, most, (outputs, inputs // group), generator=generator)
    scales = torch.rand(outputs, inputs // group, generator=generator) * 0.6 / most + 0.01
    return values, scales.half(), zeros


def awq(group: int = 8, *, has_zeros: bool = True) -> Packing:
    def pack(outputs: int, inputs: int, seed: int) -> Stored:
        values, scales, zeros = _drawn(outputs, inputs, seed, 4, group)
        if not has_zeros:
            zeros = torch.full_like(zeros, 8)
        groups = torch.arange(inputs) // group
        holds = (values - zeros[:, groups]).float() * scales.float()[:, groups]
        order = [8 * eight + place for eight in range(outputs // 8) for place in AWQ_ORDER]
        parts = {".qweight": packed(values.t()[:, order], 4, 1), ".scales": scales.t().contiguous()}
        if has_zeros:
            parts[".qzeros"] = packed(zeros.t()[:, order], 4, 1)
        return Stored(parts, holds)

    return pack


def gptq(
    bits: int, group: int = 8, *, first_version: bool = True, ordered: bool = True, names_groups: bool = True
) -> Packing:
    def pack(outputs: int, inputs: int, seed: int) -> Stored:
        values, scales, zeros = _drawn(outputs, inputs, seed, bits, group)
        groups = torch.arange(inputs) // group
        if not ordered:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        holds = (values - zeros[:, groups]).float() * scales.float()[:, groups]
        if first_version and bits == 3:
            packed_zeros = packed((zeros.t() - 1) % 8, bits, 1)
        else:
            packed_zeros = packed(zeros.t(), bits, 1)
            if first_version:  # a zero of 0 borrows from the next in its word
                packed_zeros -= sum(1 << place for place in range(0, 32, bits))
        parts = {
            ".qweight": packed(values.t(), bits, 0),
            ".qzeros": packed_zeros,
            ".scales": scales.t().contiguous(),
        }
        if names_groups:
            parts[".g_idx"] = groups.int()
        return Stored(parts, holds)

    return pack


def fp8(block: tuple[int, int] | None, ending: str = ".weight_scale_inv") -> Packing:
    def pack(outputs: int, inputs: int, seed: int) -> Stored:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        tall, wide = block or (outputs, inputs)
        scales = torch.rand(-(-outputs // tall), -(-inputs // wide), generator=generator) * 0.1 + 0.05
        rows, columns = torch.arange(outputs) // tall, torch.arange(inputs) // wide
        holds = values.float() * scales[rows][:, columns]
        stored = scales if block is not None else scales.reshape(())
        return Stored({".weight": values, ending: stored}, holds)

    return pack


def nf4(block: int = 64) -> Packing:
    """Codes of bitsandbytes, the largest numbers of their blocks quantised as well."""

    def pack(outputs: int, inputs: int, seed: int) -> Stored:
        generator = torch.Generator().manual_seed(seed)
        count = outputs * inputs
        table, outer = torch.linspace(-1, 1, 16), torch.linspace(0, 1, 256)
        codes = torch.randint(0, 16, (count,), generator=generator)
        blocks = -(-count // block)
        peaks = torch.randint(0, 256, (blocks,), generator=generator, dtype=torch.uint8)
        nested = 4
        outer_peaks = torch.rand(-(-blocks // nested), generator=generator) * 0.2
        number = torch.arange(count) // block
        holds = table[codes] * (outer[peaks.long()] * outer_peaks[torch.arange(blocks) // nested] + 0.125)[number]
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [outputs, inputs],
                 "nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.125}  # fmt: skip
        parts = {
            ".weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
            ".weight.absmax": peaks,
            ".weight.quant_map": table,
            ".weight.nested_absmax": outer_peaks,
            ".weight.nested_quant_map": outer,
            ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        return Stored(parts, holds.view(outputs, inputs))

    return pack


def bnb_int8(outputs: int, inputs: int, seed: int) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    peaks = torch.rand(outputs, generator=generator) * 0.5
    holds = torch.stack([row.float() * peak * (1 / 127) for row, peak in zip(values, peaks, strict=True)])
    return Stored({".weight": values, ".SCB": peaks, ".weight_format": torch.tensor(0, dtype=torch.uint8)}, holds)
