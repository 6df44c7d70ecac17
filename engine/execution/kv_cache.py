"""The tensors behind the pages, and how many pages memory allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.backends import native
from engine.backends.attention.base import Paged
from engine.backends.attention.formats import LARGEST, SCALE, PageShape, format_named, movable, vector_bytes
from engine.backends.native import memory
from engine.backends.native.copies import PageCopier
from engine.backends.triton import serves, upload
from engine.config import EngineConfig, parse_bytes
from engine.errors import ConfigError
from engine.host.cgroups import available_memory
from engine.scheduling.plan import Int32

if TYPE_CHECKING:
    from engine.backends.triton import copies as gpu_copies
    from engine.execution.state_cache import StateCache

DEFAULT_CPU_SHARE = 0.25
DEFAULT_CPU_LIMIT = 4 * 2**30
# The alignment of tensors in a shared memory.
_ALIGNED = 256


class KVCache:
    """K and V of every layer, [num_blocks + 1, block_size, kv_heads, head_dim] each, or one tensor that is both; for
    int8 and fp8 also their scales, [num_blocks + 1, block_size, kv_heads].

    Block 0 belongs to no sequence: tables are padded with it, and its content stays zero.
    """

    def __init__(
        self,
        shapes: Sequence[PageShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        key_centres: Sequence[Tensor | None] | None = None,
    ):
        """Allocate num_blocks pages and block 0 in a format of `engine.backends.attention.formats`.

        `key_centres`, for int8 and fp8 only: the vectors that are subtracted from each layer's keys
        (`Paged.key_centre`), or None. Raises ConfigError if there is not enough memory for them.
        """
        self.block_size = block_size
        self.states: StateCache | None = None  # beside the pages, if the model's layers have states
        self._paged: list[Paged] = []
        self._copier: PageCopier | None = None
        self._gpu_copier: gpu_copies.PageCopier | None = None
        self._vectors = [shape.vectors for shape in shapes]
        self.key_centres = [None] * len(shapes) if key_centres is None else list(key_centres)
        try:
            self.layers = self._allocate(shapes, (num_blocks + 1, block_size), dtype, device)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise ConfigError(
                f"No memory for the KV cache: {num_blocks} pages of {block_size} tokens take "
                f"{num_blocks * page_bytes(shapes, block_size, dtype)} bytes on {device}. Lower "
                "--num-gpu-blocks-override, --kv-cache-memory or --gpu-memory-utilization."
            ) from error

    def _allocate(
        self, shapes: Sequence[PageShape], pages: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> list[tuple[Tensor, ...]]:
        """(keys, values) of each layer, or one tensor that is both; then their scales, if they have any."""
        kinds = [dtype, *([SCALE] if dtype in LARGEST else [])]
        wanted = [
            (kind, (*pages, shape.kv_heads, shape.head_dim)[: 4 if kind is dtype else 3])
            for shape in shapes
            for kind in kinds
            for _ in range(shape.vectors)
        ]
        if serves(device) and shapes:
            tensors = self._allocate_together(wanted, device)
        elif device.type == "cpu":
            # Zeros, not garbage: the operating system provides such memory only when it is written.
            sizes = memory.staggered(len(wanted))
            tensors = [
                memory.zeros(*shape, dtype=kind, small=small)
                for (kind, shape), small in zip(wanted, sizes, strict=True)
            ]
        else:
            tensors = [torch.zeros(shape, dtype=kind, device=device) for kind, shape in wanted]
        made = iter(tensors)
        return [tuple(islice(made, len(kinds) * shape.vectors)) for shape in shapes]

    def _allocate_together(
        self, wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> list[Tensor]:
        """Tensors in one memory, so that one kernel can copy a page in all of them."""
        from engine.backends.triton.copies import PageCopier

        begins, end = [], 0
        for kind, shape in wanted:
            begins.append(end)
            end += -(-math.prod(shape) * kind.itemsize // _ALIGNED) * _ALIGNED
        whole = torch.zeros(end, dtype=torch.uint8, device=device)
        tensors = [
            whole[begin : begin + math.prod(shape) * kind.itemsize].view(kind).view(shape)
            for begin, (kind, shape) in zip(begins, wanted, strict=True)
        ]
        self._gpu_copier = PageCopier(whole, begins, [tensor[0].nbytes for tensor in tensors])
        return tensors

    def warm(self) -> None:
        """Compile the kernels that copy pages, if there are any, so that no request waits for that."""
        if self._gpu_copier is not None:
            self._gpu_copier.copy(torch.zeros((1, 2), dtype=torch.int32, device=self.layers[0][0].device))

    def copy_pages(self, copies: Int32) -> None:
        """Copy pages [C, 2] (source, destination); all sources are read before anything is written."""
        if not len(copies):
            return
        device = self.layers[0][0].device
        if device.type == "cpu" and self._gpu_copier is None and native.available():
            if self._copier is None:
                self._copier = PageCopier([tensor for layer in self.layers for tensor in layer])
            self._copier.copy(copies)
            return
        if self._gpu_copier is not None and not np.isin(copies[:, 1], copies[:, 0]).any():
            self._gpu_copier.copy(upload(copies, device))
            return
        source, target = upload(copies, device).long().unbind(1)
        for layer in self.layers:
            for tensor in layer:
                pages = movable(tensor)
                pages[target] = pages[source]

    def copy_found_pages(self, copies: Tensor) -> None:
        """Copy pages [C, 2] int32 (source, target) that a GPU has found itself; a pair of equal numbers copies nothing.
        No page is the target of one copy and the source of another."""
        assert self._gpu_copier is not None
        self._gpu_copier.copy(copies)

    def clear_scratch(self, blocks: int = 1) -> None:
        """Make block 0, or the first blocks, zero again after they were written (`engine.execution.warmup`)."""
        for layer in self.layers:
            for tensor in layer:
                tensor[:blocks].zero_()

    def forget(self) -> None:
        """Make all pages zero again, on a CPU as if none had ever been written: until then, each tensor of a layer
        holds the 2 MiB of its first pages."""
        for layer in self.layers:
            for tensor in layer:
                if tensor.device.type == "cpu":
                    memory.forget(tensor)
                else:
                    tensor.zero_()

    def paged(self, block_tables: Tensor) -> list[Paged]:
        """Each layer's pages under one set of block tables; returns the same objects again for the same tensor."""
        if not self._paged or self._paged[0].block_tables is not block_tables:
            self._paged = self.views(block_tables)
        return self._paged

    def views(self, block_tables: Tensor) -> list[Paged]:
        """Each layer's pages under one set of block tables."""
        views = []
        for layer, vectors, centre in zip(self.layers, self._vectors, self.key_centres, strict=True):
            twice = layer if vectors == 2 else tuple(tensor for tensor in layer for _ in range(2))
            keys, values, *scales = twice
            key_scales, value_scales = scales or (None, None)
            views.append(Paged(keys, values, block_tables, key_scales, value_scales, centre))
        return views


