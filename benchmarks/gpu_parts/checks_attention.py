"""Attention over pages against float64: rows that decode, prompts, both together, and what models add to scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, DistanceBias, Paged, Window
from engine.backends.attention.formats import LARGEST, format_named, movable
from engine.backends.triton.attention import TritonAttention
from engine.backends.triton.attention_flash import FlashPrompts, HeadShape
from gpu_parts.check import Check, Outcome, Setting, SkippedError

Rows = tuple[tuple[int, ...], tuple[int, ...]]  # queries and keys of each row


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of rows.

    Attributes:
        queries, contexts: of each row; a row's queries are its last tokens.
        pages: their format; None: that of the queries.
        flash: on a GPU torch's flash attention computes the rows that are whole.
    """

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    pages: str | None = None
    causal: bool = True
    window: Window | None = None
    softcap: float | None = None
    distances: int = 0
    content_bias: bool = False
    query_bias: bool = False
    flash: bool = False


def _paged(case: Case, setting: Setting) -> tuple[Paged, Tensor, Tensor]:
    """Pages of all rows in no order, and the K and V that they hold, in float64 [R, longest, kv_heads, head_dim]. What
    no row has written is NaN."""
    dtype = setting.dtype if case.pages is None else format_named(case.pages)
    rows, longest = len(case.contexts), max(case.contexts)
    width = math.ceil(longest / case.page)
    order = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)) + 1
    tables = order.view(rows, width).to(setting.device, torch.int32)
    shape = (rows * width + 1, case.page, case.kv_heads, case.head_dim)
    keys, values = (torch.zeros(shape, device=setting.device).to(dtype) for _ in range(2))
    if dtype not in LARGEST:
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
    scales = [torch.full(shape[:-1], torch.nan, dtype=torch.bfloat16, device=setting.device) for _ in range(2)]
    paged = Paged(keys, values, tables, *(scales if dtype in LARGEST else (None, None)))
    size = (rows, longest, case.kv_heads, case.head_dim)
    k, v = setting.normal(*size, seed=0), setting.normal(*size, seed=1)
    places = torch.arange(longest, device=setting.device)
    slots = tables.long()[:, places // case.page] * case.page + places % case.page
    there = places[None] < torch.tensor(case.contexts, device=setting.device)[:, None]
    paged.write(slots[there], k[there], v[there])
    read = []
    for pages, scale in ((keys, paged.key_scales), (values, paged.value_scales)):
        flat = movable(pages).view(-1, case.kv_heads, case.head_dim)[slots].view(dtype).double()
        if scale is not None:
            flat = flat * scale.view(-1, case.kv_heads)[slots].double()[..., None]
        read.append(flat)
    return paged, read[0], read[1]


def _expected(case: Case, q: Tensor, k: Tensor, v: Tensor, bias: DistanceBias | None, scale: float) -> Tensor:
    """[T, heads, head_dim], row by row and head by head as the definition has it."""
    answers, first, group = [], 0, case.heads // case.kv_heads
    for row, (queries, context) in enumerate(zip(case.queries, case.contexts, strict=True)):
        keys = k[row, :context].repeat_interleave(group, 1)
        values = v[row, :context].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first : first + queries].double(), keys) * scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        at = torch.arange(queries, device=q.device)[:, None] + (context - queries if case.causal else 0)
        distance = torch.arange(context, device=q.device)[None] - at
        if bias is not None:
            columns = (distance + bias.zero).clamp(0, bias.table.shape[1] - 1)
            scores = scores + bias.table.double()[:, columns]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if case.causal:
            hidden |= distance > 0
        if case.window is not None:
            hidden |= (distance < -case.window.left) | (distance > case.window.right)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        answers.append(torch.einsum("hqk,khd->qhd", weights, values))
        first += queries
    return torch.cat(answers)


def _attends(make: Callable[[Setting], list[Case]]) -> Callable[[Setting], Iterator[Outcome]]:
    def checks(setting: Setting) -> Iterator[Outcome]:
        for case in make(setting):
            paged, k, v = _paged(case, setting)
            q = setting.normal(sum(case.queries), case.heads, case.head_dim, seed=2)
            bias = None
            if case.distances:
                table = setting.normal(case.heads, 2 * case.distances - 1, seed=3).float()
                bias = DistanceBias(table, case.distances - 1)
            metadata = AttentionMetadata.build(list(case.queries), list(case.contexts), setting.device)
            scale = case.head_dim**-0.5
            if reasons := TritonAttention.unsupported(case, setting.device, paged.keys.dtype):
                raise SkippedError("; ".join(reasons))
            theirs = case.flash and setting.device.type == "cuda"  # elsewhere torch has none
            backend = TritonAttention(FlashPrompts((HeadShape.of(q, paged),), fewest=2) if theirs else None)
            got = backend.attend(
                q, paged, metadata, causal=case.causal, window=case.window, scale=scale, bias=bias,
                softcap=case.softcap,
            )  # fmt: skip
            yield got, _expected(case, q, k, v, bias, scale)

    return checks


def _decoding(setting: Setting) -> Rows:
    """Rows of one query each, of all lengths."""
    count, longest = (64, 1500) if setting.full else (3, 40)
    contexts = tuple(1 + (longest - 1) * number // (count - 1) for number in range(count))
    return (1,) * count, contexts


def _prompts(setting: Setting) -> Rows:
    """Prompts whole and in part, and rows that decode beside them."""
    if not setting.full:
        return (19, 1, 7), (19, 23, 30)
    return (1000, 1, 129, 1, 513), (1000, 700, 1500, 65, 513)


def _cases(name: str, full: dict[str, Any], tiny: dict[str, Any], *, prompts: bool = True) -> list[Check]:
    """Checks of rows that decode, and of prompts.

    Args:
        full, tiny: what of the case differs from the usual, on a GPU and elsewhere.
    """
    small = {"heads": 4, "kv_heads": 2, "head_dim": 16}

    def of(rows: Callable[[Setting], Rows]) -> Callable[[Setting], list[Case]]:
        def make(setting: Setting) -> list[Case]:
            queries, contexts = rows(setting)
            return [Case(queries=queries, contexts=contexts, **(full if setting.full else small | tiny))]

        return make

    made = [Check(f"attention, decode: {name}", _attends(of(_decoding)))]
    return [*made, Check(f"attention, prompts: {name}", _attends(of(_prompts)))] if prompts else made


CHECKS = (
    *_cases("4 heads share keys", {}, {}),
    *_cases("heads of their own, 64 features", {"heads": 16, "kv_heads": 16, "head_dim": 64}, {"kv_heads": 4}),
    *_cases("80 features, pages of 32", {"heads": 16, "head_dim": 80, "page": 32}, {"head_dim": 24, "page": 32}),
    *_cases("256 features, 1 head of keys", {"heads": 8, "kv_heads": 1, "head_dim": 256}, {"kv_heads": 1}),
    *_cases("window", {"window": Window(100)}, {"window": Window(5)}),
    *_cases("softcap", {"softcap": 5.0}, {"softcap": 2.0}),
    *_cases("bias by distance", {"distances": 1500}, {"distances": 9}),
    *_cases("all see all", {"causal": False}, {"causal": False}),
    *_cases("int8 pages", {"pages": "int8"}, {"pages": "int8"}),
    *_cases("fp8 pages", {"pages": "fp8"}, {"pages": "fp8"}),
    *_cases("whole ones by torch's flash attention", {"flash": True}, {"flash": True})[1:],
)
