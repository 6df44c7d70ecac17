"""The inputs of attention, and the interface of every backend.

All batches are ragged: R rows of T tokens laid end to end, never padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.attention.formats import convert, movable, quantise
from engine.backends.triton import upload


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window: a query at position p sees keys in [p - left, p + right]."""

    left: int
    right: int = 0


@dataclass(frozen=True, slots=True)
class Chunks:
    """A query at position p sees keys from the last multiple of `size` on that is not after p."""

    size: int


Sight = Window | Chunks


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """A bias per head that depends only on key position - query position (ALiBi, T5's buckets).

    Attributes:
        table: [heads, N] bias by distance.
        zero: column of distance 0; distances beyond either end take the end's value.
    """

    table: Tensor
    zero: int


@dataclass(frozen=True, slots=True)
class PositionBias:
    """A bias per head that depends only on the key's own position (ALiBi with rounded products).

    Attributes:
        table: [heads, N] bias by position; positions beyond the last take its value.
    """

    table: Tensor


@dataclass(frozen=True, slots=True)
class ContentBias:
    """Terms of the scores that depend on distance and on what stands there (arXiv:2006.03654, 3.1).

    The score of a query and a key at distance d = key position - query position becomes
    scale * (query . key + query . keys[c] + key . queries[c]), where c = columns[d + zero]. Only for heads that
    share no keys.

    Attributes:
        keys: [heads, N, head_dim] what queries are multiplied with, None for no such term.
        queries: [heads, N, head_dim] what keys are multiplied with, None for no such term.
        columns: [distances] int64 which of the N vectors belongs to a distance.
        zero: entry of distance 0; distances beyond either end take the end's.
    """

    keys: Tensor | None
    queries: Tensor | None
    columns: Tensor
    zero: int


Bias = DistanceBias | PositionBias | ContentBias


