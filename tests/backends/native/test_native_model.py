"""Whole models with kernels of our own and without: that they are used, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.checkpoints import Checkpoint, random_prompt
from support.driving import Job, make_engine, run
from support.executors import by_single_kernels, use_torch
from support.native import each_isa, kernels_of, needs_native
from support.pages import Pages, load, scattered_tables
from torch import Tensor

from engine import SamplingParams
from engine.backends import native
from engine.backends.native import norms, rotary
from engine.model.activations import ACTIVATIONS, activate, activate_by_name, gate_by_name
from engine.model.executors import native_rows
from engine.model.executors.choice import choose_kernels
from engine.model.executors.native_rows import NativeRows
from engine.model.normalisation import Norm
from engine.model.norms import build_norm
from engine.model.place import Place

pytestmark = needs_native
CPU = torch.device("cpu")


def hidden_states(model: Any, prompts: list[list[int]]) -> Tensor:
    """Of prompts in two chunks, then of a token each, with padding."""
    pages = Pages(model, scattered_tables([len(prompt) + 1 for prompt in prompts]))
    steps = [[p[: len(p) // 2] for p in prompts], [p[len(p) // 2 :] for p in prompts], [[5]] * len(prompts)]
    return torch.cat([row for chunks in steps for row in pages.step(chunks, padding=3)])


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-grouped", "gpt2-untied"])
def test_hidden_states_are_those_of_torch(
    checkpoint: Callable[[str], Checkpoint], name: str, dtype: torch.dtype, isa: str
) -> None:
    """A model whose weights are not laid out is torch's alone, and starts no kernel."""
    found = checkpoint(name)
    model = load(found.path, dtype, max_model_len=60)
    prompts = [random_prompt(found.vocab, seed, length) for seed, length in enumerate((11, 30, 4))]
    with native.use(None):  # a kernel would raise an error
        by_torch = hidden_states(model, prompts)
    store = rotary.rotate_and_store
    choose_kernels(model, CPU)
    with (
        kernels_of(isa, 2),
        by_single_kernels(model),
        mock.patch.object(rotary, "rotate_and_store", side_effect=store) as stored,
    ):
        ours = hidden_states(model, prompts)
    assert stored.call_count == 3 * len(model.spec.trunk.blocks), "in each layer of each step"
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert (ours.float() - by_torch.float()).abs().max() <= tolerance * by_torch.float().abs().max()


@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
def test_tokens_are_those_of_torch(checkpoint: Callable[[str], Checkpoint], cache_dtype: str) -> None:
    found = checkpoint("llama-grouped")
    prompts = found.prompts()
    jobs = [Job(prompt, SamplingParams(temperature=0.0, max_tokens=20)) for prompt in prompts]
    with native.use(None):
        wanted = run(make_engine(found.path, kv_cache_dtype=cache_dtype), jobs)
    engine = make_engine(found.path, kv_cache_dtype=cache_dtype)
    assert run(engine, jobs) == wanted
    with (
        by_single_kernels(engine.runner.model),
        mock.patch.object(norms, "rms_norm", side_effect=norms.rms_norm) as normed,
    ):
        assert run(engine, jobs) == wanted
        assert normed.called
        normed.reset_mock()
        use_torch(engine.runner.model)
        assert run(engine, jobs) == wanted
        assert not normed.called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_listed_is_what_kernels_compute(dtype: torch.dtype) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    (gate, up), rows = x.chunk(2, dim=1), NativeRows()
    tolerance = {"rtol": 2e-2, "atol": 1e-4} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for name, function in ACTIVATIONS.items():
        torch.testing.assert_close(activate_by_name(name, x, rows), activate(function, x), **tolerance)
        torch.testing.assert_close(gate_by_name(name, x, rows), activate(function, gate) * up, **tolerance)
        assert (rows.activate(name, x) is not None) == (name in native_rows.PLAIN)
        assert (rows.gate(name, x) is not None) == (name in native_rows.GATED)


def test_other_formats_are_torchs() -> None:
    x, rows = torch.randn(3, 8).half(), NativeRows()
    assert rows.activate("gelu_tanh", x) is None
    assert rows.gate("silu", x) is None
    norm = build_norm(Norm("rms", 1e-5), 8, Place(CPU, torch.float16))
    assert norm is not None
    norm.weight.fill_(1)
    choose_kernels(norm, CPU)
    assert isinstance(norm.kernels, NativeRows)
    assert norm(x).dtype == torch.float16
    with native.use(None):
        choose_kernels(norm, CPU)
    assert norm.kernels is None
