"""Long prompts computed whole by the flash attention of torch's CUDA builds: cuDNN's if available, which on an H200 is
1.4 to 1.7 times as fast as our kernel, otherwise FlashAttention 2 (arXiv:2307.08691).

Pages already contain a row's keys and values when attention begins. For a prompt, or the first chunk of a longer one,
they are copied end to end, as torch's kernels require. The copy is cheap compared with the attention of a long prompt.

The choice of rows depends only on each row's own lengths, so what else is in the step does not change its bits. But the
kernel sums in another order than ours, so bits depend on whether the prompt was computed whole. So it is a setting
(`EngineConfig.flash_prefill`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from engine.backends.attention.agreement import check_lengths
from engine.backends.attention.base import AttentionMetadata, Bias, Paged, Ragged, Sight
from engine.backends.attention.formats import format_name
from engine.backends.triton import upload

# Steps of up to 2048 tokens are recorded, and the rows of a recorded step are not known. So a longer prompt is never in
# a recorded step, and our kernels compute shorter ones in every step.
FEWEST = 2049
_LONGEST_HEAD = 256
_FORMATS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The properties of an attention that torch's kernel depends on: its heads, and the format of queries, keys and
    values."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @staticmethod
    def of(q: Tensor, kv: Paged | Ragged) -> HeadShape:
        return HeadShape(q.shape[1], kv.keys.shape[-2], q.shape[2], q.dtype)


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent rows of a step of the same kind. `whole`: whether each of them is long and has its whole context in this
    step."""

    whole: bool
    rows: slice
    tokens: slice
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class FlashPrompts:
    """The attentions that torch's flash attention computes."""

    shapes: Collection[HeadShape]  # the heads for which it was found to agree with our kernels
    fewest: int = FEWEST  # minimum queries of a row

    def runs(self, metadata: AttentionMetadata) -> tuple[Run, ...]:
        """The rows of a step, in order, if some are long with their whole context in it; otherwise none.

        Also none for a recorded step, whose rows are not known on the host.
        """
        if metadata.max_context is not None or metadata.max_queries is not None:
            return ()
        key = (FlashPrompts, self.fewest)
        found = metadata.cache.get(key)
        if not isinstance(found, tuple):
            found = metadata.cache[key] = self._find(metadata)
        return found

    def _find(self, metadata: AttentionMetadata) -> tuple[Run, ...]:
        lens, contexts = metadata.query_lens, metadata.context_lens
        whole = [n == context and n >= self.fewest for n, context in zip(lens, contexts, strict=True)]
        if not any(whole):
            return ()
        starts = np.concatenate(([0], np.cumsum(lens))).tolist()
        runs = []
        for kind, numbers in groupby(range(len(lens)), whole.__getitem__):
            first, *others = numbers
            rows = slice(first, first + 1 + len(others))
            own = AttentionMetadata.build(lens[rows], contexts[rows], metadata.query_start.device)
            runs.append(Run(kind, rows, slice(starts[rows.start], starts[rows.stop]), own))
        return tuple(runs)


def obstacle(
    queries: torch.dtype,
    head_dim: int,
    pages: torch.dtype,
    *,
    causal: bool = True,
    window: Sight | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> str:
    """The reason why torch's flash attention cannot compute an attention; "" if it can."""
    if queries not in _FORMATS:
        return f"it does not compute in {format_name(queries)}"
    if pages != queries:
        return f"pages hold {format_name(pages)}, the model computes in {format_name(queries)}"
    if head_dim % 8 or head_dim > _LONGEST_HEAD:
        return f"heads have {head_dim} features, and not a multiple of 8 up to {_LONGEST_HEAD}"
    if not causal:
        return "queries see later keys"
    beside = {"a window": window, "a bias": bias, "a soft cap": softcap, "sinks": sinks or None}
    found = [name for name, given in beside.items() if given is not None]
    return f"attention has {' and '.join(found)}" if found else ""


def attend(q: Tensor, kv: Paged, metadata: AttentionMetadata, scale: float, out: Tensor) -> None:
    """Causal attention of rows whose whole contexts are queries. `q`: [T, heads, head_dim]; out: the same shape,
    overwritten. Raises ValueError if contexts do not match the block tables; RuntimeError: torch has no such kernel."""
    slots, one = _slots(metadata, kv), operator()
    q = q if q.stride(2) == 1 else q.contiguous()
    keys, values = (pages.view(-1, *pages.shape[2:]).index_select(0, slots) for pages in (kv.keys, kv.values))
    first = 0
    for length in metadata.query_lens:  # one after the other: a long prompt fills a GPU
        row = slice(first, first + length)
        out[row] = one(q[row], keys[row], values[row], scale)
        first += length


def operator() -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """torch's causal attention of one prompt, from q [T, heads, head_dim], keys and values [T, kv_heads, head_dim], and
    the scale of scores."""
    return _by_torch


def _by_torch(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        attended = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _slots(metadata: AttentionMetadata, kv: Paged) -> Tensor:
    """[T] slots of the keys of all rows, whose contexts are end to end; computed once a step for all layers."""
    from engine.backends.triton.pages import slots_of

    key = (slots_of, kv.keys.shape[1])
    found = metadata.cache.get(key)
    if isinstance(found, Tensor):
        return found
    check_lengths(metadata, kv, causal=True)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in metadata.context_lens])
    where = kv.block_tables.device
    slots = slots_of(kv.block_tables, metadata.query_start, upload(positions, where), kv.keys.shape[1])
    metadata.cache[key] = slots
    return slots
