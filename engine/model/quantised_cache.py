"""Stores matrices on disk in their final form, so that a later start reads them instead of the checkpoint's.

On a CPU with our own kernels, an entry contains packed matrices (`gemm.Packed`) and is mapped, so that all processes
that serve a model share its pages. Otherwise it contains quantised matrices (`gemm.Quantised`).

An entry is a safetensors file, named by a hash of everything that determines its bytes: the checkpoint's files, the
sources of each matrix, their storage and formats, the code that quantised it, and the library that packed it. It is
written under a temporary name and renamed, so that no reader sees an incomplete one, and two processes may write the
same. Its checksums are verified before use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.backends import native
from engine.backends.native import gemm
from engine.backends.native.gemm import GROUP, Form, Packed, Quantised
from engine.errors import ConfigError
from engine.host.folders import cache_folder, make_private
from engine.model.packing import Pieces
from engine.model.quantisation import Held, quantiser
from engine.model.weight_files import ALIGNED, header, raw_bytes

logger = logging.getLogger("octavo.model")

FORMAT = 6
"""Changes whenever the numbers from a checkpoint or a quantiser change, or their layout in a file."""

_KEPT_SECONDS = 30 * 24 * 3600
_ABANDONED_SECONDS = 24 * 3600
_UNFINISHED = ".octavo-writing-"
_OURS = re.compile(r"(int4|int8|int8-fast|stored|plain)-[0-9a-f]{32}\.safetensors")
_DISK_SHARE = 4  # all entries together take at most this share of the disk
_CHECKSUMS = "checksums"
_STORED = {
    torch.int64: "I64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8",
    torch.int8: "I8",
}  # fmt: skip
_THREADS = 4  # checksums are computed as fast as memory is read, by few threads


def find_folder(setting: str | None) -> Path | None:
    """The folder for quantised matrices, which need not exist; None for none. `setting`: a folder or "off"; None for
    one in the user's cache. Raises ConfigError if the path begins with ~ and names a user without a home folder."""
    if setting is None:
        try:
            return cache_folder("quantization")
        except RuntimeError:  # there is no home folder
            return None
    if setting == "off":
        return None
    try:
        return Path(setting).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"quantization_cache is {setting}, but there is no such home folder. Choose another."
        ) from None


