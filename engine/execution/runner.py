"""Runs a step plan on the device: page copies, one forward pass, candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from engine.attention.base import AttentionMetadata
from engine.execution.kv_cache import KVCache
from engine.execution.pooler import Pooler
from engine.execution.sampler import sample, score_prompt
from engine.model.layers import CrossPages
from engine.model.transformer import Transformer
from engine.outputs import Activation
from engine.scheduling.plan import EncoderBatch, Int32, StepPlan, StepResult


class _Buffer:
    """Device memory that one of a plan's arrays goes to, made once and reused in every step."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        self._data = torch.zeros(size, dtype=dtype, device=device)

    def fill(self, values: Int32, length: int | None = None) -> Tensor:
        """The values on the device, followed by zeros up to `length`."""
        count = len(values)
        length = count if length is None else length
        if length > len(self._data):
            self._data = torch.zeros(2 * length, dtype=self._data.dtype, device=self._data.device)
        self._data[:count].copy_(torch.from_numpy(values))
        self._data[count:length].zero_()
        return self._data[:length]


class ModelRunner:
    """Owner of everything on the device.

    Args:
        model: the transformer, weights loaded.
        cache: the pages' tensors.
        max_num_batched_tokens: most tokens in a plan.
        min_rows: fewest rows of a matrix product (`engine.execution.invariance`).
        activation: what makes probabilities of the numbers of a head that classifies.
        project: what maps pooled vectors (`engine.model.projection`).
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_num_batched_tokens: int,
        min_rows: int = 1,
        activation: Activation = "none",
        project: nn.Module | None = None,
    ):
        self.model = model
        self.cache = cache
        self.min_rows = min_rows
        device = model.device
        size = max(max_num_batched_tokens, min_rows)
        self._token_ids = _Buffer(size, torch.int64, device)
        self._positions = _Buffer(size, torch.int64, device)
        self._slots = _Buffer(size, torch.int64, device)
        self._tables = _Buffer(1024, torch.int32, device)
        self._cross_tables = _Buffer(1024, torch.int32, device)
        self._types = _Buffer(size, torch.int64, device)
        self._pooler = Pooler(model.spec.head, self._logits, project=project, activation=activation)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        self.cache.copy_pages(plan.copies)
        if plan.encoder is not None:
            self._encode(plan.encoder)
        hidden = self._read(plan) if plan.whole else self._forward(plan)
        if plan.sampling is not None:
            result = sample(self._logits(hidden[_index(plan.sampling.rows, hidden)]), plan.sampling)
        else:
            result = StepResult.empty()
        if plan.pooling:
            result = replace(result, pooled=self._pooler.pool(hidden, plan))
        if plan.prompt_logprobs is not None:
            wanted = hidden[_index(plan.prompt_logprobs.rows, hidden)]
            result = replace(result, prompt_logprobs=score_prompt(self._logits, wanted, plan.prompt_logprobs))
        return result

    def _read(self, plan: StepPlan) -> Tensor:
        """Hidden states of whole inputs."""
        padded = max(plan.num_tokens, self.min_rows)
        lengths = np.diff(plan.query_start).tolist()
        positions = plan.positions
        if self.model.unplaced is not None:
            positions = _placed(plan, self.model.unplaced)
        return self.model.read(
            self._token_ids.fill(plan.token_ids, padded),
            self._positions.fill(positions, padded),
            AttentionMetadata.build(lengths, lengths, self.model.device),
            tokens=plan.num_tokens,
            min_rows=self.min_rows,
            types=None if plan.token_types is None else self._types.fill(plan.token_types, padded),
        )

    def _encode(self, batch: EncoderBatch) -> None:
        """Run the encoder, and store what the decoder reads of it in pages."""
        lengths = np.diff(batch.starts)
        padded = max(len(batch.token_ids), self.min_rows)
        positions = np.arange(len(batch.token_ids), dtype=np.int32) - np.repeat(batch.starts[:-1], lengths)
        self.model.encode(
            self._token_ids.fill(batch.token_ids, padded),
            self._positions.fill(positions, padded),
            self.cache.paged(self._tables.fill(batch.starts[:0]).view(0, 0)),
            self._slots.fill(batch.slots),
            AttentionMetadata.build(lengths.tolist(), lengths.tolist(), self.model.device),
            self.min_rows,
        )

    def _cross(self, plan: StepPlan, query_lens: list[int]) -> CrossPages | None:
        """Where the plan's rows find what the encoder left, the rows of a request joined to one; rows of a trial
        step find nothing."""
        if self.model.encoder is None:
            return None
        if plan.cross is None:
            return CrossPages.empty(query_lens, self.model.device)
        first = np.flatnonzero(np.diff(plan.cross.owners, prepend=-1))
        tables, joined = plan.cross.tables[first], np.add.reduceat(query_lens, first)
        return CrossPages(
            self._cross_tables.fill(tables.reshape(-1)).view(tables.shape),
            AttentionMetadata.build(joined.tolist(), plan.cross.lens[first].tolist(), self.model.device),
        )

    def _forward(self, plan: StepPlan) -> Tensor:
        padded = max(plan.num_tokens, self.min_rows)
        tables = self._tables.fill(plan.block_tables.reshape(-1)).view(plan.block_tables.shape)
        query_lens = np.diff(plan.query_start).tolist()
        metadata = AttentionMetadata.build(query_lens, plan.context_lens.tolist(), self.model.device)
        hidden: Tensor = self.model(
            self._token_ids.fill(plan.token_ids, padded),
            self._positions.fill(plan.positions, padded),
            self.cache.paged(tables),
            self._slots.fill(plan.slots),
            metadata,
            self.min_rows,
            self._cross(plan, query_lens),
        )
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocabulary] of hidden states [N, hidden], computed at an invariant row count."""
        count = len(hidden)
        if count < self.min_rows:
            hidden = torch.cat((hidden, hidden.new_zeros(self.min_rows - count, hidden.shape[1])))
        return self.model.logits(hidden)[:count]


def _placed(plan: StepPlan, unplaced: int) -> Int32:
    """Positions that count only tokens which have one; the others are before all (`Learned.unplaced`)."""
    counts = plan.token_ids != unplaced
    total = np.cumsum(counts, dtype=np.int32)
    first = plan.query_start[:-1]
    before = np.repeat((total - counts)[first], np.diff(plan.query_start))
    return np.where(counts, total - before - 1, -1).astype(np.int32)


def _index(rows: Int32, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(like.device, torch.int64)
