"""The formats in which checkpoints store quantised matrices: the tensors of each, and the numbers in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Size, Tensor

from engine.backends.native.gemm import BlockKind, Blocks, Quantised
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.quantisation import Quantization

REALS = ("F64", "F32", "F16", "BF16")
"""Formats of scales, under safetensors' names."""
WHOLE = ("I64", "I32", "I16", "I8", "U8")
"""Formats of integers."""


class Tensors(Protocol):
    """The tensors of a checkpoint as stored."""

    path: Path
    names: dict[str, tuple[Path, str]]

    def shape(self, name: str) -> Size: ...

    def format(self, name: str) -> str:
        """The format of a tensor, under safetensors' name: F32, I8 …"""
        ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor that is stored as several."""

    name: str
    parts: tuple[str, ...]
    shape: Size
    decode: Callable[..., Tensor]  # makes a tensor of that shape from the parts, in order
    format: str = "F32"  # the format of that tensor, under safetensors' name
    # our own equivalent of the parts, except for the rounding of minima; None for none
    kind: Quantization | None = None
    quantised: Callable[..., Quantised | Blocks] | None = None  # makes that kind, or the blocks of `own`, from them
    own: BlockKind | None = None  # blocks with fewer bits than `kind`; None for none


class Scheme(ABC):
    """The scheme of a `quantization_config`."""

    title: str
    """For messages: `4-bit GPTQ`."""
    unread: tuple[str, ...] = ()
    """Ends of the names of tensors that weights do not need: scales of activations, keys and values."""
    served_as: Quantization | None = None
    """The default format of matrices on a CPU; None: plain."""

    def __str__(self) -> str:
        return f"{self.title} {sorted(vars(self).items())}"

    @abstractmethod
    def find(self, tensors: Tensors) -> Iterator[Packed]:
        """The matrices that are stored with this scheme. Raises ModelLoadError if the tensors of a matrix do not match
        each other; UnsupportedModelError if a matrix is stored in another form."""


def matrices(tensors: Tensors, ending: str) -> Iterator[tuple[str, str]]:
    """Names with this end, with the part before it, in the files' order."""
    for name in list(tensors.names):
        if name.endswith(ending):
            yield name.removesuffix(ending), name


def expect(tensors: Tensors, name: str, *shapes: Iterable[int], formats: Collection[str]) -> str:
    """The name, after a check that the tensor exists and has one of these shapes and formats. `formats`: allowed
    formats, under safetensors' names. Raises ModelLoadError if it does not."""
    if name not in tensors.names:
        raise ModelLoadError(f"{tensors.path} lacks {name}, which a quantised matrix needs. Download it again.")
    found = tensors.shape(name)
    if found not in [Size(shape) for shape in shapes]:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelLoadError(
            f"{tensors.path}: the tensor {name} should have shape {wanted} to match its matrix's other tensors, but "
            f"is stored as {list(found)}."
        )
    if tensors.format(name) not in formats:
        raise ModelLoadError(
            f"{tensors.path}: the tensor {name} of a quantised matrix should be stored as {' or '.join(formats)}, but "
            f"is stored as {tensors.format(name)}. Download it again."
        )
    return name


def matrix_shape(tensors: Tensors, name: str, format: str) -> tuple[int, int]:
    """Rows and columns of an existing tensor. `format`: the required format, under safetensors' name. Raises
    ModelLoadError if it is not a matrix, or has another format."""
    shape = tensors.shape(name)
    if len(shape) != 2 or tensors.format(name) != format:
        raise ModelLoadError(
            f"{tensors.path}: {name} should be a matrix of {format}, but is stored as {list(shape)}, "
            f"{tensors.format(name)}. Download it again."
        )
    return shape[0], shape[1]


def count_groups(tensors: Tensors, scales: str, dim: int) -> int:
    """Groups of a matrix's inputs, which is the number of scales along `dim`; 1 if there are none or they are not a
    matrix, so that `expect` reports the error."""
    shape = tensors.shape(scales) if scales in tensors.names else Size()
    return max(1, shape[dim]) if len(shape) == 2 else 1


def block_size(value: Any, name: str) -> tuple[int, int] | None:
    """The rows and columns that share a scale, from a setting of a `quantization_config`; None without such a setting.
    Raises UnsupportedModelError if the setting has another form."""
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
        return value[0], value[1]
    raise UnsupportedModelError(
        f"{name} of the config's quantization_config must be two sizes, [rows, columns]; got {value!r}."
    )


def whole_number(config: Mapping[str, Any], name: str, allowed: Iterable[int], default: int | None = None) -> int:
    """A setting of a `quantization_config`. Raises UnsupportedModelError if it is not one of the allowed numbers."""
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        known = ", ".join(map(str, allowed)) if not isinstance(allowed, range) else f"{allowed[0]} to {allowed[-1]}"
        raise UnsupportedModelError(
            f"{name} of the config's quantization_config must be one of {known}; got {value!r}. Use the checkpoint in "
            "bfloat16, float16 or float32."
        )
    return value


def scaled(values: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """Numbers [..., rows, columns] times their scales, in float32.

    Args:
        scales: one number, [rows], or one per block, [..., blocks of rows, blocks of columns].
        block: rows and columns of a block; None if rows and columns divide evenly.
    """
    numbers, factors = values.float(), as_float(scales)
    if factors.numel() == 1:
        return numbers.mul_(factors.reshape(()))
    rows, columns = numbers.shape[-2:]
    if factors.dim() == 1:
        factors = factors[:, None]
    tall, wide = block or (-(-rows // factors.shape[-2]), -(-columns // factors.shape[-1]))
    wide = min(wide, columns)  # scales are repeated as often as a config says
    if tall == 1:
        return numbers.mul_(factors.repeat_interleave(wide, -1)[..., :columns])
    for start in range(factors.shape[-2]):
        part = numbers[..., start * tall : (start + 1) * tall, :]
        part *= factors[..., start : start + 1, :].repeat_interleave(wide, -1)[..., :columns]
    return numbers


def as_float(scales: Tensor) -> Tensor:
    """Scales as float32; bytes are exponents of two plus 127."""
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - 127)
    return scales.float()
