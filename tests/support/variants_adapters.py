"""The adapters' kernel as it is launched for models of 1536 and 4096 features, and for odd ones."""

from __future__ import annotations

from engine.backends.triton.adapters import _INPUTS, _OUTPUTS, _ROWS, adapters_kernel
from support.gpu import Variant

_NUMBERS = ("x_stride", "out_stride", "inputs", "outputs", "rank")


def _variant(name: str, format: str, ranks: int, slots: str, multiples: tuple[str, ...] = _NUMBERS) -> Variant:
    return Variant(
        name=name,
        kernel=adapters_kernel,
        signature=dict.fromkeys(("x", "down", "up", "out"), format)
        | {"slots": slots, "tokens": "i32", **dict.fromkeys(_NUMBERS, "i32")},
        constants={"ROWS": _ROWS, "INPUTS": _INPUTS, "OUTPUTS": _OUTPUTS, "RANKS": ranks},
        multiples=multiples,
        capabilities=(80, 86, 90, 100, 120),
    )


VARIANTS = [
    _variant("rank 16", "*bf16", 16, "*i64"),
    _variant("recorded", "*bf16", 16, "*i32"),
    _variant("rank 256", "*fp16", 64, "*i64"),
    _variant("float32", "*fp32", 64, "*i32"),
    _variant("odd", "*fp32", 32, "*i64", ()),
]
