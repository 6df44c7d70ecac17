"""The row count from which on matrix products do not depend on the batch, and that the runner keeps to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paged_simulator import make_request
from torch import Tensor, nn

from engine.backends import native
from engine.backends.attention.formats import PageShape
from engine.execution import invariance
from engine.execution.invariance import MOST_ROWS, min_invariant_rows
from engine.execution.kv_cache import KVCache
from engine.execution.runner import ModelRunner
from engine.model.activations import ACTIVATIONS, activate
from engine.model.experts import ExpertsFeedForward
from engine.model.inputs import Inputs
from engine.model.layers import Linear
from engine.model.place import Place
from engine.model.row_form import LIBRARY, RowForm
from engine.model.spec import Corrected, Dense, Experts, Lm, ScaledInput
from engine.scheduling.batch import build_plan
from engine.scheduling.plan import StepPlan
from engine.scheduling.row import Row
from engine.scheduling.sequence import SequenceGroup

# (576, 1536) is a shape for which a single bfloat16 row differs in one of ten cases on some CPUs.
SHAPES = [(96, 64), (64, 96), (256, 64), (33, 64), (1000, 48), (576, 1536)]


def model(packed: str = "by the best", dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    """Layers whose weights are laid out by whichever kernels are best here, by oneDNN, or not at all."""
    torch.manual_seed(0)
    place = Place(torch.device("cpu"), dtype)
    layers = nn.ModuleList(Linear(inner, outer, True, place) for outer, inner in SHAPES)
    for layer in layers:
        layer.weight.normal_()
        layer.bias.normal_()
        if packed == "by the best":
            layer.pack()
        elif packed == "by oneDNN":
            with native.use(None):
                layer.pack()
    return layers


@pytest.mark.parametrize("packed", ["not", "by oneDNN", "by the best"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_count_holds_for_other_inputs_too(
    dtype: torch.dtype, packed: str, caplog: pytest.LogCaptureFixture
) -> None:
    layers = model(packed, dtype)
    with caplog.at_level(logging.INFO, "octavo.execution"):
        least = min_invariant_rows(layers)
    if "may depend" in caplog.text:
        pytest.skip("no row count is invariant on this machine, and the log says so")
    assert 1 <= least <= MOST_ROWS
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        for layer in layers:
            x = torch.randn(80, layer.inputs, generator=generator).to(dtype)
            truth = layer(x)
            for rows in sorted({least, least + 1, least + 3, 17, 32, 57, 80}):
                if rows >= least:
                    for start in range(0, 81 - rows, 3):
                        part = x[start : start + rows].clone()
                        assert torch.equal(layer(part)[: 80 - start], truth[start : start + rows])


def test_a_row_does_not_see_what_the_others_hold() -> None:
    """Values of other rows, zeros or infinities, leave a row's bits alone at the measured count."""
    layers = model()
    least = min_invariant_rows(layers)
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for layer in layers:
            x = torch.randn(least + 4, layer.inputs, generator=generator)
            padded = torch.zeros_like(x)
            padded[0], padded[1:3] = x[0], torch.nan
            assert torch.equal(layer(x)[0], layer(padded)[0])


