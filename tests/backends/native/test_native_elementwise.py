"""Kernels over rows against torch: each instruction set that the machine has, odd lengths, one and two threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native import each_isa, kernels_of, needs_native
from support.rows import apart, numbers
from torch import Tensor

from engine.backends.native import activations, norms
from engine.model.activations import ACTIVATIONS
from engine.model.normalisation import Norm
from engine.model.norms import RmsNorm
from engine.model.place import Place

pytestmark = needs_native
FORMATS = [torch.float32, torch.bfloat16]
few = settings(max_examples=20, deadline=None, derandomize=True)
rows = st.integers(1, 40)
sizes = st.one_of(st.integers(1, 70), st.sampled_from([576, 1000, 2048]))
seeds = st.integers(0, 2**20)
formats = st.sampled_from(FORMATS)
threads = st.sampled_from([1, 2])


def plain_rms(x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool, in_float32: bool) -> Tensor:
    """As the model computes it without kernels."""
    part = Norm("rms", eps, weight=weight is not None, unit_offset=unit_offset, in_float32=in_float32)
    norm = RmsNorm(part, x.shape[-1], Place(torch.device("cpu"), x.dtype))
    if weight is not None:
        assert norm.weight is not None
        norm.weight.copy_(weight)
    return norm(x)  # type: ignore[no-any-return]


def assert_near(found: Tensor, wanted: Tensor, atol: float = 2e-6) -> None:
    """Equal but for float32's rounding; in bfloat16 that may change the last bit here and there."""
    assert found.dtype == wanted.dtype
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=atol)
    else:
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-5)
        seen = wanted.abs() > 0.01  # below, what cancels is no more exact in torch
        assert ((found != wanted) & seen).sum() <= 1 + found.numel() // 100


@each_isa
@few
@given(rows, sizes, seeds, formats, threads, st.booleans(), st.booleans(), st.booleans())
def test_rms_norm(
    isa: str,
    count: int,
    size: int,
    seed: int,
    dtype: torch.dtype,
    cores: int,
    weighted: bool,
    offset: bool,
    exact: bool,
) -> None:
    x = apart(numbers(seed, count, size, dtype=dtype))
    weight = numbers(seed + 1, size, dtype=dtype) if weighted else None
    with kernels_of(isa, cores):
        found = norms.rms_norm(x, weight, 1e-5, unit_offset=offset, in_float32=exact)
        assert_near(found, plain_rms(x, weight, 1e-5, offset, exact))
        for row in (0, count - 1):
            alone = norms.rms_norm(x[row : row + 1], weight, 1e-5, unit_offset=offset, in_float32=exact)
            assert torch.equal(alone[0], found[row])


@each_isa
@few
@given(rows, sizes, seeds, formats, threads, st.booleans(), st.booleans())
def test_layer_norm(
    isa: str, count: int, size: int, seed: int, dtype: torch.dtype, cores: int, weighted: bool, biased: bool
) -> None:
    x = apart(numbers(seed, count, size, dtype=dtype) + 1)
    weight = numbers(seed + 1, size, dtype=dtype) if weighted else None
    bias = numbers(seed + 2, size, dtype=dtype) if biased else None
    with kernels_of(isa, cores):
        found = norms.layer_norm(x, weight, bias, 1e-5)
        wanted = F.layer_norm(x.double(), (size,), *(p if p is None else p.double() for p in (weight, bias)), 1e-5)
        assert_near(found, wanted.to(dtype))
        for row in (0, count - 1):
            assert torch.equal(norms.layer_norm(x[row : row + 1], weight, bias, 1e-5)[0], found[row])


@each_isa
def test_norms_of_heads_that_lie_among_others(isa: str) -> None:
    """As queries and keys do in a projection."""
    heads = numbers(0, 7, 9, 24)
    weight = numbers(1, 24)
    with kernels_of(isa):
        for part in (heads[:, :4], heads[:, 4:6], heads.transpose(0, 1), heads[:, :, ::2]):
            own = weight[: part.shape[-1]]
            assert_near(norms.rms_norm(part, own, 1e-5), plain_rms(part, own, 1e-5, False, False))
            each = numbers(2, 2, part.shape[1], part.shape[2])  # weights and biases of each head's own
            found = norms.layer_norm(part, *each.flatten(1), 1e-5, weights=part.shape[1])
            assert_near(found, F.layer_norm(part, part.shape[2:]) * each[0] + each[1])
        assert_near(norms.layer_norm(heads[0, 0], weight, None, 1e-5), F.layer_norm(heads[0, 0], (24,), weight))


@each_isa
def test_large_small_and_broken_rows(isa: str) -> None:
    x = numbers(0, 6, 40)
    x[1], x[2] = 0, x[2] * 1e-20
    x[3, 7], x[4, 5] = torch.nan, torch.inf
    with kernels_of(isa):
        for found, wanted in (
            (norms.rms_norm(x, None, 1e-5), F.rms_norm(x, (40,), None, 1e-5)),
            (norms.layer_norm(x, None, None, 1e-5), F.layer_norm(x, (40,))),
        ):
            torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)
        assert norms.rms_norm(x[:0], None, 1e-5).shape == (0, 40)