def choose_cache_dtype(setting: str, dtype: torch.dtype) -> torch.dtype:
    """The pages' format; auto takes the model's format."""
    return dtype if setting == "auto" else format_named(setting)


def page_bytes(shapes: Sequence[PageShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one page takes over all layers, K and V together, including scales."""
    return block_size * sum(each.vectors * each.kv_heads * vector_bytes(each.head_dim, dtype) for each in shapes)


def count_blocks(
    config: EngineConfig,
    shapes: Sequence[PageShape],
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_encoder_len: int | None = None,
    reserved: int = 0,
    available: int | None = None,
    beside: int = 0,
    states: int = 0,
) -> int:
    """The number of pages to allocate: what memory allows, and at most what max_num_seqs sequences of max_model_len
    tokens, each with an encoder's input of max_encoder_len, can use. `dtype` is the pages' format; `reserved` bytes of
    the memory that is free now are for other things; `available` are for pages, if that was measured
    (`engine.execution.profiling`); `states` of the memory for pages are for state slots; `beside` bytes are another
    model's for each page. Raises ConfigError if there is no room for a single page."""
    size = page_bytes(shapes, config.block_size, dtype) + beside
    useful = config.most_seqs * sum(math.ceil(n / config.block_size) for n in (max_model_len, max_encoder_len or 0))
    if config.num_gpu_blocks_override is not None:
        blocks = min(config.num_gpu_blocks_override, useful)
        return _within_memory(blocks, size, "--num-gpu-blocks-override", config, device, reserved + states)
    memory, setting = cache_memory(config, device, reserved=reserved, available=available)
    memory -= states
    blocks = min(memory // size - 1, useful)  # block 0 takes a page's memory, too
    if blocks < 1:
        raise ConfigError(
            f"No memory for the KV cache: {max(memory, 0)} bytes are available, but the smallest cache, two pages of "
            f"{config.block_size} tokens, needs {2 * size}. Raise {setting}, lower --block-size, or use a "
            f"smaller --kv-cache-dtype or a smaller model."
        )
    return _within_memory(blocks, size, setting, config, device, reserved + states)


def cache_memory(
    config: EngineConfig, device: torch.device, *, reserved: int = 0, available: int | None = None
) -> tuple[int, str]:
    """Bytes for pages and state slots, and the setting that would raise them; arguments as for `count_blocks`. Ranks
    share the memory of a CPU."""
    ranks = config.tensor_parallel_size
    if config.kv_cache_memory is not None:
        return parse_bytes(config.kv_cache_memory, "kv_cache_memory") // ranks, "--kv-cache-memory"
    if available is not None:
        return available, "--gpu-memory-utilization"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = int(free - reserved - (1.0 - config.gpu_memory_utilization) * total)
        return memory, "--gpu-memory-utilization"
    memory = min(int(DEFAULT_CPU_SHARE * (available_memory() - reserved)), DEFAULT_CPU_LIMIT)
    return memory // ranks, "--kv-cache-memory"


def _within_memory(
    blocks: int, size: int, setting: str, config: EngineConfig, device: torch.device, reserved: int
) -> int:
    """The number of pages, if a CPU's memory holds those of all ranks: the operating system would hand out more, and
    kill the process."""
    free = max(available_memory() - reserved, 0) if device.type == "cpu" else math.inf
    taken = blocks * size * config.tensor_parallel_size
    if taken > free:
        raise ConfigError(
            f"No memory for the KV cache: {blocks} pages take {taken} bytes, but only {free} bytes of memory are free. "
            f"Lower {setting}."
        )
    return blocks
