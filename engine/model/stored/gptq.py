"""GPTQ's checkpoints: integers of 2, 3, 4 or 8 bits, inputs as rows, a scale and a zero for each group of inputs
(arXiv:2210.17323)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor

from engine.backends.native.gemm import Quantised
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.stored.bits import HALVES, as_lines, fits_groups, grouped, own_kind, unpacked
from engine.model.stored.scheme import (
    REALS,
    WHOLE,
    Packed,
    Scheme,
    Tensors,
    count_groups,
    expect,
    matrices,
    matrix_shape,
    whole_number,
)

_PLAIN = "-:"
"""The prefix of a `dynamic` rule that leaves modules with matching names unquantised."""


class Gptq(Scheme):
    """`qweight`, `qzeros`, `scales` and `g_idx` of a matrix; the last says to which group an input belongs."""

    def __init__(self, config: Mapping[str, Any]):
        self._bits = whole_number(config, "bits", (2, 3, 4, 8))
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise UnsupportedModelError(
                f"checkpoint_format of the config's quantization_config must be gptq or gptq_v2; got {layout!r}."
            )
        rules = config.get("dynamic") or {}
        if not isinstance(rules, Mapping) or not all(str(rule).startswith(_PLAIN) for rule in rules):
            raise UnsupportedModelError(
                "dynamic of the config's quantization_config gives modules separate settings, which is not "
                f"supported; only rules that leave modules unquantized are, which begin with {_PLAIN!r}."
            )
        self._less_one = layout == "gptq"  # the first version stores zeros minus one
        self.title = f"{self._bits}-bit GPTQ"

    def find(self, tensors: Tensors) -> Iterator[Packed]:
        for module, name in matrices(tensors, ".qweight"):
            words, outputs = matrix_shape(tensors, name, "I32")
            if words * 32 % self._bits or outputs * self._bits % 32:
                raise ModelLoadError(
                    f"{tensors.path}: {name}, stored as {[words, outputs]}, does not contain a whole number of "
                    f"{self._bits}-bit integers, or its zeros would not fill whole words."
                )
            inputs = words * 32 // self._bits
            scales = f"{module}.scales"
            groups = count_groups(tensors, scales, 0)
            parts = [
                name,
                expect(tensors, scales, (groups, outputs), formats=REALS),
                expect(tensors, f"{module}.qzeros", (groups, outputs * self._bits // 32), formats=("I32",)),
            ]
            order = f"{module}.g_idx" if f"{module}.g_idx" in tensors.names else None
            if order is not None:
                parts.append(expect(tensors, order, (inputs,), formats=WHOLE))
            decode = partial(_decode, bits=self._bits, less_one=self._less_one)
            found = Packed(f"{module}.weight", tuple(parts), Size((outputs, inputs)), decode)
            fits = self._bits == 4 and fits_groups(found.shape, groups) and tensors.format(scales) in HALVES
            if fits and (order is None or _neighbours(tensors.read(order), groups)):
                quantised = partial(_as_lines, less_one=self._less_one)
                found = replace(found, kind="int4", quantised=quantised, own=own_kind(found.shape, groups))
            yield found


def _decode(
    words: Tensor, scales: Tensor, packed_zeros: Tensor, groups: Tensor | None = None, *, bits: int, less_one: bool
) -> Tensor:
    zeros = _zeros(packed_zeros, bits, less_one)
    order = None if groups is None or _neighbours(groups, len(scales)) else groups
    return grouped(_levels(words, bits), scales.t(), zeros, order)


def _as_lines(
    words: Tensor, scales: Tensor, packed_zeros: Tensor, _groups: Tensor | None = None, *, less_one: bool
) -> Quantised:
    return as_lines(words, "gptq", partial(_levels, bits=4), scales.t(), _zeros(packed_zeros, 4, less_one))


def _levels(words: Tensor, bits: int) -> Tensor:
    """Integers [outputs, inputs] of words [inputs * bits / 32, outputs]."""
    return unpacked(words, bits, 0).t()


def _zeros(packed_zeros: Tensor, bits: int, less_one: bool) -> Tensor:
    """[outputs, groups].

    For the first version, GPTQModel subtracts one from whole words, so a zero of 0 borrows from the next; this is
    reversed here. Three-bit values, which cross words, are reduced one by one.
    """
    if less_one and 32 % bits == 0:
        packed_zeros = packed_zeros + sum(1 << place for place in range(0, 32, bits))  # wraps around
    zeros = unpacked(packed_zeros, bits, 1)
    if less_one and 32 % bits:
        zeros = zeros + 1 & (1 << bits) - 1
    return zeros.t()


def _neighbours(groups: Tensor, count: int) -> bool:
    """Whether the groups of inputs are `count` runs of adjacent inputs, in order."""
    size = -(-len(groups) // count)
    return torch.equal(groups.long(), torch.arange(len(groups)) // size)
