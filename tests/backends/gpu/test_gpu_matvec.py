"""Products with one row on a GPU (or by Triton's interpreter) against torch, one operation after the other."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from support.gpu import kernels
from support.poison import poisoned
from support.rows import numbers
from test_gpu_elementwise import by_torch, hows

from engine.backends.triton import activations, matvec
from engine.backends.triton.norms import Norm
from engine.model.activations import ACTIVATIONS

pytestmark = pytest.mark.slow

few = settings(max_examples=30, deadline=None, derandomize=True)
widths = st.sampled_from([1, 2, 7, 31, 64, 130])
sizes = st.sampled_from([1, 8, 40, 64, 129, 300, 700])
formats = st.sampled_from([torch.float32, torch.float16])
seeds = st.integers(0, 2**20)
functions = st.sampled_from([None, *activations.FUNCTIONS])


def wanted(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    function: str | None,
    gated: bool,
    addends: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The same, in float64 between the roundings to x's format in the norm and to `dtype` after the product."""
    y = by_torch(x, norm).double() @ weight.double().T
    y = (y if bias is None else y + bias.double()).to(dtype)
    first, second = y.chunk(2, -1) if gated else (y, None)
    if function is not None:
        first = ACTIVATIONS[function](first.double()).to(dtype)  # type: ignore[index]
    y = first if second is None else first * second
    total = None
    for part in (*addends, y):
        total = part if total is None else total + part
    assert total is not None
    return total


def assert_near(found: Tensor, exact: Tensor, scale: float) -> None:
    """Equal but for float32's rounding, and in 16 bits for the last bits that it changes: of sums of parts as large as
    `scale`."""
    unit = {torch.float32: 2e-6, torch.float16: 4e-3}[exact.dtype]
    torch.testing.assert_close(found.to(exact.dtype), exact, rtol=unit, atol=unit * scale)


@few
@given(st.data(), widths, sizes, seeds, formats, functions, st.booleans(), st.integers(0, 2), st.sampled_from([1, 16]))
def test_products(
    data: st.DataObject,
    width: int,
    size: int,
    seed: int,
    dtype: torch.dtype,
    function: str | None,
    gated: bool,
    addends: int,
    programs: int,
) -> None:
    """Of tiles of one or several rows, one or several to a program, of all features or of pieces."""
    gated &= function is not None
    with (
        kernels() as device,
        poisoned(matvec),
        mock.patch.object(matvec, "_PROGRAMS", programs),
        mock.patch.object(matvec, "_TILE", data.draw(st.sampled_from([2048, 16384]))),
        mock.patch.object(matvec, "_HELD_WITHOUT_NORM", data.draw(st.sampled_from([128, 4096]))),
    ):
        norm = data.draw(st.none() | hows(size, dtype, device)) if size > 8 else None
        x = (numbers(seed, 1, size, dtype=dtype) + 0.5).to(device)
        weight = numbers(seed + 1, width * (1 + gated), size, dtype=dtype, scale=size**-0.5).to(device)
        bias = numbers(seed + 2, len(weight), dtype=dtype).to(device) if data.draw(st.booleans()) else None
        given = [numbers(seed + 3 + n, 1, width, dtype=dtype).to(device) for n in range(addends)]
        kept, wide = x.clone(), data.draw(st.booleans()) and not addends
        exact = wanted(x, weight, bias, norm, function, gated, given, torch.float32 if wide else dtype)
        stream, also = (*given, None, None)[:2]
        found = matvec.product(
            x, weight, bias, norm=norm, function=function, gated=gated, stream=stream, also=also,
            dtype=torch.float32 if wide else None,
        )  # fmt: skip
        assert (found is stream) == (stream is not None)
        assert found.dtype == (torch.float32 if wide else dtype)
        assert torch.equal(x, kept)
        if wide and norm is not None:
            exact = exact.to(dtype)  # what the norm rounds may round otherwise
        assert_near(found, exact, 3.0 * max(1.0, float(exact.abs().max())))


def test_the_ways_of_sharing_out_are_reached() -> None:
    """Those that the test above means to reach, and those of served models: the whole of a small matrix at once."""
    found = set()
    for tile, held, programs in ((2048, 4096, 1), (16384, 4096, 16), (2048, 128, 16)):
        with (
            mock.patch.object(matvec, "_TILE", tile),
            mock.patch.object(matvec, "_HELD_WITHOUT_NORM", held),
            mock.patch.object(matvec, "_PROGRAMS", programs),
        ):
            how = matvec.tiling(130, 300, 4)
            found.add((how.held, how.steps > 1))
    assert found == {(True, True), (True, False), (False, False)}
    assert matvec.tiling(4096, 1024, 2, normed=True) == (16, 1, 1024, True, 4)
    assert matvec.tiling(14336, 4096, 2, gated=True, normed=True) == (1, 8, 4096, True, 8)
    assert matvec.tiling(4096, 14336, 2) == (4, 1, 2048, False, 8)
    for outputs in (1, 5, 1024, 151936):
        for features in (1, 48, 1024, 3072, 8192, 20000):
            for itemsize in (2, 4):
                how = matvec.tiling(outputs, features, itemsize)
                assert how.held == (how.block >= features)
                assert all(number & (number - 1) == 0 for number in how)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, norm = torch.ones(1, 8), torch.ones(6, 8), Norm(None, 1e-5)
    wide = matvec._HELD + 1
    with kernels():
        for call, said in (
            (lambda: matvec.product(torch.ones(2, 8), weight), "is not multiplied by"),
            (lambda: matvec.product(x.half(), weight), "is not multiplied by"),
            (lambda: matvec.product(torch.ones(1, 6), weight.t()), "must be contiguous"),
            (lambda: matvec.product(torch.ones(1, wide), torch.ones(1, wide), norm=norm), "8192 features at most"),
            (lambda: matvec.product(x, weight, torch.ones(5)), "not added to 6"),
            (lambda: matvec.product(x, weight, function="sine"), "no activation 'sine'"),
            (lambda: matvec.product(x, weight[:5], function="relu", gated=True), "cannot be gated"),
            (lambda: matvec.product(x, weight, gated=True), "they need an activation"),
            (lambda: matvec.product(x, weight, also=torch.ones(1, 6)), "needs the stream"),
            (lambda: matvec.product(x, weight, stream=torch.ones(1, 6).half()), "not added to 6"),
            (lambda: matvec.product(x, weight, norm=Norm(torch.ones(7), 1e-5)), "is not one of 8"),
            (lambda: matvec.product(x, torch.ones(8, 8), stream=x), "other programs still read it"),
        ):
            with pytest.raises(ValueError, match=said):
                call()
