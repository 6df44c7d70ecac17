"""The formats of llm-compressor and others (quant_method compressed-tensors): integers, FP8, NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Size, Tensor

from engine.backends.native.gemm import GROUP, BlockKind, Quantised
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.quantisation import Quantization
from engine.model.stored.bits import HALVES, as_lines, check_halves, fits_groups, grouped, own_kind, packed, unpacked
from engine.model.stored.fp8 import scaled_matrix
from engine.model.stored.nvfp4 import nvfp4_matrix
from engine.model.stored.scheme import (
    REALS,
    WHOLE,
    Packed,
    Scheme,
    Tensors,
    block_size,
    count_groups,
    expect,
    matrices,
    matrix_shape,
)

_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense",
    "nvfp4-pack-quantized",
)  # fmt: skip
MARK = "octavo_quantization"
"""The key in a config written by `octavo quantize` that states the requested kind. Other programs ignore it."""


class CompressedTensors(Scheme):
    """`weight_packed` or `weight`, with `weight_scale` and the other tensors of its scheme. A scheme applies to a group
    of modules; the stored tensors of a matrix show which one applies."""

    unread = (
        ".weight_shape", ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale",
        ".output_zero_point", ".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point",
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any]):
        groups = [group for group in _mapping(config, "config_groups").values() if isinstance(group, Mapping)]
        formats = {str(named) for named in (config.get("format"), *(group.get("format") for group in groups)) if named}
        if others := sorted(formats - set(_FORMATS)):
            raise UnsupportedModelError(
                f"format of the config's quantization_config must be one of {', '.join(_FORMATS)}; got {others[0]!r}."
            )
        sparsity = _mapping(config, "sparsity_config")
        if sparsity.get("format", "dense") != "dense":
            raise UnsupportedModelError(
                f"sparsity_config of the config's quantization_config has the format {sparsity['format']!r}; only "
                "dense matrices are supported."
            )
        weights = [group["weights"] for group in groups if isinstance(group.get("weights"), Mapping)]
        self._bits = sorted({bits for w in weights if (bits := w.get("num_bits")) in range(1, 9)})
        blocks = (block_size(w.get("block_structure"), "block_structure") for w in weights)
        self._blocks = {block for block in blocks if block is not None}
        if len(self._blocks) > 1:
            raise UnsupportedModelError("block_structure of the config's quantization_config has several values.")
        self.title = f"compressed-tensors ({config.get('format') or 'dense'})"
        self.served_as = config.get(MARK)
        if self.served_as not in (None, *get_args(Quantization)):
            raise UnsupportedModelError(
                f"{MARK} of the config's quantization_config must be one of {', '.join(get_args(Quantization))}; got "
                f"{self.served_as!r}."
            )

    def find(self, tensors: Tensors) -> Iterator[Packed]:
        for module, name in matrices(tensors, ".weight_packed"):
            if tensors.format(name) == "U8":
                yield nvfp4_matrix(tensors, module, name, f"{module}.weight_global_scale", divides=True)
            else:
                yield self._integers(tensors, module, name)
        for module, name in matrices(tensors, ".weight"):
            if tensors.format(name) == "I8" and f"{module}.weight_zero_point" in tensors.names:
                yield _bytes(tensors, module, name)
            elif tensors.format(name) in ("I8", "F8_E4M3"):
                found = scaled_matrix(tensors, name, next(iter(self._blocks), None))
                by_rows = tensors.shape(found.parts[1]) == Size((found.shape[0], 1))
                if tensors.format(name) == "I8" and len(found.shape) == 2 and by_rows:
                    found = replace(found, kind="int8-fast", quantised=_as_rows)
                yield found

    def _integers(self, tensors: Tensors, module: str, name: str) -> Packed:
        shape = tensors.read(expect(tensors, f"{module}.weight_shape", (2,), formats=WHOLE))
        outputs, inputs = (int(n) for n in shape)
        words = matrix_shape(tensors, name, "I32")
        if not self._bits:
            raise UnsupportedModelError(
                f"config_groups of the config's quantization_config should say how many bits weights have (num_bits of "
                f"weights, 1 to 8), but no group does, and {tensors.path} holds {name}. Use the checkpoint's own "
                "config.json."
            )
        fitting = [bits for bits in self._bits if words == (outputs, -(-inputs * bits // 32))]
        if not fitting:
            raise ModelLoadError(
                f"{tensors.path}: {name} should hold {outputs} x {inputs} integers of "
                f"{' or '.join(map(str, self._bits))} bits, but is stored as {list(words)}."
            )
        bits = fitting[0]
        scale, groups = _scales(tensors, module, outputs)
        parts, has_zeros, has_order = [name, scale], False, False
        if (zeros := f"{module}.weight_zero_point") in tensors.names:
            lines = -(-outputs * bits // 32) if tensors.format(zeros) == "I32" else outputs
            parts.append(expect(tensors, zeros, (lines, groups), formats=WHOLE))
            has_zeros = True
        if (order := f"{module}.weight_g_idx") in tensors.names:
            parts.append(expect(tensors, order, (inputs,), formats=WHOLE))
            has_order = True
        decode = partial(_decode, bits=bits, shape=(outputs, inputs), has_zeros=has_zeros, has_order=has_order)
        kind: Quantization | None = None
        quantised: Callable[..., Quantised] | None = None
        own: BlockKind | None = None
        held, whole = tensors.format(scale), Size((outputs, inputs))
        by_groups = tensors.shape(scale) == Size((outputs, groups)) and not has_order
        if by_groups and bits == 4 and held in HALVES and fits_groups(whole, groups):
            kind, quantised, own = "int4", _as_lines, own_kind(whole, groups)
        elif by_groups and bits == 8 and held in HALVES and not has_zeros and groups * GROUP == inputs:
            kind, quantised = "int8", _as_groups
        return Packed(f"{module}.weight", tuple(parts), whole, decode, kind=kind, quantised=quantised, own=own)


def _mapping(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"{name} of the config's quantization_config must be a mapping; got {value!r}.")
    return value


def written_as(kind: Quantization, outputs: int, inputs: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that store a matrix of this kind: the ends of their names, their formats under safetensors' names,
    their shapes. The number of inputs is a multiple of `GROUP`."""
    if kind == "int8-fast":
        return {".weight": ("I8", (outputs, inputs)), ".weight_scale": ("F32", (outputs, 1))}
    return {
        ".weight_packed": ("I32", (outputs, inputs * _BITS[kind] // 32)),
        ".weight_scale": ("BF16", (outputs, inputs // GROUP)),
        ".weight_shape": ("I64", (2,)),
    }


def parts_of(made: Quantised, kind: Quantization) -> dict[str, Tensor]:
    """The tensors of `written_as`."""
    assert not made.rotated, "others keep the order of the groups"
    outputs = len(made.values)
    if kind == "int8-fast":
        return {".weight": made.values, ".weight_scale": made.scales[:, None]}
    integers = made.levels().view(outputs, -1) if kind == "int4" else made.values.view(torch.uint8) ^ _SIGN
    return {
        ".weight_packed": packed(integers, _BITS[kind]),
        ".weight_scale": (made.scales[..., 0] if kind == "int4" else made.scales).bfloat16(),
        ".weight_shape": torch.tensor([outputs, made.inputs]),
    }


def config_of(kind: Quantization, ignored: list[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose linear layers are stored in this form, except those with these
    names."""
    weights: dict[str, Any] = {"num_bits": _BITS[kind], "type": "int", "symmetric": True, "dynamic": False}
    activations = None
    if kind == "int8-fast":
        weights |= {"strategy": "channel"}
        activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    else:
        weights |= {"strategy": "group", "group_size": GROUP}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8-fast" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignored,
        "kv_cache_scheme": None,
        MARK: kind,
    }


_BITS: dict[Quantization, int] = {"int4": 4, "int8": 8, "int8-fast": 8}
_SIGN = 0x80  # 8-bit integers are stored with this number added


def _as_groups(words: Tensor, scales: Tensor) -> Quantised:
    integers = unpacked(words, 8, 1)
    check_halves(scales.half())
    return Quantised((integers ^ _SIGN).view(torch.int8), scales.half(), integers.shape[1])


def _as_lines(words: Tensor, scales: Tensor, packed_zeros: Tensor | None = None) -> Quantised:
    if packed_zeros is None:
        zeros = torch.tensor(8)
    elif packed_zeros.dtype == torch.int32:
        zeros = unpacked(packed_zeros, 4, 0)[: len(scales)]
    else:
        zeros = packed_zeros + 8
    return as_lines(words, "rows", partial(unpacked, bits=4, dim=1), scales, zeros)


def _as_rows(values: Tensor, scales: Tensor) -> Quantised:
    return Quantised(values, scales.float().flatten(), values.shape[1])


def _scales(tensors: Tensors, module: str, outputs: int) -> tuple[str, int]:
    name = f"{module}.weight_scale"
    groups = count_groups(tensors, name, 1)
    expect(tensors, name, (1,), (1, 1), (outputs,), (outputs, groups), formats=REALS)
    return name, groups


def _bytes(tensors: Tensors, module: str, name: str) -> Packed:
    rows, columns = matrix_shape(tensors, name, "I8")
    scale, groups = _scales(tensors, module, rows)
    zeros = f"{module}.weight_zero_point"
    expect(tensors, zeros, (1,), (1, 1), (rows,), (rows, groups), formats=(*WHOLE, *REALS))
    return Packed(name, (name, scale, zeros), Size((rows, columns)), _of_bytes)


def _of_bytes(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    factors = _by_rows(scales, len(values))
    return grouped(values, factors, _by_rows(zeros, len(values)).expand(factors.shape))


def _by_rows(scales: Tensor, rows: int) -> Tensor:
    """[rows, groups] from one number, one per row, or already that."""
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(rows, 1)
    return scales if scales.dim() == 2 else scales[:, None]


def _decode(
    words: Tensor, scales: Tensor, *others: Tensor, bits: int, shape: tuple[int, int], has_zeros: bool, has_order: bool
) -> Tensor:
    outputs, inputs = shape
    middle = 1 << bits - 1  # integers are stored with this number added
    values = unpacked(words, bits, 1)[:, :inputs].short() - middle
    zeros = others[0] if has_zeros else None
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpacked(zeros, bits, 0)[:outputs].short() - middle
    order = others[-1] if has_order else None
    if order is not None and order.numel() and int(order.min()) < 0:  # no order was stored
        order = None
    return grouped(values, _by_rows(scales, outputs), zeros, order)
