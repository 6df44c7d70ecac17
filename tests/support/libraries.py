"""Matrices as the libraries store them that quantise models, with what they themselves make of these.

Run as a program where the libraries are installed, it writes the matrices of `KEPT` to `FILE`, with the libraries'
versions, so that tests compare with them where no library is: `PYTHONPATH=.:tests python -m support.libraries`. GPTQ's
tools may be installed without what they require (`pip install --no-deps`).
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).with_name("libraries.json")


@dataclass(frozen=True)
class Made:
    """A matrix.

    Attributes:
        said: the config's quantization_config.
        parts: what it is stored as, by the ends of the tensors' names.
        holds: [outputs, inputs], by the library, in the format in which it multiplies.
    """

    said: dict[str, Any]
    parts: dict[str, Tensor]
    holds: Tensor


@dataclass(frozen=True)
class _Drawn:
    """Numbers for a matrix of integers: a linear layer of them, scales and zeros [outputs, groups], and the group of
    each input."""

    linear: nn.Linear
    scales: Tensor
    zeros: Tensor
    groups: Tensor


def _draw(
    bits: int, group: int, outputs: int, inputs: int, dtype: torch.dtype, *, symmetric: bool, ordered: bool, least: int
) -> _Drawn:
    """`least` is the smallest zero."""
    generator = torch.Generator().manual_seed(outputs * inputs + bits + group)
    groups = torch.arange(inputs) // group
    if not ordered:
        groups = groups[torch.randperm(inputs, generator=generator)]
    levels = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
    zeros = torch.randint(least, 1 << bits, (outputs, inputs // group), generator=generator)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << bits - 1)
    elif least == 0:
        zeros[::3] = 0  # so that some are
    scales = (torch.rand(outputs, inputs // group, generator=generator) * 0.1 + 0.01).to(dtype).float()
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight.data = (levels - zeros[:, groups]) * scales[:, groups]
    return _Drawn(linear, scales, zeros.float(), groups.int())


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {f".{name}": tensor.detach().clone() for name, tensor in module.state_dict().items()}


def autoawq(group: int, outputs: int, inputs: int) -> Made:
    gemm = import_module("awq.modules.linear.gemm")
    drawn = _draw(4, group, outputs, inputs, torch.float16, symmetric=False, ordered=True, least=0)
    scales, zeros = drawn.scales.t().contiguous(), drawn.zeros.t().contiguous()
    made = gemm.WQLinear_GEMM.from_linear(drawn.linear, 4, group, scales=scales, zeros=zeros)
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None}  # fmt: skip
    return Made(said, _tensors(made), gemm.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, group).t())


def gptqmodel_awq(group: int, outputs: int, inputs: int, dtype: torch.dtype, *, symmetric: bool = False) -> Made:
    linears = import_module("gptqmodel.nn_modules.qlinear.torch_awq")
    drawn = _draw(4, group, outputs, inputs, dtype, symmetric=symmetric, ordered=True, least=0)
    made = linears.AwqTorchLinear(bits=4, group_size=group, sym=symmetric, desc_act=False, in_features=inputs,
                                  out_features=outputs, bias=False, register_buffers=True)  # fmt: skip
    made.pack(drawn.linear, drawn.scales.to(dtype), drawn.zeros)
    holds = linears.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, group).t()
    said = {"bits": 4, "group_size": group, "desc_act": False, "lm_head": False, "method": "awq", "quant_method": "awq",
            "format": "gemm", "checkpoint_format": "gemm", "pack_dtype": "int32", "zero_point": not symmetric,
            "version": "gemm"}  # fmt: skip
    return Made(said, _tensors(made), holds)


def auto_gptq(bits: int, group: int, outputs: int, inputs: int, *, symmetric: bool, ordered: bool) -> Made:
    """Whose packer damages what follows a zero of 0: the least is 1."""
    linears = _alone("auto_gptq", "nn_modules/qlinear/qlinear_cuda.py")
    drawn = _draw(bits, group, outputs, inputs, torch.float16, symmetric=symmetric, ordered=ordered, least=1)
    made = linears.QuantLinear(bits, group, inputs, outputs, False, weight_dtype=torch.float16)
    made.pack(drawn.linear.half(), drawn.scales.clone(), drawn.zeros.clone(), drawn.groups)
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": not ordered, "sym": symmetric,
            "static_groups": False, "true_sequential": True, "damp_percent": 0.01}  # fmt: skip
    return Made(said, _tensors(made), made(torch.eye(inputs, dtype=torch.float16)).t())


def gptqmodel(
    bits: int, group: int, outputs: int, inputs: int, *, symmetric: bool, ordered: bool, first_version: bool
) -> Made:
    linears = import_module("gptqmodel.nn_modules.qlinear.torch")
    models = import_module("gptqmodel.utils.model")
    drawn = _draw(bits, group, outputs, inputs, torch.float16, symmetric=symmetric, ordered=ordered, least=0)
    made = linears.TorchLinear(bits=bits, group_size=group, sym=symmetric, desc_act=not ordered, in_features=inputs,
                               out_features=outputs, bias=False, register_buffers=True).eval()  # fmt: skip
    made.pack(drawn.linear, drawn.scales.clone(), drawn.zeros.clone(), drawn.groups)
    if first_version:
        config = SimpleNamespace(bits=bits, pack_dtype=torch.int32)
        models.convert_gptq_v2_to_v1_format_module(made, config)  # as it saves
    parts = _tensors(made)
    if first_version:
        models.convert_gptq_v1_to_v2_format_module(made, bits, torch.int32)  # as it loads
    made._init_wf_unsqueeze_buffers()
    layout = "gptq" if first_version else "gptq_v2"
    said = {"bits": bits, "group_size": group, "desc_act": not ordered, "lm_head": False, "method": "gptq",
            "quant_method": "gptq", "format": layout, "checkpoint_format": layout, "pack_dtype": "int32",
            "sym": symmetric}  # fmt: skip
    return Made(said, parts, made.dequantize_weight().t())


def bitsandbytes_4(
    kind: str, block: int, outputs: int, inputs: int, dtype: torch.dtype, *, nested: bool, storage: torch.dtype
) -> Made:
    """`storage` is the format of the tensor that the codes are stored in."""
    library = import_module("bitsandbytes")
    numbers = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs * inputs + block))
    stored, state = library.functional.quantize_4bit(
        (numbers * 0.05).to(dtype), blocksize=block, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_quant_storage":
            str(storage)[6:], "bnb_4bit_use_double_quant": nested}  # fmt: skip
    parts = {".weight": stored} | {f".weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return Made(said, parts, library.functional.dequantize_4bit(stored, state))


def bitsandbytes_8(outputs: int, inputs: int) -> Made:
    """With outliers."""
    library = import_module("bitsandbytes")
    numbers = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs * inputs))
    numbers[1, 3] = 40
    linear = library.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False, threshold=6.0)
    linear.weight = library.nn.Int8Params(numbers.half(), requires_grad=False, has_fp16_weights=False)
    parts = _tensors(linear.to("cpu"))
    holds = library.functional.int8_vectorwise_dequant(parts[".weight"], parts[".SCB"])
    return Made({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}, parts, holds)


def _alone(package: str, file: str) -> ModuleType:
    """A module of a package that as a whole needs another version of transformers."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    spec = importlib.util.spec_from_file_location(Path(file).stem, Path(found.submodule_search_locations[0]) / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIBRARIES = {"awq": "autoawq", "auto_gptq": "auto-gptq", "gptqmodel": "gptqmodel", "bitsandbytes": "bitsandbytes"}
