"""Reads an adapter's files for a model."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import AdapterError, ModelLoadError
from engine.model.adapters import Adapter
from engine.model.gguf.files import SUFFIX
from engine.model.lora.matrices import Matrices, Whole, octets
from engine.model.lora.settings import FILE, MOST_RANK, LoraSettings, read_settings
from engine.model.lora.targets import Target, Targets, joined
from engine.model.transformer import Transformer

USUAL_RANK = 64
WEIGHTS = "adapter_model.safetensors"
_UNSAFE = ("adapter_model.bin", "adapter_model.pt")
_STEM = "base_model.model."
_MOST_NAME = 256
# How names of models end that differ from another only in the numbers' format.
_QUANTISED = re.compile(r"(?i)[-._](i?q\d\w*|b?f16|f32|fp(4|8|16|32)\w*|mxfp4\w*|(unsloth-)?bnb-4bit|gguf|awq|gptq)$")
_PART = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_MULTIPLIED = ("falcon_h1",)  # model types whose matrices in GGUF files are multiplied by constants
_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOKENS = ("embed_tokens", "wte", "word_embeddings", "shared", "lm_head", "embeddings", "embed_in", "embed_out")

logger = logging.getLogger("octavo.model")


def read_adapter(
    name: str,
    path: str | Path,
    model: Transformer,
    max_rank: int,
    model_type: str = "",
    *,
    of_gguf: bool = False,
    model_name: str = "",
) -> Adapter:
    """An adapter for a model. Raises AdapterError if the file is not an adapter, is damaged, has shapes other than the
    model's, or contains an unsupported kind of adapter.

    Args:
        name: the name under which requests select it.
        path: a folder that PEFT wrote, or a GGUF file that llama.cpp's converter wrote.
        max_rank: `max_lora_rank` of the engine.
        model_type: the type of the model in its config.
        of_gguf: whether the model was read from a GGUF file.
        model_name: its hub id, folder or file; "" if it has none. A folder that names another base gets a warning.
    """
    path, targets, base = Path(path), Targets(model), ""
    if model_type in _MULTIPLIED and (path.suffix == SUFFIX) != of_gguf:
        raise AdapterError(
            f"{path} is {'a PEFT folder' if of_gguf else 'a GGUF file'}, but the model was read from "
            f"{'a GGUF file' if of_gguf else 'safetensors'}. GGUF files of {model_type} contain matrices that are "
            "multiplied by constants of the config. Use an adapter and a model of the same format."
        )
    if path.suffix == SUFFIX:
        from engine.model.lora.gguf import gguf_parts  # rarely needed

        file = _gguf(path)
        found: Iterator[Matrices | Whole] = gguf_parts(file, model.spec, model_type)
    else:
        settings, file = _folder(path)
        base = settings.base
        found = _peft_parts(file, settings)
    parts: dict[str, dict[int, tuple[Target, Tensor, Tensor]]] = {}
    saved: dict[str, Tensor] = {}
    try:
        for each in found:
            if isinstance(each, Whole):
                parameter, tensor = _replaced(each, targets)
                if parameter in saved:
                    raise _twice(each.name)
                saved[parameter] = tensor
            else:
                for target, down, up in _read(each, targets, max_rank):
                    of_one = parts.setdefault(target.path, {})
                    if target.places[0] in of_one:
                        raise _twice(each.module)
                    of_one[target.places[0]] = target, down, up
    except (AdapterError, ModelLoadError) as error:
        told = str(error)
        raise AdapterError(told if str(file) in told else f"{file}: {told}.") from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise _damaged(file, error) from error
    if not parts and not saved:
        raise AdapterError(f"{file} holds no matrices of an adapter.")
    if base and model_name and _plain_name(base) != _plain_name(model_name):
        logger.warning(
            "The adapter %s was trained on %s, but this model is %s. Their matrices have equal shapes, so it is "
            "loaded. If the weights are not the same, its answers are wrong.", name, base, model_name,
        )  # fmt: skip
    products = {product: joined(list(of_one.values())) for product, of_one in parts.items()}
    return Adapter(
        name=name,
        path=str(path),
        digest=_digest({f"{k}\0{i}": t for k, p in products.items() for i, t in enumerate((p.down, p.up))} | saved),
        products=products,
        replaced=saved,
    )


def _plain_name(model: str) -> str:
    """A model's name without its owner, folder, spelling and the kind of its quantisation."""
    name = _QUANTISED.sub("", re.split(r"[/\\\\]", model.rstrip("/\\"))[-1].removesuffix(SUFFIX))
    return re.sub(r"[^a-z0-9]", "", name.lower())


