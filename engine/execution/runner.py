"""Runs a step plan on the device: page copies, one forward pass, candidates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.backends import triton as gpu
from engine.execution.adapters import LoadedAdapters
from engine.execution.beams_ahead import BeamsOnDevice, resolved
from engine.execution.buffers import Buffer
from engine.execution.cuda_graphs import DecodeGraphs
from engine.execution.divided_sampling import DividedSampler
from engine.execution.kv_cache import KVCache
from engine.execution.logits import Logits, hidden_of
from engine.execution.model_kinds import Decoder, Search, StepBuffers, kind_of
from engine.execution.pending import LateStep
from engine.execution.pooler import NO_PARTS, PoolingParts
from engine.execution.prompt_graphs import PromptGraphs, can_record_prompts
from engine.execution.recording import Recorder
from engine.execution.sampler import sample, score_prompt
from engine.execution.weighing import weighed
from engine.interface.outputs import Activation
from engine.interface.vision import VisionInfo
from engine.model.spec import Lm
from engine.model.transformer import Transformer
from engine.scheduling.plan import Int32, LateResult, SamplingBatch, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.execution.sampler_device import DeviceSampler, DeviceSamples


class ModelRunner:
    """Owns everything on the device.

    Args:
        max_num_batched_tokens: maximum tokens of a plan.
        activation: turns the numbers of a classification head into probabilities.
        parts: the parts that compute vectors beside the model.
        adapters: the model's adapters; None if it does not support them.
    """

    keeps_hidden = False  # whether a step's hidden states are kept for a drafter (`LateStep.hidden`)

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        *,
        max_num_batched_tokens: int,
        min_rows: int = 1,
        activation: Activation = "none",
        parts: PoolingParts = NO_PARTS,
        adapters: LoadedAdapters | None = None,
    ):
        self.model = model  # the transformer with its weights
        self.adapters = adapters or LoadedAdapters(model, 0, 0)
        self.cache = cache  # the pages' tensors
        self.min_rows = min_rows  # minimum rows of a matrix product (`engine.execution.invariance`)
        device = model.device
        size = max(max_num_batched_tokens, min_rows)
        # [S] tokens of the last step that sampled; graphs have a multiple of 8 rows.
        self._sampled = Buffer(-(-size // 8) * 8, torch.int32, device)
        self._candidates: StepResult | DeviceSamples | None = None  # of the last launched step, if it succeeded
        self._unfilled: Int32 | None = None  # the same, if the host knows them and no step has asked for them yet
        # how models like this one compute a plan
        self.kind = kind_of(model, StepBuffers(size, self._sampled.data), min_rows, activation, parts)
        self.graphs: DecodeGraphs | None = None
        self.prompt_graphs: PromptGraphs | None = None
        self._sampler: DeviceSampler | None = None
        if gpu.serves(device):
            from engine.execution.sampler_device import DeviceSampler

            self._sampler = DeviceSampler(device, first=self._sampled.data)
        self._beams = BeamsOnDevice(self._sampled.data)
        self._logits = Logits(model, min_rows)
        self._divided: DividedSampler | None = None
        if model.ranks is not None and model.divides_logits:
            self._divided = DividedSampler(model.ranks, model.vocab_size)
        self._samples = model.ranks is None or model.ranks.rank == 0

    def use_images(self, info: VisionInfo) -> None:
        """Read images among tokens from now on; `info`: of the model's."""
        assert isinstance(self.kind, Decoder)
        self.kind.use_images(info)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LateStep:
        """Start computing a step. A CPU computes it immediately.

        Steps run in the order in which they were launched. Tokens that the plan does not know (`StepPlan.sources`) were
        sampled by the step launched before it.
        """
        try:
            with gpu.current(self.model.device):
                return self._launch(plan)
        except BaseException:
            self._candidates = None
            if self.graphs is not None:
                self.graphs.reset()
            raise

    def _launch(self, plan: StepPlan) -> LateStep:
        plan, search = self._resolve(plan)
        self.cache.copy_pages(plan.copies)
        if plan.sources is not None and self._unfilled is not None:
            self._sampled.fill(self._unfilled)
            self._unfilled = None
        computed = self.kind.compute(plan, self.cache, self._recorded(plan), search)
        hidden = computed.hidden
        candidates: StepResult | LateResult | None = None
        sampling = plan.sampling if self._samples else None
        if plan.sampling is not None:
            assert hidden is not None
            wanted = hidden_of(hidden, plan.sampling.rows, plan.num_tokens)
            candidates = None if self.graphs is None else self.graphs.sample(wanted, plan.sampling)
            if self._divided is not None:
                own = self._logits.own(wanted)
                candidates = self._divided.sample(own, plan.sampling.filled())
            elif candidates is None:
                logits = self._logits(wanted)
                if self._samples:
                    # A GPU computes all that meanwhile; a CPU has finished, and fills masks with all of its threads.
                    sampling = weighed(logits, plan.sampling.filled())
                    candidates = self._sample(logits, sampling)
        step = LateStep(candidates=candidates or StepResult.empty(), sampling=sampling)
        if self.keeps_hidden:
            kept = self.kind.kept if isinstance(self.kind, Decoder) else ()
            step.hidden = torch.cat(list(kept), dim=1) if kept else hidden
        if plan.pooling:
            step.pooled = computed.pool()
        if plan.prompt_logprobs is not None:
            assert hidden is not None
            wanted = hidden[gpu.upload(plan.prompt_logprobs.rows, hidden.device).long()]
            step.prompt_logprobs = score_prompt(self._logits, wanted, plan.prompt_logprobs)
        return step

    def _resolve(self, plan: StepPlan) -> tuple[StepPlan, Search | None]:
        """A plan whose beams are known, or what reorders its block tables on the device."""
        before, self._candidates = self._candidates, None
        if plan.searches is None:
            return plan, None
        if before is None:
            raise RuntimeError("a search cannot continue: the previous step left no candidates")
        if isinstance(before, StepResult):
            return resolved(plan, before, self.cache.block_size), None
        return plan, partial(self._beams.go_on, plan.searches, before, self.cache, plan.block_tables.shape[1])

    def _recorded(self, plan: StepPlan) -> DecodeGraphs | PromptGraphs | None:
        recordings = () if plan.images else (self.graphs, self.prompt_graphs)
        return next((each for each in recordings if each is not None and each.serves(plan)), None)

    @torch.inference_mode()
    def warm(self) -> None:
        """Compile what copies, sampling, experts and products with quantised weights need, if anything, so that no
        request waits for that."""
        with gpu.current(self.model.device):
            self.model.warm(self._sampled.data.shape[0])
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
        """Record decoding steps of up to max_rows rows, and run them in this way from now on.

        Args:
            seconds: measures a graph; None: nothing is timed.
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
        """Record steps with prompts of up to max_rows rows and max_tokens tokens, as far as they can be recorded, and
        run them in this way from now on."""
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
        """Candidates; the first ones are kept on the device for the next step."""
        if self._sampler is None:
            self._candidates = known = sample(logits, batch)
            self._unfilled = known.tokens[:, 0]
            return known
        self._candidates = samples = self._sampler.sample(logits, batch)  # which leaves them there itself
        samples.fetch()
        return samples
