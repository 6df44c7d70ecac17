"""The content of pages and of state slots as bytes on the host, so that it can be stored outside the KV cache and
restored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends import native
from engine.backends import triton as gpu
from engine.execution.kv_cache import KVCache
from engine.execution.transfers import Download

Bytes = NDArray[np.uint8]


class Content(Protocol):
    """Pages, or state slots, as bytes on the host (`engine.execution.page_content`). `size`: bytes of one."""

    size: int

    def read(self, page: int) -> Callable[[], Bytes]:
        """Copy a page; the result waits for the copy."""

    def write(self, pages: Sequence[int], content: Bytes) -> None:
        """Fill pages [P] from content [P, size]."""


def contents_of(cache: KVCache) -> list[PageContent]:
    """Access to a cache's pages, then to its state slots if it has some."""
    contents = [PageContent([tensor for layer in cache.layers for tensor in layer])]
    return contents if cache.states is None else [*contents, PageContent(cache.states.layers)]


def shape_of(cache: KVCache) -> str:
    """Digest of what shapes the bytes of a cache's pages besides the model and the settings: kernels, and the centres
    that are subtracted from keys."""
    library, digest = native.current(), hashlib.blake2b(digest_size=16)
    digest.update(b"" if library is None else library.name.encode())
    for centre in cache.key_centres:
        digest.update(b"-" if centre is None else centre.float().cpu().numpy().tobytes())
    return digest.hexdigest()


class PageContent:
    """Reads and writes whole pages, or state slots, of a cache.

    A page's bytes are those of all layers' tensors [pages, ...], one after the other. `size`: bytes of a page.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        # [pages, bytes]; they share memory with the cache.
        self._views = [tensor.view(torch.uint8).view(tensor.shape[0], -1) for tensor in tensors]
        self._device = tensors[0].device
        ends = np.cumsum([view.shape[1] for view in self._views]).tolist()
        self._parts = [slice(end - view.shape[1], end) for view, end in zip(self._views, ends, strict=True)]
        self.size: int = ends[-1]
        self._arrays = [view.numpy() for view in self._views] if self._device.type == "cpu" else []

    def read(self, page: int) -> Callable[[], Bytes]:
        """Copy a page to the host; the result waits for the copy, and returns [size] bytes. The page may be written
        again by later steps."""
        if self._arrays:
            content = np.empty(self.size, dtype=np.uint8)
            for array, part in zip(self._arrays, self._parts, strict=True):
                content[part] = array[page]
            return lambda: content
        with torch.inference_mode(), gpu.current(self._device):
            return Download(torch.cat([view[page] for view in self._views])).wait

    def write(self, pages: Sequence[int], content: Bytes) -> None:
        """Fill pages from content [pages, size], before any later step."""
        if self._arrays:
            for array, part in zip(self._arrays, self._parts, strict=True):
                array[pages] = content[:, part]
            return
        with torch.inference_mode(), gpu.current(self._device):
            index = torch.tensor(pages, device=self._device)
            sent = torch.from_numpy(content).to(self._device)
            for view, part in zip(self._views, self._parts, strict=True):
                view[index] = sent[:, part]
