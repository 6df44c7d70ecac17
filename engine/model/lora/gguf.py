"""Adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

from torch import Tensor

from engine.errors import AdapterError
from engine.model.gguf.architectures import Placed, place_alone
from engine.model.gguf.container import TensorInfo, read_gguf
from engine.model.gguf.hybrids import ALTERNATING
from engine.model.gguf.model_types import MODEL_TYPES
from engine.model.gguf.tensors import check_readable, read_tensor
from engine.model.lora.matrices import Matrices, Whole, octets
from engine.model.spec import ModelSpec

_HALF = re.compile(r"(.+\.weight)\.lora_([ab])")


def gguf_parts(path: Path, model: ModelSpec, model_type: str) -> Iterator[Matrices | Whole]:
    """The matrices in a file. Rows of queries and keys, which llama.cpp stores in another order, are put back in order.
    Raises AdapterError if the file is not an adapter, is another kind of adapter, or is made for another or an
    unsupported architecture; ModelLoadError if the file is damaged."""
    file = read_gguf(path)
    kind, way = (file.metadata.get(name) for name in ("general.type", "adapter.type"))
    if kind != "adapter" or way != "lora":
        raise AdapterError(f"it is not a LoRA adapter: general.type is {kind!r}, adapter.type is {way!r}")
    if file.metadata.get("adapter.alora.invocation_tokens"):
        raise AdapterError("activated LoRA is not supported")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        raise AdapterError(f"adapter.lora.alpha must be a number below 1e9, got {alpha!r}")
    size = model.trunk.attentions[0].head_dim
    architecture = str(file.metadata.get("general.architecture", ""))
    _check_base(architecture, model_type)
    halves: dict[str, dict[str, Placed]] = {}
    for name, info in file.tensors.items():
        found = _HALF.fullmatch(name)
        if found is None:
            raise AdapterError(f"it holds {ascii(name)[:80]}, which is not part of a LoRA adapter")
        check_readable(path, info)
        # Of the whole model: `model` may be the part of a rank.
        numbers = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), info.shape[0] // size)
        halves.setdefault(found[1], {})[found[2]] = place_alone(replace(info, name=found[1]), architecture, numbers)
    with path.open("rb") as opened:
        for stem, pair in halves.items():
            if len(pair) < 2:
                raise AdapterError(f"half of the adapter of {stem} is missing")
            down, up = pair["a"], pair["b"]
            if len(down.info.shape) != 2 or len(up.info.shape) != 2 or "{}" in up.name:
                raise AdapterError(f"{stem} is not one matrix: adapters of experts are not supported")
            yield Matrices(
                up.name.removesuffix(".weight"),
                alpha / down.info.shape[0] if alpha else 1.0,
                (down.info.shape, up.info.shape),
                lambda down=down, up=up: (  # type: ignore[misc]
                    _numbers(opened, down.info),
                    up.arrangement.arrange(_numbers(opened, up.info).float()),
                ),
                architecture in ALTERNATING,
            )


def _numbers(file: BufferedReader, info: TensorInfo) -> Tensor:
    return read_tensor(octets(file, info.begin, info.size), replace(info, begin=0))


def _check_base(architecture: str, model_type: str) -> None:
    """Refuse an adapter for another architecture than the model's, whose matrices may have the same shapes. A model
    type that no architecture stands for is not checked."""
    own = [name for name, types in MODEL_TYPES.items() if model_type in types]
    if own and architecture in MODEL_TYPES and architecture not in own:
        raise AdapterError(
            f"general.architecture is {architecture!r}, but the model's type is {model_type!r}, whose adapters have "
            f"{' or '.join(map(repr, own))}. The adapter is for another model"
        )
