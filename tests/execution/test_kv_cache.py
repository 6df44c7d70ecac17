"""The pages' tensors, and how many pages memory allows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.backends import native
from engine.backends.attention.formats import PageShape
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution import kv_cache
from engine.execution.kv_cache import KVCache, available_memory, count_blocks, page_bytes

CPU = torch.device("cpu")
SHAPES = [PageShape(2, 4), PageShape(1, 8)]


def filled_cache(num_blocks: int = 4) -> KVCache:
    """Every page holds its own number, in the values negated."""
    cache = KVCache(SHAPES, num_blocks, 3, torch.float32, CPU)
    for keys, values in cache.layers:
        for page in range(num_blocks + 1):
            keys[page], values[page] = page, -page
    return cache


def pages(cache: KVCache) -> list[int]:
    """Which page's content each page holds, the same in all layers."""
    found = [keys[:, 0, 0, 0].tolist() for keys, _ in cache.layers]
    for (keys, values), content in zip(cache.layers, found, strict=True):
        assert content == found[0]
        for page, number in enumerate(content):
            assert (keys[page] == number).all()
            assert (values[page] == -number).all()
    return [int(number) for number in found[0]]


def copies(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


class TestPages:
    def test_shape_of_each_layer(self) -> None:
        cache = KVCache(SHAPES, 5, 16, torch.bfloat16, CPU)
        assert [tuple(keys.shape) for keys, _ in cache.layers] == [(6, 16, 2, 4), (6, 16, 1, 8)]
        for keys, values in cache.layers:
            assert keys.shape == values.shape
            assert keys.dtype == values.dtype == torch.bfloat16
            assert not keys.any()
            assert not values.any()

    def test_a_copy_goes_to_all_layers_and_nowhere_else(self) -> None:
        cache = filled_cache()
        cache.copy_pages(copies((1, 3)))
        assert pages(cache) == [0, 1, 2, 1, 4]

    def test_all_sources_are_read_before_anything_is_written(self) -> None:
        """A swap, a chain and a fan-out, each wrong if a destination is written too early."""
        cache = filled_cache()
        cache.copy_pages(copies((1, 2), (2, 1)))
        assert pages(cache) == [0, 2, 1, 3, 4]
        cache = filled_cache()
        cache.copy_pages(copies((1, 2), (2, 3), (3, 4)))
        assert pages(cache) == [0, 1, 1, 2, 3]
        cache = filled_cache()
        cache.copy_pages(copies((4, 1), (4, 2), (4, 3)))
        assert pages(cache) == [0, 4, 4, 4, 4]

    def test_kernels_and_torch_copy_alike(self) -> None:
        rng = np.random.default_rng(0)
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            made = [KVCache([PageShape(3, 64), PageShape(1, 7)], 200, 16, dtype, CPU) for _ in range(2)]
            for one, other in zip(*(cache.layers for cache in made), strict=True):
                for mine, theirs in zip(one, other, strict=True):
                    mine.copy_(torch.from_numpy(rng.integers(0, 99, mine.shape)))
                    theirs.copy_(mine)
            pairs = rng.permutation(200)[:120].reshape(-1, 2).astype(np.int32) + 1
            made[0].copy_pages(pairs)
            with native.use(None):
                made[1].copy_pages(pairs)
            for one, other in zip(*(cache.layers for cache in made), strict=True):
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
            with pytest.raises(IndexError):
                made[0].copy_pages(copies((1, 201)))

    def test_no_copies(self) -> None:
        cache = filled_cache()
        cache.copy_pages(copies())
        assert pages(cache) == [0, 1, 2, 3, 4]

    def test_backends_see_the_memory_itself(self) -> None:
        cache = filled_cache()
        tables = torch.tensor([[1, 2]], dtype=torch.int32)
        views = cache.paged(tables)
        assert len(views) == len(SHAPES)
        views[1].keys[2] = 7.0
        assert (cache.layers[1][0][2] == 7.0).all()
        assert all(view.block_tables is tables for view in views)


class TestHowMany:
    @pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
    def test_bytes_of_a_page(self, dtype: torch.dtype, itemsize: int) -> None:
        cache = KVCache(SHAPES, 9, 3, dtype, CPU)
        real = sum(tensor[0].nbytes for pair in cache.layers for tensor in pair)
        assert page_bytes(SHAPES, 3, dtype) == real == 2 * 3 * 16 * itemsize

    def count(self, max_model_len: int = 100, **settings: object) -> int:
        config = EngineConfig(model="m", block_size=10, max_num_seqs=8, **settings)  # type: ignore[arg-type]
        return count_blocks(config, SHAPES, max_model_len, torch.float32, CPU)

    def test_memory_is_divided_by_pages(self) -> None:
        """Block 0, which no sequence gets, is paid from it too."""
        size = page_bytes(SHAPES, 10, torch.float32)
        assert self.count(kv_cache_memory=8 * size) == 7
        assert self.count(kv_cache_memory=9 * size - 1) == 7

    def test_never_more_than_the_longest_requests_can_use(self) -> None:
        assert self.count(kv_cache_memory="1GiB") == 8 * 10
        assert self.count(max_model_len=101, kv_cache_memory="1GiB") == 8 * 11
        config = EngineConfig(model="m", block_size=10, max_num_seqs=8, kv_cache_memory="1GiB")
        assert count_blocks(config, SHAPES, 100, torch.float32, CPU, max_encoder_len=41) == 8 * (10 + 5)

    def test_a_number_of_pages_goes_before_everything(self) -> None:
        assert self.count(num_gpu_blocks_override=3, kv_cache_memory="1GiB") == 3
        assert self.count(num_gpu_blocks_override=5000) == 8 * 10, "more is of no use to anyone"

    def test_without_a_setting_a_share_of_free_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        size = page_bytes(SHAPES, 10, torch.float32)
        monkeypatch.setattr(kv_cache, "available_memory", lambda: 4 * 6 * size)
        assert self.count() == 5
        monkeypatch.setattr(kv_cache, "available_memory", lambda: 2**50)
        assert self.count(max_model_len=10**9) == 4 * 2**30 // size - 1

    def test_no_room_names_memory_page_and_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        size = page_bytes(SHAPES, 10, torch.float32)
        with pytest.raises(ConfigError) as error:
            self.count(kv_cache_memory=2 * size - 1)
        for part in (str(2 * size - 1), str(2 * size), "--kv-cache-memory", "--block-size"):
            assert part in str(error.value)
        monkeypatch.setattr(kv_cache, "available_memory", lambda: 0)
        with pytest.raises(ConfigError, match="0 bytes are available"):
            self.count()

    def test_memory_that_is_not_there_is_a_clear_error(self) -> None:
        with pytest.raises(ConfigError, match=r"No memory for the KV cache: 1000000000000 pages .* take \d+ bytes"):
            KVCache(SHAPES, 10**12, 16, torch.float32, CPU)

    def test_available_memory_is_a_plausible_number(self) -> None:
        assert 2**20 < available_memory() < 2**50
