"""The tensors of a checkpoint's safetensors files: which files there are, and what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model import mxfp4
from engine.model.table import WeightTable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")
_SHOWN = 5


class Checkpoint:
    """The tensors of a folder's safetensors files, under the names of a weight table; a context manager."""

    def __init__(self, path: Path):
        self.path = path
        self.files: list[Path] = []
        self.names: dict[str, tuple[Path, str]] = {}
        self._scales: dict[str, tuple[Path, str]] = {}  # where those of MXFP4 are, by the name of the blocks
        self._handles: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.files = weight_files(self.path)
            for file in self.files:
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
        for name in [name for name in renamed if name in wanted and name.endswith(mxfp4.BLOCKS)]:
            scales = name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES
            if scales in renamed and self.format(name) == self.format(scales) == "U8":
                self._check_scales(name, scales)
                self._scales[name] = self.names.pop(scales)

    def _check_scales(self, name: str, scales: str) -> None:
        blocks, found = self.shape(name), self.shape(scales)
        if len(blocks) < 3 or found != blocks[:-1]:
            raise ModelLoadError(
                f"{self.path}: the tensor {scales} should have a number for each block of {name}, which is stored as "
                f"{list(blocks)}, but is stored as {list(found)}."
            )

    def shape(self, name: str) -> torch.Size:
        """Of blocks of MXFP4 that of what they hold."""
        stored = torch.Size(self._slice(name).get_shape())
        return mxfp4.decoded_shape(stored) if name in self._scales else stored

    def format(self, name: str) -> str:
        """The stored format, in safetensors' words: F32, BF16 …; that in which blocks of MXFP4 are read."""
        return "BF16" if name in self._scales else str(self._slice(name).get_dtype())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a matrix."""
        part: Tensor = self._slice(name)[start:stop]
        return part

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored, or what blocks of MXFP4 hold."""
        stored = self._read(self.names[name])
        return mxfp4.decode(stored, self._read(self._scales[name])) if name in self._scales else stored

    def _read(self, place: tuple[Path, str]) -> Tensor:
        file, key = place
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
