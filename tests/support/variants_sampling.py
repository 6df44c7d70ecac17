"""Sampling's kernels as `engine.backends.triton.sampling` launches them for a vocabulary of 131072 tokens."""

from __future__ import annotations

from typing import Any

from engine.backends.triton import philox, sampling_best, sampling_draw, sampling_edit, sampling_walk, sampling_wide
from engine.backends.triton.sampling import SIZES
from support.gpu import Variant

_INT32 = (
    *("place", "rows", "counts", "tokens", "chunks", "candidates", "is_wide", "table"),
    *("split_place", "first", "partial"),
)
_FLOAT32 = (
    *("split_peak", "split_floor", "split_sum", "tops", "row_peak", "row_log_sum"),
    *("values", "room", "chosen", "scores", "before", "after", "logprobs"),
)
_NUMBERS = ("stride", "width", "num_splits", "num_tops", "columns", "count")
_TYPES = {
    "split_weight": "*fp64",
    "uniforms": "*fp64",
    "seeds": "*i64",
    "choices": "*i32",
    "positions": "*i32",
    **dict.fromkeys(_INT32, "*i32"),
    **dict.fromkeys(_FLOAT32, "*fp32"),
    **dict.fromkeys(_NUMBERS, "i32"),
}
_VOCABULARY = 131_072
_SIZES = {
    "vocabulary": _VOCABULARY,
    "SPLITS": _VOCABULARY // SIZES.split,
    "TOPS": _VOCABULARY // 64,
    "ROOM": SIZES.room,
    "SPLIT": SIZES.split,
    "FEW": SIZES.few,
    "DEPTH": SIZES.depth,
    "CHUNKS": SIZES.split // 64,
}


def _variant(
    name: str,
    kernel: Any,
    num_warps: int,
    types: dict[str, str] | None = None,
    capabilities: tuple[int, ...] = (80, 100),
    **constants: Any,
) -> Variant:
    """A kernel with the types that its arguments' names stand for."""
    fixed = {
        key: value
        for key, value in (_SIZES | constants).items()
        if key in kernel.arg_names and key not in (types or {})
    }
    kinds = _TYPES | {"logits": "*fp32"} | (types or {})
    return Variant(
        name=name,
        kernel=kernel,
        signature={argument: kinds[argument] for argument in kernel.arg_names if argument not in fixed},
        constants=fixed,
        multiples=tuple(key for key in ("stride", "num_splits", "num_tops") if key in kernel.arg_names),
        num_warps=num_warps,
        capabilities=capabilities,
    )


# Of a vocabulary that one split and one chunk hold, as those of tests.
_TINY = {"vocabulary": 50, "SPLITS": 1, "TOPS": 1, "num_splits": 1, "num_tops": 1}
_ONE: Any = {"capabilities": (90,)}  # what differs little from others

VARIANTS = [
    _variant("walk", sampling_walk.summarize, 4),
    _variant("walk of bfloat16", sampling_walk.summarize, 4, {"logits": "*bf16"}, **_ONE),
    _variant("choose", sampling_draw.choose, 8, COUNTED=False, COLUMNS=64),
    _variant("choose, numbers counted", sampling_draw.choose, 8, COUNTED=True, COLUMNS=64, **_ONE),
    _variant("choose of few tokens", sampling_draw.choose, 8, COUNTED=False, COLUMNS=64, **_TINY, **_ONE),
    _variant("wide", sampling_wide.wide, 16, COUNTED=False),
    _variant("wide of few tokens, numbers counted", sampling_wide.wide, 16, COUNTED=True, **_TINY, **_ONE),
    _variant("wide of as many as are collected", sampling_wide.wide, 16, COUNTED=False, vocabulary=SIZES.room, **_ONE),
    _variant("best", sampling_best.best, 8, BLOCK=SIZES.split, COLUMNS=64),
    _variant("report", sampling_best.report, 1, COUNTED=True, COLUMNS=64),
    _variant("ranks", sampling_best.count_larger, 4, BLOCK=SIZES.split),
    _variant(
        "penalties",
        sampling_edit._penalize,
        4,
        {"keys": "*i64", "first": "*i64", "last": "*i64", "vocabulary": "i32"},
        BLOCK=sampling_edit._BLOCK,
    ),
    _variant(
        "masks",
        sampling_edit._mask,
        4,
        {"masks": "*i32", "words": "i32", "vocabulary": "i32"},
        BLOCK=sampling_edit._MASK_BLOCK,
    ),
    _variant("philox", philox._fill, 4, {"out": "*fp64"}, BLOCK=philox._BLOCK),
]
