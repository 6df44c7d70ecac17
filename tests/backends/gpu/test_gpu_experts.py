"""Mixtures of experts by the kernels for GPUs: what the module gives in torch, for all shapes of steps."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model import experts as experts_of_models
from engine.model.executors.choice import choose_kernels
from engine.model.experts import ExpertsFeedForward
from engine.model.place import Place
from engine.model.spec import (
    Activation,
    Clamped,
    Corrected,
    Dense,
    Experts,
    Gated,
    GroupLimited,
    Routing,
    ScaledInput,
    SparseMixer,
)

pytest.importorskip("triton")

from support.driving import Job, make_engine, run
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.gpu import kernels

from engine import SamplingParams
from engine.backends import triton as gpu
from engine.backends.native.gemm import GROUP
from engine.backends.triton import experts, routing
from engine.backends.triton.experts import Launch, choose_launch, trial_sizes
from engine.backends.triton.routing import align, most_tiles, route
from engine.model.quantisation import ON_GPUS, Quantization, quantise_by_torch

pytestmark = pytest.mark.slow

FORMATS = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3}


def make(part: Experts, hidden: int, dtype: torch.dtype, device: torch.device, seed: int = 5) -> ExpertsFeedForward:
    """Random experts with a router that is sharp, so that rounding changes no choice."""
    module = ExpertsFeedForward(part, hidden, Place(device, dtype))
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    module.router.weight.mul_(4)
    choose_kernels(module, device)
    return module


def inputs(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def plain(module: ExpertsFeedForward) -> ExpertsFeedForward:
    """The module in float32 on the CPU."""
    copy = ExpertsFeedForward(module.part, module.up.inputs, Place(torch.device("cpu"), torch.float32))
    copy.load_state_dict({name: tensor.float().cpu() for name, tensor in module.state_dict().items()})
    return copy


def in_torch(module: ExpertsFeedForward, x: Tensor, tokens: int) -> Tensor:
    """What the module gives without kernels, in float32 on the CPU."""
    with torch.inference_mode(), mock.patch.object(gpu, "serves", return_value=False):
        out: Tensor = plain(module)(x.float().cpu(), tokens)
    return out


def with_few_bits(module: ExpertsFeedForward, kind: Quantization) -> ExpertsFeedForward:
    """The plain module that its experts stand for, which have few bits from now on."""
    meant = plain(module)
    for matrices, dense in ((module.up, meant.up), (module.down, meant.down)):
        made = [quantise_by_torch(one.float().cpu(), kind) for one in matrices.weight]
        dense.weight.copy_(torch.stack([one.dense() for one in made]))
        matrices.pack(kind, made.__getitem__)
        assert matrices.few_bits is not None
        assert matrices.packed is None
        assert not matrices.weight.numel()
    return meant


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is asked for holds what would show: no number, or an index far out of bounds."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(module: ExpertsFeedForward, x: Tensor, tokens: int, launch: Launch | None = None) -> Tensor:
    """What the kernels give is what torch gives; zeros past the tokens."""
    part = module.part
    with torch.inference_mode():
        logits = module.router(x)
    with torch.inference_mode(), poisoned():
        out = experts.mix(
            x,
            logits,
            module.up.weight,
            module.down.weight,
            tokens=tokens,
            active=part.active,
            activation=module.activation,
            gated=module.gated,
            normalize=part.normalize,
            launch=launch,
        )
    assert out.shape == x.shape
    assert out.dtype == x.dtype
    assert not out[tokens:].any()
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(out.float().cpu(), in_torch(module, x, tokens), rtol=tolerance, atol=tolerance)
    return out


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    count=st.integers(1, 9),
    active=st.integers(1, 9),
    tokens=st.integers(1, 21),
    padding=st.integers(0, 3),
    hidden=st.sampled_from([16, 40, 33]),
    normalize=st.booleans(),
    expert=st.sampled_from([Gated(24, "silu"), Gated(7, "gelu"), Dense(35, "relu")]),
    dtype=st.sampled_from(FORMATS),
)
def test_equals_the_module(
    count: int,
    active: int,
    tokens: int,
    padding: int,
    hidden: int,
    normalize: bool,
    expert: Dense | Gated,
    dtype: torch.dtype,
) -> None:
    with kernels() as device:
        module = make(Experts(expert, count, min(active, count), normalize), hidden, dtype, device)
        check(module, inputs(tokens + padding, hidden, dtype, device), tokens)


@pytest.mark.parametrize(
    "routing",
    [
        Corrected(),
        Corrected("softmax", 3, 2, 1e-3, 1.7),
        GroupLimited(),
        GroupLimited(3, 2, 1.7),
        SparseMixer(0.4),
        ScaledInput(),
    ],
)
def test_experts_that_torch_chooses(routing: Routing) -> None:
    with kernels() as device:
        part = Experts(Gated(24, "silu"), 9, 2, not isinstance(routing, SparseMixer | ScaledInput), routing)
        module = make(part, 40, torch.float32, device)
        x = inputs(13, 40, torch.float32, device)
        with torch.inference_mode(), poisoned():
            out = module.mix(x, 11)
        assert not out[11:].any()
        torch.testing.assert_close(out.cpu(), in_torch(module, x, 11), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expert", [Clamped(24, 0.7, 1.702, bias=True), Gated(24, "gelu", bias=True)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_biases_and_clamped_gates(expert: Clamped | Gated, dtype: torch.dtype) -> None:
    with kernels() as device:
        module = make(Experts(expert, 5, 2, router_bias=True), 40, dtype, device)
        x = inputs(13, 40, dtype, device)
        with torch.inference_mode(), poisoned():
            out = module.mix(x, 11)
        assert not out[11:].any()
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.float().cpu(), in_torch(module, x, 11), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("form", [Dense, Gated])
def test_activations(activation: Activation, form: type[Dense | Gated]) -> None:
    with kernels() as device:
        module = make(Experts(form(20, activation), 3, 2), 16, torch.float32, device)
        check(module, inputs(5, 16, torch.float32, device), 5)


@pytest.mark.parametrize("kind", ON_GPUS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "part",
    [
        Experts(Gated(24, "silu"), 5, 2),
        Experts(Clamped(40, 0.7, 1.702, bias=True), 5, 2, router_bias=True),
        Experts(Dense(35, "relu"), 9, 3, routing=GroupLimited(3, 2, 1.7)),
        Experts(Gated(33, "silu"), 9, 2, normalize=False, routing=ScaledInput()),
    ],
    ids=["gated", "clamped", "dense", "scaled-input"],
)
def test_weights_of_few_bits(part: Experts, dtype: torch.dtype, kind: Quantization) -> None:
    """Rows that end within a group, biases, and experts that torch chooses."""
    with kernels() as device, torch.inference_mode():
        module = make(part, 40, dtype, device)
        meant = with_few_bits(module, kind)
        x = inputs(13, 40, dtype, device)
        with poisoned():
            out = module.mix(x, 11)
        assert not out[11:].any()
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.float().cpu(), in_torch(meant, x, 11), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ON_GPUS)
@pytest.mark.parametrize(
    "launch", [Launch(16, 64, 128, 4, 4), Launch(64, 128, 64, 8, 4)], ids=lambda one: f"{one.tokens}"
)
def test_tiles_of_few_bits(launch: Launch, kind: Quantization) -> None:
    """Blocks of inputs that are longer than a row, and shorter; alone a token gets the same bits."""
    how: dict[str, Any] = {"active": 2, "activation": "silu", "gated": True, "normalize": True}
    with kernels() as device, torch.inference_mode():
        module = make(Experts(Gated(150, "silu"), 4, 2), 100, torch.float16, device)
        meant = with_few_bits(module, kind)
        matrices = module.up.held, module.down.held
        x = inputs(41, 100, torch.float16, device)
        logits = module.router(x)
        with poisoned():
            out = experts.mix(x, logits, *matrices, tokens=40, launch=launch, **how)
        torch.testing.assert_close(out.float().cpu(), in_torch(meant, x, 40), rtol=3e-3, atol=3e-3)
        assert torch.equal(experts.mix(x[3:4], logits[3:4], *matrices, tokens=1, **how), out[3:4])


def test_few_bits_without_kernels() -> None:
    """On a GPU that Triton does not serve torch widens each expert's matrix."""
    with torch.inference_mode():
        module = make(Experts(Gated(24, "silu"), 5, 2), 40, torch.float32, torch.device("cpu"))
        with mock.patch.object(experts_of_models, "on_gpu", return_value=True):
            meant = with_few_bits(module, "int4")
        x = inputs(13, 40, torch.float32, torch.device("cpu"))
        torch.testing.assert_close(module(x, 11), in_torch(meant, x, 11), rtol=1e-5, atol=1e-5)


