"""Model kinds: how the models of each kind compute a plan.

A runner has one kind. The kind turns a plan into the `Inputs` of a stack, says what a sequence needs in memory, and
pools hidden states. Everything else in a step is the same for all models, and belongs to the runner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from engine.backends import triton as gpu
from engine.backends.attention.base import AttentionMetadata
from engine.execution.alignment import Aligner, KeptQueries
from engine.execution.buffers import Buffer, SideBuffers
from engine.execution.image_vectors import ImageVectors, crop_work
from engine.execution.kv_cache import KVCache
from engine.execution.logits import Logits
from engine.execution.placed_angles import place_angles
from engine.execution.pooler import NO_PARTS, Pooler, PoolingParts
from engine.interface.outputs import Activation
from engine.interface.vision import VisionInfo
from engine.model.heads import Embedder
from engine.model.inputs import Inputs
from engine.model.labelled_spans import LabelledSpans
from engine.model.layers import CrossPages
from engine.model.transformer import Transformer
from engine.scheduling.needs import SequenceNeeds, adapters_of
from engine.scheduling.plan import EncoderBatch, PooledRow, PoolingRow, StepPlan

Search = Callable[[Tensor], None]
"""Reorders block tables on the device for beams that the host does not know (`BeamsOnDevice`)."""


class Recorded(Protocol):
    """A recorded step."""

    def run(self, plan: StepPlan, search: Search | None = None) -> Tensor:
        """Hidden states of the plan's tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """A plan after its forward pass."""

    hidden: Tensor | None  # [at least T, features]; None if rows have no common width, in which case nothing reads them
    pool: Callable[[], tuple[PooledRow, ...]]  # results of the plan's `pooling`


class StepBuffers:
    """Device memory for a plan's arrays.

    Args:
        size: number of tokens of a typical step.
        sampled: [S] tokens of the last step that sampled.
    """

    def __init__(self, size: int, sampled: Tensor):
        device = sampled.device
        self.token_ids, self.positions, self.slots, self.sources = (Buffer(size, torch.int64, device) for _ in range(4))
        self.tables, self.memories = (Buffer(1024, torch.int32, device) for _ in range(2))
        self.sides = SideBuffers(size, device)
        self._sampled = sampled

    def tokens(self, plan: StepPlan, padded: int) -> Tensor:
        """[padded] token ids; ids that the host does not know are taken from the last sampled tokens."""
        tokens = self.token_ids.fill(plan.token_ids, padded)
        if plan.sources is not None:
            sources = self.sources.fill(plan.sources)
            known = tokens[: plan.num_tokens]
            torch.where(sources < 0, known, self._sampled[sources.clamp(min=0)], out=known)
        return tokens


class ModelKind(ABC):
    """The models of one kind.

    Args:
        pooler: pools its hidden states.
        min_rows: minimum rows of a matrix product (`engine.execution.invariance`).
    """

    def __init__(self, model: Transformer, buffers: StepBuffers, pooler: Pooler, min_rows: int):
        self.model, self.buffers, self.pooler, self.min_rows = model, buffers, pooler, min_rows
        self._own_heads: dict[int, Pooler] = {}  # by the slot of the adapter that has one
        self._finds_slots = gpu.serves(model.device)  # kernels compute them from tables and positions

    @property
    @abstractmethod
    def needs(self) -> SequenceNeeds:
        """The memory needs of a sequence, and the facts that make prefixes equal."""

    @abstractmethod
    def prepare(self, plan: StepPlan, cache: KVCache, search: Search | None = None) -> Inputs:
        """The inputs of the stack that the head reads."""

    def run(self, plan: StepPlan, cache: KVCache, search: Search | None = None) -> Tensor:
        """Hidden states [Tp, features] of a plan, not recorded."""
        hidden: Tensor = self.model(self.prepare(plan, cache, search))
        return hidden

    def compute(self, plan: StepPlan, cache: KVCache, recorded: Recorded | None, search: Search | None) -> Computed:
        """The forward pass; `recorded` is a recording that serves the plan."""
        hidden = self.run(plan, cache, search) if recorded is None else recorded.run(plan, search)
        return Computed(hidden, partial(self._pooled, hidden, plan))

    def use_head(self, slot: int, head: nn.Module | None) -> None:
        """From now on, pool with an adapter's own head, or without it again."""
        self._own_heads.pop(slot, None)
        if head is not None:
            self._own_heads[slot] = self.pooler.with_head(Logits(self.model, self.min_rows, head))

    def _pooled(self, hidden: Tensor, plan: StepPlan) -> tuple[PooledRow, ...]:
        slots = adapters_of(plan.sides)
        if not self._own_heads or slots is None:
            return self.pooler.pool(hidden, plan)
        by_slot: dict[int, list[PoolingRow]] = {}
        for row in plan.pooling:
            slot = int(slots[plan.query_start[row.row]])
            by_slot.setdefault(slot if slot in self._own_heads else 0, []).append(row)
        answers: dict[int, PooledRow] = {}
        for slot, rows in by_slot.items():
            found = self._own_heads.get(slot, self.pooler).pool(hidden, replace(plan, pooling=tuple(rows)))
            answers.update((row.row, answer) for row, answer in zip(rows, found, strict=True))
        return tuple(answers[row.row] for row in plan.pooling)


