"""Weights of few bits, made at load: near the plain ones by a bound, the same with torch, equal in any batch, refused
where they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.blocks import random_blocks
from support.checkpoints import Checkpoint, make_checkpoint, random_prompt
from support.driving import Job, Strikes, finish, make_engine, run, run_alone
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.executors import use_torch
from support.families import FAMILY_SHAPES
from support.family_shape import make_family_checkpoint
from support.jobs import CHECKPOINT, MIXED, greedy, sampled
from support.native import needs_native
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from torch import Tensor

from engine import ConfigError, Engine, EngineConfig, PoolingParams, SamplingParams, inspect_model
from engine.backends import native
from engine.backends.native import gemm
from engine.backends.native.gemm import BlockKind
from engine.errors import ModelLoadError
from engine.execution import loading
from engine.execution.loading import find_quantization
from engine.interface.outputs import RequestOutput
from engine.model import quantisation, quantised_loading, weights
from engine.model.experts import ExpertMatrices
from engine.model.layers import Linear
from engine.model.quantisation import Quantization

KINDS: tuple[Quantization, ...] = ("int8", "int8-fast", "int4")
each_kind = pytest.mark.parametrize("kind", KINDS)
GROUP = gemm.GROUP
SOURCES: dict[str, Callable[[Path], Any]] = {
    "llama": lambda folder: make_checkpoint(CHECKPOINT, folder),
    "t5": lambda folder: make_seq2seq_checkpoint(SEQ2SEQ_SHAPES["t5"], folder),
    "bart": lambda folder: make_seq2seq_checkpoint(SEQ2SEQ_SHAPES["bart"], folder),
    "m2m100": lambda folder: make_seq2seq_checkpoint(SEQ2SEQ_SHAPES["m2m100"], folder),
    "umt5-plain": lambda folder: make_seq2seq_checkpoint(SEQ2SEQ_SHAPES["umt5-plain-own-head"], folder),
    "one expert each": lambda folder: make_seq2seq_checkpoint(SEQ2SEQ_SHAPES["switch-experts"], folder),
    "bert": lambda folder: make_encoder_checkpoint(ENCODER_SHAPES["bert"], folder),
    "classifier": lambda folder: make_encoder_checkpoint(ENCODER_SHAPES["roberta-classes"], folder),
    "experts": lambda folder: make_family_checkpoint(FAMILY_SHAPES["qwen3-moe"], folder),
    "shared experts": lambda folder: make_family_checkpoint(FAMILY_SHAPES["qwen2-moe"], folder),
    "clamped experts": lambda folder: make_family_checkpoint(FAMILY_SHAPES["gpt-oss"], folder),
    "latents": lambda folder: make_family_checkpoint(FAMILY_SHAPES["deepseek-v3"], folder),
}
POOLED = {"bert": PoolingParams(pooling="mean", normalize=False), "classifier": PoolingParams(task="classify")}
PROMPT = random_prompt(29, 1, 23)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny checkpoints, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            SOURCES[name](made[name])
        return made[name]

    return get


@contextmanager
def recorded() -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """What each matrix was given last, and what it made of it."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    plain = Linear.forward

    def forward(self: Linear, x: Tensor) -> Tensor:
        out = plain(self, x)
        seen[id(self)] = (x.clone(), out.clone())
        return out

    with (
        mock.patch.object(Linear, "forward", forward),
        mock.patch.object(Linear, "in_float32", lambda self, x, form=None: forward(self, x).float()),
    ):
        yield seen


def dense(weight: Tensor, kind: Quantization) -> Tensor:
    """What a weight becomes at load."""
    return quantisation.quantise(weight, kind, quantisation.form_on(weight.device, kind)).dense()


def by_modules(engine: Engine) -> Engine:
    """With layers that torch runs."""
    use_torch(engine.runner.model)
    return engine


@contextmanager
def unpacked() -> Iterator[None]:
    """Models that are loaded meanwhile keep their plain matrices."""
    no_parts = mock.patch.object(quantised_loading, "takes_parts", return_value=False)
    with mock.patch.object(Linear, "pack"), no_parts:
        yield


def matrices(engine: Engine) -> dict[str, Linear]:
    return {name: module for name, module in engine.runner.model.named_modules() if isinstance(module, Linear)}


def answer(engine: Engine, name: str) -> RequestOutput:
    params: Any = POOLED.get(name, SamplingParams(temperature=0.0, max_tokens=1))
    engine.add_request("one", PROMPT, params)
    return finish(engine)["one"]


def _steps(x: Tensor, kind: Quantization) -> Tensor:
    """What a step of each number of x is, as rows are quantised: of a row, or of a group."""
    if kind == "int8-fast":
        return (x.abs().amax(1, keepdim=True) / 127).expand_as(x)
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    return (groups.abs().amax(2, keepdim=True) / 127).expand_as(groups).flatten(1)[:, : x.shape[1]]