# As `choose_launch` gives them, each narrower along the inputs than the matrices, and not dividing them.
LAUNCHES = [Launch(16, 64, 16, 4, 4), Launch(32, 64, 32, 4, 4), Launch(64, 128, 16, 8, 4), Launch(128, 256, 16, 8, 3)]


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: f"{launch.tokens}x{launch.outputs}")
@pytest.mark.parametrize("dtype", FORMATS)
def test_tiles_of_all_sizes(launch: Launch, dtype: torch.dtype) -> None:
    """Experts with several tiles or with a part of one; blocks of outputs likewise."""
    with kernels() as device:
        module = make(Experts(Gated(70, "silu"), 4, 2), 40, dtype, device)
        x = inputs(41, 40, dtype, device)
        sizes = module.route(x)[1].flatten().bincount(minlength=4)
        assert int(sizes.max()) > 16
        check(module, x, 40, launch)


def test_experts_without_tokens() -> None:
    with kernels() as device:
        module = make(Experts(Gated(8, "silu"), 40, 2), 16, torch.float32, device)
        check(module, inputs(3, 16, torch.float32, device), 3)


@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
def test_all_tokens_may_go_to_one_expert(tokens: int) -> None:
    with kernels() as device:
        module = make(Experts(Gated(16, "silu"), 5, 1), 32, torch.float32, device)
        module.router.weight.zero_()
        module.router.weight[3] = 1.0
        x = inputs(tokens, 32, torch.float32, device).abs()
        assert bool((module.route(x)[1] == 3).all())
        check(module, x, tokens, Launch(16, 64, 32, 4, 2))


