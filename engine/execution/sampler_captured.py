"""The part of sampling that a CUDA graph can contain: one token per row, greedy or drawn, in any mixture.

The walk, the choice and the report are captured: four kernels whose grids depend only on the number of rows. The rows'
settings are in memory that does not move: a graph captured for a number of rows serves greedy rows, rows that draw and
unused rows. Random numbers are made from counters on the device, which a replay advances, so that a steady step sends
nothing at all.

`DeviceSampler` computes what is not captured: beams, reports of most probable or listed tokens and of ranks, several
draws per row, filters that only torch's sampler supports, and all changes to logits.
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
    """Samples up to `rows` rows with launches that a CUDA graph may contain.

    `sizes`: how kernels divide their work; tests use small sizes.

    Attributes:
        tokens: [rows] int32 the tokens sampled last, at an address that never changes; 0 in unused rows.
        logprobs: [rows] float32 under the model's own distribution, NaN for a row that failed.
        positions: [rows] int32 the output position of the next draw; each launch advances them.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device, *, sizes: Sizes = SIZES):
        self._rows, self._device = rows, device
        self._room = Workspace(rows, vocabulary, device, sizes)
        self._packed = torch.zeros(rows * TABLE.itemsize, dtype=torch.uint8, device=device)
        self._table = self._packed.view(torch.int32).view(rows, WORDS)
        self._table[:, word("num_draws")] = -1
        # Rows are whole vectors, so that all begin where kernels expect memory to begin.
        self._results = torch.zeros((3, -(-rows // 4) * 4), dtype=torch.int32, device=device)
        self._column = self._results[2].view(-1, 1)
        self._chosen = torch.zeros((rows, 1), dtype=torch.float32, device=device)
        self.tokens, self.logprobs = self._results[0, :rows], self._results[1, :rows].view(torch.float32)
        self.positions = self._table[:, word("position")]

    @staticmethod
    def serves(batch: SamplingBatch) -> bool:
        """Whether a batch needs just one token per row."""
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

    def put(self, batch: SamplingBatch) -> None:
        """Tell the device what the next launches sample, in one asynchronous copy. `batch`: S rows; rows after them are
        unused. Raises ValueError if the batch has more rows, or needs more than one token per row."""
        count = len(batch.table)
        if count > self._rows or not self.serves(batch):
            raise ValueError(
                f"a captured sampler takes up to {self._rows} rows with one token each, got {count} rows or "
                "several tokens"
            )
        packed = torch.zeros(len(self._packed), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        rows = packed.numpy().view(TABLE)
        rows["num_draws"] = -1
        rows[:count] = batch.table
        self._packed.copy_(packed, non_blocking=True)

    @torch.inference_mode()
    def launch(self, logits: Tensor) -> None:
        """Sample the first N rows, from logits [N, vocabulary]; this is what is captured."""
        count = len(logits)
        rows = LogitRows(logits, Parameters(table=self._table[:count], uniforms=None), self._room)
        column, chosen = self._column[:count], self._chosen[:count]
        rows.choose(column, chosen)
        logprobs = self.logprobs[:count].view(-1, 1)
        rows.report(column, chosen, logprobs, self.tokens[:count], counted=True)

    def fetch(self, rows: int) -> Fetched:
        """Start the copy of the first rows' results to the host, on the current stream."""
        return Fetched(Download(self._results[:2]), rows)


class Fetched:
    """Results on their way to the host."""

    def __init__(self, download: Download, rows: int):
        self._download, self._rows = download, rows

    @property
    def ready(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._download.ready

    def result(self) -> StepResult:
        """The values, with one column; waits until they have arrived."""
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
