"""Exact attention in plain torch, on CPU and CUDA: the oracle that every other backend is tested against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.attention.agreement import check_shapes, tables_of
from engine.backends.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPart,
    Bias,
    ContentBias,
    DistanceBias,
    Paged,
    PositionBias,
    Ragged,
    Sight,
)
from engine.backends.attention.formats import FORMATS, dequantise, format_name, movable
from engine.backends.torch import attention_encoder as whole
from engine.backends.torch.attention_tiles import TILE, Group, Shape, Step, plan

# MKL multiplies rows four at a time, and the remainder with kernels whose sums differ in the last bits. Tiles of one
# query, and heads, are padded to multiples of four, so that they get the same bits as in a larger tile.
ROWS = FEATURES = 4


@dataclass(frozen=True, slots=True)
class QueryBias:
    """A bias by distance that differs for each query (arXiv:2001.04063)."""

    scores: Tensor  # [T, N, heads] the numbers of each query
    columns: Tensor  # [distances] int64, the index (of N) for each distance, key position - query position
    zero: int  # the entry for distance 0; distances beyond either end use the end's


@dataclass(frozen=True, slots=True)
class OwnKey:
    """One more key and value for each query, visible only to that query."""

    # keys, values: [T, kv_heads, head_dim]
    keys: Tensor
    values: Tensor
    bias: Tensor  # [T, heads], added to the scores


class TorchReference(AttentionBackend):
    """Tiles of queries process chunks of keys with a running softmax.

    The running softmax is arXiv:1805.02867, its tiling arXiv:2205.14135. Scores, softmax and sums are in float32 for
    every dtype. Keys and values are gathered by slot, dequantised if pages are int8 or fp8, and never expanded over
    grouped queries.

    On a CPU, a query's result is the same to the bit whatever else is in the batch and however its prompt was chunked
    (cuBLAS makes no such promise). There is one exception: a row with a single query is a separate tile, as are the few
    queries of a short row without positions. This gives the bits of a larger tile if the CPU's matrix product sums
    whole groups of four rows alike (MKL with AVX-512 does); elsewhere the last bits may differ.

    On a CPU, torch's fused kernel computes whole rows without a cache and without a bias (those of most encoders); it
    is faster and keeps these promises (`engine.backends.torch.attention_encoder`).

    Positions that a query does not see are never read from outside its own row, so NaN or inf that another sequence
    left in a page cannot affect it.
    """

    name = "torch"

    @classmethod
    def unsupported(
        cls, part: AttentionPart, device: torch.device, cache_dtype: torch.dtype | None = None
    ) -> list[str]:
        """Computes every part over every format of the cache; made for the CPU and CUDA."""
        reasons = []
        if part.content_bias and part.heads != part.kv_heads:
            reasons.append(f"{cls.name} attention does not support a content bias for heads that share keys")
        if device.type not in ("cpu", "cuda"):
            reasons.append(f"{cls.name} attention runs on cpu and cuda; the device is {device.type}")
        if cache_dtype is not None and cache_dtype not in FORMATS:
            reasons.append(f"{cls.name} attention does not read {format_name(cache_dtype)} pages")
        return reasons

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        kv: Paged | Ragged,
        metadata: AttentionMetadata,
        *,
        causal: bool = True,
        window: Sight | None = None,
        scale: float,
        bias: Bias | QueryBias | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        own: OwnKey | None = None,
        sums: Tensor | None = None,
    ) -> Tensor:
        """As `AttentionBackend`. `sums` [T, heads] float32 receives the logarithm of each query's sum of exp(score)."""
        plain = not causal and window is None and bias is None and softcap is None and sinks is None and own is None
        plain = plain and sums is None
        if plain and isinstance(kv, Ragged) and whole.serves(q, kv, metadata):
            return whole.attend(q, kv, metadata, scale)
        check_shapes(q, kv, metadata, None if isinstance(bias, QueryBias) else bias, sinks)
        heads, head_dim = q.shape[1:]
        if isinstance(bias, QueryBias) and (len(bias.scores), bias.scores.shape[2]) != (len(q), heads):
            brought = tuple(bias.scores.shape)
            raise ValueError(f"q {tuple(q.shape)} and the scores that its queries bring {brought} do not agree")
        kv_heads = kv.keys.shape[-2]
        lines = len(tables_of(bias)) if isinstance(bias, ContentBias) else 0
        groups = self._groups(metadata, kv, Shape(heads, kv_heads, head_dim, causal, window, lines))
        if isinstance(kv, Paged):  # view, not reshape: the whole pool must never be copied silently
            keys = _Vectors(kv.keys.view(-1, head_dim), kv.key_scales, kv.key_centre)
            values = _Vectors(kv.values.view(-1, head_dim), kv.value_scales)
        else:
            keys, values = _Vectors(kv.keys.reshape(-1, head_dim)), _Vectors(kv.values.reshape(-1, head_dim))
        out = q.new_zeros(q.shape)
        for group in groups:
            result, total = _attend_group(q, keys, values, group, kv_heads, scale, bias, softcap, sinks, own)
            if group.places is not None:
                result, total = (part.index_select(0, group.places) for part in (result, total))
            out.index_copy_(0, group.tokens, result.to(q.dtype))
            if sums is not None:
                sums.index_copy_(0, group.tokens, total)
        return out

    def _groups(self, metadata: AttentionMetadata, kv: Paged | Ragged, shape: Shape) -> tuple[Group, ...]:
        """The tiles of this batch: computed by the first layer of a step, shared by the others."""
        where = kv.block_tables if isinstance(kv, Paged) else kv.starts
        size = kv.keys.shape[1] if isinstance(kv, Paged) else None
        key = (self.name, shape, size, where.data_ptr(), where.shape, where.stride(), kv.keys.device)
        found = metadata.cache.get(key)
        if found is None:
            # The tensor is kept with the tiles, so that its address stays taken and remains a valid key.
            found = metadata.cache[key] = (where, plan(metadata, kv, shape))
        groups: tuple[Group, ...] = found[1]  # type: ignore[index]
        return groups


