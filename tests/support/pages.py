"""A model without an engine: its hidden states over pages whose untouched slots are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionBackend, AttentionMetadata, Paged
from engine.backends.states import States
from engine.backends.torch.attention import TorchReference
from engine.model import checkpoint, families, weights
from engine.model.inputs import Inputs
from engine.model.layers import CrossPages
from engine.model.row_form import LIBRARY, RowForm
from engine.model.transformer import Transformer

CPU = torch.device("cpu")
BLOCK = 4


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 40,
    backend: AttentionBackend | None = None,
    device: torch.device = CPU,
) -> Transformer:
    """The model of a folder, its attention computed by the torch reference if by nothing else."""
    config = checkpoint.read_config(checkpoint.locate(str(path)))
    return weights.load_model(
        path,
        config,
        families.build_spec(config),
        dtype=dtype,
        device=device,
        backend=backend or TorchReference(),
        max_model_len=max_model_len,
        show_progress=False,
    )


class Pages:
    """Rows of one model in a paged cache whose untouched slots are NaN.

    Args:
        tables: one for each row.
        more: pages after those.
        reach: tokens that each row will have, where rotary factors depend on it; None: as many as there can be.
        form: how a row alone is computed on a GPU.
    """

    def __init__(
        self,
        model: Transformer,
        tables: list[list[int]],
        more: int = 0,
        reach: Sequence[int] | None = None,
        form: RowForm = LIBRARY,
    ):
        self.form = form
        self.model = model
        self.device = model.device
        self.tables = torch.tensor(tables, dtype=torch.int32, device=self.device)
        count = int(self.tables.max()) + 1 + more
        empty = [
            torch.full((count, BLOCK, h, d), torch.nan, dtype=model.dtype, device=self.device)
            for h, d, _ in model.kv_shapes()
        ]
        self.caches = [Paged(tensor, tensor.clone(), self.tables) for tensor in empty]
        self.lengths = [0] * len(tables)
        known = reach or [model.max_model_len] * len(tables)
        self.shifts = [next((by for most, by in model.rotary_shifts if length <= most), 0) for length in known]
        self.cross_tables: Tensor | None = None
        self.cross_lens: list[int] = []
        # Two slots for each row: a step reads one and writes the other. The first is zeros, and all are NaN at first.
        self.states = [torch.full((2 * len(tables) + 1, size), torch.nan) for size in model.spec.state_sizes]
        for slots in self.states:
            slots[0] = 0.0
        self.steps = 0

    def encode(
        self,
        inputs: list[list[int]],
        tables: list[list[int]],
        padding: int = 0,
        signals: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """The encoder's hidden states of each row's input, whose K and V go into the pages of these tables; `signals`
        are read instead of inputs, which are as long."""
        slots = [
            table[i // BLOCK] * BLOCK + i % BLOCK
            for table, ids in zip(tables, inputs, strict=True)
            for i in range(len(ids))
        ]
        width = max(map(len, tables))
        filled = [table + [0] * (width - len(table)) for table in tables]
        self.cross_tables = torch.tensor(filled, dtype=torch.int32, device=self.device)
        self.cross_lens = [len(ids) for ids in inputs]
        ids = [token for part in inputs for token in part] + [0] * padding
        positions = [i for part in inputs for i in range(len(part))] + [0] * padding
        metadata = AttentionMetadata.build(self.cross_lens, self.cross_lens, self.device)
        with torch.inference_mode():
            hidden = self.model.encode(
                Inputs(
                    token_ids=torch.tensor(ids, device=self.device),
                    positions=torch.tensor(positions, device=self.device),
                    metadata=metadata,
                    tokens=len(slots),
                    caches=self.caches,
                    slots=torch.tensor(slots, device=self.device),
                    signals=signals,
                )
            )
        assert hidden.shape[0] == len(ids)
        return list(hidden[: len(slots)].split(self.cross_lens))

    def step(self, chunks: list[list[int]], padding: int = 0, slots_known: bool = True) -> list[Tensor]:
        """Hidden states of each row's next tokens; the model is told their slots, or works them out."""
        ids, positions, slots, offsets = [], [], [], []
        for row, chunk in enumerate(chunks):
            for token in chunk:
                position = self.lengths[row]
                ids.append(token)
                positions.append(position)
                offsets.append(self.shifts[row])
                slots.append(int(self.tables[row, position // BLOCK]) * BLOCK + position % BLOCK)
                self.lengths[row] += 1
        queries = [len(c) for c in chunks]
        states = None
        if self.states:
            place = torch.arange(1, 2 * len(chunks), 2, dtype=torch.int32)
            nothing = torch.zeros_like(place)
            source, target = place + self.steps % 2, place + (self.steps + 1) % 2
            states = States(self.states, source if self.steps else nothing, target, nothing, nothing)
            self.steps += 1
        metadata = AttentionMetadata.build(queries, self.lengths.copy(), self.device)
        cross = None
        if self.cross_tables is not None:
            cross = CrossPages(self.cross_tables, AttentionMetadata.build(queries, self.cross_lens, self.device))
        with torch.inference_mode():
            hidden = self.model(
                Inputs(
                    token_ids=torch.tensor(ids + [0] * padding, dtype=torch.int32, device=self.device),
                    positions=torch.tensor(positions + [0] * padding, dtype=torch.int32, device=self.device),
                    metadata=metadata,
                    tokens=len(ids),
                    caches=self.caches,
                    slots=torch.tensor(slots, dtype=torch.int64, device=self.device) if slots_known else None,
                    cross=cross,
                    states=states,
                    sides={"rotary_offsets": torch.tensor(offsets + [0] * padding, device=self.device)}
                    if any(self.shifts)
                    else {},
                    form=self.form,
                )
            )
        assert hidden.shape[0] == len(ids) + padding
        return list(hidden[: len(ids)].split(queries))


def scattered_tables(lengths: list[int]) -> list[list[int]]:
    """A table for each of these lengths; page 0 is left out, and neighbours in a table are none in memory."""
    width = -(-max(lengths) // BLOCK)
    rows = len(lengths)
    return [[1 + row + rows * page for page in reversed(range(width))] for row in range(rows)]


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-4 of the largest value."""
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())
