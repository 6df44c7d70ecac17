"""The numbers of a GGUF file's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.native.gemm import Blocks, Quantised
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.gguf.blocks import BlockFormat, as_blocks, as_quantised, dequantise, readable_formats
from engine.model.gguf.container import Gguf, TensorInfo

_MOST_SETTINGS = 1 << 16


def mapped(path: Path) -> Tensor:
    """The bytes of a file, which are read on access. Writes to them do not change the file."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def read_tensor(
    data: Tensor, info: TensorInfo, start: int = 0, stop: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Items [start, stop) of a tensor's first dimension: as stored if the tensor is plain, else expanded to `dtype`.
    `data`: the file's bytes."""
    stop = info.shape[0] if stop is None else min(stop, info.shape[0])
    if len(info.shape) == 1:  # a row of blocks
        return dequantise(data[info.begin : info.begin + info.size], info.format, dtype)[start:stop]
    size = info.size // info.shape[0]
    octets = data[info.begin + start * size : info.begin + stop * size]
    return dequantise(octets, info.format, dtype).view(stop - start, *info.shape[1:])


def read_quantised(
    data: Tensor, info: TensorInfo, expert: int | None = None, start: int = 0, stop: int | None = None
) -> Quantised:
    """Rows [start, stop) of a matrix (or of one of several) whose format has one of our kinds, in that kind. `data`:
    the file's bytes."""
    octets = _matrix(data, info, expert, start, stop)
    return as_quantised(octets, info.format, octets.numel() // _row_bytes(info))


def read_blocks(
    data: Tensor, info: TensorInfo, expert: int | None = None, start: int = 0, stop: int | None = None
) -> Blocks:
    """Rows of a format whose blocks are multiplied unchanged: a view of the file."""
    octets = _matrix(data, info, expert, start, stop)
    return as_blocks(octets, info.format, octets.numel() // _row_bytes(info))


def _row_bytes(info: TensorInfo) -> int:
    return info.size // math.prod(info.shape[:-1])


def _matrix(data: Tensor, info: TensorInfo, expert: int | None, start: int, stop: int | None) -> Tensor:
    """The bytes of rows [start, stop) of a matrix, or of one of several."""
    rows, size = info.shape[-2], _row_bytes(info)
    begin = info.begin + (expert or 0) * rows * size
    return data[begin + start * size : begin + (rows if stop is None else min(stop, rows)) * size]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix in a file's format, whose rows are expanded when they are looked up. `octets`: uint8 [rows, bytes per
    row]."""

    octets: Tensor
    format: BlockFormat

    @staticmethod
    def of(data: Tensor, info: TensorInfo, start: int = 0, stop: int | None = None) -> StoredRows:
        """A copy of the file's data: of rows [start, stop)."""
        whole = _matrix(data, info, None, 0, None).view(info.shape[0], -1)
        return StoredRows(whole[start:stop].clone(), info.format)

    def __call__(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ids [N] in a format."""
        width = self.octets.shape[1] // self.format.size * self.format.numbers
        return dequantise(self.octets[ids].view(-1), self.format).view(len(ids), width).to(dtype)


def read_numbers(file: Gguf, name: str) -> list[float]:
    """A tensor that contains a setting. Raises ModelLoadError if it is missing, or has too many numbers."""
    info = file.tensors.get(name)
    if info is None:
        raise ModelLoadError(f"{file.path} lacks the tensor {name}. Download it again.")
    if math.prod(info.shape) > _MOST_SETTINGS:
        raise ModelLoadError(f"{file.path}: the tensor {name} has the shape {list(info.shape)}, too many numbers.")
    check_readable(file.path, info)
    numbers: list[float] = read_tensor(mapped(file.path), info).double().flatten().tolist()
    return numbers


def check_readable(path: Path, info: TensorInfo) -> None:
    """Refuse a tensor with an unsupported format. Raises UnsupportedModelError: names it."""
    if info.format.plain is None and info.format.decode is None:
        raise UnsupportedModelError(
            f"{path}: the tensor {info.name} is stored as {info.format.name}, which is not supported. Supported: "
            f"{', '.join(readable_formats())}. Use a file in one of these formats, such as Q4_K_M or Q8_0."
        )