@dataclass(frozen=True, slots=True)
class _Vectors:
    """K or V of all slots, [slots * kv_heads, head_dim]; scales and centre as in `Paged`."""

    stored: Tensor
    scales: Tensor | None = None
    centre: Tensor | None = None

    def chunks(self, rows: Tensor, size: int, width: int) -> Tensor:
        """float32 [len(rows) / size, size, width] of rows ordered by tile, head, key; zeros past head_dim."""
        found = movable(self.stored).index_select(0, rows).view(self.stored.dtype)
        found = found.float() if self.scales is None else dequantise(found, self.scales.view(-1).index_select(0, rows))
        found = found.view(-1, size, found.shape[-1])
        if self.centre is not None:
            found.view(-1, len(self.centre), *found.shape[1:]).add_(self.centre.unsqueeze(1))
        return found if found.shape[-1] == width else F.pad(found, (0, width - found.shape[-1]))


def _attend_group(
    q: Tensor,
    keys: _Vectors,
    values: _Vectors,
    group: Group,
    kv_heads: int,
    scale: float,
    bias: Bias | QueryBias | None,
    softcap: float | None,
    sinks: Tensor | None,
    own: OwnKey | None,
) -> tuple[Tensor, Tensor]:
    """Results [tiles * width, heads, head_dim] float32 of a group, and the logarithms of the sums of exp(score), [tiles
    * width, heads]."""
    heads, head_dim = q.shape[1:]
    fold = heads // kv_heads
    rows = -(-fold // ROWS) * ROWS if group.width == 1 else fold
    padded = -(-head_dim // FEATURES) * FEATURES
    shape = (group.tiles, kv_heads, rows, group.width)
    queries = q.index_select(0, group.queries).view(group.tiles, group.width, kv_heads, fold, head_dim)
    folded = queries.new_zeros((*shape, padded), dtype=torch.float32)
    folded[:, :, :fold, :, :head_dim] = queries.permute(0, 2, 3, 1, 4)
    folded = folded.mul_(scale).view(group.tiles * kv_heads, rows * group.width, padded)

    best = folded.new_full((*folded.shape[:2], 1), torch.finfo(torch.float32).min)
    total = torch.zeros_like(best)
    acc = torch.zeros_like(folded)
    for step in group.steps:
        n = step.tiles * kv_heads
        chunk = keys.chunks(step.rows, group.keys, padded)
        scores = torch.bmm(folded[:n], chunk.transpose(1, 2))
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        tiled = scores.view(step.tiles, *shape[1:], group.keys)
        if isinstance(bias, ContentBias):
            _add_content(tiled[:, :, 0], bias, folded[:n], chunk, step, scale)
        elif isinstance(bias, QueryBias):
            tiled[:, :, :fold].add_(_query_bias(bias, step, kv_heads, group))
        elif bias is not None:
            tiled[:, :, :fold].add_(_bias(bias, step, kv_heads, group))
        if step.mask is not None:
            tiled[step.masked :].add_(step.mask)
        # The running maximum starts finite, so that a query whose keys are all masked so far sums to 0.
        peak = torch.maximum(best[:n], scores.amax(-1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        decay = best[:n].sub_(peak).exp_()
        total[:n].mul_(decay).add_(weights.sum(-1, keepdim=True))
        acc[:n].mul_(decay).baddbmm_(weights, values.chunks(step.rows, group.keys, padded))
        best[:n] = peak
    if sinks is not None:
        scores = folded.new_zeros(kv_heads, rows, 1)
        scores[:, :fold] = sinks.float().view(kv_heads, fold, 1)
        scores = scores.expand(shape).reshape(best.shape)
        peak = torch.maximum(best, scores)
        decay = best.sub_(peak).exp_()
        total.mul_(decay).add_(scores.sub(peak).exp_())
        acc.mul_(decay)
    if own is not None:
        _add_own(own, folded, best, total, acc, group, shape, fold)
    acc.div_(total.clamp_min_(torch.finfo(torch.float32).tiny))
    result = acc.view(*shape, padded)[:, :, :fold, :, :head_dim].permute(0, 3, 1, 2, 4)
    sums = total.log_().add_(best).view(*shape)[:, :, :fold].permute(0, 3, 1, 2)
    return result.reshape(-1, heads, head_dim), sums.reshape(-1, heads)


def _add_own(
    own: OwnKey,
    folded: Tensor,
    best: Tensor,
    total: Tensor,
    acc: Tensor,
    group: Group,
    shape: tuple[int, int, int, int],
    fold: int,
) -> None:
    """Add each query's own key to the running softmax.

    Args:
        folded, acc: [tiles * kv_heads, rows * width, padded] queries, and sums of values.
        best, total: [tiles * kv_heads, rows * width, 1].
        shape: tiles, kv_heads, rows and width; the first `fold` rows are queries.
    """
    tiles, kv_heads, _, width = shape
    keys, values, bias = (
        x.index_select(0, group.queries).float().view(tiles, width, kv_heads, -1)
        for x in (own.keys, own.values, own.bias)
    )
    inside, head_dim = (slice(None), slice(None), slice(fold)), keys.shape[-1]
    products = folded.view(*shape, -1)[inside][..., :head_dim] * keys.permute(0, 2, 1, 3).unsqueeze(2)
    scores = folded.new_zeros(shape)
    scores[inside] = products.sum(-1) + bias.permute(0, 2, 3, 1)
    scores = scores.view(best.shape)
    peak = torch.maximum(best, scores)
    decay, weights = best.sub_(peak).exp_(), scores.sub_(peak).exp_()
    total.mul_(decay).add_(weights)
    given = weights.view(*shape, 1)[inside] * values.permute(0, 2, 1, 3).unsqueeze(2)
    acc.mul_(decay).view(*shape, -1)[inside][..., :head_dim].add_(given)


def _bias(bias: DistanceBias | PositionBias, step: Step, kv_heads: int, group: Group) -> Tensor:
    """[tiles, kv_heads, fold, width or 1, keys]; a bias by distance is a strided view of one line per tile."""
    heads, columns = bias.table.shape
    if isinstance(bias, DistanceBias):
        line = step.distance + torch.arange(group.width + group.keys - 1, device=bias.table.device) + bias.zero
    else:
        line = step.first + torch.arange(group.keys, device=bias.table.device)
    lines = bias.table.index_select(1, line.clamp_(0, columns - 1).view(-1))
    lines = lines.view(kv_heads, heads // kv_heads, *line.shape).permute(2, 0, 1, 3)
    return lines.unfold(3, group.keys, 1)


def _query_bias(bias: QueryBias, step: Step, kv_heads: int, group: Group) -> Tensor:
    """[tiles, kv_heads, fold, width, keys] of a step."""
    _, count, heads = bias.scores.shape
    line = step.distance + torch.arange(group.width + group.keys - 1, device=bias.columns.device) + bias.zero
    columns = bias.columns[line.clamp_(0, len(bias.columns) - 1)].unfold(1, group.keys, 1)
    brought = bias.scores.index_select(0, group.queries[: step.tiles * group.width]).float()
    brought = brought.view(step.tiles, group.width, count, heads).permute(0, 3, 1, 2)
    found = brought.gather(3, columns[:, None].expand(-1, heads, -1, -1))
    return found.view(step.tiles, kv_heads, heads // kv_heads, group.width, group.keys)


def _add_content(scores: Tensor, bias: ContentBias, queries: Tensor, keys: Tensor, step: Step, scale: float) -> None:
    """Add the terms of a content bias to scores [tiles, heads, width, keys].

    Each tile and chunk use the vectors of the width + keys distances between them. In the products of one query (one
    key) with these vectors, its scores are `keys` (`width`) adjacent numbers, which begin one further for each query
    (each key): a strided view.

    Args:
        queries: [tiles * heads, rows, features], times `scale`; the first `width` rows are queries.
        keys: [tiles * heads, keys, features].
    """
    (tiles, heads, width, size), (count, rows, features) = scores.shape, queries.shape
    reach = width + size
    place = step.distance + torch.arange(reach, device=scores.device) + bias.zero
    columns = bias.columns[place.clamp_(0, len(bias.columns) - 1)]

    def lines(table: Tensor) -> Tensor:
        """Lines [tiles * heads, reach, features] of the distances."""
        first = torch.arange(heads, device=scores.device)[:, None] * table.shape[1]
        found = (columns[:, None] + first).view(-1)
        return _Vectors(table.reshape(-1, table.shape[2])).chunks(found, reach, features)

    if bias.keys is not None:
        products = torch.bmm(queries, lines(bias.keys).transpose(1, 2))
        seen = products.as_strided((count, width, size), (rows * reach, reach + 1, 1))
        scores.add_(seen.view(tiles, heads, width, size))
    if bias.queries is not None:
        vectors = lines(bias.queries)
        # Only `width` of a key's products with all distances are needed, so a few keys at a time are multiplied with
        # their own.
        some = min(size, TILE)
        for begin in range(0, size, some):
            near = vectors[:, begin : begin + some + width]
            products = torch.bmm(keys[:, begin : begin + some], near.transpose(1, 2))
            seen = products.as_strided((count, width, some), (some * (some + width), 1, some + width + 1))
            scores[..., begin : begin + some].add_(seen.view(tiles, heads, width, some), alpha=scale)