"""What one imports, and what it is called where packages are."""

Case = tuple[str, Callable[[], Made]]
"""The library that one imports, and what makes a matrix by it."""


def _kept() -> dict[str, Case]:
    cases: dict[str, Case] = {
        "awq": ("awq", partial(autoawq, 8, 32, 16)),
        "awq-gptqmodel-bfloat16": ("gptqmodel", partial(gptqmodel_awq, 16, 16, 32, torch.bfloat16)),
        "bitsandbytes-int8": ("bitsandbytes", partial(bitsandbytes_8, 4, 32)),
    }
    for bits in (2, 3, 4, 8):
        gptq = partial(auto_gptq, bits, 16, 32, 32, symmetric=False, ordered=False)
        cases[f"gptq-{bits}-order"] = ("auto_gptq", gptq)
        for first in (True, False):
            other = partial(gptqmodel, bits, 16, 32, 32, symmetric=False, ordered=True, first_version=first)
            cases[f"gptqmodel-{bits}-v{1 if first else 2}"] = ("gptqmodel", other)
    codes = partial(bitsandbytes_4, outputs=6, inputs=64)
    for name, make in {
        "nf4": partial(codes, "nf4", 64, dtype=torch.bfloat16, nested=False, storage=torch.uint8),
        "fp4": partial(codes, "fp4", 64, dtype=torch.float32, nested=False, storage=torch.uint8),
        "nf4-nested": partial(codes, "nf4", 32, dtype=torch.float16, nested=True, storage=torch.uint8),
        "fp4-in-bfloat16": partial(codes, "fp4", 32, dtype=torch.bfloat16, nested=False, storage=torch.bfloat16),
        "nf4-in-float32": partial(codes, "nf4", 64, dtype=torch.float32, nested=False, storage=torch.float32),
    }.items():
        cases[name] = ("bitsandbytes", make)
    return cases


