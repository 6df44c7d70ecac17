"""Kernels over rows against torch: each instruction set that the machine has, odd lengths, one and two threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.native import norms
from tests.support.native import ISAS, kernels_of, needs_native

pytestmark = needs_native
FORMATS = [torch.float32, torch.bfloat16]
each_isa = pytest.mark.parametrize("isa", ISAS)
few = settings(max_examples=25, deadline=None, derandomize=True)
rows = st.integers(1, 40)
sizes = st.one_of(st.integers(1, 70), st.sampled_from([576, 1000, 2048]))
seeds = st.integers(0, 2**20)
formats = st.sampled_from(FORMATS)
threads = st.sampled_from([1, 2])


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def apart(x: Tensor) -> Tensor:
    """The same rows, with NaN between them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def plain_rms(x: Tensor, weight: Tensor | None, eps: float, unit_offset: bool, in_float32: bool) -> Tensor:
    """As engine.model.layers computes it without kernels."""
    shape = x.shape[-1:]
    if weight is None:
        return F.rms_norm(x.float(), shape, None, eps).to(x.dtype)
    if unit_offset:
        return F.rms_norm(x.float(), shape, 1.0 + weight.float(), eps).to(x.dtype)
    if x.dtype == torch.float32:
        return F.rms_norm(x, shape, weight, eps)
    if in_float32:
        return F.rms_norm(x.float(), shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x.float(), shape, None, eps).to(x.dtype) * weight


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Equal but for float32's rounding; in bfloat16 that may change the last bit here and there."""
    assert found.dtype == wanted.dtype
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)
    else:
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-5)
        assert (found != wanted).sum() <= 1 + found.numel() // 100


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
