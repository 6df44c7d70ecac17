"""Products with weights of 8 and 4 bits on a GPU (or by Triton's interpreter) against torch's with the weights that
these stand for, and whole models with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from support.driving import Job, make_engine, run, run_alone
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.gpu import kernels
from support.jobs import CHECKPOINT, greedy, prompt, sampled
from support.poison import poisoned
from test_gpu_elementwise import by_torch

from engine import Engine
from engine.backends.native.gemm import Quantised
from engine.backends.triton import experts, few_bits, matvec
from engine.backends.triton.norms import Norm
from engine.execution import starting
from engine.execution.recording import eager
from engine.model import quantisation, quantised_loading, transformer
from engine.model.experts import ExpertMatrices
from engine.model.latent import LatentAttention
from engine.model.quantisation import ON_GPUS, Quantization, device_product, quantise_by_torch
from engine.model.row_form import FUSED

pytestmark = pytest.mark.slow

KINDS = pytest.mark.parametrize("kind", ON_GPUS)
UNIT = {torch.float32: 4e-6, torch.float16: 4e-3}
SHAPES = ((1, 1), (7, 40), (70, 300))


def made(outputs: int, inputs: int, kind: Quantization, device: torch.device) -> Quantised:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * inputs**-0.5
    found = quantise_by_torch(weight, kind)
    return Quantised(found.values.to(device), found.scales.to(device), inputs)


def numbers(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@KINDS
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, torch.float16), (17, torch.float16), (33, torch.float16), (65, torch.float16), (2, torch.float32),
     (33, torch.float32)],
)  # fmt: skip
def test_products(rows: int, dtype: torch.dtype, kind: Quantization) -> None:
    """Of all tiles, and of more rows than these have, which take the matrix in pieces; with a bias and without."""
    with kernels() as device, poisoned(few_bits):
        for outputs, inputs in SHAPES:
            weight, x = made(outputs, inputs, kind, device), numbers(rows, inputs, dtype=dtype, device=device)
            bias = numbers(outputs, dtype=dtype, device=device, seed=1)
            exact = x.double() @ weight.dense().to(dtype).double().T
            with mock.patch.object(few_bits, "SCRATCH", 50 * inputs * dtype.itemsize):  # pieces of 50 rows
                for part, want, wide in ((None, exact, torch.float32), (bias, exact + bias.double(), dtype)):
                    found = few_bits.product(x.view(1, rows, inputs), weight, part, dtype=wide)
                    assert found.dtype == wide
                    assert found.shape == (1, rows, outputs)
                    torch.testing.assert_close(found[0].double(), want, rtol=UNIT[wide], atol=3 * UNIT[wide])
            assert few_bits.product(x[:0], weight, bias).shape == (0, outputs)


@KINDS
@pytest.mark.parametrize("held", [128, 8192], ids=["pieces", "held"])
def test_one_row_with_what_lies_around_it(held: int, kind: Quantization) -> None:
    """A norm before the product, a gate, and the stream that results are added to, in tiles and in pieces."""
    with kernels() as device, poisoned(matvec), mock.patch.object(matvec, "_HELD_WITHOUT_NORM", held):
        weight, x = made(70, 300, kind, device), numbers(1, 300, dtype=torch.float32, device=device)
        stream = numbers(1, 70, dtype=torch.float32, device=device, seed=1)
        dense, norm = weight.dense().double(), Norm(numbers(300, dtype=torch.float32, device=device, seed=2), 1e-5)
        joined = x.double() @ dense.T + stream.double()
        found = matvec.product(x, weight, stream=stream)
        assert found is stream
        torch.testing.assert_close(found.double(), joined, rtol=4e-6, atol=1e-5)
        gate, up = (by_torch(x, norm).double() @ dense.T).chunk(2, -1)
        found = matvec.product(x, weight, norm=norm, function="silu", gated=True)
        torch.testing.assert_close(found.double(), F.silu(gate) * up, rtol=4e-6, atol=1e-5)


@KINDS
def test_what_is_widened_is_what_the_weight_stands_for(kind: Quantization) -> None:
    with kernels() as device, poisoned(few_bits):
        for outputs, inputs in SHAPES:
            weight = made(outputs, inputs, kind, device)
            found = few_bits.widen(weight, torch.float32, outputs // 3, outputs)
            assert torch.equal(found, weight.dense()[outputs // 3 :])


def test_the_numbers_of_rows_that_have_a_kernel() -> None:
    """Tiles are as large as what they multiply, and the most of 64 rows."""
    tilings = {rows: few_bits.tiling(rows, 28672, 2) for rows in (1, 17, 64)}
    assert [how.rows for how in tilings.values()] == [16, 32, 64]
    assert few_bits.tiling(64, 1024, 2).outputs == 16, "the programs of a small matrix would be too few"
    with kernels() as device:
        x, weight = torch.ones(65, 64, device=device), made(96, 64, "int8", device)
        for rows, dtype, widens in ((16, torch.float32, False), (17, torch.float32, True), (64, torch.float16, False),
                                    (65, torch.float16, True)):  # fmt: skip
            with mock.patch.object(few_bits, "widen", side_effect=few_bits.widen) as widened:
                few_bits.product(x[:rows].to(dtype), weight)
            assert widened.called == widens


@KINDS
def test_without_kernels_torch_computes_them(kind: Quantization) -> None:
    """As on a GPU that Triton does not serve."""
    weight, x = made(12, 40, kind, torch.device("cpu")), torch.ones(3, 40)
    bias = torch.arange(12.0)
    torch.testing.assert_close(device_product(weight, bias)(x), F.linear(x, weight.dense(), bias))


def test_what_does_not_fit_is_refused() -> None:
    with kernels() as device:
        weight, x = made(6, 40, "int8", device), torch.ones(2, 40, device=device)
        fast = quantise_by_torch(torch.ones(6, 40), "int8-fast")
        for call, said in (
            (lambda: few_bits.product(x[:, :8], weight), "is not multiplied by"),
            (lambda: few_bits.product(x, weight, torch.ones(5, device=device)), "not added to 6"),
            (
                lambda: few_bits.product(x, Quantised(weight.values.t(), weight.scales, 6)),
                "a weight of 6 features is not",
            ),
            (lambda: few_bits.product(x, fast), "with scales"),
            (lambda: matvec.product(x, weight), "is not multiplied by"),
        ):
            with pytest.raises(ValueError, match=said):
                call()


@contextmanager
def widened_on_a_cpu() -> Iterator[None]:
    """A CPU has the few bits that a GPU has, and its activations keep their format."""

    def product(weight: Tensor | Quantised, bias: Tensor | None, kind: Quantization) -> Any:
        found = weight if isinstance(weight, Quantised) else quantisation.quantise(weight, kind)
        dense = found.dense()
        return lambda x: F.linear(x, dense.to(x.dtype), bias), None

    with (
        mock.patch.object(quantisation, "product", product),
        mock.patch.object(quantised_loading, "form_on", return_value="plain"),
    ):
        yield


SETTINGS: dict[str, Any] = {
    "max_model_len": 32,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 24,
    "quantization": "int4",
}


@contextmanager
def served(path: Path, **settings: Any) -> Iterator[Engine]:
    def tiling(rows: int, _outputs: int, _itemsize: int) -> few_bits.Tiling:
        return few_bits.Tiling(16 if rows <= 16 else 64, 256, 64, 4)

    with (
        # That a CPU's rows depend on the batch is measured, by thousands of products.
        mock.patch.object(starting, "min_invariant_rows", return_value=1),
        # Programs are interpreted one after the other: few of them.
        mock.patch.object(few_bits, "tiling", tiling),
        mock.patch.object(matvec, "_PROGRAMS", 1),
    ):
        engine = make_engine(path, **(SETTINGS | settings))
        try:
            yield engine
        finally:
            engine.close()


def test_a_decoder(checkpoint: Callable[[str], Any]) -> None:
    """A prompt and a row beside it get the tokens of the same model on a CPU, whose weights are those that the few bits
    stand for; one row alone as well by fused kernels, with steps that are recorded. The logits' matrix has 8 bits."""
    path = checkpoint(CHECKPOINT).path
    jobs = [Job(prompt(1, 19), greedy(3)), Job(prompt(2, 3), sampled(3, 3))]
    with widened_on_a_cpu(), served(path) as engine:
        expected = run_alone(engine, jobs)
    with kernels() as device, served(path, device=str(device)) as engine:
        model = engine.runner.model
        matrices = [module for module, becomes in model.matrices("int4") if becomes is not None]
        held = [module.packed.few_bits for module in matrices]
        assert {few_bits.bits(one) for one in held} == {4, 8}
        assert not any(module.weight.numel() for module in matrices)
        assert all(one.values.device == model.device for one in held)
        plain = sum(parameter.nbytes for parameter in model.parameters())
        assert model.weight_bytes() == plain + sum(one.values.nbytes + one.scales.nbytes for one in held)
        with mock.patch.object(few_bits, "widen", side_effect=few_bits.widen) as widened:
            assert run(engine, jobs) == expected
        assert widened.called, "of the prompt's rows, which have no kernel in float32"
        if device.type != "cpu":
            return
        times = cycle((2.0, 1.0))
        engine.runner.use_graphs(1, eager, lambda replay: next(times))
        with mock.patch.object(matvec, "product", side_effect=matvec.product) as fused:
            assert run(engine, jobs[:1]) == expected[:1]
        assert engine.runner.graphs.num_replayed == 2
        assert engine.runner.graphs.one_row.kept == dict.fromkeys(("layers", "logits"), FUSED.name)
        assert all(isinstance(call.args[1], Quantised) for call in fused.call_args_list)
        assert fused.called


