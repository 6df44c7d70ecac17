"""Checkpoints whose weights are stored in few bits: what is read is what they hold, number by number."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import packing, reference
from support.blocks import numbers
from support.checkpoints import random_prompt
from support.driving import Job, logprobs, make_engine, run
from support.families import FAMILY_SHAPES
from support.family_shape import build_reference
from support.native import needs_native
from support.packing import Packing
from support.pages import load
from support.reference import MIN_MARGIN
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from cli.main import main
from engine import SamplingParams
from engine.backends import triton as gpu
from engine.backends.native import gemm
from engine.config import EngineConfig
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.execution.loading import find_quantization
from engine.execution.starting import resolve
from engine.inspection import inspect_model
from engine.model.checkpoint import read_config
from engine.model.families import stored_scheme
from engine.model.stored import methods
from engine.model.stored.bits import unpacked
from engine.model.stored.fp8 import Fp8
from engine.model.weight_files import Checkpoint

ORACLE = Path(sys.prefix) / "clients" / "quantised"  # tools/setup.py puts it there
GPTQ4: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
KINDS: dict[str, tuple[dict[str, Any], Packing]] = {
    "awq": (AWQ, packing.awq()),
    "awq-symmetric": (AWQ | {"zero_point": False}, packing.awq(has_zeros=False)),
    "gptq-2": (GPTQ4 | {"bits": 2}, packing.gptq(2)),
    "gptq-3": (GPTQ4 | {"bits": 3}, packing.gptq(3)),
    "gptq-4": (GPTQ4, packing.gptq(4)),
    "gptq-8": (GPTQ4 | {"bits": 8}, packing.gptq(8)),
    "gptq-4-v2": (GPTQ4 | {"checkpoint_format": "gptq_v2"}, packing.gptq(4, first_version=False)),
    "gptq-4-act-order": (GPTQ4 | {"desc_act": True}, packing.gptq(4, ordered=False)),
    "gptq-4-no-g-idx": (GPTQ4, packing.gptq(4, names_groups=False)),
    "fp8-blocks": (FP8 | {"weight_block_size": [16, 8]}, packing.fp8((16, 8))),
    "fp8-uneven-blocks": (FP8 | {"weight_block_size": [24, 24]}, packing.fp8((24, 24))),
    "fp8-tensor": (FP8, packing.fp8(None, ".weight_scale")),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, packing.fp8((1, 1 << 20), ".weight_scale")),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, packing.nf4()),
    "bitsandbytes-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, packing.bnb_int8),
}
SHAPE = FAMILY_SHAPES["llama"]


def checkpoint(folder: Path, said: dict[str, Any], pack: Packing, **more: Any) -> dict[str, Tensor]:
    """A tiny LLaMA with the matrices of its layers stored so; gives the same numbers as plain tensors."""
    settings = {**SHAPE.settings, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, **more}  # fmt: skip
    build_reference(replace(SHAPE, settings=settings)).save_pretrained(folder)
    file = folder / "model.safetensors"
    plain = load_file(file)
    stored: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(list(plain.items())):
        module = name.removesuffix(".weight")
        if ".layers." in name and tensor.dim() == 2:
            made = pack(tensor.shape[0], tensor.shape[1], number)
            plain[name] = made.holds
            stored |= {module + ending: part for ending, part in made.parts.items()}
        else:
            stored[name] = tensor
    write(file, stored)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return plain


def write(file: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def make_plain(folder: Path, tensors: dict[str, Tensor]) -> None:
    """The checkpoint in this folder becomes one of plain tensors."""
    write(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_is_stored(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said, pack = KINDS[kind]
    plain = checkpoint(tmp_path, said, pack)
    with caplog.at_level("INFO", logger="octavo.model"):
        found = load(tmp_path).state_dict()
    assert "The weights of " in caplog.text
    make_plain(tmp_path, plain)
    whole = load(tmp_path).state_dict()
    assert whole.keys() == found.keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


@pytest.mark.parametrize("kind", ["gptq-4", "gptq-4-act-order", "nf4", "bitsandbytes-int8"])
def test_what_a_conv1d_held_is_stored_as_a_linear_layer_holds_it(kind: str, tmp_path: Path) -> None:
    """By outputs, as the libraries turn it."""
    said, pack = KINDS[kind]
    shape = FAMILY_SHAPES["gpt2"]
    sizes = {"n_embd": 64, "n_inner": 96, "n_head": 4, "n_layer": 2}
    build_reference(replace(shape, settings={**shape.settings, **sizes})).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    plain = load_file(file)
    stored: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(list(plain.items())):
        if ".h." in name and tensor.dim() == 2:
            made = pack(tensor.shape[1], tensor.shape[0], number)
            plain[name] = made.holds.t()
            stored |= {name.removesuffix(".weight") + ending: part for ending, part in made.parts.items()}
        else:
            stored[name] = tensor
    assert any(plain[name].shape == (64, 64) for name in plain), "whose sizes do not tell how it lies"
    write(file, stored)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    facts = inspect_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", quantization="none"))
    assert 0 < facts.weights_as_stored < facts.weights
    found = load(tmp_path).state_dict()
    make_plain(tmp_path, plain)
    whole = load(tmp_path).state_dict()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def test_modules_that_are_left_plain_by_rules(tmp_path: Path) -> None:
    """As GPTQModel writes them."""
    checkpoint(tmp_path, GPTQ4 | {"dynamic": {"-:.*gate.*": {}, "-:lm_head": {}}}, KINDS["gptq-4"][1])
    assert load(tmp_path).spec.decoder is not None


@pytest.mark.parametrize("kind", ["awq", "gptq-4-act-order", "fp8-blocks", "nf4"])
def test_tokens_are_those_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    """Of transformers, which reads the same numbers as plain tensors."""
    plain = checkpoint(tmp_path, *KINDS[kind])
    engine = make_engine(tmp_path, quantization="none")
    prompts = [random_prompt(SHAPE.vocab, seed, 3 + seed) for seed in range(4)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = [tokens for (tokens,) in run(engine, [Job(prompt, greedy) for prompt in prompts])]
    engine.close()
    make_plain(tmp_path, plain)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    clear = 0
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = reference.greedy(model, prompt, [], 8)
        if expected.margin > MIN_MARGIN:
            assert tokens == expected.answers[0].tokens
            clear += 1
    assert clear >= 2


IN_GROUPS: dict[str, tuple[dict[str, Any], Packing]] = {
    "awq": (AWQ | {"group_size": 32}, packing.awq(32)),
    "awq-symmetric": (AWQ | {"group_size": 32, "zero_point": False}, packing.awq(32, has_zeros=False)),
    "gptq-4": (GPTQ4 | {"group_size": 32}, packing.gptq(4, 32)),
    "gptq-4-v2": (GPTQ4 | {"group_size": 32, "checkpoint_format": "gptq_v2"}, packing.gptq(4, 32, first_version=False)),
}


@pytest.mark.parametrize("kind", [*IN_GROUPS, "gptq-4-act-order", "gptq-8", "fp8-blocks", "nf4"])
def test_they_stay_as_small_as_they_are_stored(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """4 bits in whole groups are taken as they are, but for minima, which become halves; others become int8. The model
    says nearly what it says with plain numbers."""
    taken = kind in IN_GROUPS
    plain = checkpoint(tmp_path, *(KINDS | IN_GROUPS)[kind])
    with Checkpoint(tmp_path, stored_scheme(read_config(tmp_path))) as stored:
        names = [name for name in stored.names if stored.few_bits(name)]
        assert len(names) == 7 * SHAPE.settings["num_hidden_layers"]
        for name in names:
            assert stored.kind(name) == ("int4" if taken else None)
            if taken:
                minima = stored.quantised(name).scales[..., 1:].float().abs().repeat_interleave(32, 2).flatten(1)
                assert ((stored.quantised(name).dense() - plain[name]).abs() <= minima * 2.0**-10).all()
    settings: dict[str, Any] = {"quantization_cache": "off"}
    facts = inspect_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", **settings))
    prompt = random_prompt(SHAPE.vocab, 1, 40)
    with caplog.at_level("DEBUG", "octavo.model"):
        engine = make_engine(tmp_path, **settings)
    model = engine.runner.model
    matrices = [kind for _, kind in model.matrices("stored") if kind is not None]
    assert set(matrices) == {"int4" if taken else "int8"}
    said = f"of {len(matrices)} matrices are used in their stored format"
    assert (said in caplog.text) == taken
    assert len(matrices) == 4 * SHAPE.settings["num_hidden_layers"]
    found = logprobs(engine, prompt)
    engine.close()
    assert f"stay packed and take {facts.weights >> 20} MiB" in caplog.text
    engine = make_engine(tmp_path, quantization="none")
    exact = logprobs(engine, prompt)
    assert facts.quantization == "stored"
    assert facts.weights == facts.weights_as_stored
    plain_size = sum(tensor.numel() * 4 for tensor in plain.values())
    assert facts.weights < plain_size
    engine.close()
    error = float((found - exact).abs().median() / exact.std())
    assert 0 < error < 0.05


@needs_native
@pytest.mark.parametrize(
    ("said", "pack"),
    [(AWQ | {"group_size": 128}, packing.awq(128)), (GPTQ4 | {"group_size": 128}, packing.gptq(4, 128))],
)
def test_groups_of_128_keep_their_own_bits(said: dict[str, Any], pack: Packing, tmp_path: Path) -> None:
    """The numbers, and the bits of products, are those of 4 bits with scales for each 32 inputs."""
    checkpoint(tmp_path, said, pack, hidden_size=128, intermediate_size=128, head_dim=32)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    with Checkpoint(tmp_path, stored_scheme(read_config(tmp_path))) as stored:
        for name in filter(stored.few_bits, stored.names):
            blocks, fours = stored.quantised(name, own=True), stored.quantised(name)
            assert isinstance(blocks, gemm.Blocks)
            assert isinstance(fours, gemm.Quantised)
            assert torch.equal(numbers(blocks), fours.dense())
            assert blocks.values.nbytes * 8 == 4.25 * fours.dense().numel()
            products = [gemm.matmul(packed, x) for packed in (gemm.pack_blocks(blocks), gemm.pack_int4(fours))]
            assert torch.equal(*products)
    engine = make_engine(tmp_path, quantization="stored")
    assert {kind for _, kind in engine.runner.model.matrices("stored")} == {"int4_128", None}
    found = logprobs(engine, random_prompt(SHAPE.vocab, 1, 40))
    engine.close()
    engine = make_engine(tmp_path, quantization="none")
    exact = logprobs(engine, random_prompt(SHAPE.vocab, 1, 40))
    engine.close()
    assert 0 < float((found - exact).abs().median() / exact.std()) < 0.05


WIDE_FP8: dict[str, tuple[dict[str, Any], Packing]] = {
    "blocks": (FP8 | {"weight_block_size": [128, 128]}, packing.fp8((128, 128))),
    "wide-blocks": (FP8 | {"weight_block_size": [64, 256]}, packing.fp8((64, 256))),
    "channels": ({"quant_method": "fbgemm_fp8"}, packing.fp8((1, 1 << 20), ".weight_scale")),
    "tensor": (FP8, packing.fp8(None, ".weight_scale")),
    "compressed": (
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
        packing.fp8((1, 1 << 20), ".weight_scale"),
    ),
}


@pytest.mark.parametrize("kind", WIDE_FP8)
def test_fp8_keeps_its_bytes(kind: str, tmp_path: Path) -> None:
    """Scales for each 128 inputs are all that is added. The numbers are the file's."""
    plain = checkpoint(tmp_path, *WIDE_FP8[kind], hidden_size=160, intermediate_size=300, head_dim=40)
    with Checkpoint(tmp_path, stored_scheme(read_config(tmp_path))) as stored:
        for name in filter(stored.few_bits, stored.names):
            blocks = stored.quantised(name, own=True)
            assert isinstance(blocks, gemm.Blocks)
            assert torch.equal(numbers(blocks), plain[name])
    prompt, settings = random_prompt(SHAPE.vocab, 1, 40), {"quantization_cache": "off"}
    facts = inspect_model(EngineConfig(model=str(tmp_path), device="cpu", quantization="stored"))
    engine = make_engine(tmp_path, quantization="stored", **settings)
    model = engine.runner.model
    assert {kind for _, kind in model.matrices("stored")} == {"e4m3", None}
    found = logprobs(engine, prompt)
    engine.close()
    few = sum(tensor.numel() for name, tensor in plain.items() if ".layers." in name and tensor.dim() == 2)
    rest = sum(tensor.numel() * 4 for name, tensor in plain.items() if ".layers." not in name or tensor.dim() < 2)
    assert rest + few < facts.weights < rest + 1.06 * few
    engine = make_engine(tmp_path, quantization="none")
    exact = logprobs(engine, prompt)
    engine.close()
    assert 0 < float((found - exact).abs().median() / exact.std()) < 0.01, "rows are rounded to bfloat16"