def ulps(found: Tensor, exact: Tensor) -> float:
    """The largest error of float32 numbers, in units of the last place of the exact ones."""
    exponent = torch.frexp(exact.abs().clamp_min(2.0**-126)).exponent - 24
    return float(((found.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponent)).max())


@each_isa
@pytest.mark.parametrize(
    ("name", "reach", "bound"), [("exp", 87.0, 1.5), ("tanh", 12.0, 2.5), ("sigmoid", 87.0, 2.5), ("erf", 5.0, 2.0)]
)
def test_functions_are_as_exact_as_their_source_says(isa: str, name: str, reach: float, bound: float) -> None:
    x = torch.cat((numbers(0, 200_000), (numbers(1, 200_000) * reach / 3).clamp(-reach, reach)))
    x = torch.cat((x, numbers(2, 1000) * 1e-6, torch.tensor([0.0, 1.0, -1.0, 0.625, 0.6249999])))
    with kernels_of(isa):
        found = activations.activate(x.view(1, -1), name)[0]
    exact = getattr(torch, name)(x.double())
    assert ulps(found, exact) <= bound
    if name in ("tanh", "erf"):
        assert torch.equal(found.signbit(), x.signbit())
        assert found.abs().max() <= 1


@each_isa
def test_functions_at_the_ends(isa: str) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1000.0, -1000.0, 88.7, -0.0, 3.4e38, -103.0, 1e-45]])
    with kernels_of(isa):
        for name in ("exp", "tanh", "sigmoid", "erf"):
            found, wanted = activations.activate(x, name), getattr(torch, name)(x)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-44, equal_nan=True, msg=name)
        for name, function in ACTIVATIONS.items():
            if name == "gelu":
                x = x[:, 1:7]  # torch's own gives NaN for infinity
            found, wanted = activations.activate(x, name), function(x)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-37, equal_nan=True, msg=name)


@each_isa
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@few
@given(rows, sizes, seeds, formats, threads, st.booleans())
def test_activations(
    isa: str, name: str, count: int, width: int, seed: int, dtype: torch.dtype, cores: int, biased: bool
) -> None:
    x = apart(numbers(seed, count, 2 * width, dtype=dtype, scale=3.0))
    bias = numbers(seed + 1, 2 * width, dtype=dtype) if biased else None
    whole = x if bias is None else x + bias
    function = ACTIVATIONS[name]
    gate, up = whole.chunk(2, dim=1)
    with kernels_of(isa, cores):
        dense, gated = activations.activate(x, name, bias), activations.gate(x, name, bias)
        # 1 + erf(x) cancels where x is far below 0, here as in torch.
        atol = 1e-5 if name.startswith("gelu") else 2e-6
        assert_near(dense, function(whole), atol)
        assert_near(gated, function(gate) * up, atol)
        for row in (0, count - 1):
            alone = x[row : row + 1]
            assert torch.equal(activations.activate(alone, name, bias)[0], dense[row])
            assert torch.equal(activations.gate(alone, name, bias)[0], gated[row])


@each_isa
@pytest.mark.parametrize("dtype", FORMATS)
def test_bits_do_not_depend_on_threads_or_rows(isa: str, dtype: torch.dtype) -> None:
    """Of so many numbers that they are shared, in rows of which no thread gets as many as the others."""
    x, weight = numbers(0, 67, 1030, dtype=dtype), numbers(1, 1030, dtype=dtype)

    def compute(x: Tensor) -> list[Tensor]:
        return [
            norms.rms_norm(x, weight, 1e-5),
            norms.rms_norm(x, weight, 1e-5, unit_offset=True),
            norms.layer_norm(x, weight, weight, 1e-5),
            norms.layer_norm(x, weight, None, 1e-5),
            activations.activate(x, "gelu", weight),
            activations.gate(x, "silu", weight),
        ]

    with kernels_of(isa, 1):
        alone = [torch.cat(parts) for parts in zip(*(compute(row) for row in x.split(1)), strict=True)]
    for cores in (1, 2, 3):
        with kernels_of(isa, cores):
            for found, wanted in zip(compute(x), alone, strict=True):
                assert torch.equal(found, wanted)


def test_what_kernels_cannot_take_is_refused() -> None:
    x = torch.ones(2, 6)
    for call in (
        lambda: norms.rms_norm(x.double(), None, 1e-5),
        lambda: norms.rms_norm(x, torch.ones(5), 1e-5),
        lambda: norms.rms_norm(x, torch.ones(6, dtype=torch.bfloat16), 1e-5),
        lambda: norms.layer_norm(x, None, torch.ones(12)[::2], 1e-5),
        lambda: activations.gate(x[:, :5], "silu"),
        lambda: activations.activate(x[0], "silu"),
    ):
        with pytest.raises(ValueError):
            call()