@pytest.fixture(params=[1, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "rows"), [(8192, 50), (37, 3000), (96, 2200), (40000, 3)])
def test_activations_do_not_depend_on_the_batch(width: int, rows: int, dtype: torch.dtype, threads: int) -> None:
    """However many threads share the rows: torch alone divides them anywhere, and rounds otherwise at the seams."""
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    halves = {"of a gate": x.chunk(2, dim=1)[0], "dense": x[:, :width].contiguous()}
    for name, function in ACTIVATIONS.items():
        for how, whole in halves.items():
            together = activate(function, whole)
            assert together.shape == whole.shape
            torch.testing.assert_close(together, function(whole))
            for start, count in [(0, 1), (1, 1), (2, 1), (rows - 3, 3), (rows // 3, rows // 2), (1, 2)]:
                part = activate(function, whole[start : start + count].clone())
                assert torch.equal(part, together[start : start + count]), (name, how, start, count)


@pytest.mark.parametrize("routing", [Corrected(), Corrected(groups=3, open_groups=2), ScaledInput()])
def test_scores_of_experts_do_not_depend_on_the_batch(routing: Corrected | ScaledInput) -> None:
    """torch computes the last elements of a tensor, which are no full vector, with other code. These are six scores of
    each token."""
    place = Place(torch.device("cpu"), torch.float32)
    experts = ExpertsFeedForward(Experts(Dense(8, "relu2"), count=6, active=2, routing=routing), 6, place)
    experts.router = Linear(6, 6, False, place)  # gives what it reads
    experts.router.weight.copy_(torch.eye(6))
    if isinstance(routing, Corrected):
        experts.correction.zero_()
    x = torch.randn(41, 6, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = experts.route(x)[0]
        for count in (1, 3, 5, 7, 16):
            parts = [experts.route(part)[0] for part in torch.split(x, count)]
            assert torch.equal(torch.cat(parts), whole)


def test_without_products_nothing_is_padded() -> None:
    assert min_invariant_rows(nn.LayerNorm(4)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_products_are_invariant_without_measuring(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model(dtype=dtype)
    if not all(layer.packed is not None and layer.packed.invariant for layer in layers):
        pytest.skip("others are better on this machine, or there are no kernels")
    monkeypatch.setattr(invariance, "_threshold", lambda *_: pytest.fail("measured"))
    assert min_invariant_rows(layers) == 1
    with torch.inference_mode():
        for layer in layers:
            x = torch.randn(80, layer.inputs).to(dtype)
            truth = layer(x)
            assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), truth)
            assert torch.equal(torch.cat([layer(rows) for rows in x.split(7)]), truth)


@pytest.mark.parametrize("how", ["by oneDNN", "by the best"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_equal_plain_ones(dtype: torch.dtype, how: str) -> None:
    for plain, packed in zip(model("not", dtype), model(how, dtype), strict=True):
        if packed.packed is None:
            pytest.skip("this machine has no packed products")
        assert packed.weight.numel() == 0, "the plain weight is given up"
        for rows in (1, 2, 7, 33):
            x = torch.randn(rows, plain.inputs).to(dtype)
            truth = torch.nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double())
            tolerance = 2e-5 if dtype == torch.float32 else 1e-2
            assert (packed(x).double() - truth).abs().max() <= tolerance * truth.abs().max()


def test_a_shared_weight_stays() -> None:
    """A tied head's weight is the embedding's table, which is still looked up."""
    table = nn.Parameter(torch.randn(50, 16), requires_grad=False)
    head = Linear(16, 50, False, Place(torch.device("cpu"), torch.float32), shared=table)
    head.pack()
    assert head.weight is table
    assert table.shape == (50, 16)
    x = torch.randn(3, 16)
    assert torch.allclose(head(x), x @ table.T, atol=1e-5)


class RecordingModel:
    """Stands in for the transformer: remembers how many rows each product had."""

    device = torch.device("cpu")
    encoder = head = twin = ranks = None
    decoder, rotary_shifts = object(), ()
    spec = SimpleNamespace(head=Lm(tied=True), signal=None, trunk=SimpleNamespace(embedding=None))

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[int] = []

    def __call__(self, inputs: Inputs) -> Tensor:
        assert inputs.slots is not None
        assert len(inputs.token_ids) == len(inputs.positions) >= len(inputs.slots) == sum(inputs.metadata.query_lens)
        assert len(inputs.token_ids) >= inputs.min_rows
        self.tokens.append(len(inputs.token_ids))
        return torch.nn.functional.one_hot(inputs.token_ids, 8).float() * 9

    def logits(self, hidden: Tensor, form: RowForm = LIBRARY, head: torch.nn.Module | None = None) -> Tensor:
        self.rows.append(len(hidden))
        return hidden


def plan_for(prompt: list[int], **decoding: Any) -> StepPlan:
    group = SequenceGroup(make_request("r", prompt, **decoding), 0, b"")
    sequence = group.sequences[0]
    sequence.table.extend(range(1, 1 + len(prompt)))
    return build_plan([Row(group, sequence, 0, len(prompt), True)], [], 4)


@pytest.mark.parametrize(("least", "length"), [(1, 3), (5, 3), (5, 9)])
def test_the_runner_pads_every_product_and_no_result(least: int, length: int) -> None:
    stand_in = RecordingModel()
    runner = ModelRunner(
        stand_in,  # type: ignore[arg-type]
        KVCache([PageShape(1, 2)], 16, 4, torch.float32, torch.device("cpu")),
        max_num_batched_tokens=4,
        min_rows=least,
    )
    prompt = [1, 2, 3, 4, 5, 6, 7, 0, 1][:length]
    result = runner.execute(plan_for(prompt, prompt_logprobs=1, logprobs=1))
    assert stand_in.tokens == [max(least, length)]
    assert stand_in.rows == [max(least, 1), max(least, length - 1)], "one sampled row, then the prompt's"
    assert result.tokens.tolist() == [[prompt[-1]]]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.top_ids[:, 0].tolist() == prompt[:-1]
    assert np.isfinite(result.prompt_logprobs.logprobs).all()
    without = runner.execute(plan_for(prompt))
    assert without.prompt_logprobs is None
    assert without.tokens.tolist() == [[prompt[-1]]]
