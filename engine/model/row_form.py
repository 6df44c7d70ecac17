"""The ways in which a GPU computes a single row."""

from __future__ import annotations

from typing import NamedTuple


class RowForm(NamedTuple):
    """The way in which a GPU computes a single row; an argument of each pass."""

    name: str
    fused: bool = False  # whether to use our kernels around products (`engine.model.executors.triton_row`)
    overlapping: bool = False  # whether these begin before the previous ones end


LIBRARY = RowForm("the library's products")
FUSED = RowForm("fused products", fused=True)
OVERLAPPING = RowForm("overlapping fused products", fused=True, overlapping=True)
