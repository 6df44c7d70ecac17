"""Attention on a GPU by our own Triton kernels, which read the pages directly.

The kernels are `engine/backends/triton/attention_decode.py`, which is memory-bound, and
`engine/backends/triton/attention_prefill.py`, which is compute-bound. Octavo has its own kernels because torch's
attention over pages is silently wrong with its default backend (pytorch#194167).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.attention.agreement import check_lengths, check_shapes
from engine.backends.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPart,
    Bias,
    Chunks,
    ContentBias,
    DistanceBias,
    Paged,
    Ragged,
    Sight,
    Window,
)
from engine.backends.attention.formats import FORMATS, FP8, LARGEST, format_name, movable
from engine.backends.triton import attention_flash
from engine.backends.triton import attention_shapes as shapes
from engine.backends.triton.attention_flash import FlashPrompts, HeadShape
from engine.backends.triton.attention_shapes import Tiles

_QUERIES = (torch.float32, torch.float16, torch.bfloat16)
_UNBIASED, _BY_DISTANCE, _BY_POSITION = range(3)
_STORED = {torch.int8: 1, FP8: 2}


@dataclass(frozen=True, slots=True)
class _Device:
    """The device's properties that launches depend on."""

    capability: int  # 80, 90, ..
    multiprocessors: int
    hardware: bool  # whether an instruction widens fp8


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The rows with few queries: the plan of `plan_decode`, and memory for partial results."""

    share: Tensor
    firsts: Tensor
    row_of: Tensor
    before: Tensor
    counters: Tensor
    parts: Tensor
    stats: Tensor

    @property
    def programs(self) -> int:
        return self.firsts.shape[0]


@dataclass(frozen=True, slots=True)
class _Prefilling:
    """The rows with many queries: the plan of `plan_prefill`."""

    items: Tensor
    tiles: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The parts that layers of one shape share in a step; `kept` are tensors whose addresses are part of its key."""

    decoding: _Decoding | None
    prefilling: _Prefilling | None
    tokens: int
    kept: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Shape:
    """The properties of a layer that the plan depends on."""

    heads: int
    kv_heads: int
    few: Tiles
    many: Tiles
    causal: bool
    window: Window | None


