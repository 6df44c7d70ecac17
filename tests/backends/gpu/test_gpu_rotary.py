"""Norms of heads, rotation and the way into pages on a GPU (or by Triton's interpreter) against torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from support.gpu import kernels
from support.poison import poisoned
from support.rows import numbers, poisoned_pages, rotary_parts, with_extremes
from test_gpu_elementwise import by_torch

from engine.backends.attention.base import Paged
from engine.backends.attention.formats import FP8, LARGEST
from engine.backends.triton import norms, pages
from engine.backends.triton.pages import slots_of
from engine.backends.triton.rotary import Angles, HeadNorms, rotate_, rotate_and_store
from engine.model.positions import Rotary
from engine.model.rotary import RotaryTable, rotate

pytestmark = pytest.mark.slow

few = settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
BLOCK, BLOCKS, LENGTH = 4, 12, 40
parts = rotary_parts([1, 4, 12, 16, 33, 64])
PAGE_FORMATS = [torch.float32, torch.float16, torch.bfloat16, torch.int8, FP8]


@st.composite
def head_norms(
    draw: st.DrawFn, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> HeadNorms:
    """RMSNorms of all kinds and LayerNorms, whose weights differ for queries and keys, or for each head."""
    own = draw(st.booleans())
    sizes = [count * head_dim if own else head_dim for count in (heads, kv_heads)]
    weights: list[Tensor | None] = [numbers(3 + n, size, dtype=dtype).to(device) for n, size in enumerate(sizes)]
    if not draw(st.booleans()):
        rms = norms.Norm(None, 1e-5, unit_offset=draw(st.booleans()), in_float32=draw(st.booleans()))
        return HeadNorms(*(rms._replace(weight=weight) for weight in weights), own)
    biases: list[Tensor | None] = [None, None]
    if draw(st.booleans()):
        biases = [numbers(5 + n, size, dtype=dtype).to(device) for n, size in enumerate(sizes)]
    return HeadNorms(
        *(norms.Norm(weight, 1e-5, centred=True, bias=bias) for weight, bias in zip(weights, biases, strict=True)), own
    )


def normed(x: Tensor, how: norms.Norm, own: bool) -> Tensor:
    """The norm of heads [T, n, head_dim], whose weights are [n * head_dim] where they are each head's own."""
    if not own:
        return by_torch(x, how)

    def of(part: Tensor | None, head: int) -> Tensor | None:
        return None if part is None else part.view(x.shape[1], -1)[head]

    each = [how._replace(weight=of(how.weight, head), bias=of(how.bias, head)) for head in range(x.shape[1])]
    return torch.stack([by_torch(x[:, head], one) for head, one in enumerate(each)], dim=1)


