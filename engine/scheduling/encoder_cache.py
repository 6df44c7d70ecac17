"""Pages of encoder inputs: when they are allocated, when the encoder runs, and what may find them later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.interface.outputs import EngineStats
from engine.interface.request import Request
from engine.scheduling.block_pool import BlockPool, PageHasher
from engine.scheduling.encoder_input import EncoderInput
from engine.scheduling.in_flight import Step
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.needs import adapter_sides, encoder_root
from engine.scheduling.sequence import SequenceGroup
from engine.scheduling.step import NextStep


@dataclass(eq=False)
class EncoderCache:
    """The scheduler's bookkeeping of encoders' output; does nothing for requests without an encoder input.

    A preempted request releases these pages too, but they can still be found, like a prefix: the encoder runs again
    only if they were evicted. Without prefix caching only the request itself finds them.
    """

    _pool: BlockPool
    _hasher: PageHasher
    _config: SchedulerConfig
    _stats: EngineStats

    def of(self, request: Request, arrival: int) -> EncoderInput | None:
        if not request.encoder_token_ids:
            return None
        root = encoder_root(request, self._hasher)
        if not self._config.enable_prefix_caching:
            root = self._hasher.extend(root, np.array([arrival], dtype=np.int32))
        ids, size = request.encoder_token_ids, self._config.block_size
        return EncoderInput(ids, root, self._hasher, size, request.signal, adapter_sides(request))

    def may_start(self, step: NextStep, group: SequenceGroup) -> bool:
        """Whether the encoder need not run for this request, or may run in this step."""
        encoder_input = group.encoder_input
        if encoder_input is None or (
            encoder_input.key not in step.encoder_runs and self._find(step, encoder_input) is not None
        ):
            return True
        return step.can_encode(encoder_input, group)

    def pages_needed(self, step: NextStep, group: SequenceGroup) -> int:
        """The number of available pages that `take` uses up."""
        if group.encoder_input is None:
            return 0
        known = self._find(step, group.encoder_input)
        return len(group.encoder_input.hashes) if known is None else self._pool.count_cached(known)

    def take(self, step: NextStep, group: SequenceGroup) -> None:
        """Give an admitted request its pages; the encoder runs if they are not cached."""
        encoder_input = group.encoder_input
        if encoder_input is None:
            return
        known = self._find(step, encoder_input)
        if known is None:
            self._pool.forget(encoder_input.hashes)  # the pages that are left are useless without the others
        pages = self._pool.reserve(len(encoder_input.hashes)) if known is None else self._pool.adopt(known)
        assert pages is not None  # the scheduler asked how many are needed
        encoder_input.pages = pages
        encoded = known is not None and encoder_input.key not in step.encoder_runs
        if encoded:
            self._stats.num_encoder_hits += 1
        else:
            step.encode(encoder_input, group)
        if encoder_input.num_cached is None:
            encoder_input.num_cached = len(encoder_input.tokens) if encoded else 0
            group.num_cached_tokens += encoder_input.num_cached
            self._stats.prompt_tokens += len(encoder_input.tokens)
            self._stats.prompt_tokens_cached += encoder_input.num_cached

    def publish(self, step: Step) -> None:
        """The step has succeeded: later requests may find the pages that the encoder filled."""
        for encoder_input in step.take_inputs({row.group for row in step.live()}):
            self._stats.num_encoder_runs += 1
            for page, page_hash in zip(encoder_input.pages, encoder_input.hashes, strict=True):
                self._pool.publish(page, page_hash)
        self._stats.num_encoder_hits += sum(len(run.groups) - (not run.done) for run in step.encoder_runs)

    def release(self, group: SequenceGroup) -> None:
        """A request releases its pages."""
        if group.encoder_input is not None:
            self._pool.free(group.encoder_input.pages)
            group.encoder_input.pages = []

    def finish(self, group: SequenceGroup) -> None:
        """A request has ended."""
        self.release(group)
        if group.encoder_input is not None and not self._config.enable_prefix_caching:
            self._pool.forget(group.encoder_input.hashes)

    def _find(self, step: NextStep, encoder_input: EncoderInput) -> list[int] | None:
        """The pages of an equal input, complete now or after this step; None if there are none."""
        if encoder_input.key in step.encoder_runs:
            return step.encoder_runs[encoder_input.key].encoder_input.pages
        pages = self._pool.match(encoder_input.hashes)
        return pages if len(pages) == len(encoder_input.hashes) else None
