"""Norms, activations and rotation as they are launched for a model of 4096 features, and for odd ones."""

from __future__ import annotations

from typing import Any

from engine.backends.triton.activations import activate_kernel
from engine.backends.triton.norms import norm_kernel
from support.gpu import Variant


def _norm(name: str, size: int, block: int, rows: int, warps: int, *, absent: tuple[str, ...], **flags: Any) -> Variant:
    pointers = ("x", "out", "y", "z", "after_weight", "after_bias", "weight", "bias")
    strides = ("x_outer", "x_inner", "out_outer", "out_inner")
    return Variant(
        name=name,
        kernel=norm_kernel,
        signature={p: "*bf16" for p in pointers if p not in absent}
        | {"rows": "i32", **dict.fromkeys(strides, "i32"), "after_eps": "fp32", "eps": "fp32"},
        constants=dict.fromkeys(absent, None)
        | {"INNER": 1, "SIZE": size, "AFTER": 0, "KIND": 1, "STORE": True, "ROWS": rows, "BLOCK": block}
        | flags,
        multiples=strides if size % 16 == 0 else (),
        num_warps=warps,
    )


def _activation(name: str, function: str, width: int, gated: bool) -> Variant:
    return Variant(
        name=name,
        kernel=activate_kernel,
        signature={"x": "*bf16", "out": "*bf16", "x_stride": "i32"},
        constants={"WIDTH": width, "FUNCTION": function, "GATED": gated, "BLOCK": 1024},
        multiples=("x_stride",) if width % 16 == 0 else (),
    )


_SIMPLE = ("z", "after_weight", "after_bias", "bias")
VARIANTS = [
    _norm("sum, norm", 4096, 4096, 1, 16, absent=_SIMPLE),
    _norm("sandwich", 1152, 2048, 1, 8, absent=("z", "after_bias", "bias"), AFTER=3, KIND=3),
    _norm("layer norm of two sums", 193, 256, 4, 4, absent=("after_weight", "after_bias"), KIND=4),
    _norm("widest", 32768, 32768, 1, 32, absent=_SIMPLE),
    _activation("gate", "silu", 14336, True),
    _activation("gate, odd", "gelu_tanh", 193, True),
    _activation("erf", "gelu", 3072, False),
    _activation("tanh", "tanh", 100, False),
]
