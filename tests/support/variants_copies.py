"""Copies of pages, of words of eight bytes and of one."""

from __future__ import annotations

from engine.backends.triton.copies import _BLOCK, copy_kernel
from support.gpu import Variant

VARIANTS = [
    Variant(
        name=f"copies of {words}",
        kernel=copy_kernel,
        signature={"memory": words, "begins": "*i64", "sizes": "*i64", "copies": "*i32"},
        constants={"BLOCK": _BLOCK},
    )
    for words in ("*i64", "*u8")
]
