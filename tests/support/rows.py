"""Rows of numbers for kernels that work on each row alone, and pages that such rows are stored in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.attention.base import Paged
from engine.backends.attention.formats import LARGEST, SCALE
from engine.model.positions import Rotary

CPU = torch.device("cpu")


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normally distributed numbers."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def apart(x: Tensor) -> Tensor:
    """The same rows, with NaN between them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@st.composite
def rotary_parts(draw: st.DrawFn, halves: Sequence[int]) -> tuple[Rotary | None, int]:
    """A rotary part that turns twice one of `halves` features, or none; and how many features a head has."""
    dim = 2 * draw(st.sampled_from(halves))
    rest = draw(st.sampled_from([0, 0, 1, 7, 16]))
    part = Rotary(dim=dim, theta=10000.0, interleaved=draw(st.booleans()), in_float32=draw(st.booleans()))
    return draw(st.sampled_from([part, part, part, None])), dim + rest


def poisoned_pages(
    shape: tuple[int, int, int, int], dtype: torch.dtype, centred: bool, device: torch.device = CPU
) -> Paged:
    """Pages [blocks, block, kv_heads, head_dim] of poison."""
    blocks, block, kv_heads, head_dim = shape

    def pages() -> Tensor:
        memory = torch.full((blocks * block * kv_heads * head_dim * dtype.itemsize,), 0xFF, dtype=torch.uint8)
        return memory.to(device).view(dtype).view(shape)

    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    if dtype not in LARGEST:
        return Paged(pages(), pages(), tables)
    scales = [torch.full(shape[:3], -1.0, dtype=SCALE, device=device) for _ in range(2)]
    centre = numbers(9, kv_heads, head_dim).to(device) if centred else None
    return Paged(pages(), pages(), tables, *scales, centre)


def with_extremes(projected: Tensor) -> None:
    """Very large, infinite, missing and very small numbers in some rows of heads [T, heads, head_dim]."""
    tokens = len(projected)
    projected[0] *= 1e30
    projected[tokens // 2, :, 0] = torch.inf
    projected[-1, :, -1] = torch.nan
    projected[tokens // 3] *= 1e-6
