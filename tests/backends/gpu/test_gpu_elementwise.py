"""Norms, activations and gates on a GPU (or by Triton's interpreter) against the modules by torch alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from support.gpu import kernels
from support.poison import poisoned
from support.rows import apart, numbers

from engine.backends.triton import activations, norms
from engine.model.activations import ACTIVATIONS
from engine.model.normalisation import Norm
from engine.model.norms import RmsNorm
from engine.model.place import Place

pytestmark = pytest.mark.slow

few = settings(max_examples=25, deadline=None, derandomize=True)
counts = st.integers(1, 7)
sizes = st.sampled_from([1, 3, 48, 64, 100, 193, 600, 1024, 1100])
seeds = st.integers(0, 2**20)
formats = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def assert_near(found: Tensor, wanted: Tensor, steps: int = 1) -> None:
    """Equal but for float32's rounding. That may change a last bit of 16 here and there, after each of so many
    roundings; and where Triton's interpreter makes bfloat16 it cuts off what GPUs round."""
    assert found.dtype == wanted.dtype
    found, wanted = found.cpu(), wanted.cpu()
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=4e-6, atol=4e-6)
        return
    unit = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=2 * steps * unit, atol=2 * steps * unit)
    if found.dtype == torch.float16:
        assert (found != wanted).sum() <= 1 + steps * found.numel() // 50


def by_torch(x: Tensor, how: norms.Norm | None) -> Tensor:
    """As the model computes it without kernels."""
    if how is None:
        return x
    if how.centred:
        return F.layer_norm(x, x.shape[-1:], how.weight, how.bias, how.eps)
    part = Norm("rms", how.eps, weight=how.weight is not None, unit_offset=how.unit_offset, in_float32=how.in_float32)
    module = RmsNorm(part, x.shape[-1], Place(x.device, x.dtype))
    if how.weight is not None:
        assert module.weight is not None
        module.weight.copy_(how.weight)
    return module(x)  # type: ignore[no-any-return]


@st.composite
def hows(draw: st.DrawFn, size: int, dtype: torch.dtype, device: torch.device) -> norms.Norm:
    """A norm."""
    weight = numbers(draw(seeds), size, dtype=dtype).to(device) if draw(st.booleans()) else None
    if not draw(st.booleans()):
        return norms.Norm(weight, 1e-5, unit_offset=draw(st.booleans()), in_float32=draw(st.booleans()))
    bias = numbers(draw(seeds), size, dtype=dtype).to(device) if draw(st.booleans()) else None
    return norms.Norm(weight, 1e-6, centred=True, bias=bias)


