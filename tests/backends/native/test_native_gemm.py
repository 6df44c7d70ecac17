"""Products with packed weights against float64: each instruction set that the machine has, odd sizes, strided rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blocks import numbers, random_blocks
from support.native import ISAS, each_amx, each_isa, kernels_of, needs_amx, needs_native
from support.rows import apart
from torch import Tensor

from engine.backends.native import gemm
from engine.backends.native.build import EMULATED_TILES
from engine.backends.native.gemm import GROUP, BlockKind, Form, Packed, Quantised, matmul
from engine.model import quantisation
from engine.model.gguf.blocks import groups_of, held_size

pytestmark = needs_native
few = settings(max_examples=20, deadline=None, derandomize=True)
FORMATS = [torch.float32, torch.bfloat16]
FLOAT32, BFLOAT16 = 2.0**-24, 2.0**-8  # how far rounding moves a number at most, relative to it


@dataclass(frozen=True, slots=True)
class Case:
    """Operands of a product, and how it is made."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    result: torch.dtype
    threads: int

    def run(self, packed: Packed) -> Tensor:
        """The product, into rows that lie apart, with what surrounds them untouched."""
        rows, outputs = self.x.shape[0], self.weight.shape[0]
        room = torch.full((rows + 1, outputs + 3), torch.nan, dtype=self.result)
        found = matmul(packed, apart(self.x), room[:rows, 1 : 1 + outputs])
        assert room[:rows, 0].isnan().all()
        assert room[:rows, 1 + outputs :].isnan().all()
        assert room[rows].isnan().all()
        return found

    def finished(self, sums: Tensor) -> Tensor:
        """Float32 sums with the bias, in the result's format."""
        return (sums if self.bias is None else sums + self.bias).to(self.result)


SIZES = st.one_of(st.integers(1, 140), st.sampled_from([576, 1000]))


@st.composite
def cases(draw: st.DrawFn, sizes: st.SearchStrategy[int] = SIZES) -> Case:
    rows = draw(st.one_of(st.integers(1, 30), st.sampled_from([64, 131])))
    outputs = draw(st.one_of(st.integers(1, 100), st.sampled_from([256, 577])))
    inputs = draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    weight = torch.randn(outputs, inputs, generator=generator).to(draw(st.sampled_from(FORMATS)))
    # Rows of very different sizes, as activations are.
    x = torch.randn(rows, inputs, generator=generator) * torch.rand(rows, 1, generator=generator).mul(12).exp2()
    bias = torch.randn(outputs, generator=generator) if draw(st.booleans()) else None
    formats = st.sampled_from(FORMATS)
    return Case(x.to(draw(formats)), weight, bias, draw(formats), draw(st.sampled_from([1, 2])))


# By matrix tiles: inputs that fill them, in one slice and several.
tiled = cases(st.one_of(st.integers(1, 5).map(lambda n: 32 * n), st.sampled_from([768, 800, 1600])))


def _assert_sums(found: Tensor, case: Case, x: Tensor, weight: Tensor, steps: int, added: Tensor | None = None) -> None:
    """Within what `steps` roundings to float32 of sums of x @ weight.T (float64) may make, and the last one. `added`:
    how large the parts of each weight are together that are multiplied apart."""
    wanted, magnitude = x @ weight.T, x.abs() @ (weight.abs() if added is None else added).T
    if case.bias is not None:
        wanted, magnitude = wanted + case.bias.double(), magnitude + case.bias.double().abs()
    bound = steps * FLOAT32 / (1 - steps * FLOAT32) * magnitude
    if case.result == torch.bfloat16:
        bound = bound + BFLOAT16 * (wanted.abs() + bound)
    assert ((found.double() - wanted).abs() <= bound + 1e-30).all()


@each_isa
@few
@given(cases())
def test_weights_of_floating_point(isa: str, case: Case) -> None:
    """Bound: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1."""
    with kernels_of(isa, case.threads):
        found = case.run(gemm.pack(case.weight, case.bias))
    rounded = case.x.to(case.weight.dtype).double()  # float32 rows become bfloat16 before bfloat16 weights
    x = rounded if case.weight.dtype == torch.bfloat16 else case.x.double()
    _assert_sums(found, case, x, case.weight.double(), case.x.shape[1] + 2)


