"""Runs a step plan on the device: page copies, one forward pass, candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.attention.base import AttentionMetadata
from engine.execution.alignment import Aligner, KeptQueries
from engine.execution.beams_ahead import BeamsOnDevice, resolved
from engine.execution.buffers import Buffer
from engine.execution.cuda_graphs import DecodeGraphs
from engine.execution.kv_cache import KVCache
from engine.execution.pending import LateResult, PendingStep
from engine.execution.pooler import NO_PARTS, Pooler, PoolingParts
from engine.execution.prompt_graphs import PromptGraphs, can_record_prompts
from engine.execution.recording import Recorder
from engine.execution.sampler import sample, score_prompt
from engine.execution.weighing import weighed
from engine.interface.outputs import Activation
from engine.model.experts import ExpertsFeedForward
from engine.model.heads import Embedder
from engine.model.inputs import QueryKeeper
from engine.model.kernels import LIBRARY, RowForm
from engine.model.labelled_spans import LabelledSpans
from engine.model.layers import CrossPages, Linear
from engine.model.spec import Lm
from engine.model.transformer import Transformer
from engine.scheduling.plan import EncoderBatch, Int32, PooledRow, SamplingBatch, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.execution.sampler_device import DeviceSampler, DeviceSamples


class _Logits:
    """Logits [N, vocabulary] of hidden states [N, hidden], computed at an invariant row count.

    Not a method of the runner: its holder would keep the runner alive, which keeps the holder.
    """

    def __init__(self, model: Transformer, min_rows: int):
        self._model, self._min_rows = model, min_rows

    def __call__(self, hidden: Tensor, form: RowForm = LIBRARY) -> Tensor:
        count = len(hidden)
        if count >= self._min_rows:
            return self._model.logits(hidden, form)
        hidden = torch.cat((hidden, hidden.new_zeros(self._min_rows - count, hidden.shape[1])))
        return self._model.logits(hidden)[:count]


class ModelRunner:
    """Owner of everything on the device.

    Args:
        model: the transformer, weights loaded.
        cache: the pages' tensors.
        max_num_batched_tokens: most tokens in a plan.
        min_rows: fewest rows of a matrix product (`engine.execution.invariance`).
        activation: what makes probabilities of the numbers of a head that classifies.
        parts: what makes vectors beside the model.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_num_batched_tokens: int,
        min_rows: int = 1,
        activation: Activation = "none",
        parts: PoolingParts = NO_PARTS,
    ):
        self.model = model
        self.cache = cache
        self.min_rows = min_rows
        device = model.device
        size = max(max_num_batched_tokens, min_rows)
        self._token_ids = Buffer(size, torch.int64, device)
        self._positions = Buffer(size, torch.int64, device)
        self._slots = Buffer(size, torch.int64, device)
        self._tables = Buffer(1024, torch.int32, device)
        self._cross_tables = Buffer(1024, torch.int32, device)
        self._types = Buffer(size, torch.int64, device)
        self._boxes = Buffer(4 * size, torch.int64, device)
        self._rotary = Buffer(size, torch.int64, device)
        self._sources = Buffer(size, torch.int64, device)
        # [S] tokens of the last step that sampled; graphs have a multiple of 8 rows.
        self._sampled = Buffer(-(-size // 8) * 8, torch.int32, device)
        self._candidates: StepResult | DeviceSamples | None = None  # of the step launched last, if it went well
        self._unfilled: Int32 | None = None  # the same, where the host knows them and no step has asked for them yet
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self._sampler: DeviceSampler | None = None
        if gpu.serves(device):
            from engine.execution.sampler_device import DeviceSampler

            self._sampler = DeviceSampler(device, first=self._sampled.data)
        self._beams = BeamsOnDevice(self._sampled.data)
        self._last_cross: tuple[int, CrossPages] | None = None  # of the plan of this version
        self._logits = _Logits(model, min_rows)
        self._pooler = Pooler(
            model.spec.head,
            self._logits,
            parts=parts,
            gather=_gather(model, min_rows),
            label_spans=model.head if isinstance(model.head, LabelledSpans) else None,
            activation=activation,
        )
        self._twin_pooler = None
        if model.twin is not None:
            apply = _Logits(model.twin, min_rows)
            self._twin_pooler = Pooler(model.twin.spec.head, apply, gather=_gather(model.twin, min_rows))

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin to compute a step. A CPU computes it here and now.

        Steps run in the order in which they were launched. Tokens that the plan does not know (`StepPlan.sources`)
        are those that the step launched before it sampled.
        """
        try:
            with gpu.current(self.model.device):
                return self._launch(plan)
        except BaseException:
            self._candidates = None
            if self.graphs is not None:
                self.graphs.reset()
            raise

    def _launch(self, plan: StepPlan) -> PendingStep:
        candidates_before, self._candidates = self._candidates, None
        search: Callable[[Tensor], None] | None = None
        if (searches := plan.searches) is not None:
            if candidates_before is None:
                raise RuntimeError("a search cannot go on: the step before it has left no candidates")
            if isinstance(candidates_before, StepResult):
                plan = resolved(plan, candidates_before, self.cache.block_size)
            else:
                width = plan.block_tables.shape[1]
                search = partial(self._beams.go_on, searches, candidates_before, self.cache, width)
        self.cache.copy_pages(plan.copies)
        if plan.sources is not None and self._unfilled is not None:
            self._sampled.fill(self._unfilled)
            self._unfilled = None
        if plan.encoder is not None:
            self._encode(plan.encoder)
        if self._twin_pooler is not None and plan.signals:
            return PendingStep(candidates=StepResult.empty(), sampling=None, pooled=self._pool_both(plan))
        recorded: DecodeGraphs | PromptGraphs | None = None
        if self.graphs is not None and self.graphs.serves(plan):
            recorded = self.graphs
        if recorded is None and self.prompt_graphs is not None and self.prompt_graphs.serves(plan):
            recorded = self.prompt_graphs
        kept = KeptQueries(plan) if plan.pooling and plan.pooling[0].pooling.alignment is not None else None
        if kept is None and recorded is not None:
            hidden = recorded.run(plan, search)
        else:
            hidden = self._hidden(plan, kept, search)
        candidates: StepResult | LateResult | None = None
        sampling = None
        if plan.sampling is not None:
            wanted = _rows(hidden, plan.sampling.rows, plan.num_tokens)
            candidates = None if self.graphs is None else self.graphs.sample(wanted, plan.sampling)
            if candidates is None:
                logits = self._logits(wanted)
                # A GPU computes all that meanwhile; a CPU is done, and fills masks by all of its threads.
                sampling = weighed(logits, plan.sampling.filled())
                candidates = self._sample(logits, sampling)
        step = PendingStep(candidates=candidates or StepResult.empty(), sampling=sampling or plan.sampling)
        if kept is not None:
            step.pooled = Aligner(self.model).align(plan, kept, self.cache)
        elif plan.pooling:
            step.pooled = self._pooler.pool(hidden, plan)
        if plan.prompt_logprobs is not None:
            wanted = hidden[_index(plan.prompt_logprobs.rows, hidden)]
            step.prompt_logprobs = score_prompt(self._logits, wanted, plan.prompt_logprobs)
        return step

    @torch.inference_mode()
    def warm(self) -> None:
        """Compile what copies, sampling, experts and products with quantised weights need, where it is compiled: no
        request should wait for that."""
        modules = [module for module in self.model.modules() if isinstance(module, ExpertsFeedForward)]
        with gpu.current(self.model.device):
            for module in {module.shape: module for module in modules}.values():
                module.warm(self._sampled.data.shape[0])
            for linear in self.model.modules():
                if isinstance(linear, Linear):
                    linear.warm(self.model.dtype)
            self.cache.warm()
            if self._sampler is not None and isinstance(self.model.spec.head, Lm):
                self._sampler.warm(self.model.vocab_size)
                self._beams.warm()

    def use_graphs(
        self,
        max_rows: int,
        record: Recorder,
        seconds: Callable[[Callable[[], None]], float] | None = None,
        typical: StepPlan | None = None,
    ) -> None:
        """Record decoding steps of up to max_rows rows, and run them so from now on.

        Args:
            seconds: what a graph takes; None: nothing is timed.
            typical: a step of one row to time (`DecodeGraphs.capture`).
        """
        graphs = DecodeGraphs(
            self.model,
            self.cache,
            self._sampled.data,
            max_rows=max_rows,
            record=record,
            min_rows=self.min_rows,
            seconds=seconds,
        )
        if self._sampler is not None and isinstance(self.model.spec.head, Lm):
            from engine.execution.graph_sampling import SamplingGraphs

            vocabulary, sampled = self.model.vocab_size, self._sampled.data
            graphs.sampling = SamplingGraphs(self._logits, graphs.hidden, sampled, vocabulary)
        graphs.capture(typical)
        self.graphs = graphs

    def use_prompt_graphs(self, max_rows: int, max_tokens: int, record: Recorder) -> None:
        """Record steps of up to max_rows rows that hold prompts, of up to max_tokens tokens as far as they can be, and
        run them so from now on."""
        if not can_record_prompts(self.model):
            return
        graphs = PromptGraphs(
            self.model,
            self.cache,
            self._sampled.data,
            max_rows=max_rows,
            max_tokens=max_tokens,
            record=record,
            min_rows=self.min_rows,
        )
        graphs.capture()
        self.prompt_graphs = graphs

    def _sample(self, logits: Tensor, batch: SamplingBatch) -> StepResult | LateResult:
        """Candidates; what they begin with is kept on the device, for the next step."""
        if self._sampler is None:
            self._candidates = known = sample(logits, batch)
            self._unfilled = known.tokens[:, 0]
            return known
        self._candidates = samples = self._sampler.sample(logits, batch)  # which leaves them there itself
        samples.fetch()
        return samples

    def _hidden(self, plan: StepPlan, keeper: QueryKeeper | None, search: Callable[[Tensor], None] | None) -> Tensor:
        return self._read(plan, self.model) if plan.unchunked else self._forward(plan, keeper, search)

    def _pool_both(self, plan: StepPlan) -> tuple[PooledRow, ...]:
        """The results for inputs some of which are signals: the model's twin reads those."""
        assert self.model.twin is not None
        assert self._twin_pooler is not None
        answers: dict[int, PooledRow] = {}
        for model, pooler in ((self.model, self._pooler), (self.model.twin, self._twin_pooler)):
            rows = [i for i, signal in enumerate(plan.signals) if (signal is not None) == (model is self.model.twin)]
            if rows:
                part = plan.of_rows(rows)
                found = pooler.pool(self._read(part, model), part)
                answers.update(zip([rows[wanted.row] for wanted in part.pooling], found, strict=True))
        return tuple(answers[wanted.row] for wanted in plan.pooling)

    def _read(self, plan: StepPlan, model: Transformer) -> Tensor:
        """Hidden states of whole inputs."""
        padded = max(plan.num_tokens, self.min_rows)
        return model.read(
            self._token_ids.fill(plan.token_ids, padded),
            self._positions.fill(plan.positions, padded),
            AttentionMetadata.of(plan.query_start, plan.context_lens, self.model.device),
            tokens=plan.num_tokens,
            min_rows=self.min_rows,
            types=None if plan.token_types is None else self._types.fill(plan.token_types, padded),
            boxes=None if plan.boxes is None else self._boxes.fill(plan.boxes, 4 * padded).view(-1, 4),
            rotary_positions=self._rotary_rows(plan, padded),
            signals=[gpu.upload(signal, self.model.device) for signal in plan.signals if signal is not None],
        )

    def _encode(self, batch: EncoderBatch) -> None:
        """Run the encoder, and store what the decoder reads of it in pages."""
        lengths = np.diff(batch.starts)
        padded = max(len(batch.token_ids), self.min_rows)
        positions = np.arange(len(batch.token_ids), dtype=np.int32) - np.repeat(batch.starts[:-1], lengths)
        self.model.encode(
            self._token_ids.fill(batch.token_ids, padded),
            self._positions.fill(positions, padded),
            self.cache.paged(self._tables.fill(np.zeros((0, 0), dtype=np.int32))),
            self._slots.fill(batch.slots),
            AttentionMetadata.build(lengths.tolist(), lengths.tolist(), self.model.device),
            self.min_rows,
            [gpu.upload(signal, self.model.device) for signal in batch.signals],
        )

    def _cross(self, plan: StepPlan, query_lens: list[int]) -> CrossPages | None:
        """The places where the plan's rows find what the encoder left, the rows of a request joined to one; rows of
        a trial step find nothing."""
        if self.model.encoder is None:
            return None
        if plan.cross is None:
            return CrossPages.empty(query_lens, self.model.device)
        if self._last_cross is not None and self._last_cross[0] == plan.version:
            return self._last_cross[1]  # the same rows decode again
        first = np.flatnonzero(np.diff(plan.cross.owners, prepend=-1))
        joined = np.add.reduceat(query_lens, first)
        pages = CrossPages(
            self._cross_tables.fill(plan.cross.tables[first]),
            AttentionMetadata.build(joined.tolist(), plan.cross.lens[first].tolist(), self.model.device),
        )
        self._last_cross = plan.version, pages
        return pages

    def _tokens(self, plan: StepPlan, padded: int) -> Tensor:
        """[padded] token ids; those that the host does not know are taken from what was sampled last."""
        tokens = self._token_ids.fill(plan.token_ids, padded)
        if plan.sources is not None:
            sources = self._sources.fill(plan.sources)
            known = tokens[: plan.num_tokens]
            torch.where(sources < 0, known, self._sampled.data[sources.clamp(min=0)], out=known)
        return tokens

    def _forward(
        self,
        plan: StepPlan,
        keeper: QueryKeeper | None = None,
        search: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        padded = max(plan.num_tokens, self.min_rows)
        tables = self._tables.fill(plan.block_tables)
        if search is not None:
            search(tables)
        metadata = AttentionMetadata.of(plan.query_start, plan.context_lens, self.model.device)
        hidden: Tensor = self.model(
            self._tokens(plan, padded),
            self._positions.fill(plan.positions, padded),
            self.cache.paged(tables),
            # Kernels for GPUs find slots themselves, from tables and positions.
            self._slots.fill(plan.slots) if self._sampler is None else None,
            metadata,
            self.min_rows,
            self._cross(plan, metadata.query_lens),
            self._rotary_rows(plan, padded),
            keeper=keeper,
        )
        return hidden

    def _rotary_rows(self, plan: StepPlan, padded: int) -> Tensor | None:
        """[padded] rows of rotary tables; None where they are the positions."""
        rotary_positions = plan.rotary_positions
        return None if rotary_positions is None else self._rotary.fill(rotary_positions, padded)


def _gather(model: Transformer, min_rows: int) -> Callable[[Tensor, Sequence[tuple[int, int]]], Tensor] | None:
    """The summary that a model's probe makes of hidden states; None if it has none."""
    probe = model.head.probe if isinstance(model.head, Embedder) else None
    return None if probe is None else partial(probe, min_rows=min_rows)


def _rows(hidden: Tensor, rows: Int32, num_tokens: int) -> Tensor:
    """Some tokens' hidden states, in their order; no copy where that is all of them."""
    if len(rows) < num_tokens:
        return hidden[_index(rows, hidden)]
    return hidden if hidden.shape[0] == num_tokens else hidden[:num_tokens]


def _index(rows: Int32, like: Tensor) -> Tensor:
    return gpu.upload(rows, like.device).long()
