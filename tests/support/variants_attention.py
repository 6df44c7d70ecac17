"""Attention's kernels as the backend launches them: recorded from calls, so that what is compiled is what would run.

EVERY_VARIANT=1 in the environment takes all sizes of heads, formats and generations of GPUs, not a part of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from engine.backends.attention.base import AttentionMetadata, DistanceBias, Paged, Ragged, Window
from engine.backends.attention.formats import FP8, LARGEST, SCALE, format_name
from engine.backends.triton import attention as backend
from support.gpu import Variant
from support.launches import recorded

_META = torch.device("meta")
_HEADS, _KV_HEADS = 32, 8
_WHOLE: dict[str, Any] = {
    "window": Window(100),
    "softcap": 30.0,
    "bias": DistanceBias(torch.empty(_HEADS, 65, device=_META), 32),
}
_SINKS: dict[str, Any] = {"window": Window(127), "sinks": torch.empty(64, device=_META)}
_SOME = {
    80: [(128, torch.bfloat16, {}), (96, torch.int8, {}), (128, FP8, {}), (256, torch.bfloat16, {})],
    86: [(128, torch.bfloat16, {})],
    90: [
        (64, torch.bfloat16, {}), (128, torch.bfloat16, {}), (128, FP8, {}), (80, torch.int8, {}),
        (256, torch.bfloat16, {}), (128, torch.bfloat16, _WHOLE), (64, torch.bfloat16, {"causal": False}),
        (64, torch.bfloat16, {}, 71, 1), (64, torch.bfloat16, _SINKS, 64, 8),
    ],
    100: [(64, torch.bfloat16, {}), (128, torch.bfloat16, {}), (128, torch.int8, {}), (256, torch.float32, {})],
    120: [(128, torch.bfloat16, {}), (256, torch.bfloat16, {})],
}  # fmt: skip
_ALL = {
    capability: [
        *((dim, kind, {}) for dim in (64, 80, 96, 128, 256) for kind in (torch.bfloat16, torch.int8, FP8)),
        *((dim, torch.bfloat16, how) for dim in (64, 128, 256) for how in (_WHOLE, {"causal": False})),
        (256, torch.float32, {}),
        (64, torch.bfloat16, {}, 71, 1),
        (64, torch.bfloat16, _SINKS, 64, 8),
    ]
    for capability in _SOME
}


def _launches(
    capability: int,
    head_dim: int,
    kind: torch.dtype,
    how: dict[str, Any],
    heads: int = _HEADS,
    kv_heads: int = _KV_HEADS,
) -> Iterator[Variant]:
    """What a batch of a decoding row and a prompt launches, queries being bfloat16; encoders have no pages."""
    facts = backend._Device(capability, multiprocessors=132, hardware=capability >= 89)
    words = " ".join((str(head_dim), format_name(kind), f"{heads}/{kv_heads}", *how))
    scales = (torch.empty(64, 16, kv_heads, dtype=SCALE, device=_META),) * 2 if kind in LARGEST else (None, None)
    q = torch.empty(130, heads, head_dim, dtype=torch.bfloat16, device=_META)
    kv: Paged | Ragged
    if how.get("causal", True):
        pages = torch.empty(64, 16, kv_heads, head_dim, dtype=kind, device=_META)
        kv = Paged(pages, pages, torch.empty(2, 64, dtype=torch.int32, device=_META), *scales)
    else:
        keys = torch.empty(130, kv_heads, head_dim, dtype=kind, device=_META)
        kv = Ragged(keys, keys, torch.empty(2, dtype=torch.int32, device=_META))
    metadata = AttentionMetadata.build([1, 129], [100, 129], _META)
    metadata = replace(metadata, overlapping=head_dim == 128 and capability >= 90)
    with recorded(words, capability) as found, mock.patch.object(backend, "_facts", return_value=facts):
        backend.TritonAttention().attend(q, kv, metadata, scale=0.1, **how)
    assert {variant.kernel.fn.__name__ for variant in found} == {"decode", "prefill", "plan_decode", "plan_prefill"}
    seen = len(how) or heads != _HEADS or kind != torch.bfloat16 or head_dim != 128  # plans do not depend on these
    yield from (variant for variant in found if not (seen and variant.name.startswith("plan_")))


VARIANTS = [
    variant
    for capability, cases in (_ALL if os.environ.get("EVERY_VARIANT") else _SOME).items()
    for case in cases
    for variant in _launches(capability, *case)
]
