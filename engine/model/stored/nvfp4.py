"""Weights stored as NVFP4: each 16 4-bit numbers of a row share an e4m3 scale, and a matrix a float32 one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor

from engine.errors import UnsupportedModelError
from engine.model.stored.fp8 import scaled_matrix
from engine.model.stored.mxfp4 import VALUES
from engine.model.stored.scheme import REALS, Packed, Scheme, Tensors, expect, matrices, matrix_shape

_GROUP = 16


class Nvfp4(Scheme):
    """The format of NVIDIA's Model Optimizer: NVFP4 or FP8 matrices, times a scale of the whole matrix."""

    unread = (".input_scale", ".k_scale", ".v_scale")

    def __init__(self, config: Mapping[str, Any]):
        algorithm = str(config.get("quant_algo"))
        if algorithm not in ("NVFP4", "FP8"):
            raise UnsupportedModelError(
                f"quant_algo of the config's quantization_config must be NVFP4 or FP8; got {algorithm!r}."
            )
        self.title = algorithm

    def find(self, tensors: Tensors) -> Iterator[Packed]:
        for module, name in matrices(tensors, ".weight"):
            if tensors.format(name) == "U8":
                yield nvfp4_matrix(tensors, module, name, f"{module}.weight_scale_2", divides=False)
            elif tensors.format(name) == "F8_E4M3":
                yield scaled_matrix(tensors, name, None)


def nvfp4_matrix(tensors: Tensors, module: str, name: str, whole: str, *, divides: bool) -> Packed:
    """A matrix, from the tensor of its numbers.

    Args:
        whole: the name of the scale of the whole matrix, by which the others are divided, or multiplied.

    Raises:
        ModelLoadError: a scale is missing, or has another shape or format.
    """
    rows, octets = matrix_shape(tensors, name, "U8")
    scales = expect(tensors, f"{module}.weight_scale", (rows, -(-2 * octets // _GROUP)), formats=("F8_E4M3",))
    expect(tensors, whole, (), (1,), formats=REALS)
    shape = Size((rows, 2 * octets))
    return Packed(f"{module}.weight", (name, scales, whole), shape, partial(_decode, divides=divides))


def _decode(octets: Tensor, scales: Tensor, whole: Tensor, divides: bool) -> Tensor:
    table = torch.tensor((*VALUES, *(-value for value in VALUES)))
    numbers = table[torch.stack((octets & 15, octets >> 4), -1).flatten(1).int()]
    factors = scales.float() / whole.float() if divides else scales.float() * whole.float()
    return numbers.mul_(factors.repeat_interleave(_GROUP, 1)[:, : numbers.shape[1]])
