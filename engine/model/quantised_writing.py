"""Writes a copy of a checkpoint with quantised matrices, in a format that other servers read too.

compressed-tensors' `pack-quantized` contains int8 and int4 with bfloat16 scales, in groups without rotation and without
minima; its `int-quantized` contains int8-fast exactly as it would be made at load time. A server of the new folder uses
these numbers. A matrix that the format does not support stays unquantised, and is quantised when the folder is loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from engine.backends.native.gemm import GROUP
from engine.backends.torch.attention import TorchReference
from engine.configs.values import read_values
from engine.errors import ConfigError, ModelLoadError, UnsupportedModelError
from engine.model import families
from engine.model.checkpoint import PATTERNS, locate, read_config
from engine.model.families import build_spec, stored_scheme
from engine.model.gguf.files import SUFFIX
from engine.model.gguf.weights import stored_formats
from engine.model.parameter_count import check_parameters
from engine.model.quantisation import Quantization, quantise
from engine.model.retrieval import read_folder
from engine.model.spec import LabelledSpans, ModelSpec
from engine.model.stored.compressed_tensors import config_of, parts_of, written_as
from engine.model.table import Entry, keeps_rows
from engine.model.transformer import Transformer
from engine.model.weight_files import INDEX_FILE, SINGLE_FILE, Checkpoint, header, raw_bytes
from engine.model.weights import as_linears, as_stored, plan, stored_dtype

SHARD_BYTES = 4 << 30

_UNFINISHED = ".octavo-writing-"
_COPIED = (*PATTERNS, "LICENSE*", "NOTICE*", "README.md")
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_PLAIN_BLOCKS = ("F64", "F32", "F16", "BF16")  # of a GGUF file
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The results of the writing. Sizes in bytes."""

    folder: Path
    quantised: int  # the number of quantised matrices
    plain: tuple[str, ...]  # names of matrices that will be quantised at each load
    # before, after: total size of the weights
    before: int
    after: int
    files: int  # the number of files with weights


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a new file: its format under safetensors' name, its file and its position there."""

    format: str
    shape: tuple[int, ...]
    file: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape) * _SIZES[self.format]


def quantise_checkpoint(
    model: str,
    folder: Path,
    quantization: Quantization,
    *,
    revision: str | None = None,
    hf_token: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    show_progress: bool = True,
) -> Written:
    """Write a copy of a checkpoint, tensor by tensor, so that memory never contains more than one of them. Raises
    ConfigError if the folder is a file, is not empty, or is not writable. ModelLoadError, UnsupportedModelError if the
    checkpoint cannot be loaded, is already quantised, or has no matrix that the format supports.

    Args:
        model: local folder, GGUF file with plain numbers, or hub id.
        folder: the new folder, which appears only when it is complete.
        shard_bytes: maximum size of a file of weights, unless it contains a single tensor.
    """
    folder = folder.expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Choose a folder that does not exist yet.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is not empty. Choose a folder that does not exist yet.")
    root = locate(model, revision, hf_token)
    path = read_folder(root).transformer
    config = read_config(path)
    if (scheme := stored_scheme(config)) is not None:
        raise _few_bits_already(model, scheme.title)
    spec = build_spec(config)
    if isinstance(spec.head, LabelledSpans):
        raise UnsupportedModelError(
            f"{model} is a GLiNER model, whose library does not read quantized weights. Serve it with --quantization "
            f"instead."
        )
    check_parameters(path, spec, scheme)
    with Checkpoint(path) as checkpoint:
        if checkpoint.files[0].suffix == SUFFIX and (
            few := set(stored_formats(checkpoint.files[0])) - {*_PLAIN_BLOCKS}
        ):
            raise _few_bits_already(model, f"GGUF ({', '.join(sorted(few))})")
        matrices = _find_matrices(checkpoint, config, spec, quantization)
        smaller = [name for name, fits in matrices.items() if fits]
        if not smaller:
            raise UnsupportedModelError(_nothing_fits(model, checkpoint, list(matrices)))
        sizes = {name: _size_of(checkpoint, name) for name in checkpoint.names}
        files, tensors = _lay_out(checkpoint, set(smaller), quantization, shard_bytes)
        after = sum(tensor.size for tensor in tensors.values())
        values = read_values(path / "config.json")
        ignored = _ignored(checkpoint, set(smaller), families.weight_table(config, spec).head)
        if not {"dtype", "torch_dtype"} & values.keys():
            values["dtype"] = str(stored_dtype(path, config)).removeprefix("torch.")
        values["quantization_config"] = config_of(quantization, ignored)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(folder.parent).free) < after:
                raise ConfigError(f"The weights take {after} bytes, but {folder.parent} has only {free} bytes free.")
            with _draft(folder) as draft:
                inner = draft / path.relative_to(root)
                _copy_others(root, draft, path)
                inner.mkdir(parents=True, exist_ok=True)
                _write(checkpoint, inner, tensors, files, set(smaller), quantization, sizes, show_progress)
                text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
                (inner / "config.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written: {error}.") from error
    plain = tuple(checkpoint.stored_name(name) for name, fits in matrices.items() if not fits)
    return Written(
        folder=folder, quantised=len(smaller), plain=plain, before=sum(sizes.values()), after=after, files=files
    )


