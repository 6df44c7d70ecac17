"""Who runs in a step, with which tokens, on which pages; and what a step's answer means.

There is no prefill phase and no decode phase: a sequence has tokens and computed tokens, and every
step lets it catch up by as many as the step's budget allows. The shape is that of vLLM's v1
scheduler; that groups of sequences (beams, n answers) run, wait and give way whole is our own.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping

from engine.errors import InvalidRequestError
from engine.outputs import EngineStats, RequestDelta
from engine.request import Request
from engine.scheduling.apply import Answer, Outcome, apply_candidates, apply_pooled, final_abort, take_prompt_logprobs
from engine.scheduling.batch import LastStep, Row, build_plan
from engine.scheduling.block_pool import BlockPool, PageHasher
from engine.scheduling.budget import UNLIMITED, StepLimit
from engine.scheduling.limits import SchedulerConfig, check_fits
from engine.scheduling.memories import Memories
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import Sequence, SequenceGroup, Status, pages_needed
from engine.scheduling.step import Step
from engine.scheduling.tables import Tables


class Scheduler:
    """Queues, budget, preemption. The only writer of sequences and groups.

    Use: `schedule()`, run the plan, `update()`; or `fail()` if the plan could not be run.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, hasher: PageHasher | None = None):
        self.config = config
        self.pool = pool
        self._hasher = hasher or PageHasher()
        self._groups: dict[str, SequenceGroup] = {}
        self._waiting: list[tuple[tuple[int, int], SequenceGroup]] = []  # heap; may hold finished groups
        self._num_waiting = 0
        self._running: list[SequenceGroup] = []  # in order of service
        self._deadlines: list[tuple[float, int, str]] = []  # heap; may name finished requests
        self._arrivals = 0
        self._step: list[Row] | None = None
        self._copies: dict[SequenceGroup, list[tuple[int, int]]] = {}
        self._last = LastStep()
        self._outbox: list[RequestDelta] = []
        self.stats = EngineStats(pages_total=pool.total, block_size=config.block_size)
        self._tables = Tables(pool, self._hasher, config)
        self._memories = Memories(pool, self._hasher, config, self.stats)

    # ---------------------------------------------------------------- requests in and out

    def check_fits(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            InvalidRequestError: it needs more rows or pages than there are, or its id is taken.
        """
        if request.request_id in self._groups:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use by an unfinished request.", param="request_id"
            )
        check_fits(request, self.config, self.pool.total)

    def add(self, request: Request) -> None:
        """Queue a request that `check_fits` accepts."""
        self.check_fits(request)
        memory = self._memories.of(request, self._arrivals)
        root = self._hasher.root(request.cache_salt) if memory is None else memory.key
        group = SequenceGroup(request, self._arrivals, root, memory, whole=self.config.whole_inputs)
        self._arrivals += 1
        self._groups[request.request_id] = group
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, group.arrival, request.request_id))
        self._enqueue(group)

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, or one of its answers, without a further delta; False if it is not known."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        if choice is not None and group.request.decoding.n > 1:
            if group.beam is not None or not group.started:
                return False  # no sequence serves this answer alone
            gone = [sequence for sequence in group.sequences if sequence.index == choice]
            if len(gone) < len(group.sequences):
                group.sequences = [sequence for sequence in group.sequences if sequence.index != choice]
                for sequence in gone:
                    self._tables.release(sequence)
                return bool(gone)
        self.stats.num_aborted += 1
        self._finish(group)
        return True

    def has_unfinished(self) -> bool:
        """Some request is queued or runs, or has news to deliver."""
        return bool(self._groups or self._outbox)

    def knows(self, request_id: str) -> bool:
        """The request is unfinished."""
        return request_id in self._groups

    def groups(self) -> Iterator[SequenceGroup]:
        """All unfinished groups."""
        return iter(self._groups.values())

    # ---------------------------------------------------------------- a step

    def schedule(self, limit: StepLimit | Callable[[], StepLimit] = UNLIMITED) -> StepPlan | None:
        """Plan the next step; None if nothing can run.

        Args:
            limit: how long the step may take, or who is to be asked about it if there are prompts; how they are cut
                depends on it, and no answer does.
        """
        if self._step is not None:
            raise AssertionError("schedule() was called twice without update() or fail()")
        self._expire()
        step = Step(self.config.max_num_batched_tokens)
        chunked = []
        for group in list(self._running):
            if group.status is not Status.RUNNING:
                continue  # gave way to an older group
            work = group.work()
            if sum([count for _, count in work]) == len(work):
                self._plan_group(step, group, work)
            else:
                chunked.append(group)
        if chunked or self._waiting:
            step.limit = limit() if callable(limit) else limit
            self._plan_prompts(step, chunked)
        self._copies = step.copies
        copies = [pair for pairs in self._copies.values() for pair in pairs]
        for source, _ in copies:
            self.pool.unpin(source)
        rows = [row for group in self._running for row in step.rows.get(group, ())]
        if not rows:
            return None
        self.stats.num_page_copies += len(copies)
        self._step = rows
        return build_plan(rows, copies, self.config.block_size, self._memories.begin(step), self._last)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestDelta]:
        """Apply a step's answer: progress, published pages, continuations, finished requests."""
        if self._step is None:
            raise AssertionError("update() was called without schedule()")
        rows, self._step = self._step, None
        self.stats.num_steps += 1
        self.stats.computed_tokens += plan.num_tokens
        self._memories.publish()
        self._tables.advance(rows)
        with_prompt_logprobs = take_prompt_logprobs(rows, result)
        sampled: list[tuple[SequenceGroup, int]] = []
        position = 0
        for group, is_sampled in {row.group: row.sampled for row in rows}.items():
            if is_sampled:
                sampled.append((group, position))
                position += len(group.sequences)
            else:
                self._tables.fork_from_first(group)
        answer = Answer(result, sampled)
        deltas = []
        for group, first in sampled:
            outcome = apply_candidates(group, answer, first, group in with_prompt_logprobs)
            delta = outcome.delta
            about_prompt = not group.started or delta.prompt_logprobs is not None
            if delta.choices or delta.finished or about_prompt or delta.beams is not None:
                deltas.append(delta)
            self._apply(group, outcome)
        for wanted, pooled in zip(plan.pooling, result.pooled, strict=True):
            row = rows[wanted.row]
            if (ending := apply_pooled(row.group, row, pooled)) is not None:
                deltas.append(ending.delta)
                self._apply(row.group, ending)
        return self._flush(deltas)

    def parts(self) -> dict[str, StepPlan]:
        """The planned step as one plan per request, in the same order; each brings its own copies."""
        rows: dict[SequenceGroup, list[Row]] = {}
        for row in self._step or []:
            rows.setdefault(row.group, []).append(row)
        size, encoded = self.config.block_size, self._memories.encoded
        return {
            group.request.request_id: build_plan(own, self._copies.get(group, []), size, encoded(group))
            for group, own in rows.items()
        }

    def remainder(self) -> StepPlan:
        """What is planned still, after `fail` has ended some of it; without its copies."""
        return build_plan(self._step or [], [], self.config.block_size)

    def fail(self, causes: str | Mapping[str, str]) -> list[RequestDelta]:
        """The planned step could not be run: end its requests with an error, and no others.

        Args:
            causes: why; or for each request at fault why, and the others stay planned, awaiting `update`.
        """
        rows, self._step = self._step or [], None
        deltas = []
        for group in dict.fromkeys(row.group for row in rows):
            name = group.request.request_id
            message = causes if isinstance(causes, str) else causes.get(name)
            if message is not None:
                deltas.append(final_abort(group, "error", message))
                self._finish(group)
        self._step = [row for row in rows if row.group.status is Status.RUNNING] or None
        return self._flush(deltas)

    def take_outbox(self) -> list[RequestDelta]:
        """News that no step brought (deadlines), when there was nothing to run."""
        return self._flush([])

    # ---------------------------------------------------------------- planning

    def _plan_prompts(self, step: Step, chunked: list[SequenceGroup]) -> None:
        """Give what is left to those who have several tokens to compute, and to those who wait."""
        step.begin_prompts()
        for group in chunked:
            if group.status is Status.RUNNING and step.is_open:
                self._plan_group(step, group, group.work())
        if not step.preempted:
            self._admit(step)

    def _plan_group(self, step: Step, group: SequenceGroup, work: list[tuple[Sequence, int]]) -> None:
        """Give a running group its tokens and pages, evicting younger groups if pages are short."""
        total = sum([count for _, count in work])
        budget = step.budget if total == len(work) else step.room(group)  # one token each is never put off
        budget = total if group.whole else budget
        completes = total <= budget
        sampled = completes and group.fork_point is None and group.request.pooling is None
        rows: list[Row] = []
        for sequence, count in work:
            # All sequences of a group sample in the same step: until all can, each keeps its last token.
            allowed = count if completes else min(count if len(work) == 1 else count - 1, budget)
            if allowed == 0:
                continue
            if not group.whole and not self._reserve(step, group, sequence, sequence.num_computed + allowed):
                return
            budget -= allowed
            rows.append(Row(group, sequence, sequence.num_computed, allowed, sampled))
        if rows:
            step.take(group, rows)

    def _reserve(self, step: Step, group: SequenceGroup, sequence: Sequence, end: int) -> bool:
        """Make the pages up to token `end` writable by this sequence alone; False if the group itself
        had to give way."""
        size, held = self.config.block_size, sequence.table.size
        page = sequence.num_computed // size
        copy = page < held and self.pool.is_shared(sequence.table[page])
        needed = pages_needed(end, size) - held + copy
        if needed <= 0:
            return True
        while (pages := self.pool.reserve(needed)) is None:
            victim = self._running[-1]
            self._preempt(step, victim)
            if victim is group:
                return False
            # The victim may have been the other holder of the page.
            if copy and not self.pool.is_shared(sequence.table[page]):
                copy, needed = False, needed - 1
        if copy:
            source, target = sequence.table[page], pages.pop()
            self.pool.pin(source)
            self.pool.free([source])
            sequence.table[page] = target
            step.copies.setdefault(group, []).append((source, target))
        sequence.table.extend(pages)
        return True

    def _admit(self, step: Step) -> None:
        """Take waiting groups in, in order, as long as rows, budget and pages last."""
        while step.is_open and (group := self._next_waiting()) is not None:
            if not self._memories.may_start(step, group) or (group.whole and not step.can_read(group)):
                return
            while not self._can_admit(step, group):
                lowest = self._running[-1] if self._running else None
                if lowest is None or lowest.request.priority <= group.request.priority:
                    return
                self._preempt(step, lowest)
            self._start(group)
            self._memories.take(step, group)
            self._plan_group(step, group, group.work())

    def _can_admit(self, step: Step, group: SequenceGroup) -> bool:
        if group.whole:  # there may be thousands, with a row and no page each
            return len(self._running) < self.config.max_num_seqs
        if sum(running.rows for running in self._running) + group.rows > self.config.max_num_seqs:
            return False
        needed = self._tables.pages_needed(group) + self._memories.pages_needed(step, group)
        return needed <= self.pool.num_available

    def _start(self, group: SequenceGroup) -> None:
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        sequence = group.sequences[0]
        if not group.whole:
            self._tables.adopt(group)
            self.stats.prefix_queries += sequence.num_tokens
            self.stats.prefix_hits += sequence.num_computed
        if not group.admitted:
            group.admitted, group.scheduled_time = True, time.monotonic()
            group.num_cached_tokens += sequence.num_computed
            self.stats.prompt_tokens += sequence.num_prompt
            self.stats.prompt_tokens_cached += sequence.num_computed
        group.status = Status.RUNNING
        insort(self._running, group, key=lambda g: g.key)

    def _preempt(self, step: Step, group: SequenceGroup) -> None:
        """Take a group's pages; it starts over later, from what the prefix cache still has."""
        step.preempted = True
        self._last.forget()  # it may come back to other pages
        self.stats.num_preemptions += 1
        self._running.remove(group)
        for sequence in group.sequences:
            self._tables.release(sequence)
        for source, _ in step.drop(group):
            self.pool.unpin(source)
        self._memories.release(group)
        group.pooled = None
        group.fork_point = group.common_prefix() if len(group.sequences) > 1 else None
        self._enqueue(group)

    # ---------------------------------------------------------------- bookkeeping

    def _enqueue(self, group: SequenceGroup) -> None:
        group.status = Status.WAITING
        heapq.heappush(self._waiting, (group.key, group))
        self._num_waiting += 1

    def _next_waiting(self) -> SequenceGroup | None:
        while self._waiting and self._waiting[0][1].status is Status.FINISHED:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _apply(self, group: SequenceGroup, outcome: Outcome) -> None:
        """Fork, drop and finish as the search decided; forks come before anything is freed."""
        for child, parent in outcome.forks:
            child.table.extend(self.pool.fork(parent.table))
        for sequence in outcome.dropped:
            self._tables.release(sequence)
        group.sequences = outcome.live
        group.started = True
        self.stats.generation_tokens += outcome.num_new_tokens
        if outcome.delta.finished:
            self.stats.num_finished += 1
            self._finish(group)

    def _finish(self, group: SequenceGroup) -> None:
        if group.status is Status.RUNNING:
            self._running.remove(group)
            for sequence in group.sequences:
                self._tables.release(sequence)
        elif group.status is Status.WAITING:
            self._num_waiting -= 1
        self._memories.finish(group)
        group.status = Status.FINISHED
        group.sequences = []
        del self._groups[group.request.request_id]

    def _expire(self) -> None:
        now = time.monotonic() if self._deadlines else 0.0
        while self._deadlines:
            deadline, arrival, request_id = self._deadlines[0]
            group = self._groups.get(request_id)
            if group is not None and group.arrival == arrival:
                if deadline > now:
                    return
                self.stats.num_aborted += 1
                self._outbox.append(final_abort(group, "abort", "deadline"))
                self._finish(group)
            heapq.heappop(self._deadlines)

    def _flush(self, deltas: list[RequestDelta]) -> list[RequestDelta]:
        news, self._outbox = [*self._outbox, *deltas], []
        return news

    def snapshot(self) -> EngineStats:
        """Counters and gauges of this moment."""
        stats, pool = self.stats, self.pool
        stats.num_running, stats.num_waiting = len(self._running), self._num_waiting
        stats.pages_free, stats.pages_held, stats.pages_cached = pool.num_free, pool.num_held, pool.num_cached
        stats.peak_pages_held = pool.peak_held
        return stats

    def check_integrity(self) -> None:
        """Compare the pool with the tables of all live sequences; for tests and for idle moments.

        Raises:
            AssertionError: something leaked or is held twice, or is out of every window and held.
        """
        self._tables.check(self._groups.values())
        tables = [list(s.table) for g in self._groups.values() for s in g.sequences]
        tables += [g.memory.pages for g in self._groups.values() if g.memory is not None]
        self.pool.check_integrity(tables)