class Encoder(ModelKind):
    """Models that read whole inputs, and store nothing in pages."""

    @property
    def needs(self) -> SequenceNeeds:
        return SequenceNeeds(paged=False, rotary_shifts=self.model.rotary_shifts)

    def prepare(self, plan: StepPlan, cache: KVCache, search: Search | None = None) -> Inputs:
        padded, device = max(plan.num_tokens, self.min_rows), self.model.device
        return Inputs(
            token_ids=self.buffers.token_ids.fill(plan.token_ids, padded),
            positions=self.buffers.positions.fill(plan.positions, padded),
            metadata=AttentionMetadata.of(plan.query_start, plan.context_lens, device),
            tokens=plan.num_tokens,
            min_rows=self.min_rows,
            sides=self.buffers.sides.fill(plan.sides, padded),
            signals=[gpu.upload(signal, device) for signal in plan.signals if signal is not None],
        )


class Decoder(ModelKind):
    """Models that continue their own tokens, whose keys and values are stored in pages. `images`: makes vectors of
    images among the tokens; None: the model reads none."""

    images: ImageVectors | None = None
    kept: Sequence[Tensor] = ()  # of the last step that was not recorded (`Inputs.kept`)

    @property
    def needs(self) -> SequenceNeeds:
        needs = SequenceNeeds(
            window=self.model.spec.attention_span,
            rotary_shifts=self.model.rotary_shifts,
            state_size=sum(self.model.spec.state_sizes),
        )
        if self.images is None:
            return needs
        return replace(needs, crop_work=crop_work(self.model), kept_vectors=self.images.most_vectors)

    def prepare(self, plan: StepPlan, cache: KVCache, search: Search | None = None) -> Inputs:
        padded, buffers = max(plan.num_tokens, self.min_rows), self.buffers
        tables = buffers.tables.fill(plan.block_tables)
        if search is not None:
            search(tables)
        metadata = AttentionMetadata.of(plan.query_start, plan.context_lens, self.model.device, plan.two_way)
        images, sides = None, plan.sides
        if plan.images:
            assert self.images is not None
            images = self.images.of(plan.images)
            sides = place_angles(plan, self.model)
        inputs = Inputs(
            token_ids=buffers.tokens(plan, padded),
            positions=buffers.positions.fill(plan.positions, padded),
            metadata=metadata,
            tokens=plan.num_tokens,
            min_rows=self.min_rows,
            caches=cache.paged(tables),
            slots=None if self._finds_slots else buffers.slots.fill(plan.slots),
            states=None if cache.states is None else cache.states.rows(plan.states),
            cross=self.cross(plan, metadata.query_lens),
            sides=buffers.sides.fill(sides, padded),
            images=images,
        )
        self.kept = inputs.kept
        return inputs

    def use_images(self, info: VisionInfo) -> None:
        """Read images among tokens from now on; `info`: of the model's."""
        self.images = ImageVectors(self.model, info, self.min_rows)

    def cross(self, plan: StepPlan, query_lens: list[int]) -> CrossPages | None:
        """The pages of the encoder's output for each row of the plan."""
        return None


class Following(Decoder):
    """Decoders that read another model's hidden states beside their tokens."""

    given: Tensor | None = None  # [T, features] hidden states of the next step; None: zeros

    def prepare(self, plan: StepPlan, cache: KVCache, search: Search | None = None) -> Inputs:
        inputs = super().prepare(plan, cache, search)
        if self.given is None:
            return inputs
        assert len(self.given) == plan.num_tokens
        padding = len(inputs.token_ids) - plan.num_tokens
        return replace(inputs, given=nn.functional.pad(self.given, (0, 0, 0, padding)))