def _rotated(x: Tensor) -> Tensor:
    return gemm.rotate(F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)).flatten(1)


@each_kind
@pytest.mark.parametrize("name", SOURCES)
def test_products_err_by_what_was_rounded(name: str, kind: Quantization, folder: Callable[[str], Path]) -> None:
    """Each product of a served model lies within the bound of its own roundings: |x| times the errors of the weights,
    half a step of x times the weights, and float32's. What the errors of all add up to stays near their random sum."""
    with unpacked():
        plain = make_engine(folder(name))
    with recorded() as exact:
        answer(plain, name)
    ours = by_modules(make_engine(folder(name), quantization=kind))
    assert ours.info.quantization == kind
    with recorded() as seen:
        answer(ours, name)
    modules, relative, kept = matrices(plain), [], 0
    for path, module in matrices(ours).items():
        weight, bias = modules[path].weight.double(), modules[path].bias
        x, found = (part.flatten(0, -2).double() for part in seen[id(module)])
        wanted = x @ weight.T + (0 if bias is None else bias.double())
        bits: Quantization = "int8" if kind == "int4" and path.startswith("head") else kind
        made = dense(modules[path].weight, bits).double()
        float32 = 1e-5 * (x.abs() @ weight.abs().T + 1)
        error = (found - wanted).abs()
        if "router" in path or "opening" in path or (name == "classifier" and path.startswith("head")):
            kept += 1
            assert (error <= float32).all(), path
            continue
        if bits == "int8":  # both are rotated before they are rounded
            x, made, weight = _rotated(x) / GROUP, _rotated(made), _rotated(weight)
        bound = x.abs() @ (made - weight).abs().T + _steps(x, bits) / 2 @ made.abs().T
        assert (error <= 1.01 * bound + float32).all(), path
        assert (error > float32).any(), f"{path} is not quantised"
        relative.append(float(error.square().mean().sqrt() / wanted.square().mean().sqrt()))
    layers = len(plain.runner.model.spec.trunk.blocks)
    of_layers = {
        "experts": layers,
        "shared experts": 2 * layers,
        "clamped experts": layers,
        "one expert each": 2,
        "latents": layers - 1,
    }
    assert kept == ({"classifier": 2} | of_layers).get(name, 0)
    assert max(relative) < {"int8": 0.02, "int8-fast": 0.03, "int4": 0.3}[kind]
    last = [path for path in modules if id(modules[path]) in exact][-1]
    ends = [seen_by[id(of[last])][0] for seen_by, of in ((exact, modules), (seen, matrices(ours)))]
    ends[0] = ends[0][: len(ends[1])]  # plain products have rows of padding
    apart = (ends[1] - ends[0]).square().mean().sqrt() / ends[0].square().mean().sqrt()
    assert apart < 4 * torch.tensor(relative).square().sum().sqrt(), "errors are amplified"
    for engine in (plain, ours):
        engine.close()