def assert_same(found: Tensor, wanted: Tensor, exact: bool, dtype: torch.dtype = torch.float32) -> None:
    """Equal, or but for rounding to their format and `dtype`: in float32 that of a head's largest numbers; in 16 bits
    of a last bit, which the interpreter cuts off wherever it makes bfloat16."""
    assert found.dtype == wanted.dtype
    found, wanted = found.cpu(), wanted.cpu()
    if exact:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        return
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())
    a, b = (x.double().nan_to_num(0.0, 0.0, 0.0) for x in (found, wanted))
    steps = {torch.float32: 4e-6, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
    step = max(steps[found.dtype], steps[dtype])
    scale = b.abs().amax(-1, keepdim=True) + (step > 0.01)  # terms of a norm that cancel are as large
    assert ((a - b).abs() <= step * scale).all()
    if found.dtype == torch.float16:
        assert (a != b).sum() <= 2 + a.numel() // 25


def assert_pages(
    found: Paged, wanted: Paged, exact: bool, exact_values: bool, dtype: torch.dtype = torch.float32
) -> None:
    """The same keys and values, and the same poison where nothing was written."""
    if found.key_scales is None:
        assert_same(found.keys, wanted.keys, exact, dtype)
        assert_same(found.values, wanted.values, exact_values, dtype)
        return
    for name in ("key", "value"):
        ours, theirs = getattr(found, f"{name}_scales").cpu(), getattr(wanted, f"{name}_scales").cpu()
        same = exact_values if name == "value" else exact
        torch.testing.assert_close(ours, theirs, rtol=0 if same else 2**-6, atol=0, equal_nan=True)
        steps, wanted_steps = (getattr(pages, f"{name}s").cpu() for pages in (found, wanted))
        if same:
            assert torch.equal(steps.view(torch.uint8), wanted_steps.view(torch.uint8))
        else:
            # A last bit may decide between neighbouring steps, which lie up to 32 of fp8's 448 apart.
            a, b = (x.float().nan_to_num(0.0) for x in (steps, wanted_steps))
            assert ((a - b).abs() <= 0.08 * LARGEST[steps.dtype]).all()
            assert torch.equal(steps.float().isnan(), wanted_steps.float().isnan())


@few
@given(
    st.data(), parts, st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**20),
    st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]), st.sampled_from(PAGE_FORMATS),
    st.booleans(), st.booleans(), st.sampled_from([None, None, 0.7]), st.booleans(),
)  # fmt: skip
def test_queries_are_turned_and_keys_and_values_stored(
    data: st.DataObject,
    part_and_size: tuple[Rotary | None, int],
    tokens: int,
    heads: int,
    kv_heads: int,
    seed: int,
    dtype: torch.dtype,
    page_dtype: torch.dtype,
    centred: bool,
    extreme: bool,
    clip: float | None,
    given_slots: bool,
) -> None:
    part, head_dim = part_and_size
    stored = max(tokens - 2, 1)
    with kernels() as device:
        how = data.draw(st.one_of(st.none(), st.none(), head_norms(heads, kv_heads, head_dim, dtype, device)))
        projected = numbers(seed, tokens, heads + 2 * kv_heads, head_dim, dtype=dtype).to(device)
        if extreme and how is None:
            with_extremes(projected)
        turning, values = projected.tensor_split((heads + kv_heads,), dim=1)
        clipped = projected if clip is None else projected.clamp(-clip, clip)
        wanted, wanted_values = clipped.tensor_split((heads + kv_heads,), dim=1)
        if how is not None:
            sides = ((wanted[:, :heads], how.queries), (wanted[:, heads:], how.keys))
            wanted = torch.cat([normed(x, norm, how.own) for x, norm in sides], dim=1)
        generator = torch.Generator().manual_seed(seed)
        # Positions are those of a token each of as many rows, whose tables name each page once.
        positions = torch.randint(0, BLOCK, (tokens,), generator=generator).to(device)
        tables = (torch.randperm(BLOCKS - 1, generator=generator)[:stored] + 1).int().to(device).unsqueeze(1)
        slots = tables[:, 0].long() * BLOCK + positions[:stored]
        angles = None
        if part is not None:
            table = RotaryTable(part, head_dim, LENGTH, device)
            wanted = rotate(wanted, part, *table(positions, dtype))
            angles = Angles(table.cos, table.sin, part.interleaved, part.in_float32)
        found_pages, wanted_pages = (
            poisoned_pages((BLOCKS, BLOCK, kv_heads, head_dim), page_dtype, centred, device) for _ in range(2)
        )
        wanted_pages.write(slots, wanted[:stored, heads:], wanted_values[:stored])
        keys, kept = turning[:, heads:].clone(), values.clone()
        found_pages = replace(found_pages, block_tables=tables)
        rotate_and_store(
            turning, values, found_pages, angles=angles, positions=positions.int() if given_slots else positions,
            slots=slots if given_slots else None, norms=how, clip=clip,
        )  # fmt: skip
        untouched = part is None and how is None
        assert_same(turning[:, :heads], wanted[:, :heads], untouched)
        assert_same(turning[:, heads:], keys, True)
        assert_same(values, kept, True)
        cut = page_dtype == torch.bfloat16 != dtype
        assert_pages(found_pages, wanted_pages, untouched and not cut, not cut, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_are_turned_where_they_lie(dtype: torch.dtype) -> None:
    with kernels() as device:
        for part, head_dim in ((Rotary(dim=6, theta=1e4, interleaved=True), 9), (Rotary(dim=100, theta=1e4), 100)):
            x = numbers(1, 3, 7, head_dim, dtype=dtype).to(device)
            before = x.clone()
            positions = torch.tensor([3, 39, 0], device=device)
            table = RotaryTable(part, head_dim, LENGTH, device)
            cos, sin = table(positions, dtype)
            rotate_(x[:, :5], Angles(cos, sin, part.interleaved, False))
            assert_same(x[:, :5], rotate(before[:, :5], part, cos, sin), False)
            assert torch.equal(x[:, 5:], before[:, 5:])
            again = before.clone()
            rotate_(again[:, :5], Angles(table.cos, table.sin, part.interleaved, False), positions)
            assert torch.equal(again, x), "the whole table, or the tokens' rows of it"


def test_positions_without_angles_give_nan_and_no_slot() -> None:
    with kernels() as device:
        table = RotaryTable(Rotary(dim=8, theta=1e4), 8, LENGTH, device)
        x = numbers(1, 3, 2, 8).to(device)
        pages = replace(
            poisoned_pages((BLOCKS, BLOCK, 1, 8), torch.float32, False, device),
            block_tables=torch.tensor([[1], [2], [3]], dtype=torch.int32, device=device),
        )
        positions = torch.tensor([LENGTH, -1, 2], device=device)
        rotate_and_store(
            x, x[:, 1:].clone(), pages, angles=Angles(table.cos, table.sin, False, False), positions=positions
        )
        assert x[:2, 0].isnan().all()
        assert x[2].isfinite().all()
        written = pages.keys.isfinite().all(-1).view(-1).nonzero().view(-1)
        assert written.tolist() == [3 * BLOCK + 2], "nothing goes outside a row's table"


def test_block_0_and_what_lies_outside_the_pages_stay_as_they_were() -> None:
    with kernels() as device:
        x = numbers(1, 5, 2, 8).to(device)
        pages = poisoned_pages((BLOCKS, BLOCK, 1, 8), torch.int8, False, device)
        slots = torch.tensor([0, BLOCK - 1, -1, BLOCKS * BLOCK, 2**40], device=device)
        rotate_and_store(x, x[:, 1:].clone(), pages, slots=slots)
        rows = replace(pages, block_tables=torch.zeros(5, 3, dtype=torch.int32, device=device))
        rotate_and_store(x, x[:, 1:].clone(), rows, positions=torch.zeros(5, dtype=torch.int64, device=device))
        assert_pages(pages, poisoned_pages((BLOCKS, BLOCK, 1, 8), torch.int8, False, device), True, True)


def test_slots_beyond_32_bits() -> None:
    """Slots are 64 bits wide: what lies beyond 32 is not taken for what its lower half names."""
    with kernels() as device:
        x = numbers(1, 1, 2, 64).to(device)
        table = torch.tensor([[2**21]], dtype=torch.int32, device=device)
        positions = torch.tensor([5], device=device)
        found = slots_of(table, torch.tensor([0, 1], dtype=torch.int32, device=device), positions, 2**14)
        assert found.tolist() == [2**35 + 5]
        pages = poisoned_pages((BLOCKS, BLOCK, 1, 64), torch.float32, False, device)
        rotate_and_store(x, x[:, 1:].clone(), pages, slots=torch.tensor([2**40 + BLOCK], device=device))
        assert pages.keys.isnan().all(), "a slot is not cut to 32 bits"


@few
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 3), st.integers(0, 2**20))
def test_slots(lengths: list[int], padding: int, seed: int) -> None:
    with kernels() as device, poisoned(pages):
        generator = torch.Generator().manual_seed(seed)
        tables = torch.randint(1, 2**20, (len(lengths), 7), generator=generator, dtype=torch.int32)
        before = torch.randint(0, 6 * BLOCK + 1 - 9, (len(lengths),), generator=generator).tolist()
        positions = [first + n for first, length in zip(before, lengths, strict=True) for n in range(length)]
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        wanted = [int(tables[row, p // BLOCK]) * BLOCK + p % BLOCK for row, p in zip(rows, positions, strict=True)]
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        found = slots_of(
            torch.nn.functional.pad(tables.to(device), (0, 3))[:, :7],
            starts.to(device),
            torch.tensor(positions + [2**30] * padding, dtype=torch.int64, device=device),
            BLOCK,
        )
        assert found.tolist() == wanted + [0] * padding


def test_every_step_of_fp8() -> None:
    """Numbers, those halfway between, and their neighbours become the same bytes as torch makes of them."""
    with kernels() as device:
        exact = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        middle = (exact[1:] + exact[:-1]) / 2
        inf = torch.tensor(torch.inf)
        x = torch.cat((exact, middle, middle.nextafter(inf), middle.nextafter(-inf), torch.tensor([448.0])))
        x = torch.cat((x, -x))[: 8 * 126].view(-1, 1, 126).to(device)
        x[:, :, 0] = 448.0  # so the scale is 1
        found, wanted = (poisoned_pages((BLOCKS, BLOCK, 1, 126), FP8, False, device) for _ in range(2))
        slots = torch.arange(len(x), device=device) + BLOCK
        wanted.write(slots, x, x)
        rotate_and_store(torch.cat((x, x), dim=1), x, found, slots=slots)
        assert wanted.value_scales is not None
        assert wanted.value_scales.view(-1)[slots].eq(1).all()
        assert_pages(found, wanted, True, True)


def test_what_does_not_fit_is_refused() -> None:
    with kernels() as device:
        pages = poisoned_pages((BLOCKS, BLOCK, 2, 8), torch.float32, False, device)
        x, values = torch.ones(3, 5, 8, device=device), torch.ones(3, 2, 8, device=device)
        slots, cos, sin = torch.arange(3), torch.ones(9, 8), torch.ones(9, 4)
        for call in (
            lambda: rotate_and_store(x, values[:2], pages, slots=slots),
            lambda: rotate_and_store(x, values[:, :1], pages, slots=slots),
            lambda: rotate_and_store(x, values.half(), pages, slots=slots),
            lambda: rotate_and_store(x, values, pages, slots=torch.arange(4)),
            lambda: rotate_and_store(x, values, pages),
            lambda: rotate_and_store(x, values, replace(pages, keys=pages.keys.transpose(0, 1)), slots=slots),
            lambda: rotate_and_store(x, values, replace(pages, key_scales=slots, value_scales=slots), slots=slots),
            lambda: rotate_and_store(x, values, pages, slots=slots, positions=slots[:2]),
            lambda: rotate_(x, Angles(cos[:2], sin, False, False)),
            lambda: rotate_(x, Angles(cos[:, :7], sin, False, False)),
            lambda: rotate_(x, Angles(cos, sin.t(), False, False)),
            lambda: rotate_(x.transpose(1, 2), Angles(cos, sin, False, False)),
            lambda: rotate_(torch.ones(1, 1, 1025), Angles(torch.ones(9, 1025), sin, False, False)),
        ):
            with pytest.raises(ValueError):
                call()
