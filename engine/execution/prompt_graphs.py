"""Steps with prompts as CUDA graphs, recorded for some numbers of tokens.

Python takes some 10 ms to start the kernels of all layers, and rows that decode beside a prompt would wait for that. A
graph starts them at once. It is recorded for a number of tokens, whichever rows these belong to: attention finds the
rows' lengths on the device, and the host knows only bounds on them. A step is filled up with tokens of a padding row,
in block 0. Steps with more tokens than are recorded run eagerly: a GPU takes longer for them than Python does.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata
from engine.execution.buffers import Buffer, PinnedRing, laid
from engine.execution.kv_cache import KVCache
from engine.execution.recording import Recorder
from engine.interface.token_sides import TokenSide
from engine.model.inputs import Inputs
from engine.model.transformer import Transformer
from engine.scheduling.plan import Int32, StepPlan

# Distances between recorded numbers of tokens, each up to a number of tokens: padding is at most a ninth from 512 on.
_APART = ((64, 512), (128, 1024), (256, 2048))
LARGEST = _APART[-1][1]


def token_sizes(max_tokens: int) -> list[int]:
    """The numbers of tokens that are recorded, ascending: as many as steps of up to max_tokens need, at most
    `LARGEST`."""
    sizes: list[int] = []
    before = 0
    for apart, last in _APART:
        sizes += range(before + apart, last + 1, apart)
        before = last
    return sizes[: bisect_left(sizes, min(max_tokens, LARGEST)) + 1]


def can_record_prompts(model: Transformer) -> bool:
    """Whether steps with prompts can be recorded: whether a step has nothing but tokens, their sides, positions and the
    decoder's own pages."""
    return model.decoder is not None and model.max_encoder_len is None


