"""Copies of pages on a GPU (or by Triton's interpreter), in all tensors of the cache at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from support.gpu import kernels

from engine.backends.attention.formats import FORMATS, PageShape, movable
from engine.backends.triton import copies
from engine.execution.kv_cache import KVCache

# (KV heads, features) of layers; pages of (3, 64) are larger than what a program copies.
SHAPES = [[PageShape(2, 8)], [PageShape(1, 7, 1)], [PageShape(3, 64), PageShape(1, 7), PageShape(2, 40)]]


def filled(cache: KVCache) -> list[torch.Tensor]:
    """All tensors' bytes, which are random."""
    tensors = [movable(tensor).view(torch.uint8) for layer in cache.layers for tensor in layer]
    for number, tensor in enumerate(tensors):
        generator = torch.Generator().manual_seed(number)
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator, dtype=torch.uint8))
    return tensors


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    shapes=st.sampled_from(SHAPES),
    size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(FORMATS),
    order=st.permutations(range(7)),
    count=st.integers(1, 5),
    targets=st.integers(1, 3),
)
def test_pages_are_copied_and_nothing_else(
    shapes: list[tuple[int, int]], size: int, dtype: torch.dtype, order: list[int], count: int, targets: int
) -> None:
    """Several copies of a page, too. What lies between the tensors stays as it is."""
    pairs = np.array([(order[place // targets], order[6 - place]) for place in range(count)], dtype=np.int32)
    chained = bool(np.isin(pairs[:, 1], pairs[:, 0]).any())
    with kernels() as device, pytest.MonkeyPatch.context() as patch:
        cache = KVCache(shapes, 6, size, dtype, device)
        assert cache._gpu_copier is not None
        launched = []
        copy = cache._gpu_copier.copy
        patch.setattr(cache._gpu_copier, "copy", lambda given: (launched.append(given), copy(given)))
        tensors = filled(cache)
        wanted = [tensor.clone() for tensor in tensors]
        for tensor in wanted:
            tensor[pairs[:, 1]] = tensor[pairs[:, 0]]
        memory = cache._gpu_copier._memory.view(torch.uint8)
        before = int(memory.sum(dtype=torch.int64)) - sum(int(t.sum(dtype=torch.int64)) for t in tensors)
        assert before == 0
        cache.copy_pages(pairs)
        assert all(map(torch.equal, tensors, wanted))
        assert int(memory.sum(dtype=torch.int64)) == sum(int(t.sum(dtype=torch.int64)) for t in tensors)
        assert len(launched) == (not chained)


@pytest.mark.parametrize("dtype", FORMATS)
def test_pages_that_a_gpu_has_found_are_copied_in_every_format(dtype: torch.dtype) -> None:
    """As the kernel of beams names them: two equal numbers are no copy, whatever they are."""
    pairs = torch.tensor([[0, 0], [4, 1], [2, 2], [4, 6], [3, 5], [0, 0]], dtype=torch.int32)
    with kernels() as device:
        cache = KVCache(SHAPES[2], 6, 16, dtype, device)
        tensors = filled(cache)
        wanted = [tensor.clone() for tensor in tensors]
        for tensor in wanted:
            tensor[[1, 6, 5]] = tensor[[4, 4, 3]]
        assert not any(map(torch.equal, tensors, wanted))
        cache.copy_found_pages(pairs.to(device))
        assert all(map(torch.equal, tensors, wanted))


def test_tensors_are_as_they_are_elsewhere() -> None:
    for dtype in FORMATS:
        plain = KVCache(SHAPES[2], 4, 16, dtype, torch.device("cpu"))
        assert plain._gpu_copier is None
        with kernels() as device:
            cache = KVCache(SHAPES[2], 4, 16, dtype, device)
            cache.warm()
        first = cache.layers[0][0].data_ptr()
        for one, other in zip(cache.layers, plain.layers, strict=True):
            assert [(t.shape, t.dtype, t.stride()) for t in one] == [(t.shape, t.dtype, t.stride()) for t in other]
            assert all((t.data_ptr() - first) % 256 == 0 and not movable(t).any() for t in one)


def test_words_are_as_wide_as_everything_allows() -> None:
    with kernels() as device:
        memory = torch.zeros(64, dtype=torch.uint8, device=device)
        assert copies.PageCopier(memory, [0, 32], [8, 16])._memory.dtype == torch.int64
        assert copies.PageCopier(memory, [0, 32], [8, 6])._memory.dtype == torch.uint8
        assert copies.PageCopier(memory, [0, 36], [8, 8])._memory.dtype == torch.uint8
