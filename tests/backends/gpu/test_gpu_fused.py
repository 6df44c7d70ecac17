"""Layers with few launches on a GPU (or by Triton's interpreter): every family gives what its modules give."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support import executors
from support.checkpoints import SHAPES as PLAIN_SHAPES
from support.checkpoints import make_checkpoint, random_prompt
from support.driving import Job, make_engine, run
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.gpu import kernels
from support.pages import BLOCK, Pages, load, scattered_tables
from support.poison import poisoned
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES

from engine import SamplingParams
from engine.backends import triton as gpu
from engine.backends.attention.base import AttentionMetadata, Paged
from engine.backends.triton import activations, norms, pages, rotary
from engine.model.executors.triton import TritonExecutor
from engine.model.inputs import Inputs
from engine.model.slots import find_slots
from engine.model.transformer import Transformer

pytestmark = pytest.mark.slow

# Each placement, norm, layout of rotation, and way to attend once; the others take an afternoon.
SUBJECTS = [
    "llama-one-kv-bias",  # before sublayers
    "bloom-residuals-after-norms",  # residuals begin after norms; ALiBi
    "falcon-grouped",  # in parallel, two norms
    "gptj",  # in parallel, one norm; neighbours are turned together, some features are not
    "gemma3",  # before and after sublayers, "1 + w", norms of heads, two rotations
    "mpt-odd-heads-clipped",
    "olmo2",  # after sublayers, norms of all heads at once
    "opt-norms-after-projected",  # after the sum, a projection at the end
    "qwen3",
    "mixtral",
    "phi3-window-partial-rotary-tied",
    "phi3-long-factors",  # two rows are turned as short sequences are
    "qwen2-moe",  # a network for every token beside experts
    "gpt-oss",  # sinks, experts with biases
    "t5-gated",
    "bart",
]
LENGTHS = (6, 1, 9)
VOCABULARY = 60


def make_any(name: str, folder: Path) -> Path:
    """A tiny random checkpoint."""
    if name in PLAIN_SHAPES:
        return make_checkpoint(name, folder).path
    if name in FAMILY_SHAPES:
        return make_family_checkpoint(FAMILY_SHAPES[name], folder).path
    return make_seq2seq_checkpoint(SEQ2SEQ_SHAPES[name], folder).path


@contextmanager
def by_torch(model: Transformer) -> Iterator[None]:
    """torch computes, and no kernels of ours."""
    with executors.by_torch(model), mock.patch.object(gpu, "serves", return_value=False):
        yield


def hidden_states(model: Transformer, *, padding: int = 0, slots_known: bool = True) -> list[Tensor]:
    """Of prompts in two chunks, then of a token each; and last all keys and values that were written."""
    prompts = [random_prompt(VOCABULARY, seed, length) for seed, length in enumerate(LENGTHS)]
    reach = [length + 1 for length in LENGTHS]
    held = Pages(model, scattered_tables(reach), more=8, reach=reach)
    if model.encoder is not None:
        first = int(held.tables.max()) + 1
        inputs = [random_prompt(VOCABULARY, 9 + seed, 2 + seed) for seed in range(len(LENGTHS))]
        held.encode(inputs, [[first + row] for row in range(len(inputs))])
    steps = [[p[: len(p) // 2] for p in prompts], [p[len(p) // 2 :] for p in prompts], [[5]] * len(prompts)]
    rows = [row for chunks in steps for row in held.step(chunks, padding=padding, slots_known=slots_known)]
    assert all(row.isfinite().all() for row in rows), "NaN would equal NaN"
    return rows + [tensor for cache in held.caches for tensor in (cache.keys, cache.values)]


def near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal but for float32's rounding, and poison where there is poison."""
    for found, wanted in zip(ours, theirs, strict=True):
        largest = float(wanted.abs().nan_to_num(0.0).max()) if wanted.numel() else 1.0
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * max(largest, 1e-3), equal_nan=True)


@pytest.mark.parametrize("name", SUBJECTS)
def test_hidden_states_and_pages_are_those_of_the_modules(name: str, tmp_path: Path) -> None:
    path = make_any(name, tmp_path)
    with kernels() as device:
        model = load(path, device=device)
        model.pack()
        with (
            executors.counted(TritonExecutor) as runs,
            poisoned(activations, norms, pages, rotary),
        ):
            ours = hidden_states(model)
        assert runs.call_count == 3 + (model.encoder is not None)
        with by_torch(model):
            near(ours, hidden_states(model))


