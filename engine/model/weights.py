"""Strict loading of weights from safetensors.

Every parameter is filled and every tensor of the checkpoint is used or known to be needless; names and
shapes are checked before any data is read. Each tensor is read once and copied into its place.
"""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm.auto import tqdm

from engine.attention.base import AttentionBackend
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model import families
from engine.model.quantisation import Quantization
from engine.model.spec import Lm, MaskedLm, ModelSpec, Pool
from engine.model.table import Transform, WeightTable
from engine.model.transformer import Transformer

logger = logging.getLogger("octavo.model")

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, ENCODER_EMBEDDING = "decoder.embedding.tokens", "encoder.embedding.tokens"
FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")
_SHOWN = 5


def load_model(
    path: Path,
    config: Any,
    model_spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    max_model_len: int,
    show_progress: bool = True,
    quantization: Quantization | None = None,
) -> Transformer:
    """The model of a checkpoint folder, its weights converted to `dtype` on `device`.

    Args:
        config: of the checkpoint (`engine.model.checkpoint.read_config`).
        model_spec: its parts (`engine.model.families.build_spec`).
        quantization: matrices are packed so as soon as they are filled; None leaves all as they are.

    Raises:
        ModelLoadError: no safetensors, a file that cannot be read, names or shapes that do not match,
            memory that does not suffice.
        UnsupportedModelError: a part is not implemented.
        ConfigError: max_model_len exceeds what the checkpoint has positions for.
    """
    table = families.weight_table(config, model_spec)
    with Checkpoint(path) as checkpoint:
        checkpoint.rename(table)
        as_stored = _as_stored(checkpoint, table, model_spec)
        if as_stored != model_spec:
            model_spec = as_stored
            table = families.weight_table(config, model_spec)
        try:
            model = Transformer(model_spec, backend, max_model_len, device=device, dtype=dtype)
        except RuntimeError as error:
            # The CPU's allocator raises a plain RuntimeError.
            if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
                raise
            raise ModelLoadError(
                f"The weights of {path} do not fit into the free memory of {device} as {dtype}: {error}. "
                "Use a smaller model, a 16-bit --dtype, or another --device."
            ) from error
        destinations = _plan(checkpoint, table, model)
        packing = None if quantization is None else _Packing(model, quantization, destinations)
        _fill(checkpoint, destinations, show_progress, packing)
    return model.eval()


def stored_dtype(path: Path, config: Any) -> torch.dtype:
    """The format of a checkpoint's weights: what its config says, else that of its largest tensor.

    float32 where that is none of float32, float16 and bfloat16.
    """
    named = getattr(config, "dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named.removeprefix("torch."), None)
    if named is None:
        with Checkpoint(path) as checkpoint:
            largest = max(checkpoint.names, key=lambda name: checkpoint.shape(name).numel(), default=None)
            named = None if largest is None else FORMATS.get(checkpoint.format(largest))
    return named if named in (torch.float16, torch.bfloat16) else torch.float32


class Checkpoint:
    """The tensors of a folder's safetensors files, under the names of a weight table; a context manager."""

    def __init__(self, path: Path):
        self.path = path
        self.names: dict[str, tuple[Path, str]] = {}
        self._handles: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for file in weight_files(self.path):
                with _readable(file):
                    handle = stack.enter_context(safe_open(str(file), framework="pt", device="cpu"))
                    self._handles[file] = handle
                    keys = list(handle.keys())
                for key in keys:
                    if key in self.names:
                        raise ModelLoadError(
                            f"{self.path} holds the tensor {key} twice, in {self.names[key][0].name} and {file.name}."
                        )
                    self.names[key] = (file, key)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._handles.clear()
        self._stack.close()

    def rename(self, table: WeightTable) -> None:
        """Give the tensors the table's names where the file has older ones, or leaves the prefix out."""
        wanted = {source for entry in table.entries for source in entry.sources}
        renamed: dict[str, tuple[Path, str]] = {}
        for stored, place in self.names.items():
            name = table.current(stored)
            longer = table.prefix + name
            known = name in wanted or name == table.head or table.ignores(name)
            if not known and (longer in wanted or table.ignores(longer)):
                name = longer
            if name in renamed:
                other = renamed[name][1]
                raise ModelLoadError(f"{self.path} holds the tensor {name} twice: as {other} and as {place[1]}.")
            renamed[name] = place
        self.names = renamed

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._slice(name).get_shape())

    def format(self, name: str) -> str:
        """The stored format, in safetensors' words: F32, BF16 …"""
        return str(self._slice(name).get_dtype())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a matrix."""
        part: Tensor = self._slice(name)[start:stop]
        return part

    def read(self, name: str) -> Tensor:
        file, key = self.names[name]
        with _readable(file):
            tensor: Tensor = self._handles[file].get_tensor(key)
        return tensor

    def _slice(self, name: str) -> Any:
        file, key = self.names[name]
        with _readable(file):
            return self._handles[file].get_slice(key)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        with file.open("rb"):  # safetensors says "no such file" of one that may not be read
            pass
        yield
    except PermissionError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{file} cannot be read as safetensors ({error}). It is damaged or incomplete: download it again."
        ) from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder.

    Raises:
        ModelLoadError: there are none, the index is damaged, or it names a file that is missing or lies
            outside the folder.
    """
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.is_file():
        raise ModelLoadError(_no_weights(path))
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is damaged: it holds no weight_map of tensor names to files.") from error
    for shard in shards:
        if not isinstance(shard, str) or not shard or shard in (".", "..") or "/" in shard or "\\" in shard:
            raise ModelLoadError(
                f"{index} names the file {shard!r}; a shard must be the plain name of a file in the same folder."
            )
        if not (path / shard).is_file():
            raise ModelLoadError(f"{path} lacks {shard}, which {INDEX_FILE} names. Download the checkpoint again.")
    if not shards:
        raise ModelLoadError(f"{index} names no files.")
    return [path / shard for shard in shards]


