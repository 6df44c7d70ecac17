"""Matrices of 4 bits that checkpoints hold become our own by kernels as they do by torch, bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from support import packing
from support.native import each_isa, kernels_of, needs_native
from test_stored_weights import AWQ, GPTQ4, held
from torch import Tensor

from engine.backends.native.gemm import GROUP, join_levels
from engine.backends.native.repacking import Layout, repack
from engine.model.stored import bits, methods

SIZES = [(8, 32), (24, 96), (136, 224), (264, 1120), (2056, 160)]
"""Outputs and inputs: less than a square of words, whole squares and parts; many, so that threads share them."""


def draw(*shape: int) -> Tensor:
    """Words of any bits, which begin where vectors do not."""
    count = shape[0] * shape[1]
    words = torch.randint(-(1 << 31), 1 << 31, (count + 1,), generator=torch.Generator().manual_seed(count))
    return words.int()[1:].view(shape)


def stored_words(layout: Layout, outputs: int, inputs: int) -> Tensor:
    shapes = {"awq": (inputs, outputs // 8), "gptq": (inputs // 8, outputs), "rows": (outputs, inputs // 8)}
    return draw(*shapes[layout])


def levels_of(words: Tensor, layout: Layout) -> Tensor:
    """uint8 [outputs, inputs]."""
    eights = (words[..., None].long() >> torch.arange(0, 32, 4) & 15).byte()
    if layout == "awq":
        return eights[..., [packing.AWQ_ORDER.index(place) for place in range(8)]].flatten(1).t()
    return (eights.transpose(0, 1) if layout == "gptq" else eights).flatten(1)


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("layout", get_args(Layout))
@each_isa
def test_integers_are_put_in_our_order(layout: Layout, outputs: int, inputs: int, threads: int, isa: str) -> None:
    if layout != "awq":
        outputs -= 3  # no whole eights
    words = stored_words(layout, outputs, inputs)
    with kernels_of(isa, threads):
        found = repack(words, layout)
    assert torch.equal(found, join_levels(levels_of(words, layout).reshape(outputs, -1, GROUP)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (torch.zeros(32, 4), "got .32, 4. of torch.float32"),
        (torch.zeros(32, dtype=torch.int32), "got .32. of torch.int32"),
        (torch.zeros(40, 4, dtype=torch.int32), "a multiple of 32, got 40"),
    ],
)
def test_what_are_no_such_words_is_refused(words: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        repack(words, "awq")


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "awq-symmetric": AWQ,
    "gptq": GPTQ4,
    "gptq-v2": GPTQ4 | {"checkpoint_format": "gptq_v2"},
    "compressed-tensors": {},
    "compressed-tensors-zeros": {},
}


def matrix(kind: str, outputs: int, inputs: int, group: int, dtype: torch.dtype) -> dict[str, Tensor]:
    scales = torch.randn(outputs, inputs // group, generator=torch.Generator().manual_seed(outputs)) * 0.05
    scales[0, 0], scales[-1, -1] = 1e-7, 0
    if kind.startswith("compressed"):
        parts = {".weight_packed": stored_words("rows", outputs, inputs), ".weight_scale": scales.to(dtype)}
        if kind.endswith("zeros"):
            parts[".weight_zero_point"] = draw(outputs // 8, inputs // group)
        return parts | {".weight_shape": torch.tensor([outputs, inputs])}
    parts = {".qweight": stored_words("awq" if kind.startswith("awq") else "gptq", outputs, inputs)}
    if kind != "awq-symmetric":
        parts[".qzeros"] = draw(inputs // group, outputs // 8)
    return parts | {".scales": scales.t().to(dtype).contiguous()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_kernels_take_a_checkpoint_as_torch_does(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, scales and minima; and they are what widened weights are, but for the rounding of minima."""
    weights = {"quant_method": "compressed-tensors", "config_groups": {"group": {"weights": {"num_bits": 4}}}}
    scheme = methods.find_scheme(SimpleNamespace(quantization_config=CHECKPOINTS[kind] or weights))
    assert scheme is not None
    calls: list[Tensor] = []
    by_kernel = int(bits.native.available())
    for outputs, inputs, group in [(*size, group) for size in SIZES for group in (GROUP, size[1])]:
        parts = matrix(kind, outputs, inputs, group, dtype)
        tensors = held({f"m{name}": part for name, part in parts.items()}, tmp_path)
        (packed,) = scheme.find(tensors)
        assert packed.quantised is not None
        given = [tensors.read(name) for name in packed.parts]
        with monkeypatch.context() as patched:
            patched.setattr(bits, "repack", lambda *words: calls.append(words[0]) or repack(*words))
            found = packed.quantised(*given)
            patched.setattr(bits.native, "available", lambda: False)
            wanted = packed.quantised(*given)
        assert torch.equal(found.values, wanted.values)
        assert torch.equal(found.scales.view(torch.int16), wanted.scales.view(torch.int16))
        assert found.inputs == wanted.inputs == inputs
        scales = found.scales.float().abs().repeat_interleave(GROUP, 1)
        rounding = (16 * scales[..., 0] + scales[..., 1]) * 2.0**-11 + 1e-6  # of scales that are no halves, and minima
        assert ((found.dense() - packed.decode(*given)).abs() <= rounding).all()
    assert len(calls) == by_kernel * 2 * len(SIZES)
