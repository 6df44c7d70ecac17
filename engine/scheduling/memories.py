"""Pages of encoder inputs: when they are allocated, when the encoder runs, and what may find them later."""

from __future__ import annotations

import numpy as np

from engine.interface.outputs import EngineStats
from engine.interface.request import Request
from engine.scheduling.block_pool import BlockPool, PageHasher
from engine.scheduling.encoding import Memory
from engine.scheduling.in_flight import InFlightStep
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.sequence import SequenceGroup
from engine.scheduling.step import Step


class Memories:
    """The scheduler's bookkeeping of what encoders leave; does nothing for requests without an encoder input.

    A preempted request gives up these pages too, but they stay findable like those of a prefix: the encoder
    runs again only if they were evicted. Without prefix caching only the request itself finds them.
    """

    def __init__(self, pool: BlockPool, hasher: PageHasher, config: SchedulerConfig, stats: EngineStats):
        self._pool = pool
        self._hasher = hasher
        self._config = config
        self._stats = stats

    def of(self, request: Request, arrival: int) -> Memory | None:
        """The encoder input of a new request."""
        if not request.encoder_token_ids:
            return None
        root = self._hasher.root(request.cache_salt)
        if not self._config.enable_prefix_caching:
            root = self._hasher.extend(root, np.array([arrival], dtype=np.int32))
        return Memory(request.encoder_token_ids, root, self._hasher, self._config.block_size)

    def may_start(self, step: Step, group: SequenceGroup) -> bool:
        """The encoder need not run for this request, or may run in this step."""
        memory = group.memory
        if memory is None or (memory.key not in step.encodings and self._find(step, memory) is not None):
            return True
        return step.can_encode(memory, group)

    def pages_needed(self, step: Step, group: SequenceGroup) -> int:
        """Available pages that `take` uses up."""
        if group.memory is None:
            return 0
        known = self._find(step, group.memory)
        return len(group.memory.hashes) if known is None else self._pool.count_cached(known)

    def take(self, step: Step, group: SequenceGroup) -> None:
        """Give an admitted request its pages; the encoder runs where they are not cached."""
        memory = group.memory
        if memory is None:
            return
        known = self._find(step, memory)
        if known is None:
            self._pool.forget(memory.hashes)  # what is left of them without the others is of no use
        pages = self._pool.reserve(len(memory.hashes)) if known is None else self._pool.adopt(known)
        assert pages is not None  # the scheduler asked how many are needed
        memory.pages = pages
        encoded = known is not None and memory.key not in step.encodings
        if encoded:
            self._stats.num_encoder_hits += 1
        else:
            step.encode(memory, group)
        if memory.num_cached is None:
            memory.num_cached = len(memory.tokens) if encoded else 0
            group.num_cached_tokens += memory.num_cached
            self._stats.prompt_tokens += len(memory.tokens)
            self._stats.prompt_tokens_cached += memory.num_cached

    def publish(self, step: InFlightStep) -> None:
        """The step has succeeded: later requests may find the pages that the encoder filled."""
        for memory in step.memories({row.group for row in step.live()}):
            self._stats.num_encoder_runs += 1
            for page, page_hash in zip(memory.pages, memory.hashes, strict=True):
                self._pool.publish(page, page_hash)
        self._stats.num_encoder_hits += sum(len(encoding.groups) - (not encoding.done) for encoding in step.encodings)

    def release(self, group: SequenceGroup) -> None:
        """A request gives its pages up."""
        if group.memory is not None:
            self._pool.free(group.memory.pages)
            group.memory.pages = []

    def finish(self, group: SequenceGroup) -> None:
        """A request is over."""
        self.release(group)
        if group.memory is not None and not self._config.enable_prefix_caching:
            self._pool.forget(group.memory.hashes)

    def _find(self, step: Step, memory: Memory) -> list[int] | None:
        """The pages of an equal input, complete now or after this step; None if there are none."""
        if memory.key in step.encodings:
            return step.encodings[memory.key].memory.pages
        pages = self._pool.match(memory.hashes)
        return pages if len(pages) == len(memory.hashes) else None
