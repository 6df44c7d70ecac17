"""Logits and sampling of decoding steps as CUDA graphs, for steps in which each row wants one token and no more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.execution.one_row import FormRecorder
from engine.execution.pending import LateResult
from engine.execution.sampler_captured import CapturedSampler
from engine.model.kernels import RowForm
from engine.scheduling.plan import Int32, SamplingBatch


class SamplingGraphs:
    """The graphs of the work after the hidden states of a recorded step.

    Random numbers are made on the device, of positions that it counts itself: a steady step sends nothing.

    Args:
        logits: of hidden states.
        hidden: [most rows, features] where a recorded step leaves them.
        sampled: [most rows] int32 where the next step looks for its tokens.

    Attributes:
        num_replayed: steps that were sampled as a graph.
        num_sent: those for which the device had to be told something.
    """

    def __init__(self, logits: Callable[[Tensor, RowForm], Tensor], hidden: Tensor, sampled: Tensor, vocabulary: int):
        self._logits, self._hidden, self._sampled = logits, hidden, sampled
        self._sampler = CapturedSampler(len(hidden), vocabulary, hidden.device)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._sent: SamplingBatch | None = None
        self._expected: Int32 = np.zeros(0, dtype=np.int32)  # the positions that the device has counted to
        self.num_replayed = self.num_sent = 0

    @torch.inference_mode()
    def capture(self, size: int, record: FormRecorder) -> None:
        """Record the sampling of so many rows."""
        self._graphs[size] = record(lambda form: self._step(size, form))

    def logits(self, size: int, form: RowForm) -> Tensor:
        """The logits of the first rows' hidden states, as they lie there now."""
        return self._logits(self._hidden[:size], form)

    def serves(self, batch: SamplingBatch) -> bool:
        """Nothing is wanted but one token a row."""
        return self._sampler.serves(batch)

    def run(self, batch: SamplingBatch, size: int) -> LateResult:
        """Sample a batch that this serves, of the first of `size` rows."""
        if not self._follows(batch):
            self._sampler.forget()
            self._sent, self._expected = batch, batch.table["position"]
        assert self._sent is not None
        self.num_sent += self._sampler.put(self._sent)
        self._graphs[size]()
        self._expected = self._expected + (batch.table["num_draws"] > 0)
        self.num_replayed += 1
        return self._sampler.fetch(len(batch.rows))

    def reset(self) -> None:
        """Forget what the device was told."""
        self._sent = None
        self._sampler.forget()

    def _follows(self, batch: SamplingBatch) -> bool:
        """The device has what this batch wants: it was sent, and the device has counted to its positions since."""
        if self._sent is None or self._sent.version != batch.version:
            return False
        table = batch.table
        # Where no row draws, nothing counts.
        return np.array_equal(table["position"], self._expected) or not (table["temperature"] > 0).any()

    def _step(self, size: int, form: RowForm) -> None:
        self._sampler.launch(self.logits(size, form))
        self._sampled[:size].copy_(self._sampler.tokens[:size])