def test_a_step_without_tokens_gives_zeros() -> None:
    with kernels() as device:
        module = make(Experts(Gated(16, "silu"), 4, 2), 32, torch.float32, device)
        check(module, inputs(3, 32, torch.float32, device), 0)


def test_equal_probabilities_choose_the_first() -> None:
    with kernels() as device:
        shares, chosen = route(torch.zeros(2, 6, device=device), 3, normalize=True)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(shares.cpu(), torch.full((2, 3), 1 / 3))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_what_is_no_number_stays_with_its_token() -> None:
    """Its experts' indices are within bounds still, and the others' answers are what they were."""
    with kernels() as device:
        module = make(Experts(Gated(16, "silu"), 8, 3), 32, torch.float32, device)
        x = inputs(6, 32, torch.float32, device)
        expected = check(module, x, 6)
        x[2], x[4, 5] = torch.nan, torch.inf
        with torch.inference_mode():
            logits = module.router(x)
        chosen = route(logits, 3, normalize=True)[1].tolist()
        assert all(row == sorted(set(row)) and row[0] >= 0 and row[-1] < 8 for row in chosen)
        found = module.mix(x, 6)
        assert bool(found[[2, 4]].isnan().all())
        assert torch.equal(found[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data(), count=st.integers(1, 40), tokens=st.integers(1, 60), size=st.sampled_from([16, 32]))
def test_pairs_in_the_order_of_their_experts(data: st.DataObject, count: int, tokens: int, size: int) -> None:
    """Counted where they are placed, and before that in several chunks."""
    active = data.draw(st.integers(1, min(count, 4)))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    chosen = torch.stack([torch.randperm(count, generator=random)[:active].sort().values for _ in range(tokens)]).int()
    expected = chosen.flatten().argsort(stable=True)
    by_expert = torch.split(expected, chosen.flatten().bincount(minlength=count).tolist())
    cut = [(expert, part.tolist()) for expert, own in enumerate(by_expert) for part in own.split(size) if len(part)]
    chunk = data.draw(st.sampled_from([32, 64, 4096]))
    with kernels() as device, poisoned():
        order, tiles = (found.cpu() for found in align(chosen.to(device), count, size, chunk))
    assert torch.equal(order, expected.int())
    assert int(tiles[0]) == len(cut) <= most_tiles(tokens * active, count, size)
    assert (len(tiles) - 1) // 3 == most_tiles(tokens * active, count, size)
    entries = tiles[1 : 1 + 3 * len(cut)].view(-1, 3).tolist()
    assert [(expert, order[first : first + rows].tolist()) for expert, first, rows in entries] == cut


def test_the_most_tiles_are_reached_and_never_exceeded() -> None:
    def taken(sizes: list[int], size: int) -> int:
        return sum(-(-own // size) for own in sizes)

    for pairs in range(1, 12):
        for count in range(1, 6):
            for size in (2, 3, 4):
                layouts = [s for s in itertools.product(range(pairs + 1), repeat=count) if sum(s) == pairs]
                assert max(taken(list(own), size) for own in layouts) == most_tiles(pairs, count, size)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_token_gets_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    """Also where the others change how its products are cut."""
    with kernels() as device, torch.inference_mode():
        module = make(Experts(Gated(40, "silu"), 4, 2), 48, dtype, device)
        x = inputs(40, 48, dtype, device)
        # The router's product is torch's, whose rows may depend on each other.
        logits = torch.cat([module.router(row) for row in x.split(1)])
        launches = [choose_launch(tokens, 2, 4, dtype, 90) for tokens in (1, 40)]
        assert launches[0] != launches[1]

        def mix(rows: slice | Tensor) -> Tensor:
            own = x[rows]
            out: Tensor = experts.mix(
                own, logits[rows], module.up.weight, module.down.weight,
                tokens=len(own), active=2, activation="silu", gated=True, normalize=True,
            )  # fmt: skip
            return out

        together = mix(slice(0, 40))
        for start, stop in [(0, 1), (7, 8), (39, 40), (3, 5), (7, 18)]:
            assert torch.equal(mix(slice(start, stop)), together[start:stop])
        shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(2)).to(device)
        assert torch.equal(mix(shuffled), together[shuffled])


def test_launches_follow_from_the_sizes() -> None:
    bf16 = torch.bfloat16
    # Mixtral-8x7B and Qwen3-30B-A3B, from one token to a long prompt.
    assert [choose_launch(n, 2, 8, bf16, 90).tokens for n in (1, 32, 64, 128, 8192)] == [16, 16, 32, 64, 128]
    assert [choose_launch(n, 8, 128, bf16, 90).tokens for n in (1, 64, 256, 512, 8192)] == [16, 16, 32, 64, 128]
    assert choose_launch(8192, 8, 128, bf16, 80).outputs < choose_launch(8192, 8, 128, bf16, 90).outputs
    assert choose_launch(8192, 8, 128, bf16, 120) == choose_launch(8192, 8, 128, bf16, 80)
    assert choose_launch(8192, 8, 128, bf16, 90, True) == choose_launch(8192, 8, 128, bf16, 80)
    # A program reads whole groups of few bits.
    assert not any(choose_launch(n, 2, 8, dtype, 90, True).inputs % GROUP for n in range(1, 900) for dtype in FORMATS)
    # 64 rows or more, for the matrix instructions.
    assert min(choose_launch(n, 2, 8, dtype, 90).outputs for n in range(1, 900) for dtype in FORMATS) == 64


class Compiled:
    """Stands for a kernel: notes what it would be compiled for, and computes nothing."""

    def __init__(self, kernel: Any, found: set[tuple[Any, ...]]):
        self.kernel, self.found = kernel, found
        options = getattr(kernel, "kwargs", {})  # the interpreter's
        self.general = options.get("do_not_specialize") or getattr(kernel, "do_not_specialize", None) or ()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.note

    def note(self, *given: Any, **constants: Any) -> None:
        names = list(inspect.signature(self.kernel.fn).parameters)[: len(given)]
        key: list[Any] = [self.kernel.fn.__name__, *sorted(constants.items())]
        for name, value in zip(names, given, strict=True):
            if isinstance(value, Tensor):
                key.append((name, value.dtype))
            elif value is None:
                key.append((name, None))
            elif name not in self.general:
                key.append((name, value == 1, value % 16 == 0))
        self.found.add(tuple(key))


@pytest.mark.parametrize(
    ("count", "active", "hidden", "width"), [(8, 2, 4096, 14336), (128, 8, 2048, 768), (4, 1, 64, 40), (60, 4, 33, 7)]
)
@pytest.mark.parametrize("most", [8192, 200])
def test_no_step_compiles_what_was_not_compiled_at_start(
    count: int, active: int, hidden: int, width: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of all steps are among those of the few that `warm` runs, down to what Triton makes of integers."""
    found: set[tuple[Any, ...]] = set()
    for module, names in ((routing, ("_route", "_count", "_place")), (experts, ("_multiply", "_add"))):
        for name in names:
            monkeypatch.setattr(module, name, Compiled(getattr(module, name), found))
    monkeypatch.setattr(experts, "capability_of", lambda device: 90)
    monkeypatch.setattr(experts_of_models.gpu, "serves", lambda device: True)
    place = Place(torch.device("meta"), torch.bfloat16)
    module = ExpertsFeedForward(Experts(Gated(width, "silu"), count, active), hidden, place)
    with torch.inference_mode():
        module.warm(most)
        warmed = set(found)
        assert len({key for key in warmed if key[0] == "_multiply"}) == 2 * len(
            {choose_launch(n, active, count, torch.bfloat16, 90) for n in range(1, most + 1)}
        )
        for tokens in (*range(1, 201), *range(201, most, 97), most):
            module.mix(torch.empty(tokens + tokens % 3, hidden, dtype=torch.bfloat16, device="meta"), tokens)
    assert found == warmed


def test_what_is_compiled_at_start_follows_from_the_sizes() -> None:
    bf16 = torch.bfloat16
    assert trial_sizes(8192, 2, 8, bf16, 90) == [1, 33, 65, 129, 2049]  # counted in chunks from 4097 pairs on
    assert trial_sizes(8192, 8, 128, bf16, 90) == [1, 129, 257, 513]
    assert trial_sizes(128, 2, 8, bf16, 90) == [1, 33, 65]


def test_the_device_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on the way reads a tensor, so that a step can be captured in a graph."""
    with kernels() as device, torch.inference_mode():
        module = make(Experts(Gated(16, "silu"), 8, 2), 32, torch.float32, device)
        x = inputs(6, 32, torch.float32, device)
        expected = in_torch(module, x, 5)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        else:  # the interpreter itself reads tensors: what torch offers to ask for is refused
            monkeypatch.setattr(experts_of_models, "group", None)
        try:
            out = module(x, 5)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_an_engine_gives_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts and answers that share steps."""
    given = make_family_checkpoint(FAMILY_SHAPES[family], tmp_path)
    prompts = sorted(given.prompts(), key=len)[:2]
    jobs = [Job(prompt, SamplingParams(max_tokens=4, temperature=0.0)) for prompt in prompts]
    with kernels() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_of_models, "group", None)  # the way through torch is closed
        engine = make_engine(tmp_path, device=str(device), num_gpu_blocks_override=32)
        found = run(engine, jobs)
        engine.close()
    for prompt, (answer,) in zip(prompts, found, strict=True):
        expected = given.greedy(prompt).answers[0].tokens
        assert answer == expected[: len(answer)]
        assert len(answer) == min(4, len(expected))


def test_a_runner_warms_one_of_several_modules_that_are_alike(tmp_path: Path) -> None:
    """For the largest step that there may be."""
    make_family_checkpoint(FAMILY_SHAPES["mixtral"], tmp_path)
    warmed: list[int] = []
    with kernels() as device, pytest.MonkeyPatch.context() as patch:
        engine = make_engine(tmp_path, device=str(device), num_gpu_blocks_override=32, max_num_batched_tokens=50)
        modules = [module for module in engine.runner.model.modules() if isinstance(module, ExpertsFeedForward)]
        mix = ExpertsFeedForward.mix

        def noted(self: ExpertsFeedForward, x: Tensor, tokens: int) -> Tensor:
            warmed.append(tokens)
            return mix(self, x, tokens)

        patch.setattr(ExpertsFeedForward, "mix", noted)
        engine.runner.warm()
        engine.close()
        part, weight = modules[0].part, modules[0].up.weight
        capability = experts.capability_of(device)
    assert len(modules) > 1
    assert warmed == trial_sizes(56, part.active, part.count, weight.dtype, capability)
