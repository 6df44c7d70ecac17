"""The part of sampling that a CUDA graph can hold: one token a row, greedy or drawn, in any mixture.

Captured are the walk, the choice and the report: four kernels whose grids come from the number of rows alone. What
rows want lies in memory that stays where it is: a graph that was captured for as many rows serves greedy rows, rows
that draw and rows that are unused. Random numbers are made of counters on the device, which a replay counts up, so
that a steady step sends nothing at all; or they are sent, 8 bytes a row.

Not captured, but computed by `DeviceSampler`: beams, reports of most probable tokens and ranks, several draws a row,
and all that changes logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.execution.sampler_layout import FILTERS, TOUCHING
from engine.execution.transfers import Array, Download
from engine.gpu.sampling import SIZES, LogitRows, Parameters, Sizes, Workspace
from engine.scheduling.plan import Int32, SamplingBatch, StepResult

# Bytes of each field, in their order: those of 8 come first, so that all are aligned.
_FIELDS: dict[str, tuple[type[np.generic], torch.dtype]] = {
    "seeds": (np.int64, torch.int64),
    "uniforms": (np.float64, torch.float64),
    "temperature": (np.float32, torch.float32),
    "top_p": (np.float32, torch.float32),
    "min_p": (np.float32, torch.float32),
    "top_k": (np.int32, torch.int32),
    "num_draws": (np.int32, torch.int32),
    "choices": (np.int32, torch.int32),
    "positions": (np.int32, torch.int32),
}
_ALIGNED = 16


class CapturedSampler:
    """Samples up to `rows` rows by launches that a CUDA graph may hold.

    Args:
        counted: random numbers are made on the device, of what `put` is given; else they are the batch's.
        sizes: how kernels cut their work; tests take small ones.

    Attributes:
        tokens: [rows] int32 what was sampled last, at an address that never changes; 0 in unused rows.
        logprobs: [rows] float32 under the model's own distribution, NaN for a row that failed.
        positions: [rows] int32 the output position of the next draw; counted up by each launch if `counted`.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device, *, counted: bool = True, sizes: Sizes = SIZES):
        self._rows, self._device, self._counted = rows, device, counted
        self._room = Workspace(rows, vocabulary, device, sizes)
        self._places: dict[str, slice] = {}
        size = 0
        for name, (kind, _) in _FIELDS.items():
            width = rows * np.dtype(kind).itemsize
            self._places[name] = slice(size, size + width)
            size += -(-width // _ALIGNED) * _ALIGNED
        self._packed = torch.zeros(size, dtype=torch.uint8, device=device)
        self._on_device = {name: self._packed[self._places[name]].view(kind) for name, (_, kind) in _FIELDS.items()}
        self._on_device["num_draws"].fill_(-1)
        # Rows of whole vectors, so that all begin where kernels expect memory to begin.
        self._results = torch.zeros((3, -(-rows // 4) * 4), dtype=torch.int32, device=device)
        self._column = self._results[2].view(-1, 1)
        self._chosen = torch.zeros((rows, 1), dtype=torch.float32, device=device)
        self.tokens, self.logprobs = self._results[0, :rows], self._results[1, :rows].view(torch.float32)
        self.positions = self._on_device["positions"]
        self._last: tuple[object, ...] = ()

    @staticmethod
    def serves(batch: SamplingBatch) -> bool:
        """Whether a batch wants nothing but one token a row."""
        return (
            not batch.beam_width.any()
            and int(batch.num_draws.max()) <= 1
            and int(batch.num_logprobs.max()) < 0
            and not any(len(getattr(batch, name)) for name in TOUCHING)
        )

    def put(
        self,
        batch: SamplingBatch,
        *,
        seeds: Array | None = None,
        choices: Int32 | None = None,
        positions: Int32 | None = None,
    ) -> bool:
        """Tell the device what the next launches sample, in one asynchronous copy.

        Nothing is sent where all arrays are those of the last call: the device's positions go on from where they are.

        Args:
            batch: S rows; those behind are unused.
            seeds, choices, positions: [S] int64, int32, int32, what numbers are made of if they are `counted`;
                `positions` those of the next draw.

        Returns:
            Whether anything was sent.

        Raises:
            ValueError: the batch has more rows, or wants more than one token a row.
        """
        count = len(batch.temperature)
        if count > self._rows or not self.serves(batch):
            raise ValueError(
                f"up to {self._rows} rows that want one token each, not {count} rows or ones that want more"
            )
        filters = {name: getattr(batch, name) for name in FILTERS}
        given: dict[str, Array | None] = {**filters, "num_draws": batch.num_draws}
        if self._counted:
            given |= {"seeds": seeds, "choices": choices, "positions": positions}
            if any(values is None for values in given.values()):
                raise ValueError("seeds, choices and positions are needed where numbers are made on the device")
        else:
            given["uniforms"] = batch.uniforms
        arrays = tuple(given.values())
        if len(arrays) == len(self._last) and all(a is b for a, b in zip(arrays, self._last, strict=True)):
            return False
        self._last = arrays
        packed = torch.zeros(len(self._packed), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        host = packed.numpy()
        host[self._places["num_draws"]].view(np.int32)[:] = -1
        for name, values in given.items():
            assert values is not None
            host[self._places[name]].view(_FIELDS[name][0])[:count] = values.reshape(count, -1)[:, 0]
        self._packed.copy_(packed, non_blocking=True)
        return True

    def forget(self) -> None:
        """What is given next is sent, whatever was sent before."""
        self._last = ()

    @torch.inference_mode()
    def launch(self, logits: Tensor) -> None:
        """Sample the first N rows, of logits [N, vocabulary]; this is what is captured."""
        count = len(logits)
        given = {name: values[:count] for name, values in self._on_device.items()}
        counters = {name: given[name] for name in ("seeds", "choices", "positions")} if self._counted else {}
        parameters = Parameters(
            **{name: given[name] for name in (*FILTERS, "num_draws")},
            uniforms=None if self._counted else given["uniforms"].view(-1, 1),
            **counters,
        )
        rows = LogitRows(logits, parameters, self._room)
        column, chosen = self._column[:count], self._chosen[:count]
        rows.choose(column, chosen)
        logprobs = self.logprobs[:count].view(-1, 1)
        rows.report(column, chosen, logprobs, self.tokens[:count], positions=counters.get("positions"))

    def fetch(self, rows: int) -> Fetched:
        """Start the copy of the first rows' results to the host, on the current stream."""
        return Fetched(Download(self._results[:2]), rows)


class Fetched:
    """Results on their way to the host."""

    def __init__(self, download: Download, rows: int):
        self._download, self._rows = download, rows

    @property
    def ready(self) -> bool:
        """The values are there: `result` does not wait."""
        return self._download.ready

    def result(self) -> StepResult:
        """The values, with one column; waits until they are there."""
        words = self._download.wait()[:, : self._rows]
        tokens = words[0][:, None]
        nothing = np.zeros((len(tokens), 0), dtype=np.int32)
        return StepResult(
            tokens=tokens,
            scores=np.full(tokens.shape, -np.inf, dtype=np.float32),
            logprobs=words[1].view(np.float32)[:, None],
            ranks=np.zeros_like(tokens),
            top_ids=nothing,
            top_logprobs=nothing.view(np.float32),
        )
