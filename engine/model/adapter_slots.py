"""The additions of the loaded adapters to one product, by slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.native.adapters import AdapterTable, lay_out
from engine.backends.native.memory import Arena
from engine.model.adapters import LaidOut, LowRank

_ROWS = 16  # minimum rows of each product that torch computes


class AdapterSlots:
    """The slots of one product; slot 0 is for tokens without an adapter.

    On a GPU, all slots have one size, and recorded steps find them at fixed addresses. On a CPU, each adapter has its
    own size.

    Args:
        slots: maximum number of loaded adapters.
        rank: maximum rank of an adapter.
        dtype: format of a GPU's slots.

    Attributes:
        down: [1 + slots, rank, in] on a GPU; up: [1 + slots, out, rank] there.
    """

    def __init__(self, inputs: int, outputs: int, slots: int, rank: int, dtype: torch.dtype, device: torch.device):
        self.inputs, self.outputs, self.rank = inputs, outputs, rank
        self._filled: set[int] = set()
        self.table: AdapterTable | None = None
        self.down = self.up = torch.empty(0)
        if device.type == "cpu" and not gpu.serves(device):
            self.table = AdapterTable(1 + slots, inputs, outputs, rank)
        else:
            self.down = torch.zeros(1 + slots, rank, inputs, dtype=dtype, device=device)
            self.up = torch.zeros(1 + slots, outputs, rank, dtype=dtype, device=device)

    def lay_out(self, addition: LowRank, arena: Arena) -> LaidOut:
        """An addition in the form that `put` takes. Changes nothing here, so any thread may call it while steps run. A
        CPU stores an adapter's numbers in its arena."""
        return addition if self.table is None else lay_out(addition.down, addition.up, arena)

    def put(self, slot: int, addition: LaidOut) -> None:
        """Fill an empty slot, between two steps."""
        self._filled.add(slot)
        if isinstance(addition, LowRank):
            rank = len(addition.down)
            self.down[slot, :rank].copy_(addition.down)
            self.up[slot, :, :rank].copy_(addition.up)
        else:
            assert self.table is not None
            self.table.put(slot, addition)

    def clear(self, slot: int) -> None:
        self._filled.discard(slot)
        if self.table is not None:
            self.table.clear(slot)
        else:
            self.down[slot].zero_()
            self.up[slot].zero_()

    def warm(self) -> None:
        """Compile a GPU's kernel."""
        if self.table is None and gpu.serves(self.down.device):
            from engine.backends.triton import adapters

            adapters.warm(self.down, self.up)

    def add(self, x: Tensor, out: Tensor, slots: Tensor) -> Tensor:
        """Add the results of the adapters in slots [T] for rows x [T, in] to out [T, out]; computed in float32.

        Each adapter multiplies all rows, in products of one size, so that a row's bits do not depend on the others.
        """
        count = len(x)
        x = F.pad(x.float(), (0, 0, 0, -count % _ROWS)).view(-1, _ROWS, self.inputs)
        for slot in sorted(self._filled):
            rows = slots == slot
            if self.table is not None:
                found = self.table.matrices(slot) if bool(rows.any()) else None
            else:
                found = self.down[slot].float(), self.up[slot].float()
            if found is not None:
                thin = torch.bmm(x, found[0].T.expand(len(x), -1, -1))
                added = torch.bmm(thin, found[1].T.expand(len(x), -1, -1)).view(-1, self.outputs)[:count]
                out = torch.where(rows[:, None], (out.float() + added).to(out.dtype), out)
        return out
