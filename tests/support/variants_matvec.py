"""Products with one row as they are launched for Qwen3-0.6B and Llama-3.1-8B, and for odd shapes."""

from __future__ import annotations

from engine.backends.triton.matvec import STAGES, held_kernel, pieces_kernel, tiling
from support.gpu import Variant


def _product(
    name: str,
    outputs: int,
    features: int,
    *present: str,
    kind: int = 0,
    function: str | None = None,
    gated: bool = False,
    out: str = "*bf16",
    early: bool = False,
    bits: int = 0,
) -> Variant:
    how = tiling(outputs, features, 1 if bits else 2, gated=gated, normed=kind > 0 or function is not None)
    pointers = ("x", "weight", "scales", "bias", "stream", "also", "out")
    constants: dict[str, object] = {
        "SIZE": features,
        "WIDTH": outputs,
        "BITS": bits,
        "ROWS": how.rows,
        "BLOCK": how.block,
    }
    signature = {}
    if how.held:
        pointers += ("factors", "shifts")
        constants |= {"KIND": kind, "FUNCTION": function, "GATED": gated, "STEPS": how.steps}
        signature["eps"] = "fp32"
    there = {"x", "weight", *(("scales",) if bits else ()), *present}
    formats = {"weight": {0: "*bf16", 8: "*i8", 4: "*u8"}[bits], "scales": {0: "*bf16", 8: "*fp16", 4: "*i32"}[bits]}
    return Variant(
        name=f"{'held' if how.held else 'pieces'}: {name}",
        kernel=held_kernel if how.held else pieces_kernel,
        signature={p: formats.get(p, "*bf16") for p in pointers if p in there} | {"out": out} | signature,
        constants=constants
        | {"STAGES": STAGES, "EARLY": early}
        | {p: None for p in pointers if p not in there and p != "out"},
        num_warps=how.warps,
        capabilities=(90, 100) if early else (80, 100),
    )


VARIANTS = [
    _product("Qwen3 gate", 3072, 1024, "factors", kind=1, function="silu", gated=True),
    _product("Qwen3 down", 1024, 3072, "stream"),
    _product("Qwen3 logits", 151936, 1024, out="*fp32"),
    _product("Llama gate", 14336, 4096, "factors", kind=1, function="silu", gated=True),
    _product("GPT-2 up", 3072, 768, "factors", "shifts", "bias", kind=4, function="gelu_tanh"),
    _product("Qwen3 gate, early", 3072, 1024, "factors", kind=1, function="silu", gated=True, early=True),
    _product("Llama qkv, early", 6144, 4096, "factors", kind=1, early=True),
    _product("in parallel", 4544, 18176, "bias", "stream", "also"),
    _product("Llama down, early", 4096, 14336, "stream", early=True),
    _product("widest", 28672, 8192, "factors", kind=3, function="gelu_tanh", gated=True),
    _product("4 bits, Qwen3 gate", 3072, 1024, "factors", kind=1, function="silu", gated=True, bits=4),
    _product(
        "8 bits, Llama gate, early", 14336, 4096, "factors", kind=1, function="silu", gated=True, bits=8, early=True
    ),
    _product("8 bits, Llama down", 4096, 14336, "stream", bits=8),
    _product("4 bits, Llama down, early", 4096, 14336, "stream", bits=4, early=True),
    _product("odd", 193, 101, "factors", "shifts", "bias", kind=4, function="relu2", gated=True),
]
