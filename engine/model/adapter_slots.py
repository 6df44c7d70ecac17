"""The additions of the loaded adapters to one product, by slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.native.adapters import AdapterTable
from engine.model.adapters import LowRank

_ROWS = 16  # of each product that torch computes


class AdapterSlots:
    """The slots of one product; slot 0 is that of tokens without an adapter.

    A GPU's kernels read slots of one size, which recorded steps find at the same place. A CPU has each adapter in its
    own size.

    Args:
        inputs, outputs: of the product.
        slots: adapters that can be loaded.
        rank: the largest of one that it can take.
        dtype: of a GPU's slots.

    Attributes:
        table: the same for the CPU's library.
        down: [1 + slots, rank, in] on a GPU; up: [1 + slots, out, rank] there.
    """

    def __init__(self, inputs: int, outputs: int, slots: int, rank: int, dtype: torch.dtype, device: torch.device):
        self.inputs, self.outputs, self.rank = inputs, outputs, rank
        self._parts: list[LowRank | None] = [None] * (1 + slots)
        self.table: AdapterTable | None = None
        self.down = self.up = torch.empty(0)
        if device.type == "cpu":
            self.table = AdapterTable(1 + slots, inputs, outputs)
        else:
            self.down = torch.zeros(1 + slots, rank, inputs, dtype=dtype, device=device)
            self.up = torch.zeros(1 + slots, outputs, rank, dtype=dtype, device=device)

    def put(self, slot: int, part: LowRank | None) -> None:
        """Fill a slot, or empty it."""
        if self.table is not None:
            self._parts[slot] = part
            self.table.put(slot, None if part is None else (part.down, part.up))
            return
        self.down[slot].zero_()
        self.up[slot].zero_()
        self._parts[slot] = None
        if part is not None:
            rank = len(part.down)
            self.down[slot, :rank].copy_(part.down)
            self.up[slot, :, :rank].copy_(part.up)
            self._parts[slot] = LowRank(self.down[slot, :rank], self.up[slot, :, :rank])

    def add(self, x: Tensor, out: Tensor, slots: Tensor) -> Tensor:
        """out [T, out] with what the adapters of these slots [T] make of the rows x [T, in]; computed in float32.

        All rows are multiplied by each adapter, in products of one size, so that no row's bits depend on the others'.
        """
        count = len(x)
        x = F.pad(x.float(), (0, 0, 0, -count % _ROWS)).view(-1, _ROWS, self.inputs)
        for slot, part in enumerate(self._parts):
            if part is None:
                continue
            rows = slots == slot
            if rows.device.type == "cpu" and not bool(rows.any()):
                continue
            thin = torch.bmm(x, part.down.float().T.expand(len(x), -1, -1))
            added = torch.bmm(thin, part.up.float().T.expand(len(x), -1, -1)).view(-1, self.outputs)[:count]
            out = torch.where(rows[:, None], (out.float() + added).to(out.dtype), out)
        return out
