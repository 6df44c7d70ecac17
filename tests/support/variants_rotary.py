"""The way into pages as it is launched for large models, for each format of pages, and for odd heads."""

from __future__ import annotations

from typing import Any

from engine.backends.triton.pages import slots_kernel
from engine.backends.triton.rotary import rotate_kernel
from support.gpu import Variant

_POINTERS = {
    **dict.fromkeys(("turning", "values", "query_weight", "query_bias", "key_weight", "key_bias"), "*bf16"),
    **dict.fromkeys(("cos", "sin", "centre"), "*fp32"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    "tables": "*i32",
    **dict.fromkeys(("key_pages", "value_pages", "key_scales", "value_scales"), "*bf16"),
}
_NO_NORM = ("query_weight", "query_bias", "key_weight", "key_bias")
_PLAIN = ("key_scales", "value_scales", "centre")


def _turn(name: str, absent: tuple[str, ...], pages: str = "*bf16", **flags: Any) -> Variant:
    integers = ("turning_stride", "values_stride", "length", "stored", "all_slots", "table_stride", "table_width")
    pointers = _POINTERS | {"key_pages": pages, "value_pages": pages}
    size = {"QUERIES": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "HALF": 64, "HALF_BLOCK": 64, "REST_BLOCK": 1}
    how = {
        "INTERLEAVED": False,
        "ROUNDED": True,
        "NORM": 0,
        "OWN": False,
        "CLIP": None,
        "WHERE": 2,
        "PAGE": 16,
        "STEPS": 0,
        "EARLY": False,
    }
    return Variant(
        name=name,
        kernel=rotate_kernel,
        signature={p: kind for p, kind in pointers.items() if p not in absent}
        | {**dict.fromkeys(integers, "i32"), "eps": "fp32"},
        constants={**dict.fromkeys(absent, None), **size, **how, "HEADS": 8, **flags},
        multiples=("turning_stride", "values_stride"),
        capabilities=(90, 100) if flags.get("EARLY") else (80, 100),
    )


VARIANTS = [
    _turn("decode", (*_NO_NORM, *_PLAIN, "slots")),
    _turn("norms, early", ("query_bias", "key_bias", *_PLAIN, "slots"), NORM=1, EARLY=True),
    _turn("norms", ("query_bias", "key_bias", *_PLAIN, "slots"), NORM=1),
    _turn(
        "wide heads", ("query_bias", "key_bias", *_PLAIN, "slots"), QUERIES=8, KV_HEADS=4, HEAD_DIM=256, HALF=128,
        NORM=3, HEADS=4, HALF_BLOCK=128,
    ),
    _turn("few turned", (*_NO_NORM, *_PLAIN, "slots"), HEAD_DIM=80, HALF=4, HALF_BLOCK=4, REST_BLOCK=128),
    _turn("int8", (*_NO_NORM, "tables"), "*i8", WHERE=1, STEPS=1),
    _turn("fp8", (*_NO_NORM, "slots", "centre"), "*u8", STEPS=2),
    _turn("half, clipped", (*_NO_NORM, *_PLAIN, "slots"), "*fp16", CLIP=8.0),
    _turn(
        "interleaved, layer norm, odd", (*_PLAIN, "tables"), QUERIES=5, KV_HEADS=1, HEAD_DIM=193, HALF=33, NORM=4,
        OWN=True, INTERLEAVED=True, ROUNDED=False, WHERE=1, HEADS=4, HALF_BLOCK=64, REST_BLOCK=128,
    ),
    _turn("no rotation", (*_NO_NORM, *_PLAIN, "slots", "cos", "sin"), HALF=0, HALF_BLOCK=1, REST_BLOCK=128),
    _turn(
        "no pages", (*_NO_NORM, *_PLAIN, "values", "key_pages", "value_pages", "slots", "tables"), KV_HEADS=0, PAGE=1
    ),
    Variant(
        name="slots",
        kernel=slots_kernel,
        signature={"out": "*i64", "tables": "*i32", "query_start": "*i32", "positions": "*i64"}
        | dict.fromkeys(("tokens", "rows", "table_stride", "table_width"), "i32"),
        constants={"PAGE": 16, "HALVINGS": 20, "BLOCK": 128},
    ),
]  # fmt: skip