def largest_rank(paths: Iterable[str]) -> int:
    """The largest rank that the adapters at these paths state; `USUAL_RANK` if there are none. Raises AdapterError if
    an adapter cannot be read; ModelLoadError if a GGUF file is damaged."""
    ranks = []
    for path in map(Path, paths):
        if path.suffix == SUFFIX:
            from engine.model.gguf.container import read_gguf  # rarely needed

            ranks += [
                info.shape[0] for info in read_gguf(_gguf(path)).tensors.values() if info.name.endswith(".lora_a")
            ]
        else:
            settings, _ = _folder(path)
            ranks += [settings.rank, *settings.ranks.values()]
    return min(max(ranks, default=USUAL_RANK), MOST_RANK)


def _read(each: Matrices, targets: Targets, max_rank: int) -> Iterator[tuple[Target, Tensor, Tensor]]:
    """The matrices of one module, for each product that contains its matrix."""
    found = targets.find(each.module)
    (rank, *inputs), (*outputs, also) = each.sizes
    for target in found:
        features_in, features_out = target.stored
        if inputs != [features_in] or outputs != [features_out] or rank != also or not rank:
            raise AdapterError(
                f"the adapter of {each.module} has the shapes {list(each.sizes[0])} and {list(each.sizes[1])}, but "
                f"the model's matrix has {features_in} inputs and {features_out} outputs. The adapter is for another "
                "model"
            )
    if rank > MOST_RANK:
        raise AdapterError(
            f"the adapter of {each.module} has rank {rank}. Octavo serves adapters up to rank {MOST_RANK}"
        )
    if rank > max_rank:
        raise AdapterError(
            f"the adapter of {each.module} has rank {rank}, but max_lora_rank is {max_rank}. Raise --max-lora-rank"
        )
    down, up = (tensor.float() for tensor in each.read())
    if (down.shape, up.shape) != each.sizes:
        raise AdapterError(f"the adapter of {each.module} changed while it was read")
    up = up * each.scale
    for tensor in (down, up):
        if not bool(tensor.isfinite().all()):
            raise AdapterError(f"the adapter of {each.module} contains NaN or infinite numbers")
    for target in found:
        ordered, rows = target.in_order(down, up, each.alternate)
        yield target, target.own(ordered), rows


def _replaced(each: Whole, targets: Targets) -> tuple[str, Tensor]:
    """A parameter of a classifier's head, and its values."""
    found = targets.head_parameter(each.name)
    if found is None:
        if any(f".{word}." in f".{each.name}" for word in _TOKENS):
            raise AdapterError(
                f"it contains {each.name}: adapters with added tokens, or with their own token table or output "
                "matrix, are not supported"
            )
        raise AdapterError(f"it contains {each.name} in full: of modules_to_save, only classifier heads are supported")
    entry, shape = found
    if [torch.Size(each.shape)] != entry.transform.shapes(shape):
        raise AdapterError(
            f"{each.name} has the shape {list(each.shape)}, but the model's head has {list(shape)}. Serve a base "
            "model with as many labels as the adapter has"
        )
    filled = torch.empty(shape)
    entry.transform.fill(filled, 0, each.read().float())
    if not bool(filled.isfinite().all()):
        raise AdapterError(f"{each.name} contains NaN or infinite numbers")
    return entry.target, filled


def _gguf(path: Path) -> Path:
    """The path of a GGUF file; opening anything else might block for ever."""
    if not path.is_file():
        raise AdapterError(f"{path} is not a file.")
    return path


