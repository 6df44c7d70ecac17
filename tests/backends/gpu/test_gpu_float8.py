"""Products with weights of FP8 on a GPU (or by Triton's interpreter) against torch's, and whole models with them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.checkpoints import random_prompt
from support.driving import Job, run, run_alone
from support.gpu import kernels
from support.jobs import greedy
from support.poison import poisoned
from test_gpu_few_bits import numbers, served
from test_stored_weights import SHAPE, WIDE_FP8, checkpoint

from engine.backends.native.gemm import FLOAT8, FLOAT8_GROUP, Quantised
from engine.backends.torch import float8 as reference
from engine.backends.triton import experts, few_bits, float8, matvec
from engine.model.experts import stacked

pytestmark = pytest.mark.slow

SHAPES = ((1, 1), (7, 40), (70, 300), (33, 256))


def made(outputs: int, inputs: int, by_output: bool, device: torch.device) -> Quantised:
    """All numbers but NaN, with one scale for each output or for each group."""
    generator = torch.Generator().manual_seed(outputs)
    octets = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, generator=generator)
    octets[octets & 0x7F == 0x7F] -= 1
    groups = -(-inputs // FLOAT8_GROUP)
    scales = torch.rand(outputs, 1 if by_output else groups, generator=generator) * inputs**-0.5 / 64 + 1e-4
    held = scales.expand(-1, groups).contiguous().to(device)
    whole = scales[:, 0].contiguous().to(device) if by_output else None
    return Quantised(octets.view(FLOAT8).to(device), held, inputs, by_output=whole)


def test_few_rows_are_multiplied_by_the_weights_in_their_format() -> None:
    with kernels() as device, poisoned(few_bits, matvec), mock.patch.object(float8, "FEW", 17):
        for outputs, inputs in SHAPES:
            weight = made(outputs, inputs, False, device)
            exact, bias = weight.dense().double(), numbers(outputs, dtype=torch.float16, device=device, seed=1)
            one = numbers(1, inputs, dtype=torch.float16, device=device)
            found = matvec.product(one, weight, bias, dtype=torch.float32)
            torch.testing.assert_close(found.double(), one.double() @ exact.T + bias.double(), rtol=4e-6, atol=1e-5)
            x = numbers(17, inputs, dtype=torch.float16, device=device)
            found = few_bits.product(x, weight, bias, dtype=torch.float32)
            want = x.double() @ exact.half().double().T + bias.double()
            torch.testing.assert_close(found.double(), want, rtol=4e-6, atol=2e-5)
            widened = few_bits.widen(weight, torch.float32, outputs // 3, outputs)
            assert torch.equal(widened, weight.dense()[outputs // 3 :])


@pytest.mark.parametrize("by_output", [True, False], ids=["channels", "groups"])
def test_many_rows_become_fp8_too(by_output: bool) -> None:
    with kernels() as device, poisoned(few_bits, float8):
        for outputs, inputs in SHAPES:
            weight = made(outputs, inputs, by_output, device)
            factors = weight.scales if weight.by_output is None else weight.by_output[:, None]
            bias = numbers(outputs, dtype=torch.bfloat16, device=device, seed=1)
            for rows in (9, 130):
                x = numbers(rows, inputs, dtype=torch.bfloat16, device=device)
                values, scales = reference.quantise(x, grouped=not by_output)
                want = reference.scaled_product(values, scales, weight.values, factors) + bias.double()
                tolerance = (4e-6 if device.type == "cpu" else 1e-3) * float(want.abs().max())
                found = few_bits.product(x, weight, bias, dtype=torch.float32)
                assert found.dtype == torch.float32
                torch.testing.assert_close(found.double(), want, rtol=0.0, atol=tolerance)
                out = torch.full((rows, outputs), torch.nan, device=device)
                float8.multiply(values, scales, weight, bias, out)
                torch.testing.assert_close(out.double(), want, rtol=0.0, atol=tolerance)


def test_experts_widen_them() -> None:
    with kernels() as device, poisoned(experts):
        up, down = (
            stacked([made(outputs, inputs, False, device) for _ in range(3)], 3)
            for outputs, inputs in ((48, 300), (300, 24))
        )
        x, chosen = numbers(5, 300, dtype=torch.float16, device=device), torch.tensor([[0], [2], [2], [1], [0]])
        shares, how = torch.ones(5, 1, device=device), {"tokens": 5, "activation": "silu", "gated": True}
        plain = [torch.stack([dense(one, i).half() for i in range(3)]) for one in (up, down)]
        want = experts.spread(x, shares, chosen.int().to(device), *plain, **how)
        found = experts.spread(x, shares, chosen.int().to(device), up, down, **how)
        torch.testing.assert_close(found, want, rtol=2e-3, atol=2e-3)
        assert want.abs().max() > 0.01


def dense(matrices: Quantised, index: int) -> Tensor:
    return Quantised(matrices.values[index], matrices.scales[index], matrices.inputs).dense()


@pytest.mark.parametrize("grouped", [True, False])
def test_rows_are_quantised_as_the_reference_does(grouped: bool) -> None:
    """To the bit, with zeros, subnormal scales, ties, and rows that are not finite."""
    with kernels() as device, poisoned(float8), mock.patch.object(float8, "_BLOCK_OF_ROW", 128):
        for inputs in (1, 127, 300):
            x = torch.randn(9, inputs, generator=torch.Generator().manual_seed(inputs)) * 3
            x[1], x[2] = 0, x[2] * 1e-38
            x[3], x[4, 0] = torch.arange(inputs) % 64 * 0.0625, 448.0
            x[5, -1], x[6, 0], x[7, 0] = torch.inf, torch.nan, -torch.inf
            values, scales = float8.quantise(x.to(device), grouped=grouped)
            want, factors = reference.quantise(x, grouped=grouped)
            torch.testing.assert_close(scales.cpu(), factors, rtol=0, atol=0, equal_nan=True)
            good = factors.isfinite().repeat_interleave(FLOAT8_GROUP if grouped else inputs, 1)[:, :inputs]
            assert good.any()
            assert torch.equal(values.cpu().view(torch.uint8)[good], want.view(torch.uint8)[good])


@pytest.mark.parametrize("outputs", [64, 4096, 28672])
def test_every_division_of_a_product_is_compiled_at_start(outputs: int) -> None:
    tried = {float8.tiling(rows, outputs) for rows in float8.trial_rows(outputs)}
    assert tried == {float8.tiling(rows, outputs) for rows in range(float8.FEW + 1, 8193)}


def test_a_scaled_row_is_near_itself() -> None:
    """3 bits of a fraction: each number is off by a sixteenth of itself at most, or half the smallest step."""
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    for grouped in (True, False):
        values, scales = reference.quantise(x, grouped=grouped)
        spread: Tensor = scales.repeat_interleave(FLOAT8_GROUP if grouped else 300, 1)[:, :300]
        assert ((values.float() * spread - x).abs() <= x.abs() / 16 + spread * 2.0**-10).all()


@pytest.mark.parametrize("kind", ["blocks", "channels"])
def test_a_decoder(kind: str, tmp_path: Path) -> None:
    """A model whose FP8 stays on the device has the tokens of the same model with plain weights: in float32, whose rows
    never become FP8."""
    checkpoint(tmp_path, *WIDE_FP8[kind])
    jobs = [Job(random_prompt(SHAPE.vocab, seed, length), greedy(3)) for seed, length in ((1, 19), (2, 3))]
    with served(tmp_path, quantization="none") as engine:
        expected = run_alone(engine, jobs)
    with kernels() as device, served(tmp_path, device=str(device), quantization="stored") as engine:
        model = engine.runner.model
        held = [module.packed.few_bits for module, becomes in model.matrices("stored") if becomes is not None]
        assert held
        assert all(one.is_float8 and one.values.device == model.device for one in held)
        assert all((one.by_output is None) == (kind == "blocks" and one.inputs > FLOAT8_GROUP) for one in held)
        assert run(engine, jobs) == expected
