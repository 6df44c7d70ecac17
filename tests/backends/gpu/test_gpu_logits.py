"""Logits on a GPU: float32 straight from the product, as on a CPU, and not rounded to 16 bits on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

if torch.cuda.is_available():
    pytest.skip("a GPU is here, on which benchmarks/gpu.py checks logits", allow_module_level=True)

from support.gpu import kernels
from support.late_device import late_device

from engine.model.layers import Linear
from engine.model.place import Place
from engine.model.row_form import FUSED, LIBRARY, RowForm

pytestmark = pytest.mark.slow


def check(device: torch.device, rows: int, bias: bool, dtype: torch.dtype, form: RowForm) -> None:
    """One bit more than dtype has tells these logits from others that it has rounded."""
    generator = torch.Generator().manual_seed(rows)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, shift = numbers(rows, 40), numbers(67, 40), numbers(67)
    linear = Linear(40, 67, bias, Place(device, dtype))
    linear.weight.copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(shift)
    found = linear.in_float32(x.to(device), form).cpu()
    exact = x.double() @ weight.double().T + (shift.double() if bias else 0.0)
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) < 1e-5 * float(exact.abs().max())
    assert not torch.equal(found, found.to(dtype).float())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_rows(dtype: torch.dtype, bias: bool) -> None:
    with late_device(), torch.inference_mode():
        check(torch.device("cuda:0"), 5, bias, dtype, LIBRARY)


def test_on_rocm_they_are_widened_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torch may have no such product."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    multiply = torch.mm

    def mm(*matrices: Tensor, **how: object) -> Tensor:
        assert not how, "a product into float32"
        return multiply(*matrices)

    monkeypatch.setattr(torch, "mm", mm)
    with late_device(), torch.inference_mode():
        device = torch.device("cuda:0")
        linear = Linear(8, 3, False, Place(device, torch.bfloat16))
        linear.weight.copy_(torch.full((3, 8), 0.5))
        found = linear.in_float32(torch.ones(5, 8, dtype=torch.bfloat16).to(device)).cpu()
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full((5, 3), 4.0))


def test_one_row_with_a_kernel_of_its_own() -> None:
    with kernels() as device:
        check(device, 1, True, torch.float16, FUSED)
