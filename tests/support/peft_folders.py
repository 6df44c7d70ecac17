"""Adapters of random numbers, saved as PEFT saves them, and the models that they make."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def matrices(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Features in and out of each matrix of a model of transformers, by its module's name."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            found[name] = module.nx, module.nf
    return found


def adapter_tensors(
    sizes: Mapping[str, tuple[int, int]], rank: Callable[[str], int] = lambda name: 4, *, seed: int = 0, by: float = 0.3
) -> dict[str, Tensor]:
    """Random matrices under the names that PEFT gives them.

    Args:
        by: how large the additions are, compared with the matrices of `fill_randomly`.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, (inputs, outputs) in sizes.items():
        stem = f"base_model.model.{name}"
        found[f"{stem}.lora_A.weight"] = torch.randn(rank(name), inputs, generator=generator) * inputs**-0.5
        found[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank(name), generator=generator) * by
    return found


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    """A folder as PEFT saves it, with settings of its config; a setting of ... is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name})
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": targets, "bias": "none"} | settings
    values = {name: value for name, value in values.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merged(model: Any, tensors: Mapping[str, Tensor], scale: Callable[[str], float] = lambda name: 6 / 4) -> Any:
    """A copy of a model of transformers with an adapter's additions in its matrices."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        down = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if down is not None:
            delta = scale(name) * tensors[f"base_model.model.{name}.lora_B.weight"] @ down
            module.weight += delta.t() if isinstance(module, Conv1D) else delta
    for name, parameter in model.named_parameters():
        if (whole := tensors.get(f"base_model.model.{name}")) is not None:
            parameter.copy_(whole)
    return model


def root_scale(alpha: float, rank: int) -> float:
    """The scale of rsLoRA."""
    return alpha / math.sqrt(rank)
