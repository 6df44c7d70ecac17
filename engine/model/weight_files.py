"""The tensors of a checkpoint's safetensors files, or of its GGUF file: the files and their contents."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.backends.native.gemm import BlockKind, Blocks, Quantised
from engine.errors import ModelLoadError
from engine.host.resident import give_back
from engine.model.gguf.files import SUFFIX
from engine.model.gguf.folder import LINK, PROJECTOR_LINK
from engine.model.gguf.tensors import StoredRows
from engine.model.gguf.weights import GgufWeights, stored_formats
from engine.model.quantisation import Quantization
from engine.model.stored.bits import as_blocks
from engine.model.stored.scheme import Packed, Scheme
from engine.model.table import WeightTable

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx")
_SHOWN = 5
ALIGNED = 64
"""Alignment in bytes of the data after a `header` in its file."""
MAPPED = 1 << 24
"""Bytes of read files that may stay in memory before they are released."""
_TRIMMED = 2  # releases after which freed memory is returned, which takes milliseconds


class Checkpoint:
    """The tensors of a folder's files, under the names of a weight table; a context manager. `scheme`: the format of
    matrices that are stored as several tensors each. Such a matrix is found under one name."""

    def __init__(self, path: Path, scheme: Scheme | None = None):
        self.path = path
        self.scheme = scheme
        self.files: list[Path] = []
        self.names: dict[str, tuple[Path, str]] = {}
        self._packed: dict[tuple[Path, str], tuple[Packed, list[tuple[Path, str]]]] = {}  # with its parts
        self._handles: dict[Path, Any] = {}
        self._seen: dict[Path, tuple[int, int, int]] = {}  # facts about each file when it was opened
        self._read_since: Counter[Path] = Counter()  # bytes read since files were mapped
        self._releases = 0

    def __enter__(self) -> Self:
        self.files = weight_files(self.path)
        for file in self.files:
            with _readable(file):
                self._seen[file] = _identity(file)
                handle = _opened(file)
                self._handles[file] = handle
                keys = list(handle.keys())
            if isinstance(handle, GgufWeights) and file == self.files[0]:
                self.path = file.resolve()  # for messages, because the folder is our own
            for key in keys:
                if key in self.names:
                    raise ModelLoadError(
                        f"{self.path} holds the tensor {key} twice, in {self.names[key][0].name} and {file.name}."
                    )
                self.names[key] = (file, key)
        if self.scheme is not None:
            self._unite(self.scheme)
        return self

    def __exit__(self, *error: object) -> None:
        self._handles.clear()  # closes the files

    def _unite(self, scheme: Scheme) -> None:
        """Replace tensors that form one matrix by the matrix, at the position of the first."""
        found = {packed.parts[0]: packed for packed in scheme.find(self)}
        others = {part for packed in found.values() for part in packed.parts[1:]}
        names: dict[str, tuple[Path, str]] = {}
        for stored, place in self.names.items():
            packed = found.get(stored)
            if packed is not None:
                united = (place[0], packed.name)
                self._packed[united] = packed, [self.names[part] for part in packed.parts]
                if packed.name in names or (packed.name != stored and packed.name in self.names):
                    raise ModelLoadError(f"{self.path} holds {packed.name} twice: as itself and as {stored}.")
                names[packed.name] = united
            elif stored not in others and not stored.endswith(scheme.unread):
                names[stored] = place
        self.names = names

    @property
    def title(self) -> str | None:
        """The storage format of weights that are not plain tensors, for messages: `4-bit GPTQ`."""
        if self.scheme is not None:
            return self.scheme.title
        if any(isinstance(handle, GgufWeights) for handle in self._handles.values()):
            return f"GGUF ({', '.join(self.stored_bytes)})"
        return None

    @property
    def stored_bytes(self) -> dict[str, int]:
        """The bytes in each stored format, largest first: ggml's formats for a GGUF file; otherwise the scheme's title,
        and safetensors' names for plain tensors."""
        sizes: Counter[str] = Counter()
        if self.files[0].suffix == SUFFIX:
            for path in self.files:
                sizes.update(stored_formats(path))
            return dict(sizes.most_common())
        for place in self.names.values():
            united = self._packed.get(place)
            for file, key in [place] if united is None else united[1]:
                stored = self._handles[file].get_slice(key)
                format = str(stored.get_dtype())
                title = self.scheme.title if self.scheme is not None and united is not None else format
                sizes[title] += math.prod(stored.get_shape()) * _bits(format) // 8
        return dict(sizes.most_common())

    @property
    def num_elements(self) -> int:
        """The total number of elements in all tensors."""
        return sum(self.shape(name).numel() for name in self.names)

    def rename(self, table: WeightTable) -> None:
        """Give the tensors the table's names if the file has older ones or omits the prefix."""
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
        """The shape of a tensor; for a quantised matrix, that of its numbers."""
        packed = self._packed.get(self.names[name])
        return torch.Size(self._slice(name).get_shape()) if packed is None else packed[0].shape

    def format(self, name: str) -> str:
        """The stored format under safetensors' name (F32, BF16 …); for a quantised matrix, the format in which it is
        read."""
        packed = self._packed.get(self.names[name])
        return str(self._slice(name).get_dtype()) if packed is None else packed[0].format

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a matrix."""
        part: Tensor = (self.read(name) if self.names[name] in self._packed else self._slice(name))[start:stop]
        self._read_since[self.names[name][0]] += part.nbytes
        return part

    def release(self) -> None:
        """Map the files anew once much of them has been read, so that read data no longer counts as this process's
        memory, and from time to time return what copies of it have left. Tensors still in use stay valid."""
        if self._read_since.total() < MAPPED:
            return
        self.check_unchanged()
        self._releases += 1
        if self._releases % _TRIMMED == 0:
            give_back()
        for file in self._read_since:
            with _readable(file):
                self._handles[file] = _opened(file)
        self._read_since.clear()

    def check_unchanged(self) -> None:
        """Refuse files that were written to since they were opened, because weights would be partly old and partly new.
        Raises ModelLoadError if a file was, or is gone."""
        for file, seen in self._seen.items():
            if not file.exists() or _identity(file) != seen:
                raise ModelLoadError(
                    f"{file} changed while it was read, so the weights are partly old and partly new. "
                    "Load the model again once the file is complete."
                )

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor as stored, or the numbers of a quantised matrix. `dtype`: the format to which the tensor will be
        rounded; rounding at once saves memory."""
        place = self.names[name]
        if place not in self._packed:
            return self._read(place, dtype)
        packed, parts = self._packed[place]
        return packed.decode(*self._read_parts(parts))

    def kind(self, name: str) -> Quantization | None:
        """Our own kind that equals a quantised matrix, except for the rounding of minima; None for none."""
        place = self.names[name]
        if place in self._packed:
            return self._packed[place][0].kind
        handle = self._handles[place[0]]
        return handle.kind(place[1]) if isinstance(handle, GgufWeights) else None

    def own_kind(self, name: str) -> Quantization | BlockKind | None:
        """The kind that keeps a quantised matrix in its stored format; if there is none, our own nearest kind."""
        place = self.names[name]
        handle = self._handles[place[0]]
        if place in self._packed:
            return self._packed[place][0].own or self.kind(name)
        return handle.own_kind(place[1]) if isinstance(handle, GgufWeights) else None

    def kind_on_gpu(self, name: str) -> Quantization | BlockKind | None:
        """The kind that a GPU multiplies and that equals a quantised matrix; None for none."""
        kind, own = self.kind(name), self.own_kind(name)
        return own if own == "e4m3" else kind

    def few_bits(self, name: str) -> bool:
        """Whether a tensor is quantised, in any format."""
        place = self.names[name]
        handle = self._handles[place[0]]
        return place in self._packed or (isinstance(handle, GgufWeights) and handle.few_bits(place[1]))

    def has_rows(self, name: str) -> bool:
        """Whether rows of a matrix can be read alone."""
        place = self.names[name]
        handle = self._handles[place[0]]
        return place not in self._packed and (not isinstance(handle, GgufWeights) or handle.has_rows(place[1]))

    def table_bytes(self, name: str) -> int | None:
        """Bytes of a token table whose rows are looked up in the stored format (`stored_rows`)."""
        place = self.names[name]
        handle = self._handles[place[0]]
        if not isinstance(handle, GgufWeights) or not self.few_bits(name) or not handle.has_rows(place[1]):
            return None
        return handle.stored_bytes(place[1])

    def stored_rows(self, name: str, start: int = 0, stop: int | None = None) -> StoredRows:
        """Rows [start, stop) of a token table with `table_bytes`, in its stored format."""
        file, key = self.names[name]
        with _readable(file):
            found: StoredRows = self._handles[file].stored_rows(key, start, stop)
        self._read_since[file] += found.octets.nbytes
        return found

    def by_outputs(self, name: str) -> bool:
        """Whether the weight of a transformers Conv1D, [in, out], is stored [out, in]: if quantised, or in GGUF."""
        return self.few_bits(name) or isinstance(self._handles[self.names[name][0]], GgufWeights)

    @property
    def has_few_bits(self) -> bool:
        """Whether any tensor is quantised."""
        return any(map(self.few_bits, self.names))

    def quantised(self, name: str, own: bool = False, start: int = 0, stop: int | None = None) -> Quantised | Blocks:
        """A matrix with a `kind` or an `own_kind`, in that kind; with `has_rows`, its rows [start, stop)."""
        place = self.names[name]
        if place not in self._packed:
            with _readable(place[0]):
                made: Quantised | Blocks = self._handles[place[0]].quantised(place[1], own, start, stop)
            self._read_since[place[0]] += made.values.nbytes
            return made
        packed, parts = self._packed[place]
        assert packed.quantised is not None
        tensors, (file, key) = tuple(self._read_parts(parts)), parts[0]
        try:
            made = packed.quantised(*tensors)
        except ModelLoadError as problem:
            raise ModelLoadError(f"{file}: {key}: {problem}") from None
        return as_blocks(made) if packed.own is not None and own and isinstance(made, Quantised) else made

    def stored_name(self, name: str) -> str:
        """The file's name for a tensor."""
        return self.names[name][1]

    def _read(self, place: tuple[Path, str], dtype: torch.dtype | None = None) -> Tensor:
        file, key = place
        handle = self._handles[file]
        with _readable(file):
            if dtype is not None and isinstance(handle, GgufWeights):
                tensor: Tensor = handle.get_tensor(key, dtype)
            else:
                tensor = handle.get_tensor(key)
        self._read_since[file] += tensor.nbytes
        return tensor

    def _read_parts(self, places: list[tuple[Path, str]]) -> Iterator[Tensor]:
        """The tensors that store a matrix: its numbers first, then scales and other data. Raises ModelLoadError: scales
        are not finite, which would otherwise show only in answers."""
        for number, (file, key) in enumerate(places):
            tensor = self._read((file, key))
            if number and tensor.is_floating_point() and tensor.numel():
                wide = tensor if tensor.element_size() > 1 else tensor.float()  # torch has no aminmax for 8 bits
                if not all(bool(end.isfinite()) for end in wide.aminmax()):  # NaN is both
                    raise ModelLoadError(
                        f"{file}: {key} of a quantised matrix holds numbers that are not finite. Download it again."
                    )
            yield tensor

    def _slice(self, name: str) -> Any:
        file, key = self.names[name]
        with _readable(file):
            return self._handles[file].get_slice(key)


