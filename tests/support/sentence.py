"""Folders as sentence-transformers saves them, made here, and its arithmetic spelled out in torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB, POSITIONS = 32, 97, 320
POOLING = "sentence_transformers.models.Pooling"
TRANSFORMER = "sentence_transformers.models.Transformer"


@dataclass(frozen=True)
class Module:
    """An entry of modules.json, with the files of its folder."""

    type: str
    config: dict[str, Any] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


def pooling(mode: str | Sequence[str] | None = None, **config: Any) -> Module:
    """A Pooling as today's versions write it (`mode`), or with the switches that older ones wrote."""
    if mode is not None:
        config |= {"embedding_dimension": HIDDEN, "pooling_mode": mode}
    return Module(POOLING, {"word_embedding_dimension": HIDDEN} | config if mode is None else config)


def dense(inputs: int, outputs: int, activation: str = "torch.nn.modules.activation.Tanh", **config: Any) -> Module:
    """A Dense with random weights."""
    generator = torch.Generator().manual_seed(1000 * inputs + outputs)
    tensors = {"linear.weight": torch.randn(outputs, inputs, generator=generator) * 2 * inputs**-0.5}
    if config.get("bias", True):
        tensors["linear.bias"] = torch.randn(outputs, generator=generator)
    if config.get("use_residual") and inputs != outputs:
        tensors["residual.weight"] = torch.randn(outputs, inputs, generator=generator)
    settings = {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}
    return Module("sentence_transformers.models.Dense", settings | config, tensors)


def layer_norm(size: int) -> Module:
    """A LayerNorm with random weights."""
    generator = torch.Generator().manual_seed(size)
    tensors = {
        "norm.weight": torch.randn(size, generator=generator),
        "norm.bias": torch.randn(size, generator=generator),
    }
    return Module("sentence_transformers.models.LayerNorm", {"dimension": size}, tensors)


NORMALIZE = Module("sentence_transformers.models.Normalize")
DROPOUT = Module("sentence_transformers.models.Dropout", {"dropout": 0.5})


def save_bert(folder: Path, kind: str = "BertModel", **config: Any) -> Any:
    """A small random BERT; returns transformers' model."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": POSITIONS,
    }
    return _save(getattr(transformers, kind)(transformers.BertConfig(**(settings | config))), folder)


def save_qwen3(folder: Path) -> Any:
    """A small random decoder; returns transformers' model."""
    settings = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
    )
    return _save(transformers.Qwen3ForCausalLM(settings), folder)


@torch.no_grad()
def _save(model: Any, folder: Path) -> Any:
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.2 * noise if name.endswith("orm.weight") else 0.2 * noise)
    model.save_pretrained(folder)
    return model.eval()


def pipeline_folder(
    folder: Path,
    model: Path,
    modules: Sequence[Module],
    *,
    settings: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    transformer: str = "",
    kind: str = TRANSFORMER,
) -> Path:
    """A folder with the files of `model` and these modules after its Transformer.

    Args:
        settings: config_sentence_transformers.json.
        limits: sentence_bert_config.json.
        transformer: the folder in which the transformer's own files lie.
    """
    (folder / transformer).mkdir(parents=True)
    for file in model.iterdir():
        (folder / transformer / file.name).symlink_to(file)
    entries = [{"idx": 0, "name": "0", "path": transformer, "type": kind}]
    for i, module in enumerate(modules, 1):
        path = f"{i}_{module.type.rpartition('.')[2]}"
        entries.append({"idx": i, "name": str(i), "path": path, "type": module.type})
        if module.config is not None:
            (folder / path).mkdir()
            write(folder / path / "config.json", module.config)
        if module.tensors:
            save_file(module.tensors, folder / path / "model.safetensors")
    write(folder / "modules.json", entries)
    if settings is not None:
        write(folder / "config_sentence_transformers.json", settings)
    if limits is not None:
        write(folder / transformer / "sentence_bert_config.json", limits)
    return folder


def write(file: Path, content: Any) -> None:
    """One JSON file."""
    file.write_text(json.dumps(content), encoding="utf-8")


def _weighted(states: Tensor, skip: int) -> Tensor:
    weights = torch.arange(1, len(states) + 1, dtype=torch.float32)[skip:, None]
    return (states[skip:] * weights).sum(0) / weights.sum().clamp(min=1e-9)


# sentence-transformers' kinds of pooling of hidden states [T, hidden], the first `skip` tokens being a prompt's.
POOLINGS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cls": lambda states, skip: states[skip],
    "max": lambda states, skip: states[skip:].max(0).values,
    "mean": lambda states, skip: states[skip:].sum(0) / max(len(states) - skip, 1e-9),
    "mean_sqrt_len_tokens": lambda states, skip: states[skip:].sum(0) / max(len(states) - skip, 1e-9) ** 0.5,
    "weightedmean": _weighted,
    "lasttoken": lambda states, skip: states[-1],
}


def mapped(vector: Tensor, modules: Sequence[Module]) -> Tensor:
    """What the modules after the pooling make of its vector."""
    for module in modules:
        match module.type.rpartition(".")[2]:
            case "Dense":
                assert module.config is not None
                name = module.config["activation_function"].rpartition(".")[2]
                out = getattr(torch.nn, name)()(
                    F.linear(vector, module.tensors["linear.weight"], module.tensors.get("linear.bias"))
                )
                if module.config.get("use_residual"):
                    weight = module.tensors.get("residual.weight")
                    out = out + (vector if weight is None else weight @ vector)
                vector = out
            case "LayerNorm":
                vector = F.layer_norm(vector, vector.shape, module.tensors["norm.weight"], module.tensors["norm.bias"])
            case "Normalize":
                vector = F.normalize(vector, dim=0)
            case kind:
                assert kind == "Dropout"
    return vector


@torch.no_grad()
def hidden_states(model: Any, tokens: Sequence[int]) -> Tensor:
    """[T, hidden] of transformers' model, its head left out."""
    trunk = getattr(model, model.base_model_prefix, model)
    states: Tensor = trunk(torch.tensor([list(tokens)])).last_hidden_state[0]
    return states
