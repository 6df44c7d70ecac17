"""Products with weights of 8 and 4 bits as they are launched for Qwen3-0.6B and Llama-3.1-8B, and for odd shapes."""

from __future__ import annotations

from engine.backends.triton.few_bits import _WIDENED, STAGES, rows_kernel, tiling, widen_kernel
from support.gpu import Variant

VALUES, SCALES = {8: "*i8", 4: "*u8"}, {8: "*fp16", 4: "*i32"}


def _rows(
    rows: int, outputs: int, features: int, bits: int, capabilities: tuple[int, ...], kind: str = "*bf16", out: str = ""
) -> Variant:
    how = tiling(rows, outputs, 4 if kind == "*fp32" else 2)
    pointers = {"x": kind, "weight": VALUES[bits], "scales": SCALES[bits], "out": out or kind}
    constants = {"bias": None, "SIZE": features, "BITS": bits, "ROWS": how.rows, "OUTPUTS": how.outputs}
    return Variant(
        name=f"rows: {rows} of {features} {kind} to {outputs}, {bits} bits",
        kernel=rows_kernel,
        signature=pointers | {"rows": "i32", "width": "i32"},
        constants=constants | {"BLOCK": how.block, "STAGES": STAGES},
        multiples=("width",) if outputs % 16 == 0 else (),
        num_warps=how.warps,
        capabilities=capabilities,
    )


def _widen(features: int, bits: int, capability: int) -> Variant:
    rows, block = _WIDENED
    return Variant(
        name=f"widen: {features} features, {bits} bits",
        kernel=widen_kernel,
        signature={"weight": VALUES[bits], "scales": SCALES[bits], "out": "*bf16", "first": "i32", "width": "i32"},
        constants={"SIZE": features, "BITS": bits, "ROWS": rows, "BLOCK": block},
        capabilities=(capability,),
    )


VARIANTS = [
    _rows(2, 4096, 1024, 4, (80, 100)),
    _rows(64, 28672, 4096, 8, (86, 90, 100, 120)),
    _rows(32, 128256, 4096, 8, (90,), out="*fp32"),
    _rows(5, 193, 101, 4, (120,), "*fp16"),
    _rows(16, 28672, 4096, 8, (80,), "*fp32"),
    _widen(4096, 8, 80),
    _widen(14336, 4, 100),
]
