"""Layers that map a pooled vector or a token's vector: dense layers and norms, with strictly loaded weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ModelLoadError
from engine.model.retrieval import read_state
from engine.model.sentence import AmongModel, DenseLayer, Layer, NormLayer, OwnFile, TorchFile
from engine.model.weight_files import FORMATS, SINGLE_FILE, Checkpoint


class Dense(nn.Module):
    """A dense layer [N, inputs] -> [N, outputs]; its parameters have the file's names."""

    def __init__(self, part: DenseLayer, device: torch.device):
        super().__init__()
        self.linear = nn.Linear(part.inputs, part.outputs, bias=part.bias, device=device)
        self.activation: nn.Module = getattr(nn, part.activation)()
        self.is_residual = part.residual
        self.residual: nn.Linear | None = None
        if part.residual and part.inputs != part.outputs:
            self.residual = nn.Linear(part.inputs, part.outputs, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.linear(x))
        if self.is_residual:
            out = out + (x if self.residual is None else self.residual(x))
        return out


class Norm(nn.Module):
    """A layer norm of vectors [N, size]."""

    def __init__(self, part: NormLayer, device: torch.device):
        super().__init__()
        self.norm = nn.LayerNorm(part.size, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class Unit(nn.Module):
    """Vectors divided by their Euclidean norms."""

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def load_projection(layers: Sequence[Layer], device: torch.device) -> nn.Module | None:
    """The layers with their weights, in float32 on the device; None if there are none.

    They are float32 whatever the model's format, because they are few and their results are compared. Raises
    ModelLoadError if there are no safetensors, or names or shapes do not match.
    """
    modules: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, DenseLayer):
            modules.append(Dense(layer, device))
            _fill_dense(modules[-1], layer)
        elif isinstance(layer, NormLayer):
            modules.append(Norm(layer, device))
            _fill(modules[-1], layer.folder)
        else:
            modules.append(Unit())
    return nn.Sequential(*modules).requires_grad_(False).eval() if modules else None


def _fill_dense(module: nn.Module, layer: DenseLayer) -> None:
    match layer.source:
        case OwnFile():
            _fill(module, layer.folder)
        case AmongModel():
            with Checkpoint(layer.folder) as stored:
                for name, parameter in module.named_parameters():
                    parameter.data.copy_(stored.read(name))
        case TorchFile(name=name):
            stored_state = read_state(layer.folder / name)
            for ours, parameter in module.named_parameters():
                parameter.data.copy_(stored_state[ours.removeprefix("linear.")])


def _fill(module: nn.Module, folder: Path) -> None:
    if not (folder / SINGLE_FILE).is_file():
        found = sorted(file.name for file in folder.glob("*.bin")) if folder.is_dir() else []
        raise ModelLoadError(
            f"{folder} contains no {SINGLE_FILE}"
            + (f", but {', '.join(found)}, which is not supported" if found else "")
            + ". Download the checkpoint again, or convert it once: load it with sentence-transformers and call "
            "save_pretrained(folder), which writes safetensors."
        )
    parameters = dict(module.named_parameters())
    with Checkpoint(folder) as stored:
        missing, unexpected = parameters.keys() - stored.names.keys(), stored.names.keys() - parameters.keys()
        if missing or unexpected:
            raise ModelLoadError(
                f"{folder / SINGLE_FILE} does not match its config.json: it "
                + " and ".join(
                    f"{verb} {', '.join(sorted(names))}"
                    for verb, names in (("lacks", missing), ("has no place for", unexpected))
                    if names
                )
                + "."
            )
        for name, parameter in parameters.items():
            if stored.shape(name) != parameter.shape:
                raise ModelLoadError(
                    f"{folder / SINGLE_FILE}: the tensor {name} should have shape {list(parameter.shape)} by its "
                    f"config.json, but is stored as {list(stored.shape(name))}."
                )
            if stored.format(name) not in FORMATS:
                raise ModelLoadError(
                    f"{folder / SINGLE_FILE}: the tensor {name} is stored as {stored.format(name)}; only "
                    f"{', '.join(FORMATS)} are read."
                )
            parameter.data.copy_(stored.read(name))