@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_hidden_states_in_half_precision(name: str, tmp_path: Path) -> None:
    path = make_any(name, tmp_path)
    with kernels() as device:
        model = load(path, torch.float16, device=device)
        model.pack()
        ours = hidden_states(model)
        with by_torch(model):
            theirs = hidden_states(model)
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.dtype == wanted.dtype == torch.float16
        assert torch.equal(found.isnan(), wanted.isnan())
        difference = (found - wanted).float().nan_to_num(0.0)
        assert difference.norm() <= 4 * torch.finfo(torch.float16).eps * wanted.float().nan_to_num(0.0).norm()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_any("llama-grouped", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("padding", [0, 3])
def test_slots_are_worked_out(llama: Path, padding: int) -> None:
    with kernels() as device:
        model = load(llama, device=device)
        model.pack()
        near(hidden_states(model, padding=padding, slots_known=False), hidden_states(model))
        with by_torch(model):
            near(hidden_states(model, padding=padding, slots_known=False), hidden_states(model))


def test_slots_by_torch_are_those_of_the_kernel() -> None:
    lengths = [3, 0, 1, 5]
    with kernels() as device:
        metadata = AttentionMetadata.build(lengths, [9, 4, 1, 12], device)
        tables = torch.randperm(12, dtype=torch.int32).view(4, 3).to(device)
        keys = torch.zeros(12, BLOCK, 1, 4, device=device)
        positions = torch.tensor([6, 7, 8, 0, 7, 8, 9, 10, 11, 0, 0], device=device)
        found = find_slots(Paged(keys, keys, tables), metadata, positions, 9)
        with mock.patch.object(gpu, "serves", return_value=False):
            assert torch.equal(found, find_slots(Paged(keys, keys, tables), metadata, positions, 9))


def test_rows_that_are_padding_leave_no_trace(llama: Path) -> None:
    """As decoding steps are filled up: token 0 at position 0 of block 0."""
    with kernels() as device:
        model = load(llama, device=device)
        model.pack()
        alone = Pages(model, scattered_tables([8, 8]))
        filled = Pages(model, [*scattered_tables([8, 8]), [0, 0], [0, 0]])
        wanted = [alone.step([[3], [4]], slots_known=False) for _ in range(2)]
        for expected in wanted:
            filled.lengths[2:] = [0, 0]
            near(filled.step([[3], [4], [0], [0]], slots_known=False)[:2], expected)
        assert all(cache.keys[0].isnan().all() for cache in filled.caches)


def test_a_layer_takes_four_launches_besides_products_and_attention(llama: Path) -> None:
    with kernels() as device:
        model = load(llama, device=device)
        model.pack()
        held = Pages(model, scattered_tables([8, 8]))
        layers = len(model.spec.trunk.blocks)
        with (
            mock.patch.object(norms, "_launch", side_effect=norms._launch) as normed,
            mock.patch.object(rotary, "_launch", side_effect=rotary._launch) as turned,
            mock.patch.object(activations, "_launch", side_effect=activations._launch) as gated,
            mock.patch.object(pages.slots_kernel, "run", side_effect=pages.slots_kernel.run) as placed,
        ):
            held.step([[3], [4]], slots_known=False)
            assert (normed.call_count, turned.call_count, gated.call_count) == (2 * layers + 1, layers, layers)
            assert placed.call_count == 0, "a row's only token finds its slot by itself"
            held.step([[3, 4], [5]], slots_known=False)
            assert turned.call_count == 2 * layers
            assert placed.call_count == 1


def test_what_has_no_kernel_is_computed_by_torch(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kernels() as device, mock.patch.object(norms, "WIDEST", 16), caplog.at_level(logging.INFO, "octavo.model"):
        model = load(llama, device=device)
        model.pack()
        assert caplog.text.count("there are no kernels: a norm of") == 1
        ours = hidden_states(model)
        assert len(hidden_states(model, slots_known=False)) == len(ours)
        with by_torch(model):
            near(ours, hidden_states(model))


def test_a_step_without_tokens(llama: Path) -> None:
    with kernels() as device:
        model = load(llama, device=device)
        model.pack()
        held = Pages(model, scattered_tables([8]))
        for slots_known in (True, False):
            assert [len(row) for row in held.step([[]], slots_known=slots_known)] == [0]


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma3-both-sides"])
def test_encoders(name: str, tmp_path: Path) -> None:
    path = make_encoder_checkpoint(ENCODER_SHAPES[name], tmp_path).path
    lengths = [5, 1, 7]
    with kernels() as device, torch.inference_mode():
        model = load(path, device=device)
        model.pack()
        total = sum(lengths)
        ids = torch.tensor(random_prompt(VOCABULARY, 1, total), device=device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        metadata = AttentionMetadata.build(lengths, lengths, device)
        with (
            mock.patch.object(norms, "_launch", side_effect=norms._launch) as normed,
            mock.patch.object(rotary, "_launch", side_effect=rotary._launch) as turned,
        ):
            inputs = Inputs(token_ids=ids, positions=positions, metadata=metadata, tokens=total)
            found = model(inputs)
        assert normed.called
        assert turned.called == (name != "bert")
        with by_torch(model):
            near([found], [model(inputs)])


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "gpt-neox"])
def test_greedy_tokens_are_those_of_the_modules(name: str, tmp_path: Path) -> None:
    path = make_any(name, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    jobs = [Job(random_prompt(VOCABULARY, seed, length), params) for seed, length in enumerate((7, 3))]
    small = {"max_num_batched_tokens": 8, "max_num_seqs": 2}  # also what an engine tries when it starts
    with kernels() as device:
        engine = make_engine(path, device=device.type, enforce_eager=True, **small)
        with executors.counted(TritonExecutor) as runs:
            ours = run(engine, jobs)
        assert runs.call_count >= 5
        engine.close()
    engine = make_engine(path)
    assert run(engine, jobs) == ours
    engine.close()
