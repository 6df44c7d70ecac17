"""Chooses which requests run in a step, with their tokens and pages, and applies a step's results.

There is no prefill phase and no decode phase: a sequence has tokens and computed tokens, and every step lets it catch
up by as many as the step's budget allows. The design is that of vLLM's v1 scheduler, except that groups of sequences
(beams, n answers) run, wait and are preempted as a whole.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from engine.errors import InvalidRequestError
from engine.interface.outputs import EngineStats, RequestDelta
from engine.interface.request import Request
from engine.interface.speculation import MOST_DRAFTS
from engine.scheduling.apply import (
    Answer,
    Outcome,
    accepted_rows,
    apply_candidates,
    apply_pooled,
    final_abort,
    take_prompt_logprobs,
)
from engine.scheduling.batch import LastStep, build_plan
from engine.scheduling.block_pool import BlockPool, PageHash, PageHasher
from engine.scheduling.budget import UNLIMITED, StepLimit
from engine.scheduling.draft_costs import DraftCosts, DraftGain, DraftPlaces
from engine.scheduling.drafting import Drafter, Wanted, drafts_of, forced_drafts
from engine.scheduling.encoder_cache import EncoderCache
from engine.scheduling.image_work import ImageWork
from engine.scheduling.in_flight import InFlightSteps, Step
from engine.scheduling.limits import SchedulerConfig, check_fits
from engine.scheduling.needs import sequence_root
from engine.scheduling.page_events import PageEvents
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.queues import Deadlines, WaitingQueue
from engine.scheduling.row import Row
from engine.scheduling.sequence import Sequence, SequenceGroup, Status
from engine.scheduling.state_slots import StateSlots
from engine.scheduling.step import NextStep, SearchAhead
from engine.scheduling.tables import Tables

# Seconds after the arrival of a client's request in which background requests get short steps only.
_CLIENTS_RETURN = 60.0


class Restores(Protocol):
    """Restores pages that were stored elsewhere (`engine.disk.tier`)."""

    def begin(self, group: SequenceGroup, hashes: Seq[PageHash], seen: int | None) -> bool:
        """Whether a group waits for pages from now on, until `Scheduler.restored`; see `BlockPool.match`."""


class Scheduler:
    """Queues, budget, preemption. The only writer of sequences and groups.

    Use: `schedule()`, run the plan, `update()`; or `fail()` if the plan could not be run. While a plan runs,
    `schedule_ahead()` may return the next one; answers are applied in the order of the plans.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        hasher: PageHasher | None = None,
        drafter: Drafter | None = None,
        states: BlockPool | None = None,
    ):
        self.config = config
        self.pool = pool
        # predicts tokens of decoding sequences, so that a step may check several; None: no drafts
        self.drafter = drafter
        self.draft_costs: DraftCosts | None = None  # decides how many of its drafts a step has; None: all that fit
        # whether one step takes several tokens each of which is the only one that a constraint allows
        self.drafts_forced_tokens = True
        self._draft_places = DraftPlaces()
        self.drafting = False  # whether the drafter served a request that ran when the last step was planned
        self._hasher = hasher or PageHasher()
        self._groups: dict[str, SequenceGroup] = {}
        self._waiting = WaitingQueue()
        self._running: list[SequenceGroup] = []  # in order of service
        self._deadlines = Deadlines()
        self._arrivals = 0
        self._client_came = -math.inf  # `time.monotonic()` seconds of the last request that is not in the background
        self.states: StateSlots | None = None
        if states is not None:
            self.states = StateSlots(states, config.block_size, publishes=config.enable_prefix_caching)
        self.in_flight = InFlightSteps(pool, config.block_size, self.states)
        self._drains = False  # the next step needs a preemption: none is planned ahead until that is done
        self._pools_last = False  # pooling inputs come after all other work in this step; see `_plan_prompts`
        self._last = LastStep()
        self._outbox: list[RequestDelta] = []
        self.stats = EngineStats(pages_total=pool.total, block_size=config.block_size)
        # what the prefix cache gains and loses, if that is reported (`record_events`)
        self.events: PageEvents | None = None
        # asked for pages of each new prompt that are not in memory; None: nothing is restored
        self.restores: Restores | None = None
        self._num_restoring = 0
        self._tables = Tables(pool, self._hasher, config, None, self.states)
        self._encoder_cache = EncoderCache(pool, self._hasher, config, self.stats)
        self._image_work = ImageWork(config.needs.crop_work, config.needs.kept_vectors)

    def record_events(self) -> PageEvents:
        """Start collecting what the prefix cache gains and loses, before the first request."""
        self.events = self.pool.listener = PageEvents(self._hasher, self.config.block_size)
        self._tables = Tables(self.pool, self._hasher, self.config, self.events, self.states)
        return self.events

    # ---------------------------------------------------------------- adding and ending requests

    def check_fits(self, request: Request) -> None:
        """Refuse a request that could never run. Raises InvalidRequestError if it needs more rows or pages than exist,
        or its id is taken."""
        if request.request_id in self._groups:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use by an unfinished request.", param="request_id"
            )
        check_fits(request, self.config, self.pool.total, None if self.states is None else self.states.pool.total)

    def add(self, request: Request) -> None:
        """Queue a request that `check_fits` accepts."""
        self.check_fits(request)
        encoder_input = self._encoder_cache.of(request, self._arrivals)
        needs = self.config.needs
        sides = needs.sides_of(request)
        root = sequence_root(request, self._hasher, encoder_input, sides)
        group = SequenceGroup(request, self._arrivals, root, encoder_input, unchunked=not needs.paged, sides=sides)
        self._arrivals += 1
        self._groups[request.request_id] = group
        self._deadlines.add(group)
        if not group.is_background:
            self._client_came = time.monotonic()
        restores = self.restores
        if restores is not None and restores.begin(group, self._tables.hashes(group), self.config.seen_pages):
            group.status = Status.RESTORING
            self._num_restoring += 1
        else:
            self._waiting.push(group)

    def publish_restored(self, group: SequenceGroup, places: Seq[int], pages: Seq[int]) -> None:
        """Let prompts find pages that were brought back for a group's tokens, at these places in ascending order."""
        self._tables.publish_restored(group, places, pages)

    def restored(self, group: SequenceGroup) -> None:
        """All pages that exist for a group have arrived: it waits for its turn, unless it has ended."""
        if group.status is Status.RESTORING:
            self._num_restoring -= 1
            self._waiting.push(group)

    @property
    def only_restores(self) -> bool:
        """Whether there are unfinished requests that all wait for pages from elsewhere."""
        return 0 < self._num_restoring == len(self._groups)

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, or one of its answers, without a further delta; returns False if it is unknown."""
        group = self._groups.get(request_id)
        if group is None:
            return False
        if choice is not None and group.request.decoding.n > 1:
            if group.beam is not None or not group.started:
                return False  # no sequence serves only this answer
            gone = [sequence for sequence in group.sequences if sequence.index == choice]
            if len(gone) < len(group.sequences):
                group.sequences = [sequence for sequence in group.sequences if sequence.index != choice]
                for sequence in gone:
                    self._tables.release(sequence)
                return bool(gone)
        self.stats.num_aborted += 1
        self._finish(group)
        return True

    def end(self, groups: Iterable[SequenceGroup], message: str) -> None:
        """End requests with an error; the next deltas say so."""
        for group in list(groups):
            self._outbox.append(final_abort(group, "error", message))
            self._finish(group)

    def has_unfinished(self) -> bool:
        """Whether a request is queued, runs, or has news to deliver."""
        return bool(self._groups or self._outbox)

    def knows(self, request_id: str) -> bool:
        """Whether the request is unfinished."""
        return request_id in self._groups

    def groups(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    def adapters_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the adapters of running and of waiting requests."""
        used = [(group, group.request.adapter.name) for group in self.groups() if group.request.adapter is not None]
        running = set(self._running) if used else set()
        return (
            tuple(sorted({name for group, name in used if group in running})),
            tuple(sorted({name for group, name in used if group not in running})),
        )

    # ---------------------------------------------------------------- a step

    def schedule(self, limit: StepLimit | Callable[[], StepLimit] = UNLIMITED) -> StepPlan | None:
        """Plan the next step; None if nothing can run. `limit`: how long the step may take, or a function that is
        called for the limit if there are prompts; it affects how they are cut, but no answer."""
        if self.in_flight:
            raise AssertionError("schedule() was called twice without update() or fail()")
        self._drains = False
        return self._schedule(limit, ahead=False)

    def schedule_ahead(self, limit: StepLimit | Callable[[], StepLimit] = UNLIMITED) -> StepPlan | None:
        """Plan the step after the one in flight, whose answer is not known; None if nothing can run before that.

        `StepPlan.sources` names each token that is sampled in flight. A group waits if its step depends on more of that
        answer than its position (`SequenceGroup.may_run_ahead`). Nothing is preempted. If a preemption is needed, no
        step is planned ahead until `schedule()` has made it.
        """
        if len(self.in_flight) != 1:
            raise AssertionError(f"schedule_ahead() was called with {len(self.in_flight)} steps in flight")
        plan = None if self._drains else self._schedule(limit, ahead=True)
        self.stats.num_steps_ahead += plan is not None
        return plan

    def _schedule(self, limit: StepLimit | Callable[[], StepLimit], ahead: bool) -> StepPlan | None:
        self._expire()
        step = NextStep(self.config.max_num_batched_tokens, ahead=ahead, clients_only=self._clients_have_prompts())
        self.drafting = self.drafter is not None and any(map(self._drafts_for, self._running))
        if self.drafting or (self.drafts_forced_tokens and any(group.may_be_forced for group in self._running)):
            step.limit = limit() if callable(limit) else limit
            self._leave_for_drafts(step)
            if self.drafting:
                self._prepare_drafts(step)
        chunked = []
        for group in list(self._running):
            if group.status is not Status.RUNNING or (
                ahead and not group.may_run_ahead(drafting=self._drafts_for(group))
            ):
                continue  # preempted for an older group, or needs an answer first
            if step.clients_only and group.is_background:
                break  # so are all that follow
            work = group.work()
            if self._decodes(group, work):
                self._plan_group(step, group, work)
            else:
                chunked.append(group)
        if chunked or self._waiting:
            step.limit = limit() if callable(limit) else limit
            self._plan_prompts(step, chunked)
        rows = [row for group in self._running for row in step.rows.get(group, ())]
        if not rows:
            return None
        planned = Step(rows, step.copies, list(step.encoder_runs.values()), step.searches)
        copies = [pair for pairs in step.copies.values() for pair in pairs]
        self.stats.num_page_copies += len(copies)
        pending = self.in_flight.pending() if ahead else None
        inputs = [run.encoder_input for run in planned.encoder_runs]
        planned.plan = build_plan(rows, copies, self.config.block_size, inputs, self._last, pending, step.searches)
        if step.image_work:
            planned.plan = replace(planned.plan, image_work=step.image_work)
        self.in_flight.begin(planned)
        return planned.plan

    def update(self, result: StepResult) -> list[RequestDelta]:
        """Apply the answer of the oldest step: progress, published pages, continuations, finished requests."""
        if not self.in_flight:
            raise AssertionError("update() was called without schedule()")
        step = self.in_flight.end()
        assert step.plan is not None
        rows = step.live()
        self.stats.num_steps += 1
        self.stats.computed_tokens += step.plan.num_tokens
        self._encoder_cache.publish(step)
        self.in_flight.encoded(step)
        accepted = accepted_rows(step.plan.sampling, result)
        self._tables.advance([row for row in rows if not row.drafts] if accepted else rows)
        with_prompt_logprobs = take_prompt_logprobs(step.rows, result)
        sampled: dict[SequenceGroup, list[int]] = {}
        drafted: dict[SequenceGroup, list[tuple[Row, int]]] = {}
        position = 0
        for row in step.rows:
            if not row.is_void:
                if row.sampled:
                    sampled.setdefault(row.group, []).append(position)
                    if accepted and row.drafts:
                        drafted.setdefault(row.group, []).append((row, accepted[position]))
                else:
                    self._tables.fork_from_first(row.group)
            position += row.sampled
        answer = Answer(result, sampled, accepted)
        deltas = []
        for group, places in sampled.items():
            outcome = apply_candidates(group, answer, places, group in with_prompt_logprobs)
            if drafted:
                for row, count in drafted.get(group, ()):
                    self._keep(row, count - 1, outcome.delta)
            delta = outcome.delta
            about_prompt = not group.started or delta.prompt_logprobs is not None
            if delta.choices or delta.finished or about_prompt or delta.beams is not None:
                deltas.append(delta)
            self._apply(group, outcome)
        for wanted, pooled in zip(step.plan.pooling, result.pooled, strict=True):
            row = step.rows[wanted.row]
            if not row.is_void and (ending := apply_pooled(row.group, row, pooled)) is not None:
                deltas.append(ending.delta)
                self._apply(row.group, ending)
        return self.take_outbox(deltas)

    def _keep(self, row: Row, count: int, delta: RequestDelta) -> None:
        """Count this many of a row's drafts as computed, because they were right. Drafts beyond the answer's end are
        left out."""
        count = min(count, row.sequence.num_tokens - row.start - (row.count - len(row.drafts)))
        for counted in (self.stats, delta):
            counted.num_draft_tokens += len(row.drafts)
            counted.num_accepted_draft_tokens += count
        self._draft_places.count(len(row.drafts), count)
        if self.states is not None and count < len(row.drafts):
            self.states.reject(row)  # the next step computes its known tokens again
        else:
            self._tables.advance([row.keeping(count)])
        self._tables.truncate(row.sequence)

    def fail(self, message: str, groups: Iterable[SequenceGroup] | None = None) -> list[RequestDelta]:
        """End requests of the oldest step with an error, and no others; the step is over if no request is left.
        `groups`: the groups that end; None: all."""
        deltas = []
        if groups is None:
            groups = dict.fromkeys(row.group for row in self.in_flight.oldest.live()) if self.in_flight else ()
        for group in groups:
            deltas.append(final_abort(group, "error", message))
            self._finish(group)
        self.skip()
        return self.take_outbox(deltas)

    def skip(self) -> bool:
        """Forget the oldest step if no request waits for its result. Returns whether it was forgotten."""
        if not self.in_flight or self.in_flight.oldest.live():
            return False
        self.in_flight.end()
        return True

    def take_outbox(self, deltas: Iterable[RequestDelta] = ()) -> list[RequestDelta]:
        """News that no step produced (deadlines), followed by a step's news."""
        news, self._outbox = [*self._outbox, *deltas], []
        return news

    # ---------------------------------------------------------------- planning

    def _clients_have_prompts(self) -> bool:
        """Whether background requests exist and must wait, because a client waits for its first token."""
        if not (self._waiting.num_background or (self._running and self._running[-1].is_background)):
            return False
        clients = takewhile(lambda group: not group.is_background, self._running)
        return self._waiting.has_clients or any(map(self._has_prompt, clients))

    def _has_prompt(self, group: SequenceGroup) -> bool:
        """Whether a running group does not just decode."""
        return group.num_missing > len(group.sequences) and not self._decodes(group, group.work())

    @property
    def _clients_return(self) -> bool:
        """Whether a client's request came a short time ago, so that another one may follow."""
        return time.monotonic() < self._client_came + _CLIENTS_RETURN

    def _plan_prompts(self, step: NextStep, chunked: list[SequenceGroup]) -> None:
        """Give the remaining room to sequences with several tokens to compute, and to waiting requests.

        A client may send thousands of pooling inputs, so they take turns with other work: in every second step they get
        tokens only if nothing else runs in it. In the steps between, they and other prompts get half of the work. So
        even a step that is slower than expected delays no answer for long.
        """
        step.begin_prompts()
        pooled = [group for group in chunked if group.request.pooling is not None]
        head = self._waiting.first()
        first_prompt = chunked[0] if chunked else head
        if first_prompt is not None and first_prompt.is_background and self._clients_return:
            step.shorten(first_prompt.rows)
        if pooled or (head is not None and head.request.pooling is not None):
            self._pools_last = not self._pools_last
            if not self._pools_last and self._has_other_work(step):
                step.halve()
        last = pooled if self._pools_last else []
        first = [group for group in chunked if group not in last]
        if first and not first[0].unchunked:
            self._plan_short(step, first[0], first[1:])
        self._plan_chunks(step, first)
        if not (step.preempted or self._drains):
            self._admit(step)
        if last and not self._has_other_work(step):
            self._plan_chunks(step, last[::-1])  # with several requests, each gets its turn
        if not (step.preempted or self._drains):
            head = self._waiting.first() if self._waiting.has_clients else None
            self._waiting.lacks_room = head is not None and not self._can_admit(step, head)

    def _plan_chunks(self, step: NextStep, groups: list[SequenceGroup]) -> None:
        for group in groups:
            if group not in step.rows and group.status is Status.RUNNING and step.is_open:
                self._plan_group(step, group, group.work())

    def _next_waiting(self, step: NextStep) -> SequenceGroup | None:
        """The group that is admitted next; not a pooling input if other work comes first and there is some."""
        group = self._waiting.first(pooled=not (self._pools_last and self._has_other_work(step)))
        return None if group is not None and group.is_background and step.clients_only else group

    def _has_other_work(self, step: NextStep) -> bool:
        """Whether the step has work other than pooling inputs."""
        return any(group.request.pooling is None for group in step.rows)

    def _plan_short(self, step: NextStep, oldest: SequenceGroup, others: list[SequenceGroup]) -> None:
        """Give up to half of the remaining room to prompts that have at most half as much to compute as the oldest one,
        so that a short turn of a conversation does not wait for a long prompt."""
        most, priority = oldest.num_missing // 2, oldest.key[0]
        with step.half():
            for group in others:
                is_short = not group.unchunked and group.key[0] == priority and group.num_missing <= most
                if is_short and group.status is Status.RUNNING and step.is_open:
                    self._plan_group(step, group, group.work())
            while step.is_open and (waiting := self._next_waiting(step)) is not None:
                plain = not waiting.unchunked and waiting.encoder_input is None and len(waiting.sequences) == 1
                if not plain or waiting.key[0] > priority or self._tables.num_missing(waiting) > most:
                    return
                if step.preempted or self._drains or not self._can_admit(step, waiting):
                    return
                self._start(waiting)
                self._plan_group(step, waiting, waiting.work())

    def _plan_group(self, step: NextStep, group: SequenceGroup, work: list[tuple[Sequence, int]]) -> None:
        """Give a running group its tokens and pages, evicting younger groups if pages are short."""
        total = sum([count for _, count in work])
        decodes = self._decodes(group, work)
        budget = step.budget if decodes else step.room(group)  # single tokens are never postponed
        budget = total if group.unchunked else budget
        if group.request.images and len(work) == 1 and work[0][0].num_scheduled < work[0][0].num_prompt:
            start, planned = work[0][0].num_scheduled, sum(row.count for rows in step.rows.values() for row in rows)
            hard = self.config.max_num_batched_tokens - planned
            budget = self._image_work.apart(step, group, start, min(total, budget), min(total, hard))
            budget = self._image_work.fitting(step, group, start, budget)
        completes = total <= budget
        sampled = completes and group.fork_point is None and group.request.pooling is None
        rows: list[Row] = []
        for sequence, count in work:
            # All sequences of a group sample in the same step: until all can, each keeps its last token.
            allowed = count if completes else min(count if len(work) == 1 else count - 1, budget)
            if allowed:
                budget -= allowed
                start = sequence.num_computed + sequence.num_in_flight
                rows.append(Row(group, sequence, start, allowed, sampled, sequence.num_releases))
        if step.num_drafts > 0 and decodes and sampled and group.started and group.beam is None:
            rows = self._with_drafts(step, rows)
        if group.beam is not None and group.sequences[0].num_pending:
            if not completes or not self._set_aside(step, group, rows):
                return
        elif not group.unchunked:
            lacking = [row for row in rows if row.start + row.count > row.sequence.num_writable]
            if lacking and step.ahead and not self._has_room(lacking):
                return
            for row in lacking:
                if not self._reserve(step, group, row.sequence, row.start + row.count):
                    return
        if rows and (self.states is None or self._take_states(step, group, rows, self.states)):
            step.take(group, rows)

    def _drafts_for(self, group: SequenceGroup) -> bool:
        return self.drafter is not None and self.drafter.serves(group.request)

    def _decodes(self, group: SequenceGroup, work: list[tuple[Sequence, int]]) -> bool:
        """Whether its sequences have one token each to compute; with states, also those of a row with a wrong draft."""
        total = sum([count for _, count in work])
        if total == len(work) or self.states is None:
            return total == len(work)
        return group.started and group.fork_point is None and total <= len(work) * (1 + MOST_DRAFTS)

    def _num_again(self, group: SequenceGroup) -> int:
        """The tokens that its next row computes a second time."""
        work = group.work()
        return sum([count for _, count in work]) - len(work) if self._decodes(group, work) else 0

    def _gain(self, rows: int) -> DraftGain:
        return DraftGain(self.draft_costs, rows, again=self.states is not None)

    def _leave_for_drafts(self, step: NextStep) -> None:
        """Find the tokens and pages that may be used for drafts. Running rows get their tokens first. Half of the
        remaining tokens are left to prompts."""
        tokens = min(step.budget, step.limit.tokens)
        rows = sum(group.rows for group in self._running)
        again = 0 if self.states is None else sum(map(self._num_again, self._running))
        step.num_drafts = (tokens - rows - again) // 2
        step.gain = self._gain(rows)
        sequences = [sequence for group in self._running for sequence in group.sequences]
        step.kept_pages = sum(self._tables.missing(sequence, sequence.num_tokens)[0] for sequence in sequences)

    def _prepare_drafts(self, step: NextStep) -> None:
        wanted: list[Wanted] = []
        for group in self._running:
            if not (group.started and group.beam is None and group.fork_point is None and self._drafts_for(group)):
                continue
            if step.clients_only and group.is_background:
                break
            if step.ahead and not group.may_run_ahead(drafting=True):
                continue
            if not self._decodes(group, group.work()):
                continue
            for sequence in group.sequences:
                most = min(step.num_drafts, group.request.decoding.max_tokens - 1 - sequence.num_output)
                if most > 0:
                    wanted.append((group, sequence, most))
        assert self.drafter is not None
        if self.drafter.prepare(wanted, self._gain(sum(group.rows for group in self._running))):
            self.drafting = False  # the time of this step says nothing of the cost of a draft

    def _with_drafts(self, step: NextStep, rows: list[Row]) -> list[Row]:
        """The rows of a decoding group with drafts, if there is room: no running request gives up anything for them."""
        left, drafted = step.num_drafts, []
        for row in rows:
            drafts: tuple[int, ...] = ()
            if self.drafts_forced_tokens and row.group.may_be_forced:
                drafts = forced_drafts(row.group, row.sequence, left)
                for _ in drafts:
                    step.gain.count(1.0)
            if not drafts and self.drafter is not None and self._drafts_for(row.group) and step.gain.is_worth(1.0):
                drafts = drafts_of(self.drafter, row.group, row.sequence, left, step.gain)
            drafted.append(row.drafting(drafts) if drafts else row)
            left -= len(drafts)
        if self._missing(drafted) - self._missing(rows) > self.pool.num_available - step.kept_pages:
            return rows
        step.num_drafts = left
        return drafted

    def _reserve(self, step: NextStep, group: SequenceGroup, sequence: Sequence, end: int) -> bool:
        """Let only this sequence write the pages up to token `end`; returns False if the group itself was preempted."""
        needed, shared = self._tables.missing(sequence, end)
        while (pages := self.pool.reserve(needed)) is None:
            victim = self._running[-1]
            self._preempt(step, victim)
            if victim is group:
                return False
            needed, shared = self._tables.missing(sequence, end)  # the victim may have been the other holder of a page
        copy = self._tables.take(sequence, pages, shared)
        if copy is not None:
            step.copies.setdefault(group, []).append(copy)
        return True

    def _take_states(self, step: NextStep, group: SequenceGroup, rows: list[Row], states: StateSlots) -> bool:
        """Give rows the state slots that they write, preempting younger groups if there are too few; returns False if
        the group itself was preempted."""
        least = sum(running.rows for running in self._running)
        for row in rows:
            while not states.take(row, least):
                victim = self._running[-1]
                self._preempt(step, victim)
                if victim is group:
                    return False
        return True

    def _set_aside(self, step: NextStep, group: SequenceGroup, rows: list[Row]) -> bool:
        """Take the pages that a search may need for rows whose parent beams are not known yet. Returns False if there
        are too few. The search then waits for the result of the step in flight, after which it needs fewer pages."""
        begins = rows[0].start % self.config.block_size == 0  # one page per row; else the first row needs none
        pages = None if self._drains else self.pool.reserve(len(rows) - (not begins))
        if pages is None:
            return False
        step.searches[group] = SearchAhead(rows, pages if begins else [0, *pages])
        return True

    def _missing(self, rows: list[Row]) -> int:
        """The pages that these rows lack."""
        return sum([self._tables.missing(row.sequence, row.start + row.count)[0] for row in rows])

    def _has_room(self, rows: list[Row]) -> bool:
        """Whether these rows of a running group fit without a preemption, and no older group waits for pages."""
        needed = self._missing(rows)
        short = needed > 0 and (self._drains or needed > self.pool.num_available)
        self._drains |= short
        return not short

    def _admit(self, step: NextStep) -> None:
        """Admit waiting groups in turn, as long as rows, budget and pages last."""
        while step.is_open and (group := self._next_waiting(step)) is not None:
            if not self._encoder_cache.may_start(step, group) or (group.unchunked and not step.can_read(group)):
                return
            if self.in_flight.encodes(group.encoder_input):
                return  # after that it can be found
            while not self._can_admit(step, group):
                lowest = self._running[-1] if self._running else None
                if lowest is None or lowest.key[0] <= group.key[0]:
                    return
                if step.ahead:
                    self._drains = True
                    return
                self._preempt(step, lowest)
            self._start(group)
            self._encoder_cache.take(step, group)
            self._plan_group(step, group, group.work())

    def _can_admit(self, step: NextStep, group: SequenceGroup) -> bool:
        if group.unchunked:  # there may be thousands, each with a row and no page
            return len(self._running) < self.config.max_num_seqs
        if sum(running.rows for running in self._running) + group.rows > self.config.max_num_seqs:
            return False
        if self.states is not None:  # a sequence has a slot, and a second one while it is in a step
            left = [one for running in self._running for one in running.sequences if len(one.states) == 1]
            if 2 * group.rows + len(left) > self.states.pool.num_available:
                return False
        needed = self._tables.pages_needed(group) + self._encoder_cache.pages_needed(step, group)
        return needed <= self.pool.num_available

    def _start(self, group: SequenceGroup) -> None:
        self._waiting.pop(group)
        sequence = group.sequences[0]
        if not group.unchunked:
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

    def _preempt(self, step: NextStep, group: SequenceGroup) -> None:
        """Take a group's pages; it starts again later, from what the prefix cache still has."""
        step.preempted = True
        self._last.forget()  # it may get other pages when it returns
        self.stats.num_preemptions += 1
        self._running.remove(group)
        self._give_up(group)
        for source, _ in step.drop(group):
            self.pool.unpin(source)
        self._encoder_cache.release(group)
        group.pooled = None
        group.fork_point = group.common_prefix() if len(group.sequences) > 1 else None
        self._waiting.push_back(group)

    # ---------------------------------------------------------------- bookkeeping

    def _apply(self, group: SequenceGroup, outcome: Outcome) -> None:
        """Fork, drop and finish as the search decided; forks come before anything is freed."""
        for child, parent in outcome.forks:
            self._tables.share(child, parent)
        for sequence in outcome.dropped:
            self._ended(group, sequence)
            self._tables.release(sequence)
        group.sequences = outcome.live
        group.started = True
        if group.beam is not None and outcome.live:
            self._follow(group, outcome)
        self.stats.generation_tokens += outcome.num_new_tokens
        if outcome.delta.finished:
            self.stats.num_finished += 1
            self._finish(group)

    def _follow(self, group: SequenceGroup, outcome: Outcome) -> None:
        """Handle a search that has continued. If a step in flight continues it, too, its beams get the tables they have
        there: it has chosen the same ones, unless fewer are left than before. In that case, its results for them are
            dropped."""
        found = self.in_flight.take_search(group)
        if found is None:
            return
        step, search = found
        if len(outcome.live) < len(search.rows):
            self.pool.free(search.pages)
            for sequence in outcome.live:
                sequence.void()
            return
        for row, sequence in zip(search.rows, outcome.live, strict=True):
            row.belong(sequence)
        copies = self._tables.go_on(outcome.live, dict(outcome.forks), search.pages)
        if copies:
            step.copies[group] = copies
            self.stats.num_page_copies += len(copies)

    def _give_up(self, group: SequenceGroup) -> None:
        """Release a running group's pages. The results of its rows in flight are dropped."""
        for sequence in group.sequences:
            self._tables.release(sequence)
        self.in_flight.leave(group)

    def _finish(self, group: SequenceGroup) -> None:
        if group.status is Status.RUNNING:
            self._running.remove(group)
            self._give_up(group)
        elif group.status is Status.WAITING:
            self._waiting.leave(group)
        else:
            self._num_restoring -= 1
        self._encoder_cache.finish(group)
        for sequence in group.sequences:
            self._ended(group, sequence)
        group.status = Status.FINISHED
        group.sequences = []
        del self._groups[group.request.request_id]

    def _ended(self, group: SequenceGroup, sequence: Sequence) -> None:
        if self.drafter is not None and group.beam is None and group.request.pooling is None:
            self.drafter.ended(group.request, sequence)

    def _expire(self) -> None:
        now = time.monotonic() if self._deadlines else 0.0
        for group in self._deadlines.due(now, self._groups):
            self.stats.num_aborted += 1
            self._outbox.append(final_abort(group, "abort", "deadline"))
            self._finish(group)

    def snapshot(self) -> EngineStats:
        """Current counters and gauges."""
        stats, pool = self.stats, self.pool
        stats.num_running, stats.num_waiting = len(self._running), len(self._waiting) + self._num_restoring
        stats.pages_free, stats.pages_held, stats.pages_cached = pool.num_free, pool.num_held, pool.num_cached
        stats.drafted_at, stats.accepted_at = self._draft_places.drafted, self._draft_places.accepted
        stats.peak_pages_held, stats.lacks_room = pool.peak_held, self._waiting.lacks_room
        return stats

    def check_integrity(self) -> None:
        """Compare the pool with the tables of all live sequences; for tests and for idle moments. Raises
        AssertionError: something leaked, is held twice, or is held although it is outside every window."""
        self._tables.check(self._groups.values())
        tables = [list(s.table) for g in self._groups.values() for s in g.sequences]
        tables += [g.encoder_input.pages for g in self._groups.values() if g.encoder_input is not None]
        tables += self.in_flight.set_aside()
        self.pool.check_integrity(tables, self.in_flight.pinned())
        if self.states is not None:
            self.states.check([sequence for group in self._groups.values() for sequence in group.sequences])
