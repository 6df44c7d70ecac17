"""Weights stored as MXFP4: their numbers, and checkpoints that hold them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import random_prompt
from support.driving import Job, logprobs, make_engine, run
from support.families import FAMILY_SHAPES, FamilyCheckpoint
from support.family_shape import GREEDY_TOKENS, build_reference
from support.pages import load
from support.reference import MIN_MARGIN
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine import SamplingParams
from engine.backends import native
from engine.backends.native.gemm import Blocks
from engine.config import EngineConfig
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.execution.starting import resolve
from engine.inspection import inspect_model
from engine.model.checkpoint import read_config
from engine.model.experts import ExpertMatrices
from engine.model.gguf.blocks import groups_of, numbers_of
from engine.model.quantisation import Quantization
from engine.model.stored.mxfp4 import as_blocks, decode, decoded_shape

SHAPE = FAMILY_SHAPES["gpt-oss"]
SHAPE = replace(SHAPE, settings={**SHAPE.settings, "hidden_size": 64, "intermediate_size": 32})
MATRICES = ("gate_up_proj", "down_proj")


def random_blocks(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blocks of 16 bytes, and their exponents."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(117, 126, shape, generator=generator, dtype=torch.uint8)


def test_numbers_are_those_of_transformers() -> None:
    blocks, scales = random_blocks(3, 10, 4)
    scales[0, 0] = torch.tensor([1, 127, 200, 240])
    found = decode(blocks, scales)
    assert found.shape == decoded_shape(blocks.shape) == (3, 10, 128)
    # Which lays the matrices out [in, out].
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales).transpose(1, 2))
    assert len(found[0, 0, 32:64].unique()) > 5


def stored(folder: Path) -> dict[str, Tensor]:
    """A checkpoint with experts as MXFP4, and the same numbers as plain matrices."""
    build_reference(SHAPE).save_pretrained(folder)
    file = folder / "model.safetensors"
    plain, packed = load_file(file), load_file(file)
    for name in [name for name in plain if name.endswith(MATRICES)]:
        count, inputs, outputs = plain[name].shape
        blocks, scales = random_blocks(count, outputs, inputs // 32, seed=len(packed))
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = decode(blocks, scales).transpose(1, 2).contiguous()
    save_file(packed, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return plain


def test_a_checkpoint_is_read_as_what_it_holds(tmp_path: Path) -> None:
    plain = stored(tmp_path)
    packed = load(tmp_path, torch.float32).state_dict()
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = load(tmp_path, torch.float32).state_dict()
    assert whole.keys() == packed.keys()
    assert all(torch.equal(whole[name], packed[name]) for name in whole)


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    """Which decodes the matrices itself; most prompts reach further than the window."""
    stored(tmp_path)
    how = Mxfp4Config(dequantize=True)
    theirs = GptOssForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.float32).eval()
    theirs.set_attn_implementation("eager")
    reference = FamilyCheckpoint(SHAPE, tmp_path, theirs)
    engine = make_engine(tmp_path, max_model_len=SHAPE.max_model_len, block_size=4, quantization="none")
    prompts = [random_prompt(SHAPE.vocab, seed, 11 + 9 * seed) for seed in range(4)]
    expected = [reference.greedy(prompt) for prompt in prompts]
    assert min(answer.margin for answer in expected) > MIN_MARGIN
    jobs = [Job(prompt, SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS)) for prompt in prompts]
    found = run(engine, jobs)
    engine.close()
    assert [tokens for (tokens,) in found] == [answer.answers[0].tokens for answer in expected]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_its_numbers_are_quantised(kind: Quantization, tmp_path: Path) -> None:
    """At load, and as they are kept for the next one."""
    plain = stored(tmp_path / "packed")
    shutil.copytree(tmp_path / "packed", tmp_path / "plain")
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    job = Job(random_prompt(SHAPE.vocab, 1, 20), SamplingParams(temperature=0.0, max_tokens=12))
    found = []
    for name in ("plain", "packed", "packed"):
        engine = make_engine(tmp_path / name, quantization=kind, quantization_cache=str(tmp_path / "kept"))
        found.append(run(engine, [job]))
        engine.close()
    assert found[0] == found[1] == found[2]


def test_blocks_hold_the_same_numbers() -> None:
    """Bit for bit, of every exponent that bfloat16 has."""
    blocks, scales = random_blocks(3, 10, 4)
    scales[0, 0] = torch.tensor([1, 127, 200, 240])
    made = as_blocks(blocks, scales)
    assert (made.kind, made.inputs, made.values.shape) == ("mxfp4", 128, (3, 10, 4 * 17))
    for one, numbers in zip(made.values, decode(blocks, scales), strict=True):
        assert torch.equal(numbers_of(groups_of(Blocks("mxfp4", one, 128))).flatten(1), numbers.float())


@pytest.mark.skipif(not native.available(), reason="needs native kernels")
def test_it_is_kept_as_stored(tmp_path: Path) -> None:
    """On a CPU by default: experts take their own 4.25 bits, and answers are those of the numbers in float32, but for
    the rounding of activations."""
    stored(tmp_path)
    facts = inspect_model(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    assert facts.quantization == "stored"
    assert facts.weights == sum(facts.stored.values())
    prompt = random_prompt(SHAPE.vocab, 1, 40)
    found = []
    for kind, kept in ((None, "mxfp4"), ("none", None)):
        engine = make_engine(tmp_path, quantization=kind)
        experts = [module for module in engine.runner.model.modules() if isinstance(module, ExpertMatrices)]
        assert {module.stored for module in experts} == {kept}
        assert all(product.native.kind == "mxfp4" for module in experts for product in module.packed) or kept is None
        found.append(logprobs(engine, prompt))
        engine.close()
    kept, exact = found
    assert 0 < float((kept - exact).abs().median() / exact.std()) < 0.05


def test_its_parameters_are_more_than_its_bytes(tmp_path: Path) -> None:
    stored(tmp_path)
    found = resolve(EngineConfig(model=str(tmp_path), device="cpu"), torch.device("cpu"))
    assert found.spec.decoder is not None


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    stored(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(tensors | {f"{name}_scales": tensors[f"{name}_scales"][:, 1:].contiguous()}, file)
    with pytest.raises(ModelLoadError, match="down_proj_scales should have a number for each block"):
        load(tmp_path, torch.float32)
    save_file({key: value for key, value in tensors.items() if key != f"{name}_scales"}, file)
    with pytest.raises(ModelLoadError, match="down_proj_blocks should have shape"):
        load(tmp_path, torch.float32)


def test_other_families_have_no_place_for_it(tmp_path: Path) -> None:
    build_reference(FAMILY_SHAPES["llama"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(UnsupportedModelError, match=r"quantized with mxfp4, which is not supported for this family"):
        read_config(tmp_path)