def test_fp8_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, *WIDE_FP8["tensor"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[Q + ".weight"].view(torch.uint8)[3, 5] = 0xFF
    write(file, tensors)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: .*q_proj.weight: .* not finite"):
        make_engine(tmp_path, quantization="stored")


def test_a_gpu_that_multiplies_fp8_is_given_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other GPUs, and other formats, get plain weights unless they are asked to keep them."""
    folders = {kind: tmp_path / kind for kind in ("fp8", "gptq")}
    for folder in folders.values():
        folder.mkdir()
    checkpoint(folders["fp8"], *WIDE_FP8["blocks"])
    checkpoint(folders["gptq"], *KINDS["gptq-4"])
    monkeypatch.setattr(gpu, "serves", lambda device: True)
    for converts in (True, False):
        monkeypatch.setattr(gpu, "converts_float8", lambda device, answer=converts: answer)
        for kind, folder in folders.items():
            config = EngineConfig(model=str(folder), device="cuda")
            scheme = stored_scheme(read_config(folder))
            found = find_quantization(config, folder, torch.device("cuda"), scheme)
            assert found == ("stored" if converts and kind == "fp8" else None)


def test_what_is_stored_plainly_stays_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the start says that the setting does nothing."""
    build_reference(SHAPE).save_pretrained(tmp_path)
    with caplog.at_level("WARNING", "octavo"):
        engine = make_engine(tmp_path, quantization="stored")
    assert engine.info.quantization is None
    engine.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == f"{tmp_path}: --quantization stored has no effect, because the weights are not quantized."


def test_they_are_quantised_again_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plain checkpoint would be, and kept for the next start."""
    folder, kept = tmp_path / "model", tmp_path / "kept"
    folder.mkdir()
    plain = checkpoint(folder, *KINDS["gptq-4"])
    settings: dict[str, Any] = {"quantization": "int8", "quantization_cache": str(kept)}
    jobs = [Job([1, 5, 9], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))]

    def answers(**more: Any) -> list[list[list[int]]]:
        engine = make_engine(folder, **settings | more)
        found = run(engine, jobs)
        engine.close()
        return found

    made = answers()
    read: list[str] = []
    original = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, name, *others: read.append(name) or original(self, name, *others)
    )
    assert answers() == made
    assert not any(name.endswith("_proj.weight") for name in read), "they were kept"
    monkeypatch.undo()
    make_plain(folder, plain)
    assert answers(quantization_cache="off") == made


@pytest.mark.parametrize(("bits", "dim"), [(bits, dim) for bits in range(1, 9) for dim in (0, 1)])
def test_integers_of_any_width(bits: int, dim: int) -> None:
    matrix = torch.randint(0, 1 << bits, (32, 32) if dim == 0 else (5, 96))
    found = unpacked(packing.packed(matrix, bits, dim), bits, dim)
    assert torch.equal(found.long(), matrix)


@pytest.mark.parametrize("scales", [(3, 4), (1, 1), (48, 1)])
def test_fp8_is_read_as_transformers_reads_it(scales: tuple[int, int], tmp_path: Path) -> None:
    values, factors = torch.randn(48, 64).to(torch.float8_e4m3fn), torch.rand(scales)
    tensors = {"m.weight": values, "m.weight_scale_inv": factors}
    (found,) = Fp8({"weight_block_size": [16, 16]}).find(held(tensors, tmp_path))
    assert torch.equal(found.decode(values, factors), Fp8Dequantize(None)._dequantize_one(values, factors))


class _Held:
    """Tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor], path: Path):
        self._tensors = tensors
        self.path = path
        self.names = {name: (path, name) for name in tensors}

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def format(self, name: str) -> str:
        formats = {torch.int32: "I32", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64",
                   torch.uint8: "U8",
                   torch.float16: "F16", torch.bfloat16: "BF16"}  # fmt: skip
        return formats.get(self._tensors[name].dtype, "F32")

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def held(tensors: dict[str, Tensor], path: Path) -> _Held:
    return _Held(tensors, path)


