"""Layers with a state by the kernels for GPUs, or by Triton's interpreter, against torch: the kernels, and steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from support.driving import Job, check_idle, make_engine, run, run_alone
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.gpu import kernels
from support.jobs import VOCAB, beams, greedy, prompt, sampled
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata
from engine.backends.states import States
from engine.backends.torch.states import apply_delta, convolve, each_row
from engine.backends.triton import states
from engine.model.executors.triton import TritonExecutor

pytestmark = pytest.mark.slow

COUNTS = [5, 1, 2, 9]
# Sources and targets of the rows, and the snapshots of two of them, of which one is the row's last token.
SLOTS = ([0, 3, 4, 5], [6, 7, 8, 9], [1, 0, 0, 2], [3, 0, 0, 9])


def near(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    exact = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=exact, atol=exact)


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def held(generator: torch.Generator, size: int) -> States:
    memory = torch.randn(10, size, generator=generator)
    memory[0] = 0.0
    return States([memory], *(torch.tensor(values, dtype=torch.int32) for values in SLOTS))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("taps", [2, 4])
def test_convolutions(dtype: torch.dtype, gated: bool, taps: int, generator: torch.Generator) -> None:
    width, tokens = 300, sum(COUNTS)
    weight, bias = torch.randn(width, taps, generator=generator), torch.randn(width, generator=generator)
    x = torch.randn(tokens, (3 if gated else 1) * width, generator=generator).to(dtype)
    ours = held(generator, (taps - 1) * width + 11)
    theirs = States([ours.layers[0].clone()], ours.sources, ours.targets, ours.snapshots, ours.afters)
    expected = torch.zeros(tokens, width, dtype=dtype)
    before, after, features = x.chunk(3, dim=1) if gated else (1.0, None, x)
    entered = before * features

    def step(known: Tensor, part: slice) -> Tensor:
        total, left = convolve(entered[part].float(), known.view(-1, width), weight, bias)
        rounded = total.to(dtype)
        expected[part] = torch.nn.functional.silu(rounded) if after is None else rounded * after[part]
        return left.flatten()

    each_row(COUNTS, theirs, 0, step, (taps - 1) * width, device=x.device)
    with kernels() as device:
        metadata = AttentionMetadata.build(COUNTS, COUNTS, device)
        memory = ours.layers[0].clone().to(device)
        slots = states.slots_of(metadata, ours)
        assert states.slots_of(metadata, None) is slots, "sent once a step"
        found = states.convolve(
            x.to(device), weight.to(device), bias.to(device), gated, memory, slots, metadata.query_start
        )
    near(found, expected, dtype)
    near(memory, theirs.layers[0], dtype)
    assert (memory.cpu() != ours.layers[0]).any(1).nonzero().flatten().tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim", "alternate", "most"),
    [(2, 6, 12, 20, False, 1.0), (2, 6, 12, 20, True, 2.0), (3, 3, 16, 8, False, 1.0)],
)
def test_the_delta_rule(
    dtype: torch.dtype,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    alternate: bool,
    most: float,
    generator: torch.Generator,
) -> None:
    tokens, begin, eps = sum(COUNTS), 7, 1e-6
    size = heads * key_dim * value_dim
    x = torch.randn(tokens, 2 * key_heads * key_dim + heads * value_dim, generator=generator).to(dtype)
    rates = torch.randn(tokens, 2 * heads, generator=generator).to(dtype)
    opening = torch.randn(tokens, heads * value_dim, generator=generator).to(dtype)
    decay, offset = torch.randn(heads, generator=generator) - 1.0, torch.randn(heads, generator=generator)
    norm = torch.randn(value_dim, generator=generator).to(dtype)
    ours = held(generator, begin + size)
    theirs = States([ours.layers[0].clone()], ours.sources, ours.targets, ours.snapshots, ours.afters)
    queries, keys, values = torch.split(x.float(), [key_heads * key_dim] * 2 + [heads * value_dim], dim=1)
    order = [head % key_heads if alternate else head // (heads // key_heads) for head in range(heads)]
    queries, keys = (
        torch.nn.functional.normalize(one.view(tokens, key_heads, key_dim), dim=-1)[:, order] for one in (queries, keys)
    )
    values = values.view(tokens, heads, value_dim)
    shares, speeds = rates.float().chunk(2, dim=1)
    decays = (-decay.exp() * torch.nn.functional.softplus(speeds + offset)).exp()
    attended = torch.zeros_like(values)

    def step(known: Tensor, part: slice) -> Tensor:
        given = (queries[part] * key_dim**-0.5, keys[part], values[part])
        matrices = known.view(heads, key_dim, value_dim)
        attended[part], left = apply_delta(given, decays[part, :, None], most * shares[part].sigmoid(), matrices)
        return left.flatten()

    each_row(COUNTS, theirs, 0, step, size, begin, device=x.device)
    rounded = attended.to(dtype).float()
    normed = (rounded * (rounded.square().mean(-1, keepdim=True) + eps).rsqrt()).to(dtype) * norm
    expected = (normed * torch.nn.functional.silu(opening.float()).view(normed.shape)).to(dtype).flatten(1)
    with kernels() as device:
        metadata = AttentionMetadata.build(COUNTS, COUNTS, device)
        memory = ours.layers[0].clone().to(device)
        found = states.apply_delta(
            x.to(device), rates.to(device), opening.to(device), (decay.to(device), offset.to(device), norm.to(device)),
            (key_heads, heads, key_dim, value_dim), eps, memory, begin, states.slots_of(metadata, ours),
            metadata.query_start, alternate, most,
        )  # fmt: skip
    near(found, expected, dtype)
    near(memory, theirs.layers[0], torch.float32)


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5", "falcon-h1"])
def test_steps_have_the_answers_of_a_cpu(name: str, tmp_path: Path) -> None:
    """Greedy, sampled and beam requests together, whose prompts come in pieces, and from a cached prefix."""
    path = make_family_checkpoint(replace(FAMILY_SHAPES[name], vocab=VOCAB), tmp_path).path
    jobs = [
        Job(prompt(1, 30), greedy(4, ignore_eos=True)),
        Job(prompt(3, 7), sampled(2, 4, ignore_eos=True)),
        Job(prompt(4, 5), beams(2, 3)),
    ]
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "block_size": 4}
    plain = make_engine(path, **settings)
    expected = run_alone(plain, jobs)
    plain.close()
    with kernels() as device:
        engine = make_engine(path, **settings, device=str(device), max_num_batched_tokens=16)
        assert isinstance(engine.runner.model.trunk.executor, TritonExecutor)
        assert engine.runner.graphs is None
        assert run(engine, jobs) == expected
        hits = engine.stats().prefix_hits
        assert run(engine, jobs[:1]) == expected[:1]
        assert engine.stats().prefix_hits > hits
        check_idle(engine)
        engine.close()
