"""The low-rank additions of adapters to a product, as the library reads them (`src/adapters.h`)."""

from __future__ import annotations

from torch import Tensor


class AdapterTable:
    """The additions to one product, by slot.

    Args:
        slots: the first of them is that of tokens without an adapter.
    """

    def __init__(self, slots: int, inputs: int, outputs: int):
        self._slots: list[tuple[Tensor, Tensor] | None] = [None] * slots
        self.inputs, self.outputs = inputs, outputs

    def put(self, slot: int, part: tuple[Tensor, Tensor] | None) -> None:
        """Fill a slot with down [rank, in] and up [out, rank], or empty it."""
        self._slots[slot] = part