class TritonAttention(AttentionBackend):
    """One kernel divides rows with few queries by keys; another divides rows with many queries by queries.

    Scores, softmax and sums are in float32. Products are in the queries' format, and the attention weights are rounded
    to it before they are multiplied with the values. float32 is multiplied as three products of tf32 each, which lose 2
    of its 24 bits and should be several times as fast as float32 products. int8 and fp8 are widened exactly before the
    products; a key's scale multiplies its scores, and a value's scale its weights.

    A query's result is the same to the bit whatever else is in the batch. It is also the same however its prompt was
    chunked, as long as a chunk has more than a few queries. A decoded token and the same token in a prompt may differ
    in the last bits. With `flash`, so may a token of a long prompt that was computed whole.

    Positions that no query of a row sees are never read, so NaN or inf that another sequence left in a page cannot
    affect it. Nothing waits for the device, and everything can be captured in a CUDA graph. A capture must begin with
    new metadata that no layer has used, because a plan made outside the capture would not be made again in replays.
    `flash`: the attentions that torch's flash attention computes instead; None for none.
    """

    name = "triton"
    recordable = True

    def __init__(self, flash: FlashPrompts | None = None):
        self.flash = flash
        gpu.settle_keys()  # before any kernel starts

    @classmethod
    def made_for(cls, device: torch.device) -> bool:
        return device.type == "cuda" or gpu.serves(device)

    @classmethod
    def unsupported(
        cls, part: AttentionPart, device: torch.device, cache_dtype: torch.dtype | None = None
    ) -> list[str]:
        """Computes every part except those with a content bias or a query bias, over every format of the cache, on
        NVIDIA GPUs from compute capability 8.0 on."""
        if not gpu.serves(device):
            if device.type != "cuda":
                return [f"{cls.name} attention runs on cuda; the device is {device.type}"]
            return [f"{cls.name} attention: {gpu.obstacle(device.index)[0]}"]
        reasons = []
        if part.query_bias:
            reasons.append(f"{cls.name} attention does not support a bias from queries")
        if part.content_bias:
            reasons.append(f"{cls.name} attention does not support a content bias")
        if isinstance(part.window, Chunks):
            reasons.append(f"{cls.name} attention does not support chunks")
        if part.head_dim > shapes.LONGEST_HEAD:
            reasons.append(
                f"{cls.name} attention has heads of up to {shapes.LONGEST_HEAD} features, not {part.head_dim}"
            )
        group = part.heads // part.kv_heads
        most = shapes.largest_group(part.head_dim, cache_dtype == torch.float32, _facts(device).capability)
        if group > most:
            reasons.append(f"{cls.name} attention lets up to {most} heads share keys, not {group}")
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
        bias: Bias | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(window, Chunks):
            raise ValueError("no kernel for chunks")
        check_shapes(q, kv, metadata, bias, sinks)
        _check_formats(q, kv, bias)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        how: dict[str, Any] = {"causal": causal, "window": window, "bias": bias, "softcap": softcap}
        if self.flash is not None and isinstance(kv, Paged) and HeadShape.of(q, kv) in self.flash.shapes:
            runs = self.flash.runs(metadata)
            if runs and not attention_flash.obstacle(
                q.dtype, q.shape[2], kv.keys.dtype, sinks=sinks is not None, **how
            ):
                for run in runs:
                    queries, results = q[run.tokens], out[run.tokens]
                    pages = replace(kv, block_tables=kv.block_tables[run.rows])
                    if run.whole:
                        attention_flash.attend(queries, pages, run.metadata, scale, results)
                    else:
                        self._compute(queries, pages, run.metadata, results, scale=scale, sinks=sinks, **how)
                out[runs[-1].tokens.stop :].zero_()
                return out
        self._compute(q, kv, metadata, out, scale=scale, sinks=sinks, **how)
        return out

    def _compute(
        self,
        q: Tensor,
        kv: Paged | Ragged,
        metadata: AttentionMetadata,
        out: Tensor,
        *,
        causal: bool,
        window: Window | None,
        scale: float,
        bias: Bias | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Fill out [T, heads, head_dim] with our own kernels; arguments have been checked."""
        from engine.backends.triton.attention_decode import decode
        from engine.backends.triton.attention_prefill import prefill
        from engine.backends.triton.overlap import overlapping

        heads, head_dim = q.shape[1:]
        kv_heads = kv.keys.shape[-2]
        device = _facts(q.device)
        product = q.dtype if kv.keys.dtype == q.dtype or kv.keys.dtype in LARGEST else torch.float32
        group = heads // kv_heads
        few = shapes.decode_tiles(head_dim, group, product.itemsize, device.capability, isinstance(kv, Paged))
        plain = window is None and bias is None and softcap is None
        many = shapes.prefill_tiles(
            head_dim, group, product.itemsize, kv.keys.itemsize, device.capability, plain, isinstance(kv, Paged)
        )
        prepared = _prepare(metadata, kv, _Shape(heads, kv_heads, few, many, causal, window), head_dim, device)
        if prepared.tokens < q.shape[0]:
            out[prepared.tokens :].zero_()
        arguments = _arguments(q, kv, bias, causal, window, scale, softcap, sinks, product, device)
        if prepared.decoding is not None:
            plan = prepared.decoding
            decode[(plan.programs,)](
                out=out, query_start=metadata.query_start, context=metadata.context,
                share=plan.share, firsts=plan.firsts, row_of=plan.row_of, before=plan.before, counters=plan.counters,
                parts=plan.parts, stats=plan.stats, part_rows=plan.parts.shape[2], most_chunks=plan.parts.shape[1],
                CHUNK=shapes.CHUNK, MAX_CHUNKS=shapes.max_chunks(kv_heads), **arguments, **_sizes(few),
                **overlapping(metadata.overlapping),
            )  # fmt: skip
        if prepared.prefilling is not None:
            prefill[(prepared.prefilling.tiles, kv_heads)](
                out=out, query_start=metadata.query_start, context=metadata.context, items=prepared.prefilling.items,
                # Fused, a tile of keys with a mask would give other bits than one without, and how a prompt is
                # divided decides which keys are in which.
                enable_fp_fusion=False, **arguments, **_sizes(many),
            )  # fmt: skip


@functools.cache
def _facts(device: torch.device) -> _Device:
    if device.type != "cuda":  # in Triton's interpreter
        return _Device(capability=90, multiprocessors=1, hardware=False)
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return _Device(capability, properties.multi_processor_count, capability >= 89)


def _check_formats(q: Tensor, kv: Paged | Ragged, bias: Bias | None) -> None:
    """Raises ValueError if there is no kernel for the formats of queries, keys, values and bias."""
    kind = kv.keys.dtype
    if q.dtype not in _QUERIES or kind not in FORMATS or kind != kv.values.dtype:
        raise ValueError(f"no kernel for queries of {q.dtype}, keys of {kind}, values of {kv.values.dtype}")
    scales = (kv.key_scales, kv.value_scales) if isinstance(kv, Paged) else (None, None)
    if any((scale is None) != (kind not in LARGEST) for scale in scales):
        raise ValueError(f"only int8 and fp8 pages have scales, got keys of {format_name(kind)}")
    if isinstance(bias, ContentBias):
        raise ValueError(f"{TritonAttention.name} attention does not support a content bias")


def _prepare(
    metadata: AttentionMetadata, kv: Paged | Ragged, shape: _Shape, head_dim: int, device: _Device
) -> _Prepared:
    """The plans for this batch: made by the first layer of a step, shared by similar layers."""
    where = kv.block_tables if isinstance(kv, Paged) else kv.starts
    capturing = where.is_cuda and torch.cuda.is_current_stream_capturing()
    key = (TritonAttention.name, shape, head_dim, where.shape, capturing)
    found = metadata.cache.get(key)
    if isinstance(found, _Prepared):
        return found
    check_lengths(metadata, kv, shape.causal)
    most = shape.few.block_m // (shape.heads // shape.kv_heads)
    lens = metadata.query_lens
    tile = shape.many.block_m // (shape.heads // shape.kv_heads)
    if metadata.max_queries is None:
        few = max((n for n in lens if n <= most), default=0)
        tiles = sum(-(-n // tile) for n in lens if n > most)
    else:
        few = min(most, metadata.max_queries)
        tiles = shapes.most_tiles(metadata.max_queries, len(lens), most, tile)
    prepared = metadata.cache[key] = _Prepared(
        _plan_decode(metadata, shape, head_dim, few, most, device) if few else None,
        _plan_prefill(metadata, most, tile, tiles) if tiles else None,
        sum(lens),
        (where,),
    )
    return prepared


def _plan_decode(
    metadata: AttentionMetadata, shape: _Shape, head_dim: int, queries: int, most: int, device: _Device
) -> _Decoding:
    from engine.backends.triton.attention_plan import plan_decode

    rows, kv_heads, where = len(metadata.query_lens), shape.kv_heads, metadata.query_start.device
    workers = device.multiprocessors * shapes.decoders(shape.few)
    most_chunks, reach = shapes.max_chunks(kv_heads), metadata.longest
    if shape.window is not None:
        reach = min(reach, shape.window.left + shape.window.right + queries)
    # A row's keys, in chunks of the smallest size.
    chunk_keys = max(1, -(-(reach + shape.few.block_n - 1) // shapes.CHUNK))
    chunks = min(most_chunks, chunk_keys)
    # A row with fewer keys than the longest may need more work than the longest, but by less than its chunks have
    # grown.
    work = rows * kv_heads * (chunk_keys + (chunk_keys - 1) // most_chunks)
    programs = min(workers, work)
    part_rows = queries * (shape.heads // kv_heads)

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=where)

    plan = _Decoding(
        share=empty(2, dtype=torch.int32),
        firsts=empty(programs, dtype=torch.int32),
        row_of=empty(rows, dtype=torch.int32),
        before=empty(rows, dtype=torch.int32),
        counters=empty(rows, kv_heads, dtype=torch.int32),
        parts=empty(programs, chunks, part_rows, head_dim),
        stats=empty(programs, chunks, 2, part_rows),
    )
    window = shape.window or Window(0)
    plan_decode[(rows,)](
        metadata.query_start, metadata.context, plan.share, plan.firsts, plan.row_of, plan.before, plan.counters,
        rows, window.left, window.right, programs,
        KV_HEADS=kv_heads, MOST=most, CAUSAL=shape.causal, WINDOW=shape.window is not None,
        BLOCK_N=shape.few.block_n, CHUNK=shapes.CHUNK, MAX_CHUNKS=most_chunks, HEADS=shapes.padded(kv_heads),
        num_warps=4,
    )  # fmt: skip
    return plan


def _plan_prefill(metadata: AttentionMetadata, most: int, tile: int, tiles: int) -> _Prefilling:
    from engine.backends.triton.attention_plan import plan_prefill

    items = torch.empty(1 + tiles, 2, dtype=torch.int32, device=metadata.query_start.device)
    rows = len(metadata.query_lens)
    plan_prefill[(rows,)](metadata.query_start, items, rows, MOST=most, BLOCK_Q=tile, num_warps=4)
    return _Prefilling(items, tiles)


def _arguments(
    q: Tensor,
    kv: Paged | Ragged,
    bias: Bias | None,
    causal: bool,
    window: Window | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    product: torch.dtype,
    device: _Device,
) -> dict[str, Any]:
    """The arguments of both kernels; an unread tensor stands for each absent one."""
    import triton.language as tl

    q = q if q.stride(2) == 1 else q.contiguous()
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (kv.keys, kv.values))
    key_scales = value_scales = centre = None
    pages, page = (0, 0), 1
    scale_strides = (0, 0)
    if isinstance(kv, Paged):
        key_scales, value_scales, centre = kv.key_scales, kv.value_scales, kv.key_centre
        pages, page = (keys.stride(0), values.stride(0)), keys.shape[1]
        if key_scales is not None:
            scale_strides = (key_scales.stride(0), key_scales.stride(1))
        where = kv.block_tables
    else:
        where = kv.starts
    table = None if bias is None or isinstance(bias, ContentBias) else bias.table.float().contiguous()
    by_distance = isinstance(bias, DistanceBias)
    reach = window or Window(0)
    return {
        "q": q, "keys": movable(keys), "values": movable(values),
        "key_scales": q if key_scales is None else key_scales,
        "value_scales": q if value_scales is None else value_scales,
        "centre": q if centre is None else centre, "where": where, "bias": q if table is None else table,
        "sinks": q if sinks is None else sinks.float().contiguous(),
        "q_token": q.stride(0), "q_head": q.stride(1),
        "k_page": pages[0], "k_slot": keys.stride(-3), "k_head": keys.stride(-2),
        "v_page": pages[1], "v_slot": values.stride(-3), "v_head": values.stride(-2),
        "s_page": scale_strides[0], "s_slot": scale_strides[1], "table_row": where.stride(0),
        "columns": 1 if table is None else table.shape[1], "zero": bias.zero if isinstance(bias, DistanceBias) else 0,
        "left": reach.left, "right": reach.right, "scale": scale, "softcap": softcap or 0.0,
        "HEADS": q.shape[1], "KV_HEADS": keys.shape[-2], "HEAD_DIM": q.shape[2],
        "PAGED": isinstance(kv, Paged), "PAGE": page, "STORED": _STORED.get(keys.dtype, 0),
        "HARDWARE": device.hardware, "CAUSAL": causal, "WINDOW": window is not None,
        "BIAS": _UNBIASED if table is None else _BY_DISTANCE if by_distance else _BY_POSITION,
        # Without a softcap or sinks, the centre adds the same to all of a query's scores.
        "CENTRE": centre is not None and (softcap is not None or sinks is not None),
        "SOFTCAP": softcap is not None, "SINKS": sinks is not None,
        "DTYPE": {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[product],
        "PRECISION": "tf32x3" if product == torch.float32 else "tf32",
    }  # fmt: skip


def _sizes(tiles: Tiles) -> dict[str, int]:
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": tiles.block_d,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
