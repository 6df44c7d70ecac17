"""Rotation and the way into pages against torch's: bit for bit, but for what float32 may round otherwise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native import each_isa, kernels_of, needs_native
from support.rows import CPU, numbers, poisoned_pages, rotary_parts, with_extremes
from torch import Tensor

from engine.backends.attention.base import Paged
from engine.backends.native.rotary import Rotation, rotate_, rotate_and_store
from engine.model.positions import Rotary
from engine.model.rotary import RotaryTable, rotate

pytestmark = needs_native
few = settings(max_examples=25, deadline=None, derandomize=True)
threads = st.sampled_from([1, 2])
BLOCK, BLOCKS = 4, 30
parts = rotary_parts(range(1, 41))


def assert_same(found: Tensor, wanted: Tensor, exact: bool) -> None:
    """Equal, or but for float32's rounding of a head's largest numbers; in 16 bits that may decide a last bit."""
    assert found.dtype == wanted.dtype
    if exact:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        return
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())
    a, b = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (found, wanted))
    step = 2.0**-7 if found.dtype.itemsize == 2 else 1e-6
    assert ((a - b).abs() <= step * b.abs().amax(-1, keepdim=True)).all()
    if found.dtype.itemsize == 2:
        assert (a != b).sum() <= 1 + a.numel() // 100


@each_isa
@few
@given(
    parts, st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**20),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]), st.booleans(), st.booleans(), threads,
)  # fmt: skip
def test_queries_are_turned_and_keys_and_values_stored(
    isa: str,
    part_and_size: tuple[Rotary | None, int],
    tokens: int,
    heads: int,
    kv_heads: int,
    seed: int,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    centred: bool,
    extreme: bool,
    cores: int,
) -> None:
    part, head_dim = part_and_size
    stored = max(tokens - 2, 1)
    projected = numbers(seed, tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    if extreme:
        with_extremes(projected)
    turning, values = projected.tensor_split((heads + kv_heads,), dim=1)
    slots = torch.randperm(BLOCK * BLOCKS, generator=torch.Generator().manual_seed(seed))[:stored]
    rotation = None
    wanted = turning
    if part is not None:
        positions = torch.randint(0, 500, (tokens,), generator=torch.Generator().manual_seed(seed))
        cos, sin = RotaryTable(part, head_dim, 500, CPU)(positions, dtype)
        wanted = rotate(turning, part, cos, sin)
        rotation = Rotation(cos, sin, part.interleaved)
    found_pages, wanted_pages = (
        poisoned_pages((BLOCKS, BLOCK, kv_heads, head_dim), page_dtype, centred) for _ in range(2)
    )
    wanted_pages.write(slots, wanted[:stored, heads:], values[:stored])
    keys = turning[:, heads:].clone()
    with kernels_of(isa, cores):
        rotate_and_store(turning, values, rotation, found_pages, slots)
    assert_same(turning[:, :heads], wanted[:, :heads], part is None)
    assert_same(turning[:, heads:], keys, True)
    assert_same(found_pages.values, wanted_pages.values, True)
    if page_dtype == torch.int8:
        assert found_pages.key_scales is not None
        assert found_pages.value_scales is not None
        assert wanted_pages.key_scales is not None
        assert wanted_pages.value_scales is not None
        assert_same(found_pages.value_scales, wanted_pages.value_scales, True)
        torch.testing.assert_close(found_pages.key_scales, wanted_pages.key_scales, rtol=2**-7, atol=0, equal_nan=True)
        assert (found_pages.keys.int() - wanted_pages.keys.int()).abs().max() <= 1
    else:
        assert_same(found_pages.keys, wanted_pages.keys, part is None)


@each_isa
@few
@given(parts, st.integers(1, 30), st.integers(1, 5), st.integers(0, 2**20), st.booleans(), threads)
def test_heads_are_turned_where_they_lie(
    isa: str, part_and_size: tuple[Rotary | None, int], tokens: int, heads: int, seed: int, half: bool, cores: int
) -> None:
    part, head_dim = part_and_size
    if part is None:
        return
    dtype = torch.bfloat16 if half else torch.float32
    x = numbers(seed, tokens, heads + 2, head_dim, dtype=dtype)
    before = x.clone()
    cos, sin = RotaryTable(part, head_dim, 64, CPU)(torch.arange(tokens), dtype)
    rotation = Rotation(cos, sin, part.interleaved)
    with kernels_of(isa, cores):
        rotate_(x[:, :heads], rotation)
        assert_same(x[:, :heads], rotate(before[:, :heads], part, cos, sin), False)
        assert torch.equal(x[:, heads:], before[:, heads:])
        alone = before[-1:, :heads].contiguous()
        rotate_(alone, Rotation(cos[-1:], sin[-1:], part.interleaved))
        assert torch.equal(alone[0], x[-1, :heads])


@each_isa
def test_every_half_is_rounded_as_torch_does(isa: str) -> None:
    """All numbers of 16 bits, those between two of them, and those just beside the middle."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    exact = bits.view(torch.float16).float()
    middle = (exact + exact.roll(-1)) / 2
    x = torch.cat(
        (exact, middle, middle.nextafter(torch.tensor(torch.inf)), middle.nextafter(torch.tensor(-torch.inf)))
    )
    x = x.view(-1, 1, 64)
    for dtype in (torch.float16, torch.bfloat16):
        found, wanted = (torch.zeros(len(x) // 16, 16, 1, 64, dtype=dtype) for _ in range(2))
        tables = torch.zeros(1, 1, dtype=torch.int32)
        slots = torch.arange(len(x))
        Paged(wanted, wanted.clone(), tables).write(slots, x, x)
        with kernels_of(isa):
            rotate_and_store(torch.cat((x, x), dim=1), x, None, Paged(found, found.clone(), tables), slots)
        assert_same(found, wanted, True)


def test_what_does_not_fit_is_refused() -> None:
    pages = poisoned_pages((BLOCKS, BLOCK, 2, 8), torch.float32, False)
    x, values, slots = torch.ones(3, 5, 8), torch.ones(3, 2, 8), torch.arange(3)
    cos, sin = torch.ones(3, 1, 8), torch.ones(3, 1, 4)
    for call in (
        lambda: rotate_and_store(x, values[:2], None, pages, slots),
        lambda: rotate_and_store(x, values[:, :1], None, pages, slots),
        lambda: rotate_and_store(x, values.bfloat16(), None, pages, slots),
        lambda: rotate_and_store(x, values, None, pages, torch.arange(4)),
        lambda: rotate_and_store(x, values, None, pages, slots.int()),
        lambda: rotate_and_store(x, values, Rotation(cos[:2], sin, False), pages, slots),
        lambda: rotate_and_store(x, values, Rotation(cos, sin.bfloat16(), False), pages, slots),
        lambda: rotate_(x.transpose(1, 2), Rotation(cos, sin, False)),
        lambda: rotate_(x, Rotation(cos.bfloat16(), sin.bfloat16(), False)),
    ):
        with pytest.raises(ValueError):
            call()