@each_amx
@few
@given(tiled)
def test_weights_of_floating_point_by_tiles(isa: str, case: Case) -> None:
    """float32 is six products of parts and what the three others would give, each less than a rounding."""
    with kernels_of(isa, case.threads):
        packed = gemm.pack(case.weight, case.bias, amx=True)
        assert packed.kind == ("amx_bfloat16" if case.weight.dtype == torch.bfloat16 else "amx_float32")
        found = case.run(packed)
    rounded = case.x.to(case.weight.dtype).double()
    x = rounded if case.weight.dtype == torch.bfloat16 else case.x.double()
    _assert_sums(found, case, x, case.weight.double(), 6 * case.x.shape[1] + 4)


@each_amx
@pytest.mark.parametrize("inputs", [768, 3072])
def test_tiles_err_less_than_vectors(isa: str, inputs: int) -> None:
    generator = torch.Generator().manual_seed(7)
    weight, x = torch.randn(96, inputs, generator=generator), torch.randn(40, inputs, generator=generator)
    with kernels_of(isa):
        errors = [
            (matmul(gemm.pack(weight, amx=amx), x).double() - x.double() @ weight.double().T).square().mean().sqrt()
            for amx in (True, False)
        ]
    assert errors[0] < errors[1]


@each_amx
@few
@given(tiled)
def test_a_row_by_tiles_does_not_depend_on_the_others(isa: str, case: Case) -> None:
    assert_rows_are_independent(isa, partial(gemm.pack, amx=True), case)


@each_amx
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("inputs", [64, 1600])
def test_many_rows_by_tiles_are_those_of_one(isa: str, dtype: torch.dtype, inputs: int) -> None:
    """Also with more tiles than share a panel's parts."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, inputs, generator=generator).to(dtype)
    x = torch.randn(1300, inputs, generator=generator).to(dtype)
    with kernels_of(isa, 2):
        packed = gemm.pack(weight, amx=True)
        found = matmul(packed, x)
        assert torch.equal(found, torch.cat([matmul(packed, part) for part in x.split(37)]))


@pytest.mark.slow
@needs_amx
@pytest.mark.parametrize("dtype", FORMATS)
def test_emulated_tiles_give_the_bits_of_the_processor(dtype: torch.dtype) -> None:
    """With numbers whose products, or parts, are subnormal, too."""
    generator = torch.Generator().manual_seed(9)
    weight, x = (torch.randn(size, 800, generator=generator) for size in (70, 40))
    x *= torch.randint(-70, 10, x.shape, generator=generator).float().exp2()
    weight *= torch.randint(-70, 10, weight.shape, generator=generator).float().exp2()
    x[:, 8:16] *= 2.0**-60
    products = []
    for isa in (ISAS[0], EMULATED_TILES):
        with kernels_of(isa):
            products.append(matmul(gemm.pack(weight.to(dtype), amx=True), x))
    assert torch.equal(products[0], products[1])


@each_amx
def test_inputs_that_do_not_fill_tiles_are_multiplied_by_vectors(isa: str) -> None:
    with kernels_of(isa):
        kinds = [gemm.pack(torch.ones(8, n), amx=True).kind for n in (0, 31, 32, 33, 64)]
    assert kinds == ["float32", "float32", "amx_float32", "float32", "amx_float32"]


def _quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers and scales of rows, as the kernels make them: float64 [rows, inputs], float32 [rows]."""
    x = x.float()
    peak = x.abs().amax(1)
    reciprocal = torch.where(peak >= 2.0**-100, torch.full_like(peak, 127) / peak, 0)  # 127 / peak would round twice
    return (x * reciprocal[:, None]).round().double(), peak / 127


@each_isa
@few
@given(cases())
def test_weights_of_8_bits_with_a_scale_for_each_output_exactly(isa: str, case: Case) -> None:
    with kernels_of(isa, case.threads):
        made = gemm.quantise_int8_fast(case.weight)
        found = case.run(gemm.pack_int8_fast(made, case.bias))
    integers, scales = _quantised_rows(case.x)
    sums = (integers @ made.values.double().T).float() * (made.scales * scales[:, None])
    assert torch.equal(found, case.finished(sums))


