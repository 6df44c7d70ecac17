"""Matrices of random blocks of GGUF's formats."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.native.gemm import BlockKind, Blocks
from engine.model.gguf import blocks


def random_blocks(kind: BlockKind, outputs: int, inputs: int, seed: int = 0) -> Blocks:
    """Any bytes, but that halves are about 0.01, and exponents those of such numbers."""
    format = blocks.format_of(kind)
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(
        0, 256, (outputs * inputs // format.numbers, format.size), dtype=torch.uint8, generator=generator
    )
    for place in format.halves:
        halves = torch.randn(len(octets), 1, generator=generator).mul(0.01).half()
        octets[:, place : place + 2] = halves.view(torch.uint8)
    if kind == "mxfp4":
        octets[:, 0] = octets[:, 0] % 8 + 116
    return Blocks(kind, octets.view(outputs, -1), inputs)


def numbers(weight: Blocks) -> Tensor:
    """What torch makes of them, float32 [outputs, inputs]."""
    return blocks.numbers_of(blocks.groups_of(weight)).flatten(1)