@few
@given(st.data(), counts, sizes, seeds, formats, st.booleans())
def test_norms(data: st.DataObject, count: int, size: int, seed: int, dtype: torch.dtype, deep: bool) -> None:
    with kernels() as device, poisoned(norms):
        how = data.draw(hows(size, dtype, device))
        shape = (count, 3, size) if deep else (count, size)
        x = apart(numbers(seed, *shape, dtype=dtype).to(device) + 0.5)
        wanted = by_torch(x, how)
        assert_near(norms.norm(x, how), wanted, 2)
        out = apart(torch.full(shape, torch.nan, dtype=dtype, device=device))
        assert norms.norm(x, how, out) is out
        assert_near(out, wanted, 2)
        whole = torch.as_strided(out, (out.untyped_storage().nbytes() // dtype.itemsize,), (1,))
        assert whole.isnan().sum() == 5 * (whole.numel() // (size + 5)), "nothing was written between the rows"
        norms.norm(x, how, x)
        assert_near(x, wanted, 2)


@few
@given(st.data(), counts, sizes, seeds, formats)
def test_sums_and_their_norms(data: st.DataObject, count: int, size: int, seed: int, dtype: torch.dtype) -> None:
    with kernels() as device, poisoned(norms):
        stream, y, z = (numbers(seed + n, count, size, dtype=dtype).to(device) for n in range(3))
        after = data.draw(st.one_of(st.none(), hows(size, dtype, device)))
        how = data.draw(st.one_of(st.none(), hows(size, dtype, device)))
        also = z if data.draw(st.booleans()) else None
        in_place = data.draw(st.booleans())
        total = stream + by_torch(y, after)
        total = total if also is None else total + z
        steps = 2 + (after is not None) + (also is not None)
        kept = y.clone()
        found = norms.add_norm(stream, y, how, after=after, also=also, in_place=in_place)
        if in_place or how is None:
            assert found is stream
        else:
            assert_near(stream, total, steps)
        if size > 3 or how is None or not how.centred:  # nothing is left of so few without their mean
            assert_near(found, by_torch(total, how), 3 * steps)
        assert torch.equal(y, kept)


def test_rows_do_not_depend_on_how_many_there_are() -> None:
    with kernels() as device:
        for size in (48, 300, 2050):
            stream, y = (numbers(n, 40, size).to(device) for n in range(2))
            how = norms.Norm(numbers(5, size).to(device), 1e-5)
            alone = torch.cat([norms.add_norm(stream[i : i + 1].clone(), y[i : i + 1], how) for i in range(len(y))])
            assert torch.equal(norms.add_norm(stream, y, how), alone)


def test_what_does_not_fit_is_refused() -> None:
    how = norms.Norm(None, 1e-5)
    x = torch.ones(3, 8)
    with kernels():
        for call in (
            lambda: norms.norm(torch.ones(1, norms.WIDEST + 1), how),
            lambda: norms.norm(torch.ones(2, 2, 2, 2), how),
            lambda: norms.norm(x.t(), how),
            lambda: norms.add_norm(x, x[:2], how),
            lambda: norms.add_norm(x, x.half(), how),
            lambda: norms.add_norm(x, torch.ones(3, 9)[:, :8], how),
            lambda: norms.add_norm(x, x, how, also=x[:1]),
            lambda: activations.activate(x, "sine"),
            lambda: activations.activate(x[0], "relu"),
            lambda: activations.activate(x.t(), "relu"),
            lambda: activations.gate(x[:, :7], "relu"),
        ):
            with pytest.raises(ValueError):
                call()


def test_nothing_of_nothing() -> None:
    with kernels() as device:
        empty = torch.ones(0, 8, device=device)
        how = norms.Norm(None, 1e-5)
        assert norms.norm(empty, how).shape == norms.add_norm(empty, empty, how).shape == (0, 8)
        assert activations.gate(empty, "silu").shape == (0, 4)


@pytest.mark.parametrize("function", activations.FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_activations(function: str, dtype: torch.dtype) -> None:
    assert set(activations.FUNCTIONS) == set(ACTIVATIONS)
    plain = ACTIVATIONS[function]  # type: ignore[index]
    with kernels() as device, poisoned(activations):
        for count, width in ((3, 193), (1, 1100), (2, 48)):
            x = apart(numbers(width, count, width, dtype=dtype, scale=3.0).to(device))
            x[0, :8] = torch.tensor([0.0, -0.0, 100.0, 1e-4, -1e-4, 40.0, -40.0, torch.nan])
            # torch rounds between the parts of some functions.
            exact = plain(x.double() if dtype == torch.float32 else x.float()).to(dtype)
            torch.testing.assert_close(activations.activate(x, function), exact, equal_nan=True, **near(dtype))
            if width % 2 == 0:
                _, up = x.chunk(2, dim=-1)
                halves = exact[:, : width // 2] * up
                torch.testing.assert_close(activations.gate(x, function), halves, equal_nan=True, **near(dtype))


def near(dtype: torch.dtype) -> dict[str, float]:
    """Tolerances: of float32 a few last bits, of 16 bits two of them, also of the number that an activation is of."""
    unit = torch.finfo(dtype).eps
    return {"rtol": 2e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 4 * unit, "atol": 4 * unit}
