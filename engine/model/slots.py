"""Computes the slots of a step's new tokens in the pages, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.attention.base import AttentionMetadata, Paged


def find_slots(cache: Paged, metadata: AttentionMetadata, positions: Tensor, tokens: int) -> Tensor:
    """[T] int64 block * block_size + offset of the first T = tokens of the positions, from their rows' block tables.

    Nothing waits for the device, so this can be recorded (`engine.execution.cuda_graphs`).
    """
    positions, size = positions[:tokens], cache.keys.shape[1]
    if gpu.serves(positions.device):
        from engine.backends.triton.pages import slots_of

        return slots_of(cache.block_tables, metadata.query_start, positions, size)
    numbers = torch.arange(tokens, dtype=torch.int32, device=positions.device)
    rows = torch.searchsorted(metadata.query_start[1:], numbers, right=True)
    pages = cache.block_tables[rows, positions.long() // size]
    return pages.long() * size + positions % size
