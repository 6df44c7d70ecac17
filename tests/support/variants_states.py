"""The kernels of layers with a state as they are launched for LFM2-1.2B and small Qwen3.5 models, and for odd sizes."""

from __future__ import annotations

from engine.backends.triton.states import convolve_kernel, delta_kernel
from support.gpu import Variant

_SIZES = ("width", "stride", "size")
_STRIDES = ("x_stride", "rates_stride", "opening_stride", "size", "begin")
_EVERY = (80, 86, 90, 100, 120)


def _convolution(name: str, format: str, taps: int, gated: bool, multiples: tuple[str, ...] = _SIZES) -> Variant:
    return Variant(
        name=name,
        kernel=convolve_kernel,
        signature=dict.fromkeys(("x", "out", "weight", "bias"), format)
        | {"memory": "*fp32", "slots": "*i32", "query_start": "*i32", "rows": "i32", **dict.fromkeys(_SIZES, "i32")},
        constants={"TAPS": taps, "GATED": gated, "BIASED": not gated, "FEATURES": 256},
        multiples=multiples,
        capabilities=_EVERY,
    )


def _delta(name: str, format: str, key: int, value: int, multiples: tuple[str, ...] = _STRIDES) -> Variant:
    keys, values = (1 << (size - 1).bit_length() for size in (key, value))
    pointers = dict.fromkeys(("x", "rates", "opening", "out", "decay", "offset", "norm"), format)
    return Variant(
        name=name,
        kernel=delta_kernel,
        signature=pointers
        | {"memory": "*fp32", "slots": "*i32", "query_start": "*i32", "rows": "i32", **dict.fromkeys(_STRIDES, "i32")}
        | {"scale": "fp32", "eps": "fp32", "most": "fp32"},
        constants={
            "HEADS": 16,
            "EACH": 2,
            "KEY": key,
            "VALUE": value,
            "KEYS": keys,
            "VALUES": values,
            "ALTERNATE": name == "odd",
        },
        multiples=multiples,
        num_warps=8 if keys * values > 4096 else 4,
        capabilities=_EVERY,
    )


VARIANTS = [
    _convolution("gated", "*bf16", 3, True),
    _convolution("of the delta rule", "*bf16", 4, False),
    _convolution("odd", "*fp32", 4, False, ()),
    _delta("128 by 128", "*bf16", 128, 128),
    _delta("256 by 128", "*fp16", 256, 128),
    _delta("odd", "*fp32", 12, 20, ()),
]
