"""Attention on a CPU by the native library: a running softmax over chunks of keys, read directly from the pages.

The kernel is `engine/backends/native/src/attention_batch.cpp`.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.backends import native
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
from engine.backends.attention.formats import format_name
from engine.backends.native.program import AddedBias
from engine.backends.native.structures import structure
from engine.host.cpus import core_cache

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_QUERIES = (torch.float32, torch.bfloat16, torch.float16)
_UNBIASED, _BY_DISTANCE, _BY_POSITION, _BY_CONTENT = range(4)
# Alignment of each thread's memory.
_ALIGNMENT = 64

_SIZES = native.Kernel("attention_sizes", "p")
_ATTEND = native.Kernel("attention", "p")


_Call: Any = structure(
    "Attention",
    "pointer q keys values out | int q_format kv_format q_token q_head key_token key_head value_token value_head |"
    "pointer key_scales value_scales centre where | int where_row block_size slots |"
    "pointer query_start context two_way | int rows tokens heads kv_heads head_dim causal left right chunk |"
    "double scale softcap | pointer bias sinks | int bias_kind bias_columns bias_zero |"
    "pointer distance_keys distance_queries distance_columns | int distances content threads cache |"
    "pointer workspace shared finished | int workspace_bytes shared_floats whole tile outside",
)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The parts that the layers of a step share: a call without their tensors, its address, and its data."""

    call: Any
    address: int
    kept: tuple[Tensor | None, ...]