@dataclass(frozen=True, slots=True)
class Paged:
    """K and V of one layer in pages.

    Attributes:
        keys, values: [num_blocks, block_size, kv_heads, head_dim], in a format of `engine.backends.attention.formats`,
            which need not be that of the queries. Block 0 belongs to no sequence. Both may be one tensor, whose
            vectors are keys and values at once.
        block_tables: [R, max blocks] int32. Pages that no query of a row sees may be 0: they must not be read.
        key_scales, value_scales: [num_blocks, block_size, kv_heads] of int8 and fp8 pages; None for all others.
        key_centre: [kv_heads, head_dim] float32 that was subtracted from keys before they were quantised, and that
            readers add; None for nothing. It adds the same to all scores of a query, so that a backend may leave
            it out where no softcap follows, and where there are no sinks.
    """

    keys: Tensor
    values: Tensor
    block_tables: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    key_centre: Tensor | None = None

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new tokens, in the pages' format.

        Numbers that are not finite, or that the format cannot hold, are read back as NaN: in int8 and fp8 their
        whole vector is; only pages in the format of the new tokens take everything as it is.

        Args:
            slots: [T] int64, block * block_size + offset of each token.
            keys, values: [T, kv_heads, head_dim] in a floating-point format.
        """
        heads, head_dim = self.keys.shape[2:]
        single = self.values is self.keys
        if self.key_scales is None or self.value_scales is None:
            self.keys.view(-1, heads, head_dim).index_copy_(0, slots, convert(keys, self.keys.dtype))
            if not single:
                self.values.view(-1, heads, head_dim).index_copy_(0, slots, convert(values, self.values.dtype))
            return
        if self.key_centre is not None:
            keys, values = keys - self.key_centre, values.float()
        quantised, scales = quantise(torch.stack((keys,) if single else (keys, values)), self.keys.dtype)
        stored = [(self.keys, self.key_scales), (self.values, self.value_scales)][: len(scales)]
        for (pages, page_scales), steps, own in zip(stored, movable(quantised), scales, strict=True):
            movable(pages).view(-1, heads, head_dim).index_copy_(0, slots, steps)
            page_scales.view(-1, heads).index_copy_(0, slots, own)


@dataclass(frozen=True, slots=True)
class Ragged:
    """K and V laid end to end without a cache (encoders).

    Attributes:
        keys, values: [tokens, kv_heads, head_dim].
        starts: [R] int32 first token of each row.
    """

    keys: Tensor
    values: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The shape of one ragged batch, on the host and on the device; built once per step.

    Attributes:
        query_lens: R queries per row (host).
        context_lens: R keys per row (host), the row's own new tokens included. The last query of a
            row stands at position context_len - 1 when causal.
        query_start: [R + 1] int32 (device).
        context: [R] int32 (device).
        cache: a backend's own per-step work (tiles, masks), keyed by the backend.
        max_context: no row has more keys; None: the longest of `context_lens`. Where a step is recorded once and
            started again with other lengths (`engine.execution.cuda_graphs`), only the device knows those.
        max_queries: all rows together have no more queries, and how they share them only the device knows
            (`engine.execution.prompt_graphs`); None: `query_lens` says it.
        two_way: of each row, whether its causal queries see all later keys of it, too (host): the tokens of an image
            that see each other. None: none do.
        overlapping: a kernel may begin while the one before it ends (`engine.model.kernels.RowForm`).
    """

    query_lens: list[int]
    context_lens: list[int]
    query_start: Tensor
    context: Tensor
    cache: dict[object, object]
    max_context: int | None = None
    max_queries: int | None = None
    overlapping: bool = False
    two_way: tuple[bool, ...] | None = None

    @property
    def longest(self) -> int:
        """Most keys of a row."""
        return max(self.context_lens, default=0) if self.max_context is None else self.max_context

    @staticmethod
    def build(query_lens: list[int], context_lens: list[int], device: torch.device) -> AttentionMetadata:
        """Metadata for R rows."""
        starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        return AttentionMetadata(
            query_lens=query_lens,
            context_lens=context_lens,
            query_start=upload(starts, device),
            context=upload(np.array(context_lens, dtype=np.int32), device),
            cache={},
        )

    @staticmethod
    def of(
        query_start: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        device: torch.device,
        two_way: tuple[bool, ...] | None = None,
    ) -> AttentionMetadata:
        """Metadata of a plan's rows, whose arrays it may share: [R + 1] first query of each row, [R] keys."""
        return AttentionMetadata(
            query_lens=(query_start[1:] - query_start[:-1]).tolist(),
            context_lens=context_lens.tolist(),
            query_start=upload(query_start, device),
            context=upload(context_lens, device),
            cache={},
            two_way=two_way,
        )


class AttentionPart(Protocol):
    """The properties of a model's attention that decide whether a backend can serve it."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def window(self) -> Sight | None: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def content_bias(self) -> bool:
        """Whether a `ContentBias` is added."""

    @property
    def query_bias(self) -> bool:
        """Whether each query brings what is added to its scores: torch computes those, and no graph can record it."""


class AttentionBackend(ABC):
    """One way to compute attention.

    Attributes:
        recordable: lengths and tables are read on the device, and how far they reach is `max_context`'s to say: what
            was started can be started again with others in their place (`engine.execution.cuda_graphs`).
    """

    name: str
    recordable = False

    @classmethod
    def made_for(cls, device: torch.device) -> bool:
        """Whether a device is of a kind that this backend was made for; if not, the log need not say why it cannot."""
        return True

    @classmethod
    def unsupported(
        cls, part: AttentionPart, device: torch.device, cache_dtype: torch.dtype | None = None
    ) -> list[str]:
        """The reasons why this backend cannot compute `part` on `device`, one per entry; empty if it can.

        Args:
            cache_dtype: format of the pages; None where K and V come without a cache.
        """
        return []

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        kv: Paged | Ragged,
        metadata: AttentionMetadata,
        *,
        causal: bool = True,
        window: Sight | None = None,
        scale: float,
        bias: Bias | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of q [T, heads, head_dim] over each row's own keys; returns [T, heads, head_dim].

        heads is a multiple of kv_heads; head h reads key head h // (heads // kv_heads). sinks: [heads] float32, one
        more score of each query, which belongs to no value.
        """
