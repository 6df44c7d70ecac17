"""Logits and sampling of decoding steps as CUDA graphs, for steps in which each row needs just one token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.execution.one_row import FormRecorder
from engine.execution.sampler_captured import CapturedSampler
from engine.model.row_form import RowForm
from engine.scheduling.plan import Int32, LateResult, SamplingBatch


class SamplingGraphs:
    """The graphs of the work after the hidden states of a recorded step.

    The device makes random numbers from positions that it counts itself, so a steady step sends nothing.

    Args:
        logits: computes logits from hidden states.
        hidden: [maximum rows, features] memory in which a recorded step leaves them.
        sampled: [maximum rows] int32 memory in which the next step looks for its tokens.

    Attributes:
        num_sent: number of these steps that sent something to the device.
    """

    def __init__(self, logits: Callable[[Tensor, RowForm], Tensor], hidden: Tensor, sampled: Tensor, vocabulary: int):
        self._logits, self._hidden, self._sampled = logits, hidden, sampled
        self._sampler = CapturedSampler(len(hidden), vocabulary, hidden.device)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._sent: SamplingBatch | None = None
        self._expected: Int32 = np.zeros(0, dtype=np.int32)  # the positions that the device has reached
        self.num_replayed = self.num_sent = 0

    @torch.inference_mode()
    def capture(self, size: int, record: FormRecorder) -> None:
        """Record the sampling of this many rows."""
        self._graphs[size] = record(lambda form: self._step(size, form))

    def logits(self, size: int, form: RowForm) -> Tensor:
        """The logits of the first rows' current hidden states."""
        return self._logits(self._hidden[:size], form)

    def serves(self, batch: SamplingBatch) -> bool:
        """Whether each row needs just one token."""
        return self._sampler.serves(batch)

    def run(self, batch: SamplingBatch, size: int) -> LateResult:
        """Sample a batch that this serves, as the first of `size` rows."""
        if not self._follows(batch):
            self._sampler.put(batch)
            self._sent, self._expected = batch, batch.table["position"]
            self.num_sent += 1
        self._graphs[size]()
        self._expected = self._expected + (batch.table["num_draws"] > 0)
        self.num_replayed += 1
        return self._sampler.fetch(len(batch.rows))

    def reset(self) -> None:
        """Forget what the device has been sent."""
        self._sent = None

    def _follows(self, batch: SamplingBatch) -> bool:
        """Whether the device has what this batch needs: it was sent, and the device has counted to its positions
        since."""
        if self._sent is None or self._sent.version != batch.version:
            return False
        table = batch.table
        # If no row draws, nothing is counted.
        return np.array_equal(table["position"], self._expected) or not (table["temperature"] > 0).any()

    def _step(self, size: int, form: RowForm) -> None:
        self._sampler.launch(self.logits(size, form))
        self._sampled[:size].copy_(self._sampler.tokens[:size])
