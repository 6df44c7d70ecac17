"""The choice of beams, for each number of them."""

from __future__ import annotations

from engine.backends.triton.beams import WIDTHS, go_on_kernel
from support.gpu import Variant

VARIANTS = [
    Variant(
        name=f"up to {width} beams",
        kernel=go_on_kernel,
        signature={
            "tokens": "*i32",
            "scores": "*fp32",
            "columns": "i32",
            "numbers": "*i32",
            "tables": "*i32",
            "table_row": "i32",
            "sampled": "*i32",
            "places": "*i64",
            "pairs": "*i32",
            "pages": "*i32",
            "rows": "i32",
        },
        constants={"BEAMS": width},
        num_warps=4 if width < WIDTHS[-1] else 8,
    )
    for width in WIDTHS
]
