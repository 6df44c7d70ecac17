"""Checkpoints of 4 bits as AutoAWQ and GPTQ's tools write them, from a plain one by rounding to nearest.

Groups of 128 inputs, as published checkpoints have. What the methods are good for, a better choice of the integers,
changes neither the layout nor the speed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs is at each place of a word, the first in the lowest bits."""
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}


def write_stored(plain: Path, folder: Path, method: str) -> None:
    """Write a checkpoint of one safetensors file again, with the matrices of its layers in 4 bits.

    Args:
        method: awq (integers from 0 to 15 with zeros) or gptq (symmetric about 8).
    """
    made: dict[str, Tensor] = {}
    pack: Callable[[Tensor], dict[str, Tensor]] = {"awq": awq, "gptq": gptq}[method]
    for name, tensor in load_file(plain / "model.safetensors").items():
        if ".layers." in name and tensor.dim() == 2:
            parts = pack(tensor.float())
            made |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
        else:
            made[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    for file in plain.glob("*.json"):
        shutil.copy(file, folder)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": CONFIGS[method]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def awq(weight: Tensor) -> dict[str, Tensor]:
    """A matrix [outputs, inputs] as qweight [inputs, outputs / 8], qzeros and scales by groups (arXiv:2306.00978)."""
    groups = weight.unflatten(1, (-1, GROUP))
    least, most = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scales = ((most - least) / 15).half()
    zeros = (-least / scales.float()).round().clamp(0, 15)
    values = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    return {"qweight": _in_words(_ordered(values)), "qzeros": _in_words(_ordered(zeros)), "scales": scales.t()}


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """The same as qweight [inputs / 8, outputs], qzeros (less one), scales and g_idx (arXiv:2210.17323)."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).half()
    values = (groups / scales.float()[..., None] + 8).round().clamp(0, 15).flatten(1)
    zeros = torch.full(scales.t().shape, 7)
    return {
        "qweight": _in_words(values).t(),
        "qzeros": _in_words(zeros),
        "scales": scales.t(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _ordered(integers: Tensor) -> Tensor:
    """[outputs, columns] as rows of columns, each eight of whose outputs are in AWQ's order."""
    return integers.t().unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)


def _in_words(integers: Tensor) -> Tensor:
    """Eight neighbours of 0 to 15 [rows, columns] in a word each: int32 [rows, columns / 8]."""
    eights = integers.to(torch.int64).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return eights.sum(-1).to(torch.int32)
