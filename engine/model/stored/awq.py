"""AWQ's checkpoints: 4-bit integers, outputs as columns, a scale and a zero for each group of inputs
(arXiv:2306.00978)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Size, Tensor

from engine.backends.native.gemm import Quantised
from engine.errors import UnsupportedModelError
from engine.model.stored.bits import HALVES, as_lines, fits_groups, grouped, own_kind, unpacked
from engine.model.stored.scheme import (
    REALS,
    Packed,
    Scheme,
    Tensors,
    count_groups,
    expect,
    matrices,
    matrix_shape,
    whole_number,
)


class Awq(Scheme):
    """`qweight`, `qzeros` and `scales` of a matrix."""

    def __init__(self, config: Mapping[str, Any]):
        whole_number(config, "bits", (4,), config.get("w_bit"))
        layout = str(config.get("version") or config.get("format") or "gemm").lower()
        if layout != "gemm" or config.get("backend", "autoawq") not in ("autoawq", "auto", None):
            raise UnsupportedModelError(
                f"version of the config's quantization_config must be gemm, of the backend autoawq; got {layout!r}, "
                f"{config.get('backend', 'autoawq')!r}."
            )
        self.title = "4-bit AWQ"

    def find(self, tensors: Tensors) -> Iterator[Packed]:
        for module, name in matrices(tensors, ".qweight"):
            inputs, words = matrix_shape(tensors, name, "I32")
            outputs = words * 8
            scales, zeros = f"{module}.scales", f"{module}.qzeros"
            groups = count_groups(tensors, scales, 0)
            parts = [name, expect(tensors, scales, (groups, outputs), formats=REALS)]
            if zeros in tensors.names:
                parts.append(expect(tensors, zeros, (groups, words), formats=("I32",)))
            found = Packed(f"{module}.weight", tuple(parts), Size((outputs, inputs)), _decode)
            if fits_groups(found.shape, groups) and tensors.format(scales) in HALVES:
                found = replace(found, kind="int4", quantised=_as_lines, own=own_kind(found.shape, groups))
            yield found


def _decode(words: Tensor, *others: Tensor) -> Tensor:
    return grouped(_levels(words), *_scaling(*others))


def _as_lines(words: Tensor, *others: Tensor) -> Quantised:
    return as_lines(words, "awq", _levels, *_scaling(*others))


def _levels(words: Tensor) -> Tensor:
    """Integers [outputs, inputs] of words [inputs, outputs / 8]."""
    return _ordered(words).t().contiguous()


def _scaling(scales: Tensor, packed_zeros: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales and zeros [outputs, groups]."""
    zeros = torch.full_like(scales, 8) if packed_zeros is None else _ordered(packed_zeros)
    return scales.t(), zeros.t()


def _ordered(words: Tensor) -> Tensor:
    """Integers [rows, outputs] of words [rows, outputs / 8]: even outputs of eight come first, then odd ones."""
    return unpacked(words, 4, 1).view(len(words), -1, 2, 4).transpose(2, 3).reshape(len(words), -1)