FEW_BITS: dict[str, tuple[Callable[[Tensor], Quantised], Callable[..., Packed]]] = {
    "int8": (gemm.quantise_int8, gemm.pack_int8),
    "int8_rotated": (partial(gemm.quantise_int8, form="rotated"), gemm.pack_int8),
    "int4": (gemm.quantise_int4, gemm.pack_int4),
}


def _assert_tiles_change_nothing(kind: str, case: Case) -> None:
    quantise, pack = FEW_BITS[kind]
    made = quantise(case.weight)
    by_tiles, by_vectors = (pack(made, case.bias, amx=amx) for amx in (True, False))
    assert (by_tiles.kind, by_vectors.kind) == (f"amx_{kind}", kind)
    as_integers = torch.int16 if case.result == torch.bfloat16 else torch.int32
    found, wanted = (case.run(packed).contiguous().view(as_integers) for packed in (by_tiles, by_vectors))
    assert torch.equal(found, wanted)


@each_amx
@pytest.mark.parametrize("kind", FEW_BITS)
@few
@given(case=cases())
def test_few_bits_by_tiles_are_those_by_vectors(isa: str, kind: str, case: Case) -> None:
    with kernels_of(isa, case.threads):
        _assert_tiles_change_nothing(kind, case)


@each_amx
@pytest.mark.parametrize("kind", FEW_BITS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(16, 33, 1), (17, 70, 1000), (300, 130, 32), (512, 31, 545), (1500, 40, 70)])
def test_many_rows_of_few_bits_by_tiles(isa: str, kind: str, threads: int, shape: tuple[int, int, int]) -> None:
    """Several blocks of rows, several parts of a panel, some rows that are not finite."""
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(8)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    x[rows // 2, 0], x[rows // 3], x[rows // 4, inputs - 1] = torch.nan, 0, torch.inf
    with kernels_of(isa, threads):
        _assert_tiles_change_nothing(kind, Case(x, weight, torch.arange(float(outputs)), torch.float32, threads))


@each_amx
def test_tiles_multiply_every_integer_of_8_bits(isa: str) -> None:
    """-128, too, which other programs write."""
    values = torch.arange(-128, 128, dtype=torch.int8).repeat(6, 1)
    made = replace(gemm.quantise_int8(torch.ones(6, 256)), values=values)
    x = torch.cat([torch.full((1, 256), sign * 3.0) for sign in (1, -1)] + [torch.randn(30, 256)])
    with kernels_of(isa):
        found, wanted = (matmul(gemm.pack_int8(made, amx=amx), x) for amx in (True, False))
    assert torch.equal(found, wanted)
    weight = made.dense()
    _assert_sums(found[:2], Case(x[:2], weight, None, torch.float32, 1), x[:2].double(), weight.double(), 64)


@each_amx
@pytest.mark.parametrize("kind", FEW_BITS)
@pytest.mark.parametrize("slower", [True, False])
def test_the_faster_way_is_taken(
    isa: str, kind: str, slower: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is measured once, and the log says how."""
    seconds = 0.0

    def delayed(packed: Packed, x: Tensor) -> Tensor:
        nonlocal seconds
        seconds += 0.05 if packed.kind.startswith("amx") == slower else 0.01
        return matmul(packed, x)

    gemm._tiles_are_faster.cache_clear()
    monkeypatch.setattr(gemm, "matmul", delayed)
    monkeypatch.setattr(gemm.time, "perf_counter", lambda: seconds)
    quantise, pack = FEW_BITS[kind]
    with kernels_of(isa), caplog.at_level(logging.DEBUG, "octavo.native"):
        made = quantise(torch.ones(4, 64))
        kinds = {pack(made).kind for _ in range(3)}
        assert pack(made, amx=True).kind == f"amx_{kind}"
        assert pack(made, amx=False).kind == kind
    gemm._tiles_are_faster.cache_clear()
    assert kinds == {kind if slower else f"amx_{kind}"}
    assert len([record for record in caplog.records if "with matrix tiles" in record.getMessage()]) == 1


@each_isa
@pytest.mark.parametrize("kind", FEW_BITS)
@few
@given(case=cases())
def test_weights_with_scales_for_groups(isa: str, kind: str, case: Case) -> None:
    quantise, pack = FEW_BITS[kind]
    with kernels_of(isa, case.threads):
        made = quantise(case.weight)
        found = case.run(pack(made, case.bias))
    rows, inputs = case.x.shape
    groups = F.pad(case.x, (0, -inputs % GROUP)).reshape(-1, GROUP)
    integers, scales = _quantised_rows(gemm.rotate(groups.float() / GROUP) if made.rotated else groups)
    x = (integers * scales.double()[:, None]).view(rows, -1)
    weight, added = made.dense().double(), None
    if made.rotated:
        weight = (made.integers() * made.factors()[..., None]).double().flatten(1)
    else:
        x = x[:, :inputs]
    if made.has_minima:
        minima = made.scales[..., 1].double().repeat_interleave(GROUP, 1)[:, :inputs]
        added = (weight - minima).abs() + minima.abs()
    _assert_sums(found, case, x, weight, made.scales.shape[1] * (2 if made.has_minima else 1) + 4, added)


@each_isa
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("inputs", [1, 31, 32, 172])
def test_rotated_groups_are_those_of_torch(isa: str, dtype: torch.dtype, inputs: int) -> None:
    """To the bit, and they stand for the same weights: Sylvester's matrix times itself is the group's size."""
    weight = torch.randn(37, inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
    with kernels_of(isa):
        made = gemm.quantise_int8(weight, "rotated")
    by_torch = quantisation.quantise_by_torch(weight, "int8", "rotated")
    assert torch.equal(made.values, by_torch.values)
    assert torch.equal(made.scales, by_torch.scales)
    matrix = torch.ones(1, 1)
    while len(matrix) < GROUP:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    groups = F.pad(weight.double(), (0, -inputs % GROUP)).view(37, -1, GROUP) @ matrix.double()
    steps = made.factors()[..., None].double()
    assert ((made.integers() * steps - groups).abs() <= steps * 0.501).all()
    assert (steps[..., 0] * 127 <= groups.abs().amax(2) + 127.5 * made.counted()).all(), "no larger than need be"
    assert float((made.dense() - weight.float()).abs().max()) < float(steps.max()) / 2


@each_isa
def test_a_large_activation_takes_less_from_its_neighbours_where_groups_are_rotated(isa: str) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(64, 128, generator=generator), torch.randn(16, 128, generator=generator)
    x[:, 5] = 50
    errors = []
    forms: tuple[Form, ...] = ("plain", "rotated")
    for form in forms:
        with kernels_of(isa):
            found = matmul(gemm.pack_int8(gemm.quantise_int8(weight, form)), x)
        errors.append(float((found - x @ weight.T).square().mean()))
    assert errors[1] < 0.25 * errors[0]


each_block_kind = pytest.mark.parametrize("kind", get_args(BlockKind))


@each_isa
@each_block_kind
def test_blocks_of_a_file_in_their_own_bits(isa: str, kind: BlockKind) -> None:
    """Weights are those of the blocks to the bit, of no more bytes than said, and sums as exact as those of groups can
    be. Rows depend neither on others nor on threads."""
    outputs, inputs = 77, 768
    made = random_blocks(kind, outputs, inputs)
    dense = numbers(made)
    integers, scales, minima = groups_of(made)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(29, inputs, generator=generator) * torch.rand(29, 1, generator=generator).mul(12).exp2()
    case = Case(x.bfloat16(), dense, torch.randn(outputs, generator=generator), torch.float32, 2)
    assert_rows_are_independent(isa, lambda _, bias: gemm.pack_blocks(made, bias), case)
    with kernels_of(isa, 2):
        packed = gemm.pack_blocks(made, case.bias)
        found = case.run(packed)
        assert torch.equal(gemm.unpack(replace(packed, bias=None)), dense)
    panels = -(-outputs // packed.panel)
    assert 0 <= packed.nbytes - panels * packed.panel * held_size(kind, inputs) < 64 * panels, "they are aligned"
    assert held_size(kind, inputs) <= 1.06 * made.values.shape[1]
    if kind == "e4m3":  # rows stay bfloat16
        _assert_sums(found, case, case.x.double(), dense.double(), inputs + scales.shape[1] + 4)
        return
    size = integers.shape[-1]
    steps, units = _quantised_rows(case.x.reshape(-1, size))
    added = (
        None if minima is None else ((dense.view(integers.shape) - minima[..., None]).abs() + minima[..., None].abs())
    )
    rows = (steps * units.double()[:, None]).view(len(x), -1)
    chain = scales.shape[1] * (1 if minima is None else 2) + 4
    _assert_sums(found, case, rows, dense.double(), chain, None if added is None else added.flatten(1).double())


@each_isa
@pytest.mark.parametrize("subnormal", [True, False])
@pytest.mark.parametrize("inputs", [1, 127, 130, 301])
def test_rows_of_float8_that_fill_no_group(isa: str, inputs: int, subnormal: bool) -> None:
    """float32 rows are rounded to bfloat16 first; all 254 numbers are exact. Subnormal ones go another way."""
    made = random_blocks("e4m3", 37, inputs)
    made.values[:, 128:132] = torch.ones(37, 1).view(torch.uint8)
    fit = min(inputs, 127)
    if subnormal:
        every = torch.arange(256, dtype=torch.uint8)
        made.values[0, :fit], made.values[1, :fit] = every[:fit], every[128 : 128 + fit]
    else:
        made.values[:, :fit] = made.values[:, :fit] & 0xB7 | 0x08
    dense, x = numbers(made), torch.randn(14, inputs, generator=torch.Generator().manual_seed(1))
    case = Case(x, dense, torch.randn(37, generator=torch.Generator().manual_seed(2)), torch.float32, 2)
    assert_rows_are_independent(isa, lambda _, bias: gemm.pack_blocks(made, bias), case)
    with kernels_of(isa, 2):
        packed = gemm.pack_blocks(made, case.bias)
        assert torch.equal(gemm.unpack(replace(packed, bias=None)), dense)
        _assert_sums(case.run(packed), case, x.bfloat16().double(), dense.double(), inputs + 8)


@each_isa
def test_matrices_of_several_kinds_as_one(isa: str) -> None:
    """Each part's outputs are those of its own product, to the bit; biases are of all."""
    generator = torch.Generator().manual_seed(4)
    x, bias = torch.randn(21, 256, generator=generator), torch.randn(177, generator=generator)
    with kernels_of(isa, 2):
        parts = [
            gemm.pack_blocks(random_blocks("q4_k", 64, 256)),
            gemm.pack_blocks(random_blocks("q6_k", 33, 256)),
            gemm.pack_int8(torch.randn(80, 256, generator=generator)),
        ]
        joined = gemm.join(parts, bias)
        apart = torch.cat([matmul(part, x) for part in parts], 1)
        assert torch.equal(matmul(joined, x), apart + bias)
        assert torch.equal(matmul(joined, x[3:4]), apart[3:4] + bias)
        ids = torch.tensor([[176, 0], [64, 96]])
        assert torch.equal(gemm.look_up(joined, ids), gemm.unpack(replace(joined, bias=None))[ids])
    assert joined.nbytes == sum(part.nbytes for part in parts)


@each_isa
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "int8", "int8_rotated", "int8_fast", "int4", *get_args(BlockKind)]
)
def test_rows_are_looked_up(isa: str, dtype: torch.dtype, kind: str) -> None:
    """The numbers that torch makes of the same weight, to the bit."""
    inputs = 256 if kind in get_args(BlockKind) else 101
    weight = torch.randn(77, inputs, generator=torch.Generator().manual_seed(5))
    with kernels_of(isa, 2):
        match kind:
            case "float32" | "bfloat16":
                packed = gemm.pack(weight.to(getattr(torch, kind)))
                wanted = weight.to(getattr(torch, kind)).float()
            case "int8_fast":
                packed = gemm.pack_int8_fast(made := gemm.quantise_int8_fast(weight))
                wanted = made.dense()
            case "int8" | "int8_rotated" | "int4":
                quantise, pack = FEW_BITS[kind]
                packed = pack(made := quantise(weight))
                wanted = made.dense()
            case _:
                packed = gemm.pack_blocks(blocks := random_blocks(kind, 77, inputs))
                wanted = numbers(blocks)
        ids = torch.tensor([[0, 76, 31], [32, 5, 5]], dtype=torch.int32)
        assert torch.equal(gemm.look_up(packed, ids, dtype), wanted[ids].to(dtype))
        with pytest.raises(ValueError, match="rows from 0 to 76 can be looked up, got 0 to 77"):
            gemm.look_up(packed, torch.tensor([0, 77]))