def _few_bits_already(model: str, title: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The weights of {model} are already quantized ({title}). Serve it unchanged (octavo serve {model}), or "
        "choose the original checkpoint."
    )


def _nothing_fits(model: str, checkpoint: Checkpoint, names: list[str]) -> str:
    why = "it has no matrices that can be quantized"
    if names:
        shown = ", ".join(checkpoint.stored_name(name) for name in names[:_SHOWN])
        why = (
            f"compressed-tensors needs matrices [outputs, inputs] whose inputs are a multiple of {GROUP}, "
            f"but no matrix here is ({shown})"
        )
    return f"{model} cannot be converted: {why}. Serve it with --quantization, which quantizes it while it loads."


def _find_matrices(checkpoint: Checkpoint, config: Any, spec: ModelSpec, kind: Quantization) -> dict[str, bool]:
    """Names of the tensors that become quantised matrices, in the file's order, and whether the format supports each as
    its kind."""
    table = families.weight_table(config, spec)
    checkpoint.rename(table)
    stored = as_stored(checkpoint, table, spec)
    if stored != spec:
        table = families.weight_table(config, stored)
    length = min(16, stored.max_positions or 16)  # no matrix depends on it
    model = Transformer(stored, TorchReference(), length, device="meta", dtype=torch.float32)  # shapes, no memory
    plan(checkpoint, as_linears(checkpoint, table), model)  # refuses a model that cannot be loaded
    names = {module: name for name, module in model.named_modules()}
    kinds = {f"{names[module]}.weight": becomes for module, becomes in model.matrices(kind)}
    uses: dict[str, list[Entry]] = {}
    for entry in table.chosen(checkpoint.names):
        for name in entry.sources:
            uses.setdefault(name, []).append(entry)
    fits: dict[str, bool] = {}
    for name in checkpoint.names:
        entries = uses.get(name, [])
        if any(kinds.get(entry.target) for entry in entries):
            (entry, *others) = entries
            # Other servers expect the output matrix in plain numbers.
            own = not others and kinds[entry.target] == kind and not entry.target.startswith("head.")
            fits[name] = own and keeps_rows(entry.transform) and _has_place(checkpoint, name)
    return fits


def _has_place(checkpoint: Checkpoint, name: str) -> bool:
    shape = checkpoint.shape(name)
    return len(shape) == 2 and shape[1] % GROUP == 0 and checkpoint.stored_name(name).endswith(".weight")


def _ignored(checkpoint: Checkpoint, smaller: set[str], head: str | None) -> list[str]:
    """Names of modules that stay plain although other servers would expect them to be quantised."""
    plain = [
        stored.removesuffix(".weight")
        for name in checkpoint.names
        if name not in smaller and len(checkpoint.shape(name)) == 2
        if (stored := checkpoint.stored_name(name)).endswith(".weight")
    ]
    tied = [] if head is None else [head.removesuffix(".weight")]
    return list(dict.fromkeys([*tied, *plain]))