@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss", "deepseek-v3"])
def test_experts_and_latents(family: str, tmp_path: Path) -> None:
    """They get the tokens of the same model on a CPU, whose weights are those that the few bits stand for. What is
    multiplied with the heads' latents stays plain."""
    given = make_family_checkpoint(FAMILY_SHAPES[family], tmp_path)
    jobs = [Job(one, greedy(3)) for one in sorted(given.prompts(), key=len)[:2]]
    plain_heads = mock.patch.object(transformer, "on_gpu", return_value=True)
    with plain_heads, widened_on_a_cpu(), served(tmp_path) as engine:
        expected = run_alone(engine, jobs)
    with kernels() as device, served(tmp_path, device=str(device)) as engine:
        model = engine.runner.model
        matrices = [module for module, becomes in model.matrices("int4") if becomes is not None]
        of_experts = [module.few_bits for module in matrices if isinstance(module, ExpertMatrices)]
        assert of_experts
        assert all(one.values.shape[0] > 1 and one.values.device == model.device for one in of_experts)
        assert not any(module.weight.numel() for module in matrices)
        latents = [module for module in model.modules() if isinstance(module, LatentAttention)]
        assert bool(latents) == (family == "deepseek-v3")
        assert all(module.keys.weight.numel() and module.values.weight.numel() for module in latents)
        plain = sum(parameter.nbytes for parameter in model.parameters())
        held = [module.few_bits for module in matrices]
        assert model.weight_bytes() == plain + sum(one.values.nbytes + one.scales.nbytes for one in held)
        with mock.patch.object(experts, "spread", side_effect=experts.spread) as spread:
            assert run(engine, jobs) == expected
        assert spread.called