KEPT: dict[str, Case] = _kept()


def _all() -> dict[str, Case]:
    cases = dict(KEPT)
    for group in (32, 64, 128, 256):
        cases[f"awq-{group}"] = ("awq", partial(autoawq, group, 96, 256))
        for dtype in (torch.float16, torch.bfloat16):
            for symmetric in (False, True):
                awq = partial(gptqmodel_awq, group, 96, 256, dtype, symmetric=symmetric)
                cases[f"awq-gptqmodel-{group}-{str(dtype)[6:]}-{'' if symmetric else 'a'}symmetric"] = "gptqmodel", awq
    for bits in (2, 3, 4, 8):
        for group in (32, 128, 256):
            for symmetric in (False, True):
                for ordered in (False, True):
                    name = f"{bits}-{group}-{'' if symmetric else 'a'}symmetric-{'' if ordered else 'un'}ordered"
                    how = {"symmetric": symmetric, "ordered": ordered}
                    cases[f"auto-gptq-{name}"] = "auto_gptq", partial(auto_gptq, bits, group, 64, 256, **how)
                    for first in (True, False):
                        gptq = partial(gptqmodel, bits, group, 64, 256, first_version=first, **how)
                        cases[f"gptqmodel-{name}-v{1 if first else 2}"] = "gptqmodel", gptq
    for kind in ("nf4", "fp4"):
        for block in (32, 64, 128, 1024):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                for nested in (False, True):
                    # Rows of whole blocks: of others bitsandbytes 0.50 multiplies wrong numbers on AVX-512.
                    codes = partial(bitsandbytes_4, kind, block, 24, 4096, dtype, nested=nested, storage=torch.uint8)
                    name = f"{kind}-{block}-{str(dtype)[6:]}{'-nested' if nested else ''}"
                    cases[name] = "bitsandbytes", codes
    cases["bitsandbytes-int8-large"] = "bitsandbytes", partial(bitsandbytes_8, 48, 96)
    return cases


ALL: dict[str, Case] = _all()


def digest(numbers: Tensor) -> str:
    """Of a matrix' bytes, row by row."""
    return hashlib.sha256(numbers.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Kept:
    """What `FILE` has of a matrix: the same as of one that is made, but of its numbers the format, the first and a
    digest."""

    said: dict[str, Any]
    parts: dict[str, Tensor]
    dtype: torch.dtype
    begins: list[float]
    digest: str


def kept() -> dict[str, Kept]:
    """What `FILE` has, by name."""
    found = {}
    for name, entry in json.loads(FILE.read_text(encoding="utf-8")).items():
        parts = {ending: _read(part) for ending, part in entry["parts"].items()}
        dtype = getattr(torch, entry["dtype"])
        found[name] = Kept(entry["said"], parts, dtype, entry["begins"], entry["digest"])
    return found


def _read(part: dict[str, Any]) -> Tensor:
    octets = bytearray(base64.b64decode(part["base64"]))
    return torch.frombuffer(octets, dtype=getattr(torch, part["dtype"])).view(part["shape"])


def _written(tensor: Tensor) -> dict[str, Any]:
    octets = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    text = base64.b64encode(octets).decode()
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "base64": text}


def main() -> None:
    entries = {}
    for name, (library, make) in KEPT.items():
        made = make()
        entries[name] = {
            "library": f"{LIBRARIES[library]} {version(LIBRARIES[library])}",
            "said": made.said,
            "parts": {ending: _written(part) for ending, part in made.parts.items()},
            "dtype": str(made.holds.dtype)[6:],
            "begins": made.holds[0, :8].tolist(),
            "digest": digest(made.holds),
        }
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    sys.stdout.write(f"{FILE}: {len(entries)} matrices\n")


if __name__ == "__main__":
    main()