PACKERS = {
    "pack": gemm.pack,
    "int8": gemm.pack_int8,
    "int8-rotated": lambda weight, bias=None: gemm.pack_int8(gemm.quantise_int8(weight, "rotated"), bias),
    "int8-fast": gemm.pack_int8_fast,
    "int4": gemm.pack_int4,
}
each_packer = pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)


@each_isa
@each_packer
@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=cases())
def test_a_row_does_not_depend_on_the_others(isa: str, packer: Callable[..., Packed], case: Case) -> None:
    assert_rows_are_independent(isa, packer, case)


def assert_rows_are_independent(isa: str, packer: Callable[..., Packed], case: Case) -> None:
    """Nor do they depend on threads: each row alone, some of them, and all of them come out the same to the bit."""
    rows = case.x.shape[0]
    with kernels_of(isa, 1):
        packed = packer(case.weight, case.bias)
        alone = torch.cat([matmul(packed, row, dtype=case.result) for row in case.x.split(1)])
        some = torch.cat([matmul(packed, part, dtype=case.result) for part in case.x.split(max(rows // 3, 1))])
        assert torch.equal(alone, some)
        assert torch.equal(alone, case.run(packed))
    with kernels_of(isa, 2):
        assert torch.equal(alone, case.run(packed))
        assert torch.equal(alone[:1], matmul(packed, case.x[:1], dtype=case.result))


@each_isa
@each_packer
@pytest.mark.parametrize("shape", [(2048, 70, 33), (515, 96, 260), (3, 2000, 64)])
def test_many_rows_are_those_of_one(isa: str, packer: Callable[..., Packed], shape: tuple[int, int, int]) -> None:
    """Also where rows are cut into several blocks, and divided among threads."""
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    with kernels_of(isa, 2):
        packed = packer(weight)
        found = matmul(packed, x)
        for row in (0, 1, rows // 2, rows - 1):
            assert torch.equal(found[row : row + 1], matmul(packed, x[row : row + 1]))


@each_isa
@each_packer
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(isa: str, packer: Callable[..., Packed], poison: float) -> None:
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(40, 50, generator=generator), torch.randn(5, 50, generator=generator)
    with kernels_of(isa):
        packed = packer(weight)
        clean = matmul(packed, x)
        x[2, 49] = poison
        found = matmul(packed, x)
    assert not found[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], clean[others])


@each_isa
def test_results_are_rounded_as_by_torch(isa: str) -> None:
    """Numbers of any bits: subnormal ones stay, infinities and NaN too."""
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31, (1 << 15, 1), generator=generator, dtype=torch.int64).int()
    bits[: 1 << 13] &= -0x7F800001  # without an exponent
    bits[1 << 13 : 1 << 14] |= 0x7F800000
    x = bits.view(torch.float32)
    with kernels_of(isa):
        found = matmul(gemm.pack(torch.ones(40, 1)), x, dtype=torch.bfloat16)
    wanted = x.bfloat16().expand(-1, 40)
    assert torch.equal(found.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(found[numbers].view(torch.int16), wanted[numbers].view(torch.int16))


@each_isa
def test_unpacked_weights_are_the_packed_ones(isa: str) -> None:
    weight = torch.randn(37, 71, generator=torch.Generator().manual_seed(3))
    with kernels_of(isa):
        assert torch.equal(gemm.unpack(gemm.pack(weight)), weight)
        assert torch.equal(gemm.unpack(gemm.pack(weight.bfloat16())), weight.bfloat16().float())
        for quantise, pack in (
            FEW_BITS["int8"],
            FEW_BITS["int8_rotated"],
            (gemm.quantise_int8_fast, gemm.pack_int8_fast),
            (gemm.quantise_int4, gemm.pack_int4),
        ):
            made = quantise(weight)
            torch.testing.assert_close(gemm.unpack(pack(made)), made.dense(), rtol=1e-6, atol=2e-6)


@each_isa
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_of_packed_weights_are_the_weights(isa: str, dtype: torch.dtype) -> None:
    """To the bit, also where the weight was packed some rows at a time."""
    generator = torch.Generator().manual_seed(5)
    for outputs, inputs in ((300, 71), (77, 64), (65, 1)):
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        ids = torch.randint(outputs, (150,), generator=generator)
        cases: list[tuple[Any, Callable[..., Packed], Tensor]] = [(weight, partial(_packed_into, gemm.pack), weight)]
        for quantise, pack in (
            FEW_BITS["int8"],
            FEW_BITS["int8_rotated"],
            (gemm.quantise_int8_fast, gemm.pack_int8_fast),
            (gemm.quantise_int4, gemm.pack_int4),
        ):
            made = quantise(weight)
            cases.append((made, partial(_packed_into, pack), made.dense()))
        with kernels_of(isa, threads=2):
            for whole, pack_into, expected in cases:
                packed = gemm.pack_parts(_parts(whole, outputs), outputs, None, pack_into)
                assert torch.equal(packed.data, pack_into(whole, None).data)
                for result in FORMATS if isinstance(whole, Quantised) else [dtype]:
                    assert torch.equal(gemm.look_up(packed, ids, result), expected[ids].to(result))
            for wrong in (-1, outputs):
                with pytest.raises(ValueError, match=f"rows from 0 to {outputs - 1}"):
                    gemm.look_up(packed, torch.tensor([0, wrong]), dtype)


def _parts(whole: Any, outputs: int) -> Iterator[Any]:
    for start in range(0, outputs, 128):
        rows = slice(start, start + 128)
        if isinstance(whole, Quantised):
            yield replace(whole, values=whole.values[rows], scales=whole.scales[rows])
        else:
            yield whole[rows]


def _packed_into(pack: Callable[..., Packed], made: Any, into: Tensor | None) -> Packed:
    return pack(made, into=into)


@each_isa
@pytest.mark.parametrize("dtype", FORMATS)
def test_8_bits_err_by_half_a_step(isa: str, dtype: torch.dtype) -> None:
    weight = torch.randn(9, 45, generator=torch.Generator().manual_seed(4)).to(dtype)
    weight[3] = 0
    with kernels_of(isa):
        fast, exact = gemm.quantise_int8_fast(weight), gemm.quantise_int8(weight)
    assert torch.equal(fast.scales, weight.float().abs().amax(1) / 127)
    groups = F.pad(weight.float(), (0, -45 % GROUP)).view(9, -1, GROUP)
    assert torch.equal(exact.scales, (groups.abs().amax(2) / 127).half())
    for made, scales in (
        (fast, fast.scales[:, None]),
        (exact, exact.scales.float().repeat_interleave(GROUP, 1)[:, :45]),
    ):
        assert ((made.dense() - weight.float()).abs() <= scales * 0.50001).all()
        assert not made.values[3].any()


@each_isa
@pytest.mark.parametrize("dtype", FORMATS)
def test_4_bits_err_less_than_with_plain_scales(isa: str, dtype: torch.dtype) -> None:
    """Than with those that put the least weight at 0 and the largest at 15, or the largest magnitude at -8; and clearly
    less on average."""
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(5)).to(dtype)
    weight[7, 32:64], weight[8, :32] = 0, 0.5
    groups = weight.float().view(64, -1, GROUP)
    lowest, highest = groups.aminmax(dim=2, keepdim=True)
    step = torch.where(highest > lowest, (highest - lowest) / 15, 1)
    line = ((groups - lowest) / step).round() * step + lowest - groups
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = torch.where(extreme == 0, 1, extreme / -8)
    through_zero = (groups / scale).round().clamp(-8, 7) * scale - groups
    errors = []
    for portable, plain in ((False, line), (True, through_zero)):
        with kernels_of(isa):
            made = gemm.quantise_int4(weight, "portable" if portable else "plain")
        assert made.levels().max() <= 15
        assert torch.equal(gemm.join_levels(made.levels()), made.values)
        assert torch.equal(made.dense()[7, 32:64], weight[7, 32:64].float())
        found = (made.dense() - weight.float()).view(64, -1, GROUP)
        assert (found.square().sum(2) <= plain.square().sum(2) * 1.02 + 1e-9).all()
        errors.append(float(found.square().sum()))
        assert errors[-1] < 0.9 * plain.square().sum()
    assert torch.equal(made.scales[..., 1], -8 * made.scales[..., 0])
    assert torch.equal(made.scales[..., 0].bfloat16(), made.scales[..., 0])
    assert errors[0] < 0.8 * errors[1]


@each_isa
@pytest.mark.parametrize("size", [1e-1, 1e-3, 1e-5, 1e-6, 1e-9, 1e5])
def test_8_bits_of_small_and_large_weights(isa: str, size: float) -> None:
    """Halves are far apart near 0: no integer leaves its range, and errors are at most half a step of what is kept."""
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(7)) * size
    forms: tuple[Form, ...] = ("plain", "portable")
    for form in forms:
        with kernels_of(isa):
            made = gemm.quantise_int8(weight, form)
        by_torch = quantisation.quantise_by_torch(weight, "int8", form)
        assert torch.equal(made.scales, by_torch.scales)
        assert int((made.values.int() - by_torch.values.int()).abs().max()) <= 1  # ties
        assert made.values.abs().max() <= 127
        steps = made.scales.float().repeat_interleave(GROUP, 1)
        assert ((made.dense() - weight).abs() <= steps * 0.501).all()
        assert (made.scales > 0).all()


@each_isa
def test_4_bits_tell_weights_that_lie_far_from_0(isa: str) -> None:
    """To within the minimum's rounding, and what does not fit a half is not hidden."""
    near = torch.randn(3, 64, generator=torch.Generator().manual_seed(6))
    with kernels_of(isa):
        made = gemm.quantise_int4(near + 100)
        assert float((made.dense() - near - 100).abs().max()) < 0.4
        assert not gemm.quantise_int4(near * 1e7).dense().isfinite().any()


@each_isa
def test_weights_that_are_not_finite_are_not_hidden(isa: str) -> None:
    weight = torch.ones(3, 64)
    weight[1, 40] = torch.inf
    with kernels_of(isa):
        for pack in (gemm.pack_int8, gemm.pack_int8_fast, gemm.pack_int4):
            found = matmul(pack(weight), torch.ones(1, 64))
            assert found.isfinite().tolist() == [[True, False, True]]


@each_isa
def test_nothing_to_do(isa: str) -> None:
    with kernels_of(isa):
        packed = gemm.pack(torch.randn(5, 7))
        assert matmul(packed, torch.empty(0, 7)).shape == (0, 5)
        assert matmul(packed, torch.zeros(2, 3, 7)).shape == (2, 3, 5)
        empty = gemm.pack(torch.empty(5, 0), torch.arange(5.0))
        assert torch.equal(matmul(empty, torch.empty(2, 0)), torch.arange(5.0).expand(2, 5))


def test_what_does_not_fit_is_refused() -> None:
    packed = gemm.pack(torch.zeros(5, 7))
    with pytest.raises(ValueError, match="inputs must be rows of"):
        matmul(packed, torch.zeros(2, 6))
    with pytest.raises(ValueError, match="inputs must be rows of"):
        matmul(packed, torch.zeros(2, 7, dtype=torch.float16))
    with pytest.raises(ValueError, match="cannot go to"):
        matmul(packed, torch.zeros(2, 7), torch.zeros(5, 2).T)
    with pytest.raises(ValueError, match="a weight must be a matrix"):
        gemm.pack(torch.zeros(5, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match="the bias must have 5 numbers"):
        gemm.pack(torch.zeros(5, 7), torch.zeros(7))
    with pytest.raises(ValueError, match="expected"):
        gemm.pack_int4(gemm.quantise_int8(torch.zeros(5, 7)))
    with pytest.raises(ValueError, match="expected"):
        gemm.pack_int8(gemm.quantise_int8_fast(torch.zeros(5, 7)))