@pytest.fixture
def compressors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library's."""
    if not ORACLE.is_dir():
        pytest.skip(f"there is no {ORACLE}: make test installs it")
    monkeypatch.syspath_prepend(str(ORACLE))
    return pytest.importorskip("compressed_tensors.compressors")


SCHEMES = [
    (kind, bits, symmetric, strategy)
    for kind, widths in (("int", (3, 4, 8)), ("bytes", (8,)), ("float", (8,)))
    for bits in widths
    for symmetric in (True, False)
    for strategy in ("group", "channel", "tensor", "block")
    if symmetric or (kind != "float" and strategy in ("group", "channel"))
    if kind != "int" or strategy != "block"
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bits", "symmetric", "strategy"), SCHEMES)
def test_compressed_tensors_are_read_as_the_library_reads_them(
    compressors: Any, kind: str, bits: int, symmetric: bool, strategy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In the format of the scales, in which the library multiplies."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    outputs, inputs, group, block = 48, 96, 32, [16, 32]
    args = QuantizationArgs(
        num_bits=bits,
        type="float" if kind == "float" else "int",
        symmetric=symmetric,
        strategy=strategy,
        group_size=group if strategy == "group" else None,
        block_structure=block if strategy == "block" else None,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    shapes = {"group": (outputs, inputs // group), "channel": (outputs, 1), "tensor": (1,), "block": (3, 3)}
    given = {
        "weight": torch.randn(outputs, inputs, dtype=dtype),
        "weight_scale": (torch.rand(shapes[strategy]) * 0.1 + 0.02).to(dtype),
    }
    if not symmetric:
        given["weight_zero_point"] = torch.randint(-2, 2, shapes[strategy], dtype=torch.int8)
    name, said = {
        "int": ("PackedQuantizationCompressor", "pack-quantized"),
        "bytes": ("IntQuantizationCompressor", "int-quantized"),
        "float": ("FloatQuantizationCompressor", "float-quantized"),
    }[kind]
    compressor = getattr(compressors, name)
    stored = compressor.compress(given, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    weights = {"num_bits": bits, "type": args.type, "block_structure": args.block_structure}
    config = {"quant_method": "compressed-tensors", "format": said, "config_groups": {"group_0": {"weights": weights}}}
    ours = methods.find_scheme(type("Config", (), {"quantization_config": config}))
    assert ours is not None
    tensors = held({f"m.{key}": value for key, value in stored.items()}, tmp_path)
    (found,) = ours.find(tensors)
    assert (found.name, found.shape) == ("m.weight", expected.shape)
    assert torch.equal(found.decode(*map(tensors.read, found.parts)).to(dtype), expected)


def test_nvfp4_is_read_as_the_library_reads_it(compressors: Any, tmp_path: Path) -> None:
    """And Model Optimizer's, whose scale of a matrix is the reciprocal."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    whole = torch.tensor([64.0])
    scales = (weight.view(48, 6, 16).abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    given = {"weight": weight, "weight_scale": scales.float(), "weight_global_scale": whole}
    stored = compressors.NVFP4PackedCompressor.compress(given, scheme)
    expected = compressors.NVFP4PackedCompressor.decompress(stored, scheme)["weight"]
    other = {"weight": stored["weight_packed"], "weight_scale": scales, "weight_scale_2": 1 / whole}
    for said, tensors in (
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, stored),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, other),
    ):
        ours = methods.find_scheme(type("Config", (), {"quantization_config": said}))
        assert ours is not None
        found_in = held({f"m.{key}": value for key, value in tensors.items()}, tmp_path)
        (found,) = ours.find(found_in)
        assert (found.name, found.shape) == ("m.weight", expected.shape)
        numbers_read = found.decode(*map(found_in.read, found.parts))
        assert torch.equal(numbers_read.to(expected.dtype), expected)
        assert float((numbers_read - weight).abs().max()) < 0.6


def test_a_whole_checkpoint_of_compressed_tensors(tmp_path: Path) -> None:
    """With what belongs to activations and to cached keys, which weights do not need."""

    def pack(outputs: int, inputs: int, seed: int) -> packing.Stored:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(-8, 8, (outputs, inputs), generator=generator)
        scales = torch.rand(outputs, inputs // 32, generator=generator) * 0.05
        holds = values.float() * scales.repeat_interleave(32, 1)
        parts = {
            ".weight_packed": packing.packed(values + 8, 4, 1),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([outputs, inputs]),
            ".input_scale": torch.tensor([1.0]),
            ".k_scale": torch.tensor([1.0]),
        }
        return packing.Stored(parts, holds)

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    plain = checkpoint(tmp_path, said, pack)
    found = load(tmp_path).state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    for groups in ({}, {"group_0": {"targets": ["Linear"]}}):
        changed = config | {"quantization_config": said | {"config_groups": groups}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(UnsupportedModelError, match=r"config_groups .* \(num_bits of weights, 1 to 8\), but"):
            load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    make_plain(tmp_path, plain)
    whole = load(tmp_path).state_dict()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "aqlm"}, ("aqlm", "awq, bitsandbytes, compressed-tensors", "unquantized")),
        ({}, ("a method that config.json does not name",)),
        (GPTQ4 | {"bits": 5}, ("bits of the config's", "2, 3, 4, 8", "5")),
        (GPTQ4 | {"bits": "4"}, ("bits of the config's", "'4'")),
        (GPTQ4 | {"checkpoint_format": "marlin"}, ("checkpoint_format", "gptq or gptq_v2", "'marlin'")),
        (GPTQ4 | {"dynamic": {"+:x": {"bits": 8}}}, ("dynamic", "'-:'")),
        (GPTQ4 | {"dynamic": {"-:x": {}, "x": {"bits": 8}}}, ("dynamic", "'-:'")),
        (GPTQ4 | {"rotation": "hadamard"}, ("rotation of the config's", "'hadamard'")),
        (AWQ | {"bits": 8}, ("bits of the config's", "4", "8")),
        (AWQ | {"version": "gemv"}, ("version", "gemm", "'gemv'")),
        (AWQ | {"backend": "llm-awq"}, ("autoawq", "'llm-awq'")),
        (FP8 | {"weight_block_size": [128]}, ("weight_block_size", "[128]")),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, ("quant_algo", "NVFP4 or FP8", "'W4A8_AWQ'")),
        (
            {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"},
            ("format", "pack-quantized", "mxfp8-quantized"),
        ),
        (
            {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {"format": "sparse-bitmask"}},
            ("sparsity_config", "sparse-bitmask"),
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(said: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    checkpoint(tmp_path, said, packing.awq())
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(tmp_path)
    for word in words:
        assert any(one in str(caught.value) for one in word.split("|"))


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gptq-4", lambda t: t.pop(Q + ".scales"), "lacks model.layers.0.self_attn.q_proj.scales"),
        ("gptq-4", lambda t: t.update({Q + ".scales": t[Q + ".scales"][:, :9]}), "scales should have shape"),
        ("gptq-4", lambda t: t.update({Q + ".qzeros": t[Q + ".qzeros"][:1]}), "qzeros should have shape"),
        ("gptq-4", lambda t: t.update({Q + ".g_idx": t[Q + ".g_idx"] + 9}), "g_idx of a quantised matrix must lie"),
        ("gptq-4", lambda t: t.update({Q + ".qweight": t[Q + ".qweight"].float()}), "should be a matrix of I32"),
        ("gptq-4", lambda t: t.update({Q + ".weight": torch.zeros(64, 64)}), "holds .*q_proj.weight twice"),
        ("gptq-4", lambda t: t.update({Q + ".extra": torch.zeros(1)}), "do not match its config: .*q_proj.extra"),
        ("gptq-4", lambda t: t.update({Q + ".qweight": t[Q + ".qweight"][:4]}), "should have shape|g_idx"),
        ("awq", lambda t: t.update({Q + ".qzeros": t[Q + ".qzeros"][:, :2]}), "qzeros should have shape"),
        ("fp8-blocks", lambda t: t.pop(Q + ".weight_scale_inv"), "lacks .*q_proj.weight_scale"),
        ("fp8-blocks", lambda t: t.update({Q + ".weight_scale_inv": torch.ones(3, 5)}), "should have shape"),
        ("nf4", lambda t: t.update({Q + STATE: t[Q + STATE][:9]}), "nf4 is damaged"),
        ("nf4", lambda t: t.update({Q + STATE: state(shape=[1 << 20, 1 << 20])}), "should hold 1099511627776 numbers"),
        ("nf4", lambda t: t.update({Q + STATE: state(blocksize=0)}), "should hold"),
        ("nf4", lambda t: t.update({Q + ".weight": t[Q + ".weight"].float()}), "should hold .* is stored as .*F32"),
        ("bitsandbytes-int8", lambda t: t.pop(Q + ".SCB"), "lacks .*q_proj.SCB"),
        ("bitsandbytes-int8", lambda t: t.update({Q + ".weight_format": torch.zeros(2)}), "weight_format should have"),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_errors_that_name_the_tensor(
    kind: str, change: Callable[[dict[str, Tensor]], object], words: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, *KINDS[kind])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    write(file, tensors)
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("kind", "part", "quantization"),
    [("gptq-4", ".scales", "none"), ("awq", ".scales", "stored"), ("fp8-blocks", ".weight_scale_inv", "none"),
     ("nf4", ".weight.nested_absmax", "none"), ("bitsandbytes-int8", ".SCB", "stored")],
)  # fmt: skip
def test_scales_that_are_not_finite_are_refused_by_name(
    kind: str, part: str, quantization: str, number: float, tmp_path: Path
) -> None:
    """A single one would make every answer NaN, or only some."""
    checkpoint(tmp_path, *(KINDS | IN_GROUPS if quantization == "stored" else KINDS)[kind])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors[Q + part].view(-1)[-1] = number
    write(file, tensors)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: {re.escape(Q + part)} .* are not finite"):
        make_engine(tmp_path, skip_tokenizer_init=True, quantization=quantization)


@pytest.mark.parametrize("layout", [1, 2, 3])
def test_orders_that_are_made_for_one_kind_of_gpu_are_refused(layout: int, tmp_path: Path) -> None:
    """col32, col_turing and col_ampere, which bitsandbytes refuses as well."""
    checkpoint(tmp_path, *KINDS["bitsandbytes-int8"])
    file = tmp_path / "model.safetensors"
    write(file, load_file(file) | {Q + ".weight_format": torch.tensor(layout, dtype=torch.uint8)})
    with pytest.raises(UnsupportedModelError, match=f"q_proj.weight_format is {layout}: .* only rows"):
        load(tmp_path)


Q = "model.layers.0.self_attn.q_proj"
STATE = ".weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> Tensor:
    said = {"shape": [64, 64], "blocksize": 64, "nested_blocksize": 4, "nested_offset": 0.125} | changes
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "title"),
    [("awq", "4-bit AWQ"), ("gptq-3", "3-bit GPTQ"), ("fp8-blocks", "FP8"), ("nf4", "4-bit bitsandbytes")],
)
def test_octavo_models_says_how_weights_are_stored(
    kind: str, title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that belongs to the matrices under the scheme's name, and what is plain beside it."""
    checkpoint(tmp_path, *KINDS[kind])
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {name: tensor for name, tensor in tensors.items() if "_proj" not in name}
    sizes = {"F32": sum(tensor.nbytes for tensor in plain.values())}
    sizes[title] = sum(tensor.nbytes for tensor in tensors.values()) - sizes["F32"]
    assert main(["models", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["stored_as"]
    assert found == sizes
    assert list(found.values()) == sorted(sizes.values(), reverse=True)
    assert main(["models", str(tmp_path)]) == 0
    assert re.search(rf"^stored as .*{title} [\d.]+ MiB", capsys.readouterr().out, re.MULTILINE)


def test_a_config_that_asks_for_more_than_is_stored_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, *KINDS["gptq-4"])
    settings: dict[str, Any] = {"model": str(tmp_path), "device": "cpu", "dtype": "float32", "show_progress": False}
    resolve(EngineConfig(**settings), torch.device("cpu"))
    assert inspect_model(EngineConfig(**settings)).weight_files == 1
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 50}))
    with pytest.raises(ModelLoadError, match="50 layers"):
        resolve(EngineConfig(**settings), torch.device("cpu"))
