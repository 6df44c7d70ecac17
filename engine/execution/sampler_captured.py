"""The part of sampling that a CUDA graph can hold: one token a row, greedy or drawn, in any mixture.

Captured are the walk, the choice and the report: four kernels whose grids come from the number of rows alone. What
rows want lies in memory that stays where it is: a graph that was captured for as many rows serves greedy rows, rows
that draw and rows that are unused. Random numbers are made of counters on the device, which a replay counts up, so
that a steady step sends nothing at all; or they are sent, 8 bytes a row.

Not captured, but computed by `DeviceSampler`: beams, reports of most probable or listed tokens and of ranks, several
draws a row, filters that only torch's sampler knows, and all that changes logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.backends.triton.sampling import SIZES, LogitRows, Parameters, Sizes, Workspace
from engine.execution.transfers import Download
from engine.interface.sampling_table import TABLE, WORDS, by_torch, word
from engine.scheduling.plan import SamplingBatch, StepResult


class CapturedSampler:
    """Samples up to `rows` rows by launches that a CUDA graph may hold.

    Args:
        counted: random numbers are made on the device, of the table's seeds, choices and positions; else they are the
            batch's.
        sizes: how kernels cut their work; tests take small ones.

    Attributes:
        tokens: [rows] int32 what was sampled last, at an address that never changes; 0 in unused rows.
        logprobs: [rows] float32 under the model's own distribution, NaN for a row that failed.
        positions: [rows] int32 the output position of the next draw; counted up by each launch if `counted`.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device, *, counted: bool = True, sizes: Sizes = SIZES):
        self._rows, self._device, self._counted = rows, device, counted
        self._room = Workspace(rows, vocabulary, device, sizes)
        # The table's rows, and numbers of the host behind them.
        size, numbers = rows * TABLE.itemsize, 0 if counted else rows * 8
        self._packed = torch.zeros(size + numbers, dtype=torch.uint8, device=device)
        self._table = self._packed[:size].view(torch.int32).view(rows, WORDS)
        self._uniforms = None if counted else self._packed[size:].view(torch.float64).view(rows, 1)
        self._table[:, word("num_draws")] = -1
        # Rows of whole vectors, so that all begin where kernels expect memory to begin.
        self._results = torch.zeros((3, -(-rows // 4) * 4), dtype=torch.int32, device=device)
        self._column = self._results[2].view(-1, 1)
        self._chosen = torch.zeros((rows, 1), dtype=torch.float32, device=device)
        self.tokens, self.logprobs = self._results[0, :rows], self._results[1, :rows].view(torch.float32)
        self.positions = self._table[:, word("position")]
        self._last: SamplingBatch | None = None

    @staticmethod
    def serves(batch: SamplingBatch) -> bool:
        """Whether a batch wants nothing but one token a row."""
        table = batch.table
        return not (
            len(batch.edits)
            or len(batch.masked)
            or batch.watched is not None
            or table["beam_width"].any()
            or int(table["num_draws"].max()) > 1
            or int(table["num_logprobs"].max()) >= 0
            or by_torch(table).any()
        )

    def put(self, batch: SamplingBatch) -> bool:
        """Tell the device what the next launches sample, in one asynchronous copy.

        Nothing is sent where the batch has the version of the last call, and its numbers: the same positions, if they
        are `counted`, which go on from where the device is, else the same uniforms.

        Args:
            batch: S rows; those behind are unused.

        Returns:
            Whether anything was sent.

        Raises:
            ValueError: the batch has more rows, or wants more than one token a row.
        """
        count, table, last = len(batch.table), batch.table, self._last
        if last is not None and last.version == batch.version:
            if not self._counted and np.array_equal(last.uniforms, batch.uniforms):
                return False
            if self._counted and np.array_equal(last.table["position"], table["position"]):
                return False
        if count > self._rows or not self.serves(batch):
            raise ValueError(
                f"a captured sampler takes up to {self._rows} rows with one token each, got {count} rows or "
                "several tokens"
            )
        self._last = batch
        packed = torch.zeros(len(self._packed), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        size = self._rows * TABLE.itemsize
        rows = packed.numpy()[:size].view(TABLE)
        rows["num_draws"] = -1
        rows[:count] = table
        if not self._counted:
            packed.numpy()[size:].view(np.float64)[:count] = batch.uniforms[:, 0]
        self._packed.copy_(packed, non_blocking=True)
        return True

    def forget(self) -> None:
        """Send the next batch whole, whatever was sent before."""
        self._last = None

    @torch.inference_mode()
    def launch(self, logits: Tensor) -> None:
        """Sample the first N rows, of logits [N, vocabulary]; this is what is captured."""
        count = len(logits)
        uniforms = None if self._uniforms is None else self._uniforms[:count]
        parameters = Parameters(table=self._table[:count], uniforms=uniforms)
        rows = LogitRows(logits, parameters, self._room)
        column, chosen = self._column[:count], self._chosen[:count]
        rows.choose(column, chosen)
        logprobs = self.logprobs[:count].view(-1, 1)
        rows.report(column, chosen, logprobs, self.tokens[:count], counted=self._counted)

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
