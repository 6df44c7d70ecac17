"""Large memory: where it begins, what is in it, that it is shared out without overlaps."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from engine.backends.attention.formats import PageShape
from engine.backends.native.memory import HUGE, Arena, forget, huge, zeros
from engine.execution.kv_cache import KVCache


def test_zeros_begin_at_a_large_page() -> None:
    made = zeros(3, HUGE, 2, dtype=torch.bfloat16)
    assert made.shape == (3, HUGE, 2)
    assert made.data_ptr() % HUGE == 0
    assert not made.any()
    made.fill_(1)
    assert bool((made == 1).all())
    assert not zeros(5, 2, dtype=torch.float32).any()


def test_no_two_tensors_of_the_cache_need_a_new_large_page_for_the_same_token() -> None:
    cache = KVCache([PageShape(2, 64)] * 4, 4096, 16, torch.bfloat16, torch.device("cpu"))
    tensors = [tensor for layer in cache.layers for tensor in layer]
    begins = [-tensor.data_ptr() % HUGE for tensor in tensors]
    assert sorted(begins) == [place * HUGE // 8 for place in range(8)]
    assert all(tensor.data_ptr() % mmap.PAGESIZE == 0 and tensor.nbytes > 4 * HUGE for tensor in tensors)


def test_what_is_forgotten_is_zero_and_takes_no_memory() -> None:
    for made in (zeros(3, HUGE + 5, dtype=torch.int8), zeros(7, dtype=torch.int8)):
        made.fill_(1)
        forget(made)
        if len(made) == 3 and sys.platform == "linux":
            assert not {*resident(made)[: made.nbytes // mmap.PAGESIZE]} & {1}
        assert not made.any()
        made.fill_(2)
        assert bool((made == 2).all())


def resident(tensor: torch.Tensor) -> bytes:
    """For each page of a tensor that begins at one, whether it is in memory (mincore)."""
    found = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    ask = ctypes.CDLL(None).mincore
    ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert ask(tensor.data_ptr(), tensor.nbytes, found) == 0
    return bytes(found)


def test_memory_too_large_is_refused() -> None:
    for size in (2**60, 2**70):
        with pytest.raises(MemoryError, match=str(size)):
            huge(size)


def test_pieces_do_not_overlap() -> None:
    arena = Arena()
    sizes = [1, 64, 65, 1000, HUGE, 2**26 - 10, 2**26, 3, 2**27]
    pieces = [arena.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece[:1] = number
        piece[-1:] = number
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        assert piece.shape == (size,)
        assert (int(piece[0]), int(piece[-1])) == (number, number)


def test_a_piece_keeps_its_memory() -> None:
    arena = Arena()
    piece = arena.take(HUGE)
    piece.fill_(7)
    arena.take(2**26)
    del arena
    gc.collect()
    assert bool((piece == 7).all())


def test_the_system_is_asked_for_large_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not hasattr(mmap, "MADV_HUGEPAGE") or not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("the system has no large pages to ask for")

    def marked(address: int) -> bool:
        """The mapping around an address has been advised (VmFlags hg)."""
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                first, last = (int(part, 16) for part in head.split("-"))
                inside = first <= address < last
            elif inside and head == "VmFlags:":
                return "hg" in line.split()
        return False

    assert marked(huge(4 * HUGE).data_ptr() + HUGE)
