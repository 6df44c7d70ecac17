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
) -> Variant:
    how = tiling(outputs, features, 2, gated=gated, normed=kind > 0 or function is not None)
    pointers = ("x", "weight", "bias", "stream", "also", "out")
    constants: dict[str, object] = {"SIZE": features, "WIDTH": outputs, "ROWS": how.rows, "BLOCK": how.block}
    signature = {}
    if how.held:
        pointers += ("factors", "shifts")
        constants |= {"KIND": kind, "FUNCTION": function, "GATED": gated, "STEPS": how.steps}
        signature["eps"] = "fp32"
    there = {"x", "weight", *present}
    return Variant(
        name=f"{'held' if how.held else 'pieces'}: {name}",
        kernel=held_kernel if how.held else pieces_kernel,
        signature={p: "*bf16" for p in pointers if p in there} | {"out": out} | signature,
        constants=constants
        | {"STAGES": STAGES, "EARLY": early}
        | {p: None for p in pointers if p not in there and p != "out"},
        num_warps=how.warps,
        capabilities=(90, 100) if early else (80, 90, 100),
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
    _product("odd", 193, 101, "factors", "shifts", "bias", kind=4, function="relu2", gated=True),
]
