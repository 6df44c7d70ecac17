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
    """A query at position p sees the keys from the last multiple of `size` up to p."""

    size: int


Sight = Window | Chunks


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """A bias per head that depends only on key position - query position (ALiBi, T5's buckets)."""

    table: Tensor  # [heads, N] bias by distance
    zero: int  # the column for distance 0; distances beyond either end use the end's value


@dataclass(frozen=True, slots=True)
class PositionBias:
    """A bias per head that depends only on the key's position (ALiBi with rounded products). `table`: [heads, N] bias
    by position; positions beyond the last use its value."""

    table: Tensor


@dataclass(frozen=True, slots=True)
class ContentBias:
    """Score terms that depend on the distance and on content (arXiv:2006.03654, 3.1).

    The score of a query and a key at distance d = key position - query position becomes scale * (query . key + query .
    keys[c] + key . queries[c]), where c = columns[d + zero]. Only for heads that do not share keys.
    """

    keys: Tensor | None  # [heads, N, head_dim] vectors to multiply queries with; None for no such term
    queries: Tensor | None  # [heads, N, head_dim] vectors to multiply keys with; None for no such term
    columns: Tensor  # [distances] int64, the index of the vector (of N) for each distance
    zero: int  # the entry for distance 0; distances beyond either end use the end's


Bias = DistanceBias | PositionBias | ContentBias


@dataclass(frozen=True, slots=True)
class Paged:
    """K and V of one layer in pages."""

    # keys, values: [num_blocks, block_size, kv_heads, head_dim], in a format of `engine.backends.attention.formats`,
    # which may differ from the queries' format. Block 0 belongs to no sequence. Both may be the same tensor, whose
    # vectors are keys and values at once.
    keys: Tensor
    values: Tensor
    # [R, max blocks] int32. Entries of pages that no query of a row sees may be 0; such pages must not be read.
    block_tables: Tensor
    # key_scales, value_scales: [num_blocks, block_size, kv_heads] for int8 and fp8 pages; otherwise None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    # [kv_heads, head_dim] float32, subtracted from keys before quantisation and added again by readers; None for none.
    # It adds the same to all scores of a query, so a backend may ignore it if there is neither a softcap nor a sink.
    key_centre: Tensor | None = None

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new tokens, in the pages' format.

        Numbers that are not finite, or that the format cannot represent, are read back as NaN; in int8 and fp8, their
        whole vector is. Only pages in the format of the new tokens take every number unchanged.

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
    """K and V laid end to end without a cache (encoders)."""

    # keys, values: [tokens, kv_heads, head_dim]
    keys: Tensor
    values: Tensor
    starts: Tensor  # [R] int32 first token of each row


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """The shape of one ragged batch, on the host and on the device; built once per step."""

    query_lens: list[int]  # number of queries of each of the R rows (host)
    # number of keys of each of the R rows (host), including its new tokens. If causal, the last query of a row is at
    # position context_len - 1.
    context_lens: list[int]
    query_start: Tensor  # [R + 1] int32 (device)
    context: Tensor  # [R] int32 (device)
    # a backend's results that are computed once per step (tiles, masks), keyed by the backend
    cache: dict[object, object]
    # the maximum number of keys of a row; None: the largest of `context_lens`. If a step is recorded once and replayed
    # with other lengths (`engine.execution.cuda_graphs`), only the device knows the lengths.
    max_context: int | None = None
    # the maximum number of queries of all rows together, if only the device knows how they are divided among rows
    # (`engine.execution.prompt_graphs`); None: `query_lens` says it
    max_queries: int | None = None
    # whether a kernel may begin before the previous one ends (`engine.model.row_form.RowForm`)
    overlapping: bool = False
    # for each row (host), the keys that its causal queries see besides the usual ones: 0: none; 1: all later keys of
    # the row, as in an image whose tokens see each other; 2: those and the keys before a window. None: 0 for all rows
    two_way: tuple[int, ...] | None = None

    @property
    def longest(self) -> int:
        """Maximum number of keys of a row."""
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
        two_way: tuple[int, ...] | None = None,
    ) -> AttentionMetadata:
        """Metadata for a plan's rows, whose arrays it may share: [R + 1] first query of each row, [R] keys."""
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
        """Whether each query adds its own numbers to its scores: torch computes those, and no graph can record them."""


class AttentionBackend(ABC):
    """One way to compute attention."""

    name: str
    # whether lengths and tables are read only on the device, within `max_context`, so that a recorded step can be
    # replayed with others in their place (`engine.execution.cuda_graphs`)
    recordable = False

    @classmethod
    def made_for(cls, device: torch.device) -> bool:
        """Whether the backend was made for this kind of device; if not, the log need not say why it is not used."""
        return True

    @classmethod
    def unsupported(
        cls, part: AttentionPart, device: torch.device, cache_dtype: torch.dtype | None = None
    ) -> list[str]:
        """The reasons why this backend cannot compute `part` on `device`, one per entry; empty if it can.
        `cache_dtype`: format of the pages; None for K and V without a cache."""
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
        more score for each query, without a value. Scores are scale * q k, then softcap * tanh(. / softcap), then +
        bias: transformers' order. If causal, queries are at the last positions of their row, otherwise at the first
        ones. Tokens past the sum of the query lengths, and queries that see no key, get zeros. Raises ValueError if
        shapes, formats or lengths contradict each other; IndexError if a row's pages or tokens are outside the keys, on
        a CPU with the library.
        """