def kept_files(folder: Path) -> list[Path]:
    """The entries in a folder. Other files are never removed, whatever folder it is. Raises OSError if the folder
    cannot be read."""
    return [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of the model, or those of its experts."""

    name: str
    kind: Held | None  # its quantised kind; None: it stays plain
    form: Form
    count: int  # 1, or the number of experts
    outputs: int
    inputs: int
    sources: tuple[str, ...]  # a description of the tensors that fill it
    pieces: Pieces = ()  # the layout for our own kernels; empty if they do not use it

    @property
    def stored(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The tensors of a file that contain it."""
        if not self.pieces:
            return {f"{self.name}.values": self._values, f"{self.name}.scales": self._scales}
        sizes = (gemm.size_of(kind, outputs, self.inputs) for kind, outputs in self.pieces)
        return {
            f"{self.name}.packed.{number}": (torch.uint8, (self.count, -(-size // ALIGNED) * ALIGNED))
            for number, size in enumerate(sizes)
        }

    def tensors_of(self, made: Quantised | Packed) -> list[Tensor]:
        """The tensors to write for a quantised matrix, in order of their names."""
        if isinstance(made, Quantised):
            return [made.values, made.scales]
        parts = made.parts or (made,)
        assert tuple((part.kind, part.outputs) for part in parts) == self.pieces
        return [part.data for part in parts]

    def made_of(self, tensors: list[Tensor]) -> Quantised | Packed:
        """The matrix stored in these tensors."""
        if not self.pieces:
            values, scales = tensors
            return Quantised(values, scales, self.inputs, self.form == "rotated")
        parts = [
            gemm.packed_from(kind, data, outputs, self.inputs)
            for (kind, outputs), data in zip(self.pieces, tensors, strict=True)
        ]
        return parts[0] if len(parts) == 1 else gemm.join(parts)

    @property
    def _values(self) -> tuple[torch.dtype, tuple[int, ...]]:
        groups = -(-self.inputs // GROUP)
        if self.kind != "int4":
            return torch.int8, (self.count, self.outputs, groups * GROUP if self.form == "rotated" else self.inputs)
        return torch.uint8, (self.count, self.outputs, groups, GROUP // 2)

    @property
    def _scales(self) -> tuple[torch.dtype, tuple[int, ...]]:
        if self.kind == "int8-fast":
            return torch.float32, (self.count, self.outputs)
        groups = -(-self.inputs // GROUP)
        if self.form == "rotated":
            return torch.uint8, (self.count, self.outputs, 4 + groups)
        return torch.float16, (self.count, self.outputs, groups, *((2,) if self.kind == "int4" else ()))


class Cache:
    """The folder that keeps one model's matrices. Raises OSError if the folder cannot be created, others can write to
    it, or the checkpoint's files do not exist.

    Args:
        folder: the folder of all entries; created if missing.
        dtype: the format in which its weights are read.
        kind: their quantised kind, for the file's name.
    """

    def __init__(self, folder: Path, files: Sequence[Path], dtype: torch.dtype, matrices: Sequence[Matrix], kind: str):
        make_private(folder)
        self._files = list(files)
        self.origin = _identities(files)
        library = native.current()
        packer = library.name if library is not None and any(matrix.pieces for matrix in matrices) else ""
        decides = [FORMAT, quantiser(), packer, str(dtype), self.origin, [asdict(matrix) for matrix in matrices]]
        self.key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
        self.folder = folder
        self.path = folder / f"{kind}-{self.key[:32]}.safetensors"  # path of the entry
        self.layout = _Layout(matrices)

    def open(self, verified: Callable[[str], object]) -> Entry | None:
        """The verified entry; None if there is none. A damaged entry is removed. `verified`: called with the name of
        each tensor whose checksum is right."""
        try:
            entry = Entry(self, verified)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            logger.warning("Quantized weights in %s cannot be used and are computed again: %s.", self.path, error)
            if isinstance(error, SafetensorError | ValueError):
                with contextlib.suppress(OSError):
                    self.path.unlink()
            return None
        with contextlib.suppress(OSError):  # it may be another user's
            os.utime(self.path)
        return entry

    def write(self) -> Writer:
        """A new entry to fill. Raises OSError if there is no room, or the folder is not writable."""
        self._tidy()
        size, disk = self.layout.size, shutil.disk_usage(self.folder)
        if disk.free < 2 * size:
            raise OSError(f"it would take {size} bytes of the {disk.free} that are free in {self.folder}")
        most = disk.total // _DISK_SHARE
        if size > most:
            raise OSError(f"it would take {size} bytes, but all together take at most {most}, a quarter of the disk")
        self._make_room(most - size)
        return Writer(self)

    def _make_room(self, most: int) -> None:
        """Remove the least recently used entries until the others take no more than this."""
        found: list[tuple[os.stat_result, Path]] = []
        for path in kept_files(self.folder):
            with contextlib.suppress(OSError):  # another process may have removed it
                found.append((path.stat(), path))
        for status, path in sorted(found, key=lambda each: -each[0].st_mtime):
            most -= status.st_size
            if most < 0:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _tidy(self) -> None:
        """Remove entries that were not used for long or whose checkpoint has changed or is gone, and files of killed
        processes."""
        now = time.time()
        for path in kept_files(self.folder):
            with contextlib.suppress(OSError):
                if _is_stale(path) or now - path.stat().st_mtime > _KEPT_SECONDS:
                    path.unlink()
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()

    def unchanged(self) -> bool:
        """Whether the checkpoint's files have not changed since this was made."""
        try:
            return _identities(self._files) == self.origin
        except OSError:
            return False


class Entry:
    """The matrices of a file. Raises OSError if the file cannot be read, RuntimeError if it is removed meanwhile;
    SafetensorError, ValueError if the file is damaged, or does not match its name."""

    def __init__(self, cache: Cache, verified: Callable[[str], object]):
        with cache.path.open("rb"):  # safetensors says "no such file" about an unreadable file
            pass
        with safe_open(str(cache.path), framework="pt", device="cpu") as handle:
            if (handle.metadata() or {}).get("key") != cache.key:
                raise ValueError("it was not made from this checkpoint")
            cache.layout.check(handle)
            # Views of the file: nothing is read yet.
            self._tensors: dict[str, Tensor] = {name: handle.get_tensor(name) for name in cache.layout.places}
        sums = self._tensors.pop(_CHECKSUMS).tolist()
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(lambda tensor: zlib.crc32(raw_bytes(tensor)), self._tensors.values())
            for name, made, kept in zip(self._tensors, found, sums, strict=False):  # there may be more sums
                if made != kept:
                    pool.shutdown(cancel_futures=True)
                    raise ValueError("its checksums are wrong")
                verified(name)

    def take(self, matrix: Matrix, index: int) -> Quantised | Packed:
        """A matrix, or the matrix of an expert. A packed one is a view of the mapped file."""
        tensors = [self._tensors[name][index] for name in matrix.stored]
        if not native.available():  # torch keeps the tensors that it gets: they must not be pages of a file
            tensors = [tensor.clone() for tensor in tensors]
        return matrix.made_of(tensors)


class Writer:
    """A file to which matrices are written as they are made; a context manager that removes the file unless it was
    kept.

    If the system supports it, the file has no name until it is complete, and disappears if the process is killed.
    Raises OSError if the file cannot be written.
    """

    def __init__(self, cache: Cache):
        self._cache = cache
        self._sums = dict.fromkeys((name for name in cache.layout.places if name != _CHECKSUMS), 0)
        self._path: Path | None = None
        try:
            descriptor = os.open(cache.folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
        except (AttributeError, OSError):  # a system or file system without such files
            descriptor, path = tempfile.mkstemp(prefix=_UNFINISHED, dir=cache.folder)
            self._path = Path(path)
        self._file = os.fdopen(descriptor, "wb")
        try:
            self._file.write(cache.layout.header({"key": cache.key, "files": json.dumps(cache.origin)}))
            self._start = self._file.tell()
            self._file.truncate(self._start + cache.layout.size)
        except OSError:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # an error here follows from an earlier write error
            self._file.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def put(self, matrix: Matrix, index: int, made: Quantised | Packed) -> None:
        """Write a matrix; those of experts are written in order. Raises OSError if the file cannot be written."""
        for name, tensor in zip(matrix.stored, matrix.tensors_of(made), strict=True):
            place = self._cache.layout.places[name]
            size = (place.end - place.begin) // matrix.count
            self._file.seek(self._start + place.begin + index * size)
            for data in (raw_bytes(tensor), bytes(size - tensor.nbytes)):
                self._sums[name] = zlib.crc32(data, self._sums[name])
                self._file.write(data)

    def keep(self) -> None:
        """Move the file to its final name, unless the checkpoint has changed meanwhile. Raises OSError if the file
        cannot be written."""
        self._file.seek(self._start + self._cache.layout.places[_CHECKSUMS].begin)
        for number in self._sums.values():
            self._file.write(number.to_bytes(8, "little"))
        self._file.flush()
        if not self._cache.unchanged():
            raise OSError("the checkpoint has changed meanwhile")
        if self._path is None:
            path = self._cache.folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
            number = self._file.fileno()
            os.link(f"/proc/self/fd/{number}", path, src_dir_fd=number)  # links need a folder descriptor
            self._path = path
        self._file.close()
        self._path.replace(self._cache.path)


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a tensor in a file: bytes [begin, end) after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class _Layout:
    """The layout of a file with these matrices. Wider formats come first, so that all tensors are aligned."""

    def __init__(self, matrices: Sequence[Matrix]):
        tensors = [(name, *stored) for matrix in matrices for name, stored in matrix.stored.items()]
        sums = -(-len(tensors) * 8 // ALIGNED) * ALIGNED // 8  # the data after it is aligned
        tensors.append((_CHECKSUMS, torch.int64, (sums,)))
        self.places: dict[str, _Place] = {}
        end = 0
        for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            self.places[name] = _Place(dtype, shape, begin, end)
        self.size = end

    def header(self, metadata: dict[str, str]) -> bytes:
        """The beginning of the file."""
        stored = {name: (_STORED[p.dtype], p.shape, p.end - p.begin) for name, p in self.places.items()}
        return header(stored, metadata)[0]

    def check(self, handle: Any) -> None:
        """Raise ValueError for a file with other tensors."""
        if set(handle.keys()) != set(self.places):
            raise ValueError("it contains other matrices")
        for name, place in self.places.items():
            stored = handle.get_slice(name)
            if stored.get_dtype() != _STORED[place.dtype] or tuple(stored.get_shape()) != place.shape:
                raise ValueError(f"{name} has another shape or format")


def _identities(files: Sequence[Path]) -> list[list[Any]]:
    """Facts that change when a file changes. Change times, which no program can set, distinguish copies of equal
    size."""
    found = []
    for file in files:
        path = Path(os.path.realpath(file))  # unlike `resolve`, this raises nothing for circular links
        status = path.stat()
        found.append([str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return found


def _is_stale(path: Path) -> bool:
    """Whether the checkpoint of this entry has changed or is gone, or the entry cannot be read."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as handle:
            files = json.loads((handle.metadata() or {})["files"])
        return bool(_identities([Path(file[0]) for file in files]) != files)
    except (OSError, SafetensorError, ValueError, KeyError, IndexError, TypeError, RuntimeError):
        return True  # RuntimeError: another process has removed it meanwhile