class PromptGraphs:
    """The graphs of a decoder without an encoder, from tokens of any rows to their hidden states.

    Args:
        model, cache: the runner's.
        sampled: [at least max_rows] int32, the previous step's tokens.
        max_rows, max_tokens: the limits of a step; steps with more tokens than `LARGEST` are not served.
        record: makes a graph of a function.
        min_rows: minimum rows of a matrix product (`engine.execution.invariance`).
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        sampled: Tensor,
        *,
        max_rows: int,
        max_tokens: int,
        record: Recorder,
        min_rows: int = 1,
    ):
        self._model, self._cache, self._sampled, self._record = model, cache, sampled, record
        self._min_rows, self._max_rows = min_rows, max_rows
        self._rows = max_rows + 1  # the last row is padding
        self._longest = model.max_model_len
        blocks = math.ceil(self._longest / cache.block_size)
        sizes, most = token_sizes(max_tokens), self._rows * self._longest
        # A padding row is no longer than others may be.
        padded = [size - before <= self._longest for before, size in pairwise((0, *sizes))]
        self._sizes = [size for size, fits in zip(sizes, padded, strict=True) if fits and min_rows <= size <= most]
        top = max(self._sizes, default=0)
        self._sides = model.sides
        self._columns = 3 + sum(side.width for side in self._sides)  # tokens, sources, positions, numbers of sides
        length, device = self._columns * top + 2 * self._rows + 1, model.device
        self._state = torch.zeros(length, dtype=torch.int32, device=device)
        self._ring = PinnedRing(length, torch.int32, device)
        self._tables = torch.zeros(self._rows, blocks, dtype=torch.int32, device=device)
        self._landing = Buffer(1024, torch.int32, device)
        self._hidden = torch.zeros(top, model.spec.trunk.output_size, dtype=model.dtype, device=device)
        self._graphs: dict[int, Callable[[], None]] = {}
        self.num_replayed = 0  # number of steps that ran as a graph

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all graphs, the largest first; all rows are padding meanwhile, and write only to block 0."""
        for size in reversed(self._sizes):
            lens = np.array(self._lens(size), dtype=np.int32)
            self._send(self._padding(size), lens, lens)
            self._graphs[size] = self._record(self._step(size))
        self._cache.clear_scratch()

    def serves(self, plan: StepPlan) -> bool:
        """Whether the plan has no more tokens and rows than are recorded, and no encoder inputs."""
        return (
            bool(self._graphs)
            and 0 < plan.num_tokens <= self._sizes[-1]
            and plan.num_rows <= self._max_rows
            and plan.encoder is None
            and plan.cross is None
            and not plan.unchunked
        )

    def run(self, plan: StepPlan, search: Callable[[Tensor], None] | None = None) -> Tensor:
        """Hidden states [T, features] of a plan that this serves; valid until the next step. `search` is as in
        `DecodeGraphs.run`."""
        count, rows = plan.num_tokens, plan.num_rows
        size = self._sizes[bisect_left(self._sizes, count)]
        fixed = self._padding(size)
        fixed[0, :count], fixed[2, :count] = plan.token_ids, plan.positions
        if plan.sources is not None:
            fixed[1, :count] = plan.sources
        for side, place in self._places():
            if side.name in plan.sides:
                fixed[place, :count] = plan.sides[side.name].T
        lens, contexts = np.zeros((2, self._rows), dtype=np.int32)
        lens[:rows], contexts[:rows] = np.diff(plan.query_start), plan.context_lens
        lens[-1] = contexts[-1] = size - count
        self._send(fixed, lens, contexts)
        width = plan.block_tables.shape[1]
        self._tables[:rows, :width].copy_(self._landing.fill(plan.block_tables))
        if search is not None:
            search(self._tables)
        self._graphs[size]()
        self.num_replayed += 1
        return self._hidden[:count]

    def _send(self, fixed: Int32, lens: Int32, contexts: Int32) -> None:
        starts = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(lens, dtype=np.int32)))
        values = np.concatenate((fixed.ravel(), starts, contexts))
        self._ring.send(values, self._state[: len(values)])

    def _padding(self, size: int) -> Int32:
        """The values [columns, size] of padding tokens."""
        fixed = np.zeros((self._columns, size), dtype=np.int32)
        fixed[1] = -1
        for side, place in self._places():
            fixed[place] = side.default
        return fixed

    def _places(self) -> Iterator[tuple[TokenSide, slice]]:
        """The columns of each side's numbers."""
        first = 3
        for side in self._sides:
            yield side, slice(first, first + side.width)
            first += side.width

    def _lens(self, size: int) -> list[int]:
        """Lengths of rows with this many tokens in total."""
        whole, left = divmod(size, self._longest)
        return [*[self._longest] * whole, left, *[0] * self._rows][: self._rows]

    def _step(self, size: int) -> Callable[[], None]:
        """The work of a graph of `size` tokens."""
        end = self._columns * size
        fixed = self._state[:end].view(self._columns, size)
        tokens, sources, positions = fixed[:3]
        sides = {side.name: laid(side, fixed[place]) for side, place in self._places()}
        starts = self._state[end : end + self._rows + 1]
        contexts = self._state[end + self._rows + 1 : end + 2 * self._rows + 1]
        caches = self._cache.views(self._tables)
        metadata = AttentionMetadata(
            query_lens=self._lens(size),
            context_lens=[self._longest] * self._rows,
            query_start=starts,
            context=contexts,
            cache={},
            max_context=self._longest,
            max_queries=size,
        )

        def step() -> None:
            ids = torch.where(sources >= 0, self._sampled[sources.clamp_min(0)], tokens)
            hidden = self._model(
                Inputs(
                    token_ids=ids,
                    positions=positions,
                    metadata=metadata,
                    tokens=size,
                    min_rows=self._min_rows,
                    caches=caches,
                    sides=sides,
                )
            )
            self._hidden[:size].copy_(hidden)
            metadata.cache.clear()  # what is computed once per step is part of the graph

        return step