@each_kind
@pytest.mark.parametrize("name", ["experts", "clamped experts"])
def test_experts_are_quantised(name: str, kind: Quantization, folder: Callable[[str], Path]) -> None:
    """The second have biases, which keep their format."""
    with mock.patch.object(ExpertMatrices, "pack"):
        plain = make_engine(folder(name))
    ours = make_engine(folder(name), quantization=kind)
    pairs = [
        (one, other)
        for one, other in zip(plain.runner.model.modules(), ours.runner.model.modules(), strict=True)
        if isinstance(one, ExpertMatrices) and isinstance(other, ExpertMatrices)
    ]
    assert pairs
    for one, other in pairs:
        assert not other.weight.numel(), "the plain matrices are given up"
        for expert in range(len(one.weight)):
            x = torch.eye(one.inputs)  # quantised without an error
            bias = 0.0 if one.bias is None else one.bias[expert]
            expected = dense(one.weight[expert], kind).T + bias
            torch.testing.assert_close(other(x, expert), expected, rtol=2e-2, atol=1e-4)


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Computed by our own kernels, and by torch."""
    if request.param == "torch":
        with native.use(None):
            yield request.param
    elif native.available():
        yield request.param
    else:
        pytest.skip("there is no native library, nor a compiler")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_answers_depend_on_nothing_else(
    kind: Quantization, kernels: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    """The same tokens alone, in a batch, and after being preempted, to the bit of the logits: drawn ones among them."""
    path = checkpoint(CHECKPOINT).path
    alone = run_alone(plain := make_engine(path, quantization=kind, enable_prefix_caching=False), MIXED)
    assert run(plain, MIXED) == alone
    one = make_engine(path, quantization=kind, max_num_batched_tokens=64, max_num_seqs=24, block_size=4)
    strike = Strikes(one, 5, 4)
    assert run(one, MIXED, strike) == alone
    assert strike.count > len(MIXED)
    assert one.stats().num_preemptions >= strike.count
    for engine in (plain, one):
        engine.close()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_encoders_depend_on_nothing_else(
    name: str, kind: Quantization, kernels: str, folder: Callable[[str], Path]
) -> None:
    prompts = [random_prompt(29, seed, length) for seed, length in enumerate((1, 30, 7, 18))]
    engine = make_engine(folder(name), quantization=kind)
    if name == "t5":
        jobs = [Job(p, params) for p in prompts for params in (greedy(8), sampled(3, 8, n=2))]
        assert run(engine, jobs) == run_alone(engine, jobs)
    else:
        for number, tokens in enumerate(prompts):
            engine.add_request(str(number), tokens, POOLED[name])
        together = finish(engine)
        for number, tokens in enumerate(prompts):
            engine.add_request("alone", tokens, POOLED[name])
            assert finish(engine)["alone"].pooled == together[str(number)].pooled
    engine.close()


@needs_native
@pytest.mark.parametrize("inputs", [1, 31, 333, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_computes_what_kernels_do(dtype: torch.dtype, inputs: int) -> None:
    """int8-fast to the bit, however long the sums; the others but for the rounding of sums of groups."""
    generator = torch.Generator().manual_seed(inputs)
    weight, bias = torch.randn(45, inputs, generator=generator), torch.randn(45, generator=generator)
    x = torch.randn(2, 3, inputs, generator=generator).to(dtype)
    x[1, 2] = 0
    for kind in KINDS:
        ours = quantisation.product(weight.to(dtype), bias.to(dtype), kind)[0](x)
        made = quantisation.quantise(weight.to(dtype).float(), kind, quantisation.form_on(weight.device, kind))
        theirs = quantisation.torch_product(made, bias.to(dtype))(x)
        assert ours.shape == theirs.shape == (2, 3, 45)
        assert ours.dtype == theirs.dtype == dtype
        if kind == "int8-fast":
            assert torch.equal(ours, theirs)
        else:
            scale = float((x.float().abs() @ weight.abs().T).max())
            epsilon = max(torch.finfo(dtype).eps, 1e-6)
            assert float((ours.float() - theirs.float()).abs().max()) <= epsilon * scale


@needs_native
@pytest.mark.parametrize("kind", get_args(BlockKind))
def test_torch_computes_with_blocks_what_kernels_do(kind: BlockKind) -> None:
    """But for the rounding of sums of groups; rows that are looked up are the same."""
    made = random_blocks(kind, 45, 512)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(6))
    joined = gemm.Joined((made, quantisation.quantise(torch.randn(19, 512), "int4")))
    whole = quantisation.Parts((kind, "int4"), (45, 19))
    bias = torch.randn(64)
    ours, packed = quantisation.product(joined, bias, whole)
    theirs = quantisation.torch_product(joined, bias)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    assert ours(x.half()).dtype == theirs(x.half()).dtype == torch.float16
    assert packed is not None
    ids, kept = torch.tensor([3, 44, 0, 3]), gemm.pack_blocks(made)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(gemm.look_up(kept, ids, dtype), quantisation.rows(made, ids, dtype))


@needs_native
def test_torch_quantises_as_kernels_do() -> None:
    weight = torch.randn(200, 333, generator=torch.Generator().manual_seed(0))
    weight[3], weight[5, 32:64], weight[7, 4], weight[8], weight[9] = 0, 0, torch.inf, 1e-30, 1e-31
    kinds: tuple[Quantization, ...] = ("int8", "int8-fast")
    for kind in kinds:
        eights, theirs = quantisation.quantise(weight, kind), quantisation.quantise_by_torch(weight, kind)
        assert torch.equal(eights.values, theirs.values)
        assert torch.equal(eights.scales.isnan(), theirs.scales.isnan())
        assert torch.equal(eights.scales.nan_to_num(), theirs.scales.nan_to_num())
    fours, theirs = gemm.quantise_int4(weight), quantisation.quantise_by_torch(weight, "int4")
    assert (fours.scales != theirs.scales).sum() <= 0.01 * fours.scales.numel() + 1, (
        "but for ties; NaN differs from NaN"
    )
    assert (fours.levels() != theirs.levels()).float().mean() < 0.005
    errors = [(made.dense() - weight).nan_to_num(posinf=0, neginf=0).square().sum() for made in (fours, theirs)]
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-3, atol=0)


@each_kind
def test_a_product_with_a_row_that_is_not_finite(kind: Quantization, kernels: str) -> None:
    product, _ = quantisation.product(torch.randn(40, 50, generator=torch.Generator().manual_seed(1)), None, kind)
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    clean = product(x)
    x[1, 49] = torch.nan
    found = product(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], clean[::2])
    assert product(x[:0]).shape == (0, 40)


def test_without_kernels_the_log_says_what_is_lost(
    checkpoint: Callable[[str], Checkpoint], caplog: pytest.LogCaptureFixture
) -> None:
    with native.use(None), caplog.at_level(logging.WARNING):
        make_engine(checkpoint(CHECKPOINT).path, quantization="int8").close()
    assert "octavo doctor" in caplog.text
    caplog.clear()
    with native.use(None), caplog.at_level(logging.WARNING):
        make_engine(checkpoint(CHECKPOINT).path).close()
    assert "few bits" not in caplog.text


def test_sizes(checkpoint: Callable[[str], Checkpoint]) -> None:
    """By hand: 32 inputs have a scale of 16 bits, and of int4 a minimum; a row of int8-fast has a float32 one. Norms
    and the float32 bias stay, and so do embeddings which are no head's matrix as well."""
    path = checkpoint(CHECKPOINT).path
    with unpacked():
        plain = make_engine(path)
    sizes = {
        kind: inspect_model(EngineConfig(model=str(path), dtype="float32", device="cpu", quantization=kind)).weights
        for kind in (None, *KINDS)
    }
    more = dict.fromkeys(KINDS, 0)
    for name, module in matrices(plain).items():
        groups, held = -(-module.inputs // 32), 4 * module.inputs
        rows = {"int8": module.inputs + 2 * groups, "int8-fast": module.inputs + 4, "int4": 20 * groups}
        if name.startswith("head"):
            rows["int4"] = rows["int8"]
        for kind in KINDS:
            more[kind] += module.outputs * (rows[kind] - held)
    assert {kind: sizes[kind] - sizes[None] for kind in KINDS} == more
    plain.close()


def test_matrices_are_packed_while_others_load(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no time is more than a layer's worth of them plain and filled."""
    events: list[str] = []
    read, pack = weights.Checkpoint.read, Linear.pack

    def reading(self: weights.Checkpoint, name: str, *others: Any) -> Tensor:
        events.append(name)
        return read(self, name, *others)

    def packing(self: Linear, kind: Quantization | None = None, *others: Any, **how: Any) -> None:
        pack(self, kind, *others, **how)
        assert kind is not None
        assert self.shared or not self.weight.numel()
        events.append("packed")

    monkeypatch.setattr(weights.Checkpoint, "read", reading)
    monkeypatch.setattr(Linear, "pack", packing)
    engine = make_engine(checkpoint(CHECKPOINT).path, quantization="int8")
    layers = len(engine.runner.model.spec.trunk.blocks)
    assert events.count("packed") == len(matrices(engine)) == 4 * layers + 1, "each once"
    for layer in range(layers - 1):
        last = max(number for number, event in enumerate(events) if f"layers.{layer}." in event)
        assert events[: last + 2].count("packed") >= 4 * (layer + 1)
    engine.close()


def test_what_cannot_fit_is_refused(checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(CHECKPOINT).path
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    monkeypatch.setattr(loading, "LOADING", 0)
    monkeypatch.setattr(loading, "available_memory", lambda: size // 2)
    place = None, torch.float32, torch.device("cpu")
    with pytest.raises(ModelLoadError, match=r"as float32.*--quantization int8 or int4"):
        loading.check_weights_fit(path, *place)
    loading.check_weights_fit(path, *place, "int8")
    monkeypatch.setattr(loading, "available_memory", lambda: size // 5)
    with pytest.raises(ModelLoadError, match=r"as int8.*model, --quantization int4, or"):
        loading.check_weights_fit(path, *place, "int8")
    loading.check_weights_fit(path, *place, "int4")


def test_what_a_gpu_takes(tmp_path: Path) -> None:
    cuda = torch.device("cuda")

    def found(setting: Any, stored: Any = None) -> Any:
        scheme = None if stored is None else SimpleNamespace(served_as=stored)
        return find_quantization(EngineConfig(model="m", quantization=setting), tmp_path, cuda, scheme)

    for kind in ("int8", "int4"):
        assert found(kind) == found(None, kind) == kind
        assert found("none", kind) is None
    assert found(None) is None
    said = "quantization is int8-fast, .* cuda: int8-fast works on CPUs only, GPUs support int8 and int4.*--device cpu"
    with pytest.raises(ConfigError, match=said):
        found("int8-fast")
    assert found(None, "int8-fast") is None, "as the checkpoint's own form it is widened"
