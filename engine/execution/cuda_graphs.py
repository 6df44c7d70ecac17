"""Decoding steps as CUDA graphs: recorded once for each number of rows, then started with one call.

If few rows decode, a layer's kernels finish sooner than Python can start them. A graph starts all of a step's kernels
at once, but with the same arguments each time. So a step's inputs lie at fixed addresses (`DecodeState`), rows are
padded to the next recorded number, and attention divides the keys that it finds. Steps with prompts have separate
graphs (`engine.execution.prompt_graphs`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata
from engine.execution.decode_state import DecodeState
from engine.execution.kv_cache import KVCache
from engine.execution.one_row import FormRecorder, OneRow
from engine.execution.recording import Recorder
from engine.model.inputs import Inputs
from engine.model.layers import CrossPages
from engine.model.row_form import LIBRARY, RowForm
from engine.model.transformer import Transformer
from engine.scheduling.plan import LateResult, SamplingBatch, StepPlan

if TYPE_CHECKING:
    from engine.execution.graph_sampling import SamplingGraphs


def graph_sizes(max_rows: int) -> list[int]:
    """The numbers of rows that are recorded: 1, 2, 4, 8, then every multiple of 8 that max_rows needs."""
    top = math.ceil(max_rows / 8) * 8
    return [size for size in (1, 2, 4) if size < max_rows] + (
        list(range(8, top + 1, 8)) if max_rows > 4 else [1 << (max_rows - 1).bit_length()]
    )


def _divisible(plan: StepPlan) -> bool:
    """Whether each token may be a row."""
    return plan.cross is None and plan.states is None and plan.searches is None


def _one_by_one(plan: StepPlan) -> StepPlan:
    """The plan of the same step, with a row for each token. All rows write their keys and values before one attends. So
    a draft sees the tokens before it, in the pages that their rows share."""
    counts = np.diff(plan.query_start)
    return replace(
        plan,
        query_start=np.arange(plan.num_tokens + 1, dtype=np.int32),
        context_lens=plan.positions + 1,
        block_tables=np.repeat(plan.block_tables, counts, axis=0),
    )


class DecodeGraphs:
    """The graphs of a decoder, from sampled tokens to the hidden states of the next tokens.

    Args:
        model, cache: the runner's.
        sampled: [at least max_rows] int32, the previous step's tokens.
        record: makes a graph of a function.
        seconds: measures a graph; None: nothing is timed (`OneRow`).
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        sampled: Tensor,
        *,
        max_rows: int,
        record: Recorder,
        min_rows: int = 1,
        seconds: Callable[[Callable[[], None]], float] | None = None,
    ):
        self._model, self._cache, self._sampled, self._record = model, cache, sampled, record
        self._max_rows = max_rows  # maximum rows of a decoding step
        self._sizes = graph_sizes(max(max_rows, min_rows))
        self._sizes = [size for size in self._sizes if size >= min_rows]
        self._min_rows = min_rows  # minimum rows of a matrix product (`engine.execution.invariance`)
        size = cache.block_size
        memory_blocks = math.ceil((model.max_encoder_len or 0) / size)
        blocks = math.ceil(model.max_model_len / size)
        self.state = DecodeState(self._sizes[-1], blocks, memory_blocks, model.device, model.sides)
        features = model.spec.trunk.output_size
        # [maximum rows, features] memory for a step's hidden states
        self.hidden = torch.zeros(self._sizes[-1], features, dtype=model.dtype, device=model.device)
        self._starts = torch.arange(self._sizes[-1] + 1, dtype=torch.int32, device=model.device)
        self._graphs: dict[int, Callable[[], None]] = {}
        self.sampling: SamplingGraphs | None = None  # the recorded sampling that follows, if there is one
        self.one_row = OneRow(model, record, seconds)  # how one row was recorded
        self.num_replayed = 0  # number of steps that ran as a graph
        self._written = 0  # the slot of the recorded row

    @torch.inference_mode()
    def capture(self, typical: StepPlan | None = None) -> None:
        """Record all graphs, the largest first; the state is padding, so that they write only to block 0.

        Args:
            typical: a step of one row whose context is in the cache; ways to compute it are compared and timed on it.
                None: they are timed on padding, for which attention's result does not depend on queries and keys.
        """
        for size in reversed(self._sizes):
            if size == 1 and typical is not None:
                self.state.load(typical)
                self.state.inputs(1).moving.zero_()  # each replay computes the same
                self._written = int(typical.slots[0])
            self._graphs[size] = self._recorder(size, "layers")(self._step(size))
            if self.sampling is not None:
                self.sampling.capture(size, self._recorder(size, "logits"))
        self.reset()
        self._cache.clear_scratch()

    def serves(self, plan: StepPlan) -> bool:
        """Whether the plan has only rows that decode, perhaps with drafts."""
        sampling = plan.sampling
        return (
            bool(self._graphs)
            and sampling is not None
            and plan.num_tokens == len(sampling.rows) <= self._max_rows
            and (plan.num_tokens == plan.num_rows or _divisible(plan))
            and plan.encoder is None
            and plan.prompt_logprobs is None
            and not plan.pooling
            and not plan.unchunked
        )

    def run(self, plan: StepPlan, search: Callable[[Tensor], None] | None = None) -> Tensor:
        """Hidden states [R, features] of a plan that this serves; valid until the next step. `search`: changes the
        block tables [rows, blocks] as the plan's searches have chosen."""
        if plan.num_tokens > plan.num_rows:
            plan = _one_by_one(plan)
        self.state.load(plan)
        if search is not None and plan.searches is not None:
            search(self.state.tables)
            self.state.exchanged(plan.searches)
        size = self._size_of(plan.num_rows)
        self._graphs[size]()
        self.state.advanced()
        self.num_replayed += 1
        return self.hidden[: plan.num_rows]

    def sample(self, hidden: Tensor, batch: SamplingBatch) -> LateResult | None:
        """Candidates of hidden states [S, features] of an earlier step, in `hidden` or elsewhere; None if their
        sampling is not recorded."""
        count = len(batch.rows)
        if self.sampling is None or not 0 < count <= self._max_rows or not self.sampling.serves(batch):
            return None
        if hidden.data_ptr() != self.hidden.data_ptr():
            self.hidden[:count].copy_(hidden)
        return self.sampling.run(batch, self._size_of(count))

    def reset(self) -> None:
        """A step failed on the way: the device's state is unknown, and is sent again."""
        self.state.reset()
        if self.sampling is not None:
            self.sampling.reset()

    def _size_of(self, count: int) -> int:
        return self._sizes[bisect_left(self._sizes, count)]

    def _recorder(self, size: int, name: str) -> FormRecorder:
        def outcome(form: RowForm) -> list[Tensor]:
            if self.sampling is not None and name == "logits":
                return [self.sampling.logits(1, form)]
            # A row's own keys and values matter little in its own attention, but in that of later rows they are all
            # there is.
            block, place = divmod(self._written, self._cache.block_size)
            return [self.hidden[:1], *(tensor[block, place] for layer in self._cache.layers for tensor in layer)]

        if size > 1:
            return lambda function: self._record(lambda: function(LIBRARY))
        return self.one_row.recorder(name, outcome)

    def _step(self, size: int) -> Callable[[RowForm], None]:
        """The work of a graph of `size` rows."""
        inputs = self.state.inputs(size)
        caches = self._cache.views(inputs.tables)
        metadata = self._metadata(inputs.contexts, size, self._model.max_model_len)
        shapes, cross = [metadata], None
        if self._model.max_encoder_len is not None:
            cross = CrossPages(inputs.memories, self._metadata(inputs.memory_lens, size, self._model.max_encoder_len))
            shapes.append(cross.metadata)

        def step(form: RowForm) -> None:
            known = self._sampled[inputs.sources.clamp_min(0)]
            tokens = torch.where(inputs.sources >= 0, known, inputs.tokens)
            # Slots are computed on the device, from tables and positions.
            formed = replace(metadata, overlapping=form.overlapping)
            hidden = self._model(
                Inputs(
                    token_ids=tokens,
                    positions=inputs.positions,
                    metadata=formed,
                    tokens=size,
                    min_rows=self._min_rows,
                    caches=caches,
                    cross=cross,
                    sides=inputs.sides,
                    form=form,
                )
            )
            self.hidden[:size].copy_(hidden)
            inputs.advance()
            # What backends compute once per step is part of the graph and must not be kept, because lengths change.
            for shape in shapes:
                shape.cache.clear()

        return step

    def _metadata(self, contexts: Tensor, size: int, longest: int) -> AttentionMetadata:
        return AttentionMetadata(
            query_lens=[1] * size,
            context_lens=[longest] * size,
            query_start=self._starts[: size + 1],
            context=contexts,
            cache={},
            max_context=longest,
        )