class EncoderDecoder(Decoder):
    """Decoders that read an encoder's output for another input, in separate pages."""

    _last: tuple[int, CrossPages] | None = None  # for the plan of this version

    @property
    def needs(self) -> SequenceNeeds:
        return replace(super().needs, encoder_length=self.model.max_encoder_len or 0)

    def prepare(self, plan: StepPlan, cache: KVCache, search: Search | None = None) -> Inputs:
        if plan.encoder is not None:
            self.model.encode(self.prepare_encoder(plan.encoder, cache))
        return super().prepare(plan, cache, search)

    def prepare_encoder(self, batch: EncoderBatch, cache: KVCache) -> Inputs:
        """The encoder's inputs, which it reads whole."""
        lengths, buffers, device = np.diff(batch.starts), self.buffers, self.model.device
        padded = max(len(batch.token_ids), self.min_rows)
        positions = np.arange(len(batch.token_ids), dtype=np.int32) - np.repeat(batch.starts[:-1], lengths)
        return Inputs(
            token_ids=buffers.token_ids.fill(batch.token_ids, padded),
            positions=buffers.positions.fill(positions, padded),
            metadata=AttentionMetadata.build(lengths.tolist(), lengths.tolist(), device),
            tokens=len(batch.token_ids),
            min_rows=self.min_rows,
            caches=cache.paged(buffers.tables.fill(np.zeros((0, 0), dtype=np.int32))),
            slots=buffers.slots.fill(batch.slots),
            sides=buffers.sides.fill(batch.sides, padded),
            signals=[gpu.upload(signal, device) for signal in batch.signals],
        )

    def cross(self, plan: StepPlan, query_lens: list[int]) -> CrossPages:
        """The pages of the encoder's output for each row of the plan, with the rows of a request joined into one; empty
        for a trial step."""
        if plan.cross is None:
            return CrossPages.empty(query_lens, self.model.device)
        if self._last is not None and self._last[0] == plan.version:
            return self._last[1]  # the same rows decode again
        first = np.flatnonzero(np.diff(plan.cross.owners, prepend=-1))
        joined = np.add.reduceat(query_lens, first)
        pages = CrossPages(
            self.buffers.memories.fill(plan.cross.tables[first]),
            AttentionMetadata.build(joined.tolist(), plan.cross.lens[first].tolist(), self.model.device),
        )
        self._last = plan.version, pages
        return pages


class Speech(EncoderDecoder):
    """Encoder-decoder models that also find where in the audio their tokens are spoken."""

    def compute(self, plan: StepPlan, cache: KVCache, recorded: Recorded | None, search: Search | None) -> Computed:
        if not plan.pooling or plan.pooling[0].pooling.alignment is None:
            return super().compute(plan, cache, recorded, search)
        kept = KeptQueries(plan)  # no recorded step exposes its queries
        hidden = self.model(replace(self.prepare(plan, cache, search), keeper=kept))
        return Computed(hidden, partial(Aligner(self.model).align, plan, kept, cache))


class TwoTowers(Encoder):
    """An encoder of texts and its twin, an encoder of signals, whose vectors are compared."""

    def __init__(self, model: Transformer, buffers: StepBuffers, pooler: Pooler, min_rows: int):
        super().__init__(model, buffers, pooler, min_rows)
        assert model.twin is not None
        self.twin = Encoder(model.twin, buffers, _pooler(model.twin, min_rows), min_rows)

    def compute(self, plan: StepPlan, cache: KVCache, recorded: Recorded | None, search: Search | None) -> Computed:
        if not plan.signals:
            return super().compute(plan, cache, recorded, search)
        return Computed(None, partial(self._pool, plan, cache))

    def _pool(self, plan: StepPlan, cache: KVCache) -> tuple[PooledRow, ...]:
        answers: dict[int, PooledRow] = {}
        for tower in (self, self.twin):
            rows = [i for i, signal in enumerate(plan.signals) if (signal is not None) == (tower is self.twin)]
            if rows:
                part = plan.of_rows(rows)
                found = tower.pooler.pool(tower.run(part, cache), part)
                answers.update(zip([rows[wanted.row] for wanted in part.pooling], found, strict=True))
        return tuple(answers[wanted.row] for wanted in plan.pooling)


def kind_of(
    model: Transformer, buffers: StepBuffers, min_rows: int, activation: Activation, parts: PoolingParts
) -> ModelKind:
    """The kind of a model.

    Args:
        activation: turns the numbers of a classification head into probabilities.
        parts: the parts that compute vectors beside the model.
    """
    kind: type[ModelKind] = TwoTowers if model.twin is not None else Encoder
    if model.decoder is not None:
        heard = model.spec.signal is not None and model.spec.signal.kind == "audio"
        kind = Decoder if model.encoder is None else Speech if heard else EncoderDecoder
        if getattr(model.spec.trunk.embedding, "joined", None) is not None:
            kind = Following
    return kind(model, buffers, _pooler(model, min_rows, activation, parts), min_rows)


def _pooler(
    model: Transformer, min_rows: int, activation: Activation = "none", parts: PoolingParts = NO_PARTS
) -> Pooler:
    probe = model.head.probe if isinstance(model.head, Embedder) else None
    gather: Callable[[Tensor, Sequence[tuple[int, int]]], Tensor] | None = None
    if probe is not None:
        gather = partial(probe, min_rows=min_rows)
    return Pooler(
        model.spec.head,
        Logits(model, min_rows),
        parts=parts,
        gather=gather,
        label_spans=model.head if isinstance(model.head, LabelledSpans) else None,
        activation=activation,
    )
