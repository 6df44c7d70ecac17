"""Products with weights of FLOAT8 as they are launched for Llama-3.1-8B, and for odd shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.backends.triton.few_bits import _WIDENED, rows_kernel, widen_kernel
from engine.backends.triton.few_bits import STAGES as FEW_STAGES
from engine.backends.triton.few_bits import tiling as few_tiling
from engine.backends.triton.float8 import STAGES, quantise_kernel, scaled_kernel, tiling
from engine.backends.triton.matvec import STAGES as ROW_STAGES
from engine.backends.triton.matvec import held_kernel, pieces_kernel
from engine.backends.triton.matvec import tiling as row_tiling
from support.gpu import Variant
from support.variants_experts import products

NUMBERS = {80: "*u8", 86: "*u8", 89: "*fp8e4nv", 90: "*fp8e4nv", 100: "*fp8e4nv", 120: "*fp8e4nv"}


def _quantise(features: int, grouped: bool, block: int, capability: int) -> Variant:
    return Variant(
        name=f"quantise: {features} features, grouped: {grouped}",
        kernel=quantise_kernel,
        signature={"x": "*bf16", "values": "*u8", "scales": "*fp32", "stride": "i32"},
        constants={"SIZE": features, "GROUPED": grouped, "BLOCK": block},
        multiples=("stride",),
        num_warps=max(1, block // 512),
        capabilities=(capability,),
    )


def _scaled(rows: int, outputs: int, features: int, grouped: bool, capability: int, kind: str = "*bf16") -> Variant:
    how = tiling(rows, outputs)
    numbers = {"x": "*fp8e4nv", "scales": "*fp32", "weight": "*fp8e4nv", "factors": "*fp32", "out": kind}
    return Variant(
        name=f"scaled: {rows} of {features} to {outputs}, grouped: {grouped}",
        kernel=scaled_kernel,
        signature=numbers | {"rows": "i32", "width": "i32"},
        constants={
            "bias": None, "SIZE": features, "GROUPED": grouped, "ROWS": how.rows, "OUTPUTS": how.outputs,
            "STAGES": STAGES,
        },
        multiples=("width",) if outputs % 16 == 0 else (),
        num_warps=how.warps,
        capabilities=(capability,),
    )  # fmt: skip


def _few(rows: int, outputs: int, features: int, capability: int, kind: str = "*bf16") -> Variant:
    how = few_tiling(rows, outputs, 4 if kind == "*fp32" else 2)
    pointers = {"x": kind, "weight": NUMBERS[capability], "scales": "*fp32", "out": kind}
    constants = {"bias": None, "SIZE": features, "BITS": 8, "ROWS": how.rows, "OUTPUTS": how.outputs}
    return Variant(
        name=f"rows: {rows} of {features} {kind} to {outputs}",
        kernel=rows_kernel,
        signature=pointers | {"rows": "i32", "width": "i32"},
        constants=constants | {"BLOCK": how.block, "STAGES": FEW_STAGES},
        multiples=("width",) if outputs % 16 == 0 else (),
        num_warps=how.warps,
        capabilities=(capability,),
    )


def _row(outputs: int, features: int, capability: int, gated: bool = False) -> Variant:
    width = outputs // (1 + gated)
    how = row_tiling(width, features, 1, gated=gated, normed=gated)
    pointers = {"x": "*bf16", "weight": NUMBERS[capability], "scales": "*fp32", "out": "*bf16"}
    constants: dict[str, Any] = {"bias": None, "stream": None, "also": None, "SIZE": features, "WIDTH": width}
    constants |= {"BITS": 8, "ROWS": how.rows, "BLOCK": how.block, "STAGES": ROW_STAGES, "EARLY": capability >= 90}
    if how.held:
        kind, function = (1, "silu") if gated else (0, None)
        constants |= {"shifts": None, "KIND": kind, "FUNCTION": function, "GATED": gated, "STEPS": how.steps}
        pointers |= {"eps": "fp32"} | ({"factors": "*bf16"} if gated else {})
        constants |= {} if gated else {"factors": None}
    return Variant(
        name=f"row: {features} to {outputs}, gated: {gated}",
        kernel=held_kernel if how.held else pieces_kernel,
        signature=pointers,
        constants=constants,
        num_warps=how.warps,
        capabilities=(capability,),
    )


def _widen(features: int, capability: int) -> Variant:
    rows, block = _WIDENED
    numbers = {"weight": NUMBERS[capability], "scales": "*fp32", "out": "*bf16"}
    return Variant(
        name=f"widen: {features} features",
        kernel=widen_kernel,
        signature=numbers | {"first": "i32", "width": "i32"},
        constants={"SIZE": features, "BITS": 8, "ROWS": rows, "BLOCK": block},
        capabilities=(capability,),
    )


VARIANTS = [
    _quantise(4096, False, 4096, 90),
    _quantise(14336, True, 1024, 100),
    _quantise(101, True, 128, 120),
    _scaled(128, 6144, 4096, True, 90),
    _scaled(2048, 28672, 4096, True, 90),
    _scaled(2048, 4096, 14336, False, 100),
    _scaled(300, 193, 101, True, 90, "*fp16"),
    _scaled(2048, 28672, 4096, True, 120),
    _few(2, 4096, 1024, 80),
    _few(64, 28672, 4096, 90),
    _few(32, 4096, 14336, 100),
    _few(5, 193, 101, 120, "*fp16"),
    _few(16, 28672, 4096, 80, "*fp32"),
    _row(6144, 4096, 90),
    _row(28672, 4096, 90, gated=True),
    _row(4096, 14336, 90),
    _row(4096, 14336, 80),
    _widen(4096, 80),
    _widen(14336, 90),
    *(
        replace(one, signature={**one.signature, "weights": "*fp8e4nv", "scales": "*fp32"})
        for one in products(90, 8, (64, 8192))
        if one.name.startswith("Qwen3")
    ),
]