def _no_weights(path: Path) -> str:
    expected = f"{SINGLE_FILE} or {INDEX_FILE}"
    found = sorted(f.name for f in path.iterdir() if f.suffix in (".safetensors", *_OTHER_SUFFIXES))
    if not found:
        return f"{path} holds no weights; expected {expected}."
    shown = ", ".join(found[:_SHOWN])
    if any(name.endswith(".safetensors") for name in found):
        return f"{path} holds {shown}, but neither {expected}. Rename the file, or add the index of the shards."
    return (
        f"{path} holds weights in a format that is not read ({shown}); expected {expected}. Use a revision of the "
        "model that has safetensors, or convert it once: load it with transformers and call "
        "save_pretrained(folder), which writes safetensors."
    )


def _as_stored(checkpoint: Checkpoint, table: WeightTable, model: ModelSpec) -> ModelSpec:
    """The model, with an output matrix and token tables of their own where the checkpoint has such although they are
    said to be one: then they are used, as in transformers; and without a head where an encoder's config names one that
    is not stored.

    Raises:
        UnsupportedModelError: it is not clear which table the output matrix is tied to.
    """
    heads = [name for entry in table.entries if entry.target.startswith("head.") for name in entry.sources]
    if isinstance(model.head, MaskedLm) and not any(name in checkpoint.names for name in heads):
        # Sentence encoders often keep the name of the class that they were pretrained as.
        logger.info("%s: no masked-language-model head is stored, so masks cannot be filled.", checkpoint.path)
        return replace(model, head=Pool())
    target = EMBEDDING if model.decoder is not None else ENCODER_EMBEDDING
    embedding = next(entry.sources[0] for entry in table.chosen(checkpoint.names) if entry.target == target)
    if isinstance(model.head, Lm | MaskedLm) and model.head.tied and _differs(checkpoint, table.head, embedding):
        level = logging.INFO if table.expects_head else logging.WARNING
        message = "%s: tie_word_embeddings is true, but %s is stored with values of its own, which are used."
        logger.log(level, message, checkpoint.path, table.head)
        model = replace(model, head=replace(model.head, tied=False))
    own = [name for name in table.copies if _differs(checkpoint, name, embedding)]
    if not own or not model.shared_tokens:
        return model
    if isinstance(model.head, Lm) and model.head.tied:
        raise UnsupportedModelError(
            f"{checkpoint.path}: tie_word_embeddings is true, but {_some(own)} and {embedding} have different "
            "values, so it is not clear which of them is the output matrix. Store it as a tensor of its own "
            f"({table.head}), or drop the tables that are not used."
        )
    return replace(model, shared_tokens=False)


