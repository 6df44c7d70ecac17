"""A token alone on a GPU (or by Triton's interpreter): with the fewest launches, what the modules give."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.checkpoints import random_prompt
from support.gpu import kernels
from support.pages import Pages, load, scattered_tables
from support.poison import poisoned
from test_gpu_fused import VOCABULARY, by_torch, make_any, near

from engine.backends.triton import activations, matvec, norms, rotary
from engine.model.executors.triton import TritonExecutor
from engine.model.executors.triton_operations import Join
from engine.model.executors.triton_row import MultiplyRow
from engine.model.row_form import FUSED, LIBRARY, RowForm
from engine.model.transformer import Transformer

pytestmark = pytest.mark.slow

# Of each placement, norm and feed-forward network one, with the products of a layer that kernels compute, and the norms
# of a step that are no part of one: the last of all, and where a sublayer's result is normed, or the sum with it.
SUBJECTS = {
    "llama-one-kv-bias": (4, 1),
    "qwen3": (4, 1),
    "gpt2": (4, 1),
    "gemma3": (4, 6),
    "gptj": (4, 1),  # in parallel
    "falcon-grouped": (4, 1),  # in parallel, two norms
    "bloom-residuals-after-norms": (4, 6),
    "olmo2": (4, 8),  # half of them of queries and keys
    "opt-norms-after-projected": (4, 4),
    "mixtral": (2, 4),
    "t5-gated": (6, 1),
    "bart": (6, 7),
}


def executor_of(model: Transformer) -> TritonExecutor:
    assert model.decoder is not None
    assert isinstance(model.decoder.executor, TritonExecutor)
    return model.decoder.executor


def answers(model: Transformer, form: RowForm) -> list[Tensor]:
    """Hidden states and logits of a prompt's chunk and of three tokens alone, and what was written into pages."""
    held = Pages(model, scattered_tables([9]), more=8, form=form)
    if model.encoder is not None:
        held.encode([random_prompt(VOCABULARY, 9, 3)], [[int(held.tables.max()) + 1]])
    rows = [held.step([tokens], slots_known=False)[0] for tokens in ([3, 1, 4], [1], [5], [9])]
    logits = [model.logits(row[-1:], form) for row in rows]
    assert all(part.isfinite().all() for part in (*rows, *logits)), "NaN would equal NaN"
    return rows + logits + [tensor for cache in held.caches for tensor in (cache.keys, cache.values)]


@pytest.mark.parametrize("name", SUBJECTS)
def test_hidden_states_logits_and_pages_are_those_of_the_modules(name: str, tmp_path: Path) -> None:
    with kernels() as device, torch.inference_mode():
        model = load(make_any(name, tmp_path), device=device)
        model.pack()
        layers = len(model.spec.trunk.blocks)
        assert model.decoder is not None
        with (
            poisoned(activations, matvec, norms, rotary),
            mock.patch.object(matvec, "product", side_effect=matvec.product) as products,
            mock.patch.object(norms, "_launch", side_effect=norms._launch) as normed,
        ):
            held = Pages(model, scattered_tables([9]), more=8, form=FUSED)
            if model.encoder is not None:
                held.encode([[3, 4]], [[int(held.tables.max()) + 1]])
            held.step([[3, 1]], slots_known=False)
            assert not products.called, "of several tokens"
            before = normed.call_count
            held.step([[5]], slots_known=False)
            of_products, of_norms = SUBJECTS[name]
            expected = of_products * layers + (model.decoder.projection is not None)
            assert products.call_count == expected
            assert normed.call_count - before == of_norms
            ours = answers(model, FUSED)
            assert products.call_count == 4 * expected + 4, "logits, too"
        with by_torch(model):
            near(ours, answers(model, LIBRARY))


@pytest.mark.parametrize("name", ["qwen3", "falcon-grouped"])
def test_in_half_precision(name: str, tmp_path: Path) -> None:
    with kernels() as device, torch.inference_mode():
        model = load(make_any(name, tmp_path), torch.float16, device=device)
        model.pack()
        ours = answers(model, FUSED)
        with by_torch(model):
            theirs = answers(model, LIBRARY)
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found.isnan(), wanted.isnan())
        difference = (found - wanted).float().nan_to_num(0.0)
        assert difference.norm() <= 4 * torch.finfo(torch.float16).eps * wanted.float().nan_to_num(0.0).norm()


def test_what_is_too_wide_keeps_its_operations(tmp_path: Path) -> None:
    with kernels() as device, mock.patch.object(matvec, "_HELD", 16):
        model = load(make_any("qwen3", tmp_path), device=device)
        model.pack()
        made = executor_of(model).row_operations
        assert any(isinstance(one, Join) for one in made)
        products = [one for one in made if isinstance(one, MultiplyRow)]
        assert products
        assert not any(one.norm or one.function for one in products)