def _size_of(checkpoint: Checkpoint, name: str) -> int:
    found = checkpoint.format(name)
    if found not in _SIZES:
        raise UnsupportedModelError(
            f"{checkpoint.path}: the tensor {checkpoint.stored_name(name)} is stored as {found}; only "
            f"{', '.join(_SIZES)} are written."
        )
    return checkpoint.shape(name).numel() * _SIZES[found]


def _lay_out(
    checkpoint: Checkpoint, smaller: set[str], kind: Quantization, shard_bytes: int
) -> tuple[int, dict[str, _Tensor]]:
    tensors: dict[str, _Tensor] = {}
    file, filled = 0, 0
    for name in checkpoint.names:
        shape, stored = checkpoint.shape(name), checkpoint.stored_name(name)
        if name in smaller:
            module = stored.removesuffix(".weight")
            made = {module + end: _Tensor(*what) for end, what in written_as(kind, shape[0], shape[1]).items()}
        else:
            made = {stored: _Tensor(checkpoint.format(name), tuple(shape))}
        size = sum(tensor.size for tensor in made.values())
        if filled and filled + size > shard_bytes:
            file, filled = file + 1, 0
        filled += size
        if double := sorted(made.keys() & tensors.keys()):
            raise ModelLoadError(f"{checkpoint.path}: two tensors would be called {double[0]}.")
        tensors |= {new: replace(tensor, file=file) for new, tensor in made.items()}
    return file + 1, tensors


def _write(
    checkpoint: Checkpoint,
    folder: Path,
    tensors: dict[str, _Tensor],
    files: int,
    smaller: set[str],
    kind: Quantization,
    sizes: dict[str, int],
    show_progress: bool,
) -> None:
    names = [SINGLE_FILE] if files == 1 else [f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)]
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[IO[bytes], int]] = {}
        for number, name in enumerate(names):
            own = {key: tensor for key, tensor in tensors.items() if tensor.file == number}
            # Wider formats first, so that all are aligned.
            order = sorted(own, key=lambda key: -_SIZES[own[key].format])
            head, begins = header(
                {key: (own[key].format, own[key].shape, own[key].size) for key in order}, {"format": "pt"}
            )
            file: IO[bytes] = stack.enter_context((folder / name).open("wb"))
            file.write(head)
            file.truncate(len(head) + sum(tensor.size for tensor in own.values()))
            places |= {key: (file, len(head) + begin) for key, begin in begins.items()}
        bar = stack.enter_context(
            tqdm(total=sum(sizes.values()), unit="B", unit_scale=True, unit_divisor=1024, desc=f"Writing {kind}",
                 disable=not show_progress)
        )  # fmt: skip
        for name in checkpoint.names:
            for key, tensor in _made(checkpoint, name, kind if name in smaller else None).items():
                file, begin = places.pop(key)
                file.seek(begin)
                file.write(raw_bytes(tensor))
                del tensor  # before the next is read
            bar.update(sizes[name])
    if files > 1:
        index = {
            "metadata": {"total_size": sum(tensor.size for tensor in tensors.values())},
            "weight_map": {key: names[tensor.file] for key, tensor in sorted(tensors.items())},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _made(checkpoint: Checkpoint, name: str, kind: Quantization | None) -> dict[str, Tensor]:
    tensor, stored = checkpoint.read(name), checkpoint.stored_name(name)
    if kind is None:
        return {stored: tensor}
    made = quantise(tensor, kind, "portable")
    if not bool(made.scales.isfinite().all()):
        raise ModelLoadError(f"{checkpoint.path}: the tensor {stored} contains infinite numbers or NaN.")
    module = stored.removesuffix(".weight")
    return {module + end: part for end, part in parts_of(made, kind).items()}


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """A temporary folder beside this one, which is renamed to it on success and removed otherwise."""
    draft = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    try:
        yield draft
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o777 & ~mask)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy_others(root: Path, draft: Path, own: Path) -> None:
    """Copy all files of a checkpoint, except those that are rewritten: config and weights in `own`."""
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(place) / name for name in names):
            inside = str(file.relative_to(root))
            if file.parent == own and (file.name == "config.json" or ".safetensors" in file.name):
                continue
            if any(fnmatch(inside, pattern) for pattern in _COPIED):
                (draft / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, draft / inside)
