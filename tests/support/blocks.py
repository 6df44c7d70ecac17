"""Matrices of random blocks of GGUF's formats."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.native.gemm import FLOAT8_GROUP, BlockKind, Blocks
from engine.model.gguf import blocks


def random_blocks(kind: BlockKind, outputs: int, inputs: int, seed: int = 0) -> Blocks:
    """Any bytes, but that scales are about 0.01, and exponents those of such numbers, and that none is NaN."""
    format = blocks.format_of(kind)
    generator = torch.Generator().manual_seed(seed)
    count = outputs * -(-inputs // format.numbers)
    octets = torch.randint(0, 256, (count, format.size), dtype=torch.uint8, generator=generator)
    for place in format.halves:
        halves = torch.randn(len(octets), 1, generator=generator).mul(0.01).half()
        octets[:, place : place + 2] = halves.view(torch.uint8)
    if kind == "mxfp4":
        octets[:, 0] = octets[:, 0] % 8 + 116
    if kind == "e4m3":
        numbers = octets[:, :FLOAT8_GROUP]
        numbers[numbers & 0x7F == 0x7F] -= 1
        if inputs % FLOAT8_GROUP:
            numbers.view(outputs, -1, FLOAT8_GROUP)[:, -1, inputs % FLOAT8_GROUP :] = 0
        octets[:, FLOAT8_GROUP:] = torch.randn(count, 1, generator=generator).mul(0.01).view(torch.uint8)
    return Blocks(kind, octets.view(outputs, -1), inputs)


def numbers(weight: Blocks) -> Tensor:
    """What torch makes of them, float32 [outputs, inputs]."""
    return blocks.numbers_of(blocks.groups_of(weight)).flatten(1)[:, : weight.inputs]