def _bits(format: str) -> int:
    """The bits of a number in a format under safetensors' name: 8 for F8_E4M3, 16 for BF16."""
    found = re.search(r"\d+", format)
    return 8 if found is None else int(found[0])  # BOOL


def _opened(file: Path) -> Any:
    return GgufWeights(file) if file.suffix == SUFFIX else safe_open(str(file), framework="pt", device="cpu")


def _identity(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        with file.open("rb"):  # safetensors says "no such file" about an unreadable file
            pass
        yield
    except PermissionError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{file} cannot be read as safetensors ({error}). It is damaged or incomplete: download it again."
        ) from error


def header(
    tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and the position of each tensor after it. `tensors`: by name, in file order:
    format under safetensors' name, shape, bytes. If wider formats come first, all are aligned; the first one to
    `ALIGNED` bytes."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    begins, end = {}, 0
    for name, (stored, shape, size) in tensors.items():
        begins[name], end = end, end + size
        entries[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return len(text).to_bytes(8, "little") + text, begins


def raw_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, or the GGUF files that it represents. Raises ModelLoadError if
    there are none, the index is damaged, or it names a file that is missing or outside the folder."""
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.is_file() and (path / LINK).is_symlink():
        projector = path / PROJECTOR_LINK
        return [path / LINK, *([projector] if projector.is_symlink() else [])]
    if not index.is_file():
        raise ModelLoadError(_no_weights(path))
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is damaged: it has no weight_map of tensor names to files.") from error
    for shard in shards:
        if not isinstance(shard, str) or not shard or shard in (".", "..") or "/" in shard or "\\" in shard:
            raise ModelLoadError(f"{index} refers to the file {shard!r}, but shards must be in the same folder.")
        if not (path / shard).is_file():
            raise ModelLoadError(
                f"{path} lacks {shard}, which is listed in {INDEX_FILE}. Download the checkpoint again."
            )
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
