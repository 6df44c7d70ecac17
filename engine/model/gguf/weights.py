"""A GGUF file's tensors with the interface of a `safetensors` file, under transformers' names."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.native.gemm import BlockKind, Blocks, Quantised
from engine.errors import ModelLoadError
from engine.model.gguf.architectures import Placed, describe, place
from engine.model.gguf.container import read_gguf
from engine.model.gguf.projectors import is_projector, place_projector
from engine.model.gguf.tensors import StoredRows, check_readable, mapped, read_blocks, read_quantised, read_tensor
from engine.model.quantisation import Quantization

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class GgufWeights:
    """The tensors of a file. Quantised tensors are expanded. Raises ModelLoadError if the file is damaged or
    incomplete; UnsupportedModelError if it contains something unsupported."""

    def __init__(self, path: Path):
        self._placed, _ = _contents(path.resolve(), _identity(path))
        self._data = mapped(path)

    def keys(self) -> list[str]:
        """The names, in the file's order."""
        return list(self._placed)

    def get_tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor; in a given format, if it is quantised and no computation follows."""
        placed = self._placed[name]
        dtype = dtype if placed.arrangement.keeps_rows else torch.float32
        if placed.expert is None:
            parts = [read_tensor(self._data, info, dtype=dtype) for info in placed.infos]
            return placed.arrangement.arrange(parts[0] if len(parts) == 1 else torch.cat(parts))
        part = read_tensor(self._data, placed.info, placed.expert, placed.expert + 1, dtype)
        return placed.arrangement.arrange(part[0])

    def few_bits(self, name: str) -> bool:
        """Whether a tensor is quantised."""
        return any(info.format.plain is None for info in self._placed[name].infos)

    def kind(self, name: str) -> Quantization | None:
        """The kind of ours that a matrix has; None for none."""
        return self._placed[name].info.format.kind if self._is_matrix(name) else None

    def own_kind(self, name: str) -> Quantization | BlockKind | None:
        """The kind that keeps a matrix in its own format; None if there is none."""
        return self._placed[name].info.format.own_kind if self._is_matrix(name) else None

    def _is_matrix(self, name: str) -> bool:
        placed = self._placed[name]
        return len(placed.shape) == 2 and placed.arrangement.keeps_rows and not placed.others

    def has_rows(self, name: str) -> bool:
        """Whether single rows of a matrix can be read."""
        placed = self._placed[name]
        return placed.arrangement.by_rows and placed.expert is None and not placed.others

    def quantised(self, name: str, own: bool = False, start: int = 0, stop: int | None = None) -> Quantised | Blocks:
        """A matrix with a `kind` or an `own_kind`, in that kind; with `has_rows`, its rows [start, stop)."""
        placed = self._placed[name]
        format = placed.info.format
        read = read_blocks if own and format.own_kind != format.kind else read_quantised
        made: Quantised | Blocks = read(self._data, placed.info, placed.expert, start, stop)
        return made.changed(lambda tensor: placed.arrangement.arrange(tensor).contiguous())

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return sum(info.size for info in self._placed[name].infos)

    def stored_rows(self, name: str, start: int = 0, stop: int | None = None) -> StoredRows:
        """Rows [start, stop) of a quantised matrix with `has_rows`, in the file's format."""
        return StoredRows.of(self._data, self._placed[name].info, start, stop)

    def get_slice(self, name: str) -> GgufSlice:
        """A tensor that is read in part."""
        return GgufSlice(self, self._placed[name], self._data)


class GgufSlice:
    """A tensor that is read in part."""

    def __init__(self, weights: GgufWeights, placed: Placed, data: Tensor):
        self._weights = weights
        self._placed = placed
        self._data = data

    def get_shape(self) -> list[int]:
        return list(self._placed.shape)

    def get_dtype(self) -> str:
        """The format of the result, under safetensors' name."""
        formats = {info.format.plain for info in self._placed.infos}
        plain = next(iter(formats))
        return "F32" if plain is None or len(formats) > 1 else _NAMES[plain]

    def __getitem__(self, rows: slice) -> Tensor:
        if self._weights.has_rows(self._placed.name):
            start, stop, _ = rows.indices(self._placed.shape[0])
            return read_tensor(self._data, self._placed.info, start, max(start, stop))
        return self._weights.get_tensor(self._placed.name)[rows]


def stored_formats(path: Path) -> dict[str, int]:
    """The bytes of a file in each stored format, largest first. Raises ModelLoadError, UnsupportedModelError: see
    `GgufWeights`."""
    _, sizes = _contents(path.resolve(), _identity(path))
    return sizes


def _identity(path: Path) -> Any:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@lru_cache(maxsize=4)  # a start opens the weights several times
def _contents(path: Path, identity: Any) -> tuple[dict[str, Placed], dict[str, int]]:
    """Tensors by name, and bytes by format."""
    file = read_gguf(path, vocabulary=False)
    found: dict[str, Placed] = {}
    for placed in place_projector(file) if is_projector(file) else place(file, *describe(file)):
        for info in placed.infos:
            check_readable(path, info)
        if placed.name in found:
            raise ModelLoadError(
                f"{path} holds {placed.name} twice: as {found[placed.name].info.name} and as {placed.info.name}."
            )
        found[placed.name] = placed
    sizes: dict[str, int] = {}
    for info in file.tensors.values():
        sizes[info.format.name] = sizes.get(info.format.name, 0) + info.size
    return found, dict(sorted(sizes.items(), key=lambda entry: -entry[1]))