def _folder(path: Path) -> tuple[LoraSettings, Path]:
    if not path.is_dir():
        raise AdapterError(
            f"{path} is not a folder. Give the folder that contains {FILE} and {WEIGHTS}, or a {SUFFIX} file."
        )
    if not (path / FILE).is_file():
        raise AdapterError(f"The folder {path} has no {FILE}, so it is not an adapter that PEFT saved.")
    settings = read_settings(path / FILE)
    if not (path / WEIGHTS).is_file():
        other = next((name for name in _UNSAFE if (path / name).is_file()), None)
        if other is not None:
            raise AdapterError(
                f"{path / other} is a pickle, which may run code when it is read. Save the adapter as {WEIGHTS} "
                "(PEFT's save_pretrained does)."
            )
        raise AdapterError(f"The folder {path} has no {WEIGHTS}.")
    return settings, path / WEIGHTS


def _peft_parts(file: Path, settings: LoraSettings) -> Iterator[Matrices | Whole]:
    try:
        stored: Any = safe_open(str(file), framework="pt", device="cpu")
        names = list(stored.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(file, error) from error
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", octets(opened, 0, 8).numpy().tobytes())
        header = json.loads(octets(opened, 8, length).numpy().tobytes())
        yield from _parts_of(stored, names, settings, partial(_numbers, opened, 8 + length, header))


def _numbers(file: BufferedReader, start: int, header: Mapping[str, Any], name: str) -> Tensor:
    entry = header[name]
    begin, end = entry["data_offsets"]
    return octets(file, start + begin, end - begin).view(_FORMATS[entry["dtype"]]).view(entry["shape"])


def _parts_of(
    stored: Any, names: Iterable[str], settings: LoraSettings, read: Callable[[str], Tensor]
) -> Iterator[Matrices | Whole]:
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        if len(name) > _MOST_NAME:
            raise AdapterError(
                f"it contains a tensor whose name has {len(name)} characters; at most {_MOST_NAME} are read"
            )
        short = name.removeprefix(_STEM)
        if str(stored.get_slice(name).get_dtype()) not in _FORMATS:
            raise AdapterError(
                f"{name} is stored as {stored.get_slice(name).get_dtype()}; supported: {', '.join(_FORMATS)}"
            )
        if found := _PART.fullmatch(short):
            if modules.setdefault(found[1], {}).setdefault(found[2], name) != name:
                raise _twice(found[1])
        elif "lora_" in short:
            kind = "adapters of embeddings" if "lora_embedding" in short else "such tensors"
            raise AdapterError(f"it contains {name}: {kind} are not supported")
        else:
            shape = tuple(stored.get_slice(name).get_shape())
            yield Whole(short, shape, lambda name=name: read(name))  # type: ignore[misc]
    for module, halves in modules.items():
        yield _of_module(module, halves, settings, stored, read)


def _of_module(
    module: str, halves: Mapping[str, str], settings: LoraSettings, stored: Any, read: Callable[[str], Tensor]
) -> Matrices:
    if len(halves) < 2:
        missing = "B" if "A" in halves else "A"
        raise AdapterError(f"lora_{missing} of {module} is missing. Save the adapter again")
    if not settings.aims_at(module):
        raise AdapterError(f"it contains an adapter of {module}, which target_modules of {FILE} do not name")
    down, up = (tuple(stored.get_slice(halves[half]).get_shape()) for half in "AB")
    if len(down) != 2 or len(up) != 2:
        raise AdapterError(f"{module} has an adapter of {max(len(down), len(up))} dimensions")
    if down[0] != settings.rank_of(module):
        raise AdapterError(
            f"the adapter of {module} has rank {down[0]}, but {FILE} says {settings.rank_of(module)}. The two files "
            "belong to different adapters"
        )
    return Matrices(
        module,
        settings.scale_of(module),
        (down, up),
        lambda: (read(halves["A"]), read(halves["B"])),
    )


def _twice(module: str) -> AdapterError:
    return AdapterError(f"it contains {module} twice, under two names. Save the adapter again")


def _damaged(file: Path, error: Exception) -> AdapterError:
    return AdapterError(f"{file} cannot be read ({error}). It is damaged or incomplete: save or copy it again.")


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name}\0{list(tensors[name].shape)}\0".encode())
        digest.update(tensors[name].contiguous().numpy().data)
    return digest.digest()