def _differs(checkpoint: Checkpoint, name: str | None, original: str) -> bool:
    """Whether this tensor is stored with other values than the original; one that equals it is dropped from the
    checkpoint."""
    if name is None or name == original or name not in checkpoint.names or original not in checkpoint.names:
        return False
    shape, step = checkpoint.shape(name), 8192
    if shape == checkpoint.shape(original) and all(
        torch.equal(checkpoint.rows(name, row, row + step), checkpoint.rows(original, row, row + step))
        for row in range(0, shape[0], step)
    ):
        del checkpoint.names[name]
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where a stored tensor goes: source number `place` of a parameter."""

    parameter: Tensor
    transform: Transform
    place: int
    shape: torch.Size


def _plan(checkpoint: Checkpoint, table: WeightTable, model: Transformer) -> dict[str, _Destination]:
    """Where each stored tensor goes, by its name.

    Raises:
        ModelLoadError: names or shapes do not match.
    """
    parameters = dict(model.named_parameters())
    destinations: dict[str, _Destination] = {}
    for entry in table.chosen(checkpoint.names):
        parameter = parameters.pop(entry.target).data
        if entry.default is not None and not any(name in checkpoint.names for name in entry.sources):
            parameter.fill_(entry.default)
            continue
        shapes = entry.transform.shapes(parameter.shape)
        for place, (name, shape) in enumerate(zip(entry.sources, shapes, strict=True)):
            destinations[name] = _Destination(parameter, entry.transform, place, shape)
    if parameters:
        raise ModelLoadError(f"The table of weight names fills no {_some(list(parameters))}.")
    if missing := [name for name in destinations if name not in checkpoint.names]:
        raise ModelLoadError(f"{checkpoint.path} lacks tensors that its config asks for: {_some(missing)}.")
    unexpected = [name for name in checkpoint.names if name not in destinations and not table.ignores(name)]
    if unexpected:
        raise ModelLoadError(f"{checkpoint.path} holds tensors that its config has no place for: {_some(unexpected)}.")
    for name, destination in destinations.items():
        if checkpoint.shape(name) != destination.shape:
            raise ModelLoadError(
                f"{checkpoint.path}: the tensor {name} should have shape {list(destination.shape)} by the config, "
                f"but is stored as {list(checkpoint.shape(name))}."
            )
        if checkpoint.format(name) not in FORMATS:
            raise UnsupportedModelError(
                f"{checkpoint.path}: the tensor {name} is stored as {checkpoint.format(name)}; only "
                f"{', '.join(FORMATS)} are read. Use a checkpoint that is not quantised."
            )
    return destinations


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


class _Packing:
    """Packs each matrix when the last of its tensors has been read, so that the memory never holds the whole model
    in its plain format: what is not filled yet takes none."""

    def __init__(self, model: Transformer, quantization: Quantization, destinations: dict[str, _Destination]):
        self._missing = Counter(destination.parameter.data_ptr() for destination in destinations.values())
        self._waiting = defaultdict(list)
        for module, kind in model.matrices(quantization):
            needs = [parameter.data_ptr() for parameter in module.parameters(recurse=False)]
            for pointer in needs:
                self._waiting[pointer].append((module, kind, needs))

    def filled(self, pointer: int) -> None:
        """A tensor has gone to the parameter at this address."""
        self._missing[pointer] -= 1
        if self._missing[pointer] == 0:
            for module, kind, needs in self._waiting.pop(pointer, ()):
                if not any(self._missing[other] for other in needs):
                    module.pack(kind)


def _fill(
    checkpoint: Checkpoint, destinations: dict[str, _Destination], show_progress: bool, packing: _Packing | None = None
) -> None:
    total = sum(d.shape.numel() * d.parameter.element_size() for d in destinations.values())
    # File order, so that a file is read from front to back.
    order = [name for name in checkpoint.names if name in destinations]
    with tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="Loading weights", disable=not show_progress
    ) as bar:
        for name in order:
            destination = destinations.pop(name)  # which would keep what packing gives up
            source = checkpoint.read(name).to(destination.parameter.dtype)
            if source.dtype == torch.float16 and not bool(source.isfinite().all()):
                raise ModelLoadError(
                    f"{checkpoint.path}: values of the tensor {name} exceed the range of float16. "
                    "Use --dtype bfloat16 or float32."
                )
            destination.transform.fill(destination.parameter, destination.place, source)
            bar.update(source.numel() * source.element_size())
            if packing is not None:
                pointer = destination.parameter.data_ptr()
                del destination
                packing.filled(pointer)