class NativeAttention(AttentionBackend):
    """Tiles of queries process chunks of keys with a running softmax, all heads that share keys together.

    Sums are in float32. If queries are bfloat16, pages bfloat16 or int8, and the CPU multiplies bfloat16, the attention
    weights are rounded to bfloat16 before they are multiplied with the values, and the rounded weights are summed.
    Otherwise products are in float32.

    A query's result is the same to the bit whatever else is in the batch, however its prompt was chunked (even into
    single queries), and however many threads share the work. Another instruction set may give other bits.

    Positions that no query of a row sees are never read, so NaN or inf that another sequence left in a page cannot
    affect it.
    """

    name = "native"

    @classmethod
    def made_for(cls, device: torch.device) -> bool:
        return device.type == "cpu"

    def __init__(self) -> None:
        self._memory = threading.local()

    @classmethod
    def unsupported(
        cls, part: AttentionPart, device: torch.device, cache_dtype: torch.dtype | None = None
    ) -> list[str]:
        """Computes every part over every format of the cache except fp8, on the CPU; a content bias not over int8, and
        not for heads that share keys."""
        if device.type != "cpu":
            return [f"{cls.name} attention runs on cpu; the device is {device.type}"]
        reasons = []
        if part.content_bias and part.heads != part.kv_heads:
            reasons.append(f"{cls.name} attention does not support a content bias for heads that share keys")
        if part.content_bias and cache_dtype == torch.int8:
            reasons.append(f"{cls.name} attention does not support a content bias over int8 pages")
        if cache_dtype is not None and cache_dtype not in _FORMATS:
            reasons.append(f"{cls.name} attention does not read {format_name(cache_dtype)} pages")
        if not reasons and not native.available():
            reasons.append("there is no native library")
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
        content = isinstance(bias, ContentBias)
        if content and kv.keys.dtype == torch.int8:
            raise ValueError("no kernel for a content bias over keys of int8")
        prepared = self._prepare(q, kv, metadata, causal, window, content)
        if bias is not None or sinks is not None:
            check_shapes(q, kv, metadata, bias, sinks)
        keys, values = _slots(kv.keys), _slots(kv.values)
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        call = prepared.call
        call.q, call.keys, call.values, call.out = q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()
        call.q_token, call.q_head, _ = q.stride()
        call.key_token, call.key_head, _ = keys.stride()
        call.value_token, call.value_head, _ = values.stride()
        call.scale, call.softcap = scale, softcap or 0.0
        if isinstance(kv, Paged) and kv.key_scales is not None and kv.value_scales is not None:
            call.key_scales, call.value_scales = kv.key_scales.view(-1).data_ptr(), kv.value_scales.view(-1).data_ptr()
            call.centre = None if kv.key_centre is None else kv.key_centre.view(-1).data_ptr()
        if sinks is not None:
            sinks = sinks.float().contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        added = describe_bias(bias, keys.dtype)
        for name, value in added.fields.items():
            setattr(call, name, value)
        _ATTEND.call(prepared.address)
        del added, sinks  # they had to live until now
        if call.outside:
            call.outside = 0
            raise IndexError(f"a row's keys lie outside the {call.slots} slots")
        return out

    def describe(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        kv: Paged | Ragged,
        metadata: AttentionMetadata,
        *,
        causal: bool,
        window: Sight | None,
        content: bool,
    ) -> int:
        """The part that layers with queries of this shape [T, heads, head_dim] share in a step, for
        `engine.backends.native.program`: the address of a structure that lives as long as the metadata. `content`:
        whether a `ContentBias` is added. Raises ValueError: see `attend`."""
        return self._prepare(torch.empty((), dtype=dtype).expand(shape), kv, metadata, causal, window, content).address

    def _prepare(
        self,
        q: Tensor,
        kv: Paged | Ragged,
        metadata: AttentionMetadata,
        causal: bool,
        window: Sight | None,
        content: bool,
    ) -> _Prepared:
        """The call for this batch: checked and made by the first layer of a step, completed by each layer."""
        keys, values = kv.keys, kv.values
        where = kv.block_tables if isinstance(kv, Paged) else kv.starts
        formats = (q.dtype, keys.dtype, values.dtype, isinstance(kv, Paged) and kv.key_scales is not None)
        key = (
            self.name, q.shape, keys.shape, values.shape, formats, causal, window, content,
            where.data_ptr(), where.shape, where.stride(),
        )  # fmt: skip
        found = metadata.cache.get(key)
        if isinstance(found, _Prepared):
            return found
        check_shapes(q, kv, metadata, None)
        check_lengths(metadata, kv, causal)
        _check_formats(q, kv)
        laid = where if where.dtype == torch.int32 and where.stride(-1) == 1 else where.int().contiguous()
        start, context = metadata.query_start.contiguous(), metadata.context.contiguous()
        two_way = None if metadata.two_way is None else torch.tensor(metadata.two_way, dtype=torch.int32)
        call = _Call(
            q_format=_FORMATS[q.dtype],
            kv_format=_FORMATS[keys.dtype],
            where=laid.data_ptr(),
            where_row=laid.stride(0),
            block_size=keys.shape[1] if isinstance(kv, Paged) else 0,
            slots=keys.shape[0] * (keys.shape[1] if isinstance(kv, Paged) else 1),
            query_start=start.data_ptr(),
            context=context.data_ptr(),
            two_way=None if two_way is None else two_way.data_ptr(),
            rows=len(metadata.query_lens),
            tokens=q.shape[0],
            heads=q.shape[1],
            kv_heads=keys.shape[-2],
            head_dim=q.shape[2],
            causal=causal,
            left=window.left if isinstance(window, Window) else -1,
            right=window.right if isinstance(window, Window) else 0,
            chunk=window.size if isinstance(window, Chunks) else 0,
            content=content,
            threads=torch.get_num_threads(),
            cache=core_cache(),
        )
        _SIZES.call(ctypes.addressof(call))
        room = self._room(call)
        # `where` is kept too, so that its address stays taken and remains a valid key.
        prepared = _Prepared(call, ctypes.addressof(call), (where, laid, start, context, two_way, *room))
        metadata.cache[key] = prepared
        return prepared

    def _room(self, call: Any) -> tuple[Tensor, ...]:
        """Give a call working memory, which calls of one thread share, because they run one after the other."""
        wanted: tuple[int, ...] = (
            call.threads * call.workspace_bytes + _ALIGNMENT,
            call.threads * call.shared_floats,
            call.threads,
        )
        memory: tuple[Tensor, ...] | None = getattr(self._memory, "tensors", None)
        if memory is None or any(len(has) < size for has, size in zip(memory, wanted, strict=True)):
            if memory is not None:
                wanted = tuple(max(size, len(has)) for size, has in zip(wanted, memory, strict=True))
            memory = self._memory.tensors = (
                torch.empty(wanted[0], dtype=torch.uint8),
                torch.empty(wanted[1], dtype=torch.float32),
                torch.zeros(wanted[2], dtype=torch.int32),
            )
        workspace, call.shared, call.finished = (tensor.data_ptr() for tensor in memory)
        call.workspace = -(-workspace // _ALIGNMENT) * _ALIGNMENT
        return memory


def _check_formats(q: Tensor, kv: Paged | Ragged) -> None:
    """Raises ValueError if there is no kernel for the formats of queries, keys and values."""
    kind = kv.keys.dtype
    if q.dtype not in _QUERIES or kind not in _FORMATS or kind != kv.values.dtype:
        raise ValueError(f"no kernel for queries of {q.dtype}, keys of {kind}, values of {kv.values.dtype}")
    scales = (kv.key_scales, kv.value_scales) if isinstance(kv, Paged) else (None, None)
    if any((scale is None) != (kind != torch.int8) for scale in scales):
        raise ValueError(f"only int8 pages have scales, got keys of {kind}")


def _slots(x: Tensor) -> Tensor:
    """Keys or values as [slots, kv_heads, head_dim]; pages are never copied."""
    if x.dim() == 4:
        return x.view(-1, *x.shape[2:])
    return x if x.stride(2) == 1 else x.contiguous()


def describe_bias(bias: Bias | None, dtype: torch.dtype) -> AddedBias:
    """The description of a bias for kernels, for keys of this format."""
    kept: tuple[Tensor, ...] = ()
    fields: dict[str, int | None] = dict.fromkeys(
        ("bias", "distance_keys", "distance_queries", "distance_columns", "bias_columns", "bias_zero", "distances"), 0
    )
    match bias:
        case None:
            fields["bias_kind"] = _UNBIASED
        case ContentBias():
            columns = bias.columns.contiguous()
            fields |= {"bias_kind": _BY_CONTENT, "bias_columns": len(columns), "bias_zero": bias.zero}
            fields["distance_columns"], kept = columns.data_ptr(), (columns,)
            for name, table in (("distance_keys", bias.keys), ("distance_queries", bias.queries)):
                if table is not None:
                    laid = table.to(dtype).contiguous()
                    fields[name], fields["distances"] = laid.data_ptr(), laid.shape[1]
                    kept = (*kept, laid)
        case _:
            laid = bias.table.float().contiguous()
            fields |= {"bias": laid.data_ptr(), "bias_columns": laid.shape[1], "bias_kind": _BY_POSITION}
            if isinstance(bias, DistanceBias):
                fields |= {"bias_kind": _BY_DISTANCE, "bias_zero": bias.zero}
            kept = (laid,)
    return AddedBias(fields, kept)
