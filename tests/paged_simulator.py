"""A model that is no model, run behind the real scheduler: it proves that pages, copies and forks are right.

`FakeModel` chooses its logits by a hash of the salt and of all tokens so far. `Simulator` keeps what a
runner would keep in paged memory: for each slot the token and the hash up to it. It computes a new
token's hash from what the *memory* holds before it, so a wrong page anywhere changes the answer, and it
compares every page that a row names with the tokens that the row should see. An encoder's input leaves a hash per
token, each of the whole input; every token of a decoder takes all of them in, as its row's pages have them.
`solve` decodes the same request alone, by plain loops that know nothing of pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest import mock

import numpy as np

from engine.interface.outputs import ChoiceDelta, RequestDelta, TokenLogprobs
from engine.interface.request import Decoding, Request
from engine.interface.sampling_table import TABLE, Kind
from engine.scheduling.batch import build_plan
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.philox import uniforms
from engine.scheduling.plan import StepPlan, StepResult, TokenScores
from engine.scheduling.row import Row
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as Line
from engine.scheduling.sequence import SequenceGroup, Status

VOCAB = 17
_MASK = 2**64 - 1
_LOG_ZERO = float("-inf")


class FakeModel:
    """Log-probabilities as a pure function of salt and tokens."""

    def __init__(self, seed: int = 0, rows: int = 4096):
        logits = np.random.default_rng(seed).normal(0.0, 1.7, (rows, VOCAB))
        self._rows = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)

        self._digests: dict[tuple[str | None, tuple[int, ...]], int] = {}

    def root(self, salt: str | None) -> int:
        return 1 if salt is None else self.extend(2, sum(salt.encode()))

    def extend(self, state: int, token: int) -> int:
        mixed = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15) & _MASK
        return mixed ^ (mixed >> 29)

    def encode(self, salt: str | None, tokens: Sequence[int]) -> list[int]:
        """What an encoder leaves of each token: it depends on all of them."""
        whole = self.extend(self.root(salt), 1000)
        for token in tokens:
            whole = self.extend(whole, token)
        return [self.extend(whole, 50 * place + token) for place, token in enumerate(tokens)]

    def digest(self, encoded: Sequence[int]) -> int:
        """All that an encoder left, in one number; 0 without an encoder."""
        digest = 0
        for state in encoded:
            digest = self.extend(digest ^ state, 0)
        return digest

    def decode(self, state: int, token: int, digest: int) -> int:
        """The state after one more token of the decoder."""
        return self.extend(state ^ digest, token)

    def state(self, request: Request, tokens: Sequence[int]) -> int:
        state = self.root(request.cache_salt)
        salt, encoder_input = request.cache_salt, request.encoder_token_ids
        if (salt, encoder_input) not in self._digests:
            self._digests[salt, encoder_input] = self.digest(self.encode(salt, encoder_input))
        digest = self._digests[salt, encoder_input]
        for token in tokens:
            state = self.decode(state, token, digest)
        return state

    def logprobs(self, state: int) -> np.ndarray:
        return self._rows[(state >> 17) % len(self._rows)]


def is_published(pool: BlockPool, page: int) -> bool:
    """The page's content is known by hash, so that it must not be written."""
    return pool._hash_of[page] is not None


def top(logprobs: np.ndarray, count: int) -> list[int]:
    """The most probable tokens, best first."""
    return np.argsort(-logprobs, kind="stable")[:count].tolist()


def draw(processed: np.ndarray, temperature: float, uniform: float) -> int:
    """Inverse CDF in vocabulary order, or the most probable token."""
    if temperature == 0.0:
        return int(processed.argmax())
    weights = np.exp((processed.astype(np.float64) - processed.max()) / temperature)
    cumulative = weights.cumsum()
    return int(min(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"), VOCAB - 1))


# ------------------------------------------------------------------ the answer a request gets alone


@dataclass
class Answer:
    """One choice of a request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    aborted: bool = False


def _processed(model: FakeModel, request: Request, output: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    raw = model.logprobs(model.state(request, [*request.prompt_token_ids, *output]))
    processed = raw.copy()
    if len(output) < request.decoding.min_tokens:
        processed[list(request.decoding.stop_ids)] = _LOG_ZERO
    return raw, processed


def solve(model: FakeModel, request: Request) -> list[Answer]:
    """All answers of a request, decoded alone."""
    if request.decoding.num_beams > 1:
        return _solve_beams(model, request)
    return [_solve_choice(model, request, choice) for choice in range(request.decoding.n)]


def _solve_choice(model: FakeModel, request: Request, choice: int) -> Answer:
    decoding, answer = request.decoding, Answer()
    total = 0.0
    while answer.finish_reason is None:
        raw, processed = _processed(model, request, answer.tokens)
        uniform = float(uniforms([decoding.seed], [choice], [len(answer.tokens)])[0])
        token = draw(processed, decoding.temperature, uniform)
        answer.tokens.append(token)
        total += float(raw[token])
        if token in decoding.stop_ids:
            answer.finish_reason = "stop"
            answer.stop_reason = None if token in decoding.eos_ids else token
        elif len(answer.tokens) == decoding.max_tokens:
            answer.finish_reason = "length"
    answer.cumulative_logprob = total
    return answer


def _solve_beams(model: FakeModel, request: Request) -> list[Answer]:
    """The rules of `transformers`' beam search, written down once more without looking at the engine's."""
    decoding = request.decoding
    beams, penalty = decoding.num_beams, decoding.length_penalty
    to_keep = max(2, 1 + len(decoding.stop_ids)) * beams
    running: list[tuple[np.float32, list[int]]] = [(np.float32(0.0), [])]
    finished: list[tuple[float, float, list[int]]] = []
    length = 0
    while True:
        candidates = []
        for total, output in running:
            processed = _processed(model, request, output)[1]
            candidates += [
                (np.float32(processed[token]) + total, [*output, token])
                for token in range(VOCAB)
                if processed[token] > _LOG_ZERO
            ]
        candidates.sort(key=lambda candidate: -candidate[0])
        length += 1
        running = []
        for rank, (total, output) in enumerate(candidates[:to_keep]):
            if output[-1] in decoding.stop_ids or length == decoding.max_tokens:
                if rank < beams:
                    finished.append((float(total) / length**penalty, float(total), output))
            elif len(running) < beams:
                running.append((total, output))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis[0])[:beams]
        if length == decoding.max_tokens or not running:
            break
        if len(finished) == beams:
            horizon = decoding.max_tokens if decoding.early_stopping == "never" and penalty > 0 else length
            if decoding.early_stopping is True or float(running[0][0]) / horizon**penalty <= finished[-1][0]:
                break
    answers = []
    for score, total, output in finished[: decoding.n]:
        stopped = output[-1] in decoding.stop_ids
        answers.append(
            Answer(
                tokens=output,
                finish_reason="stop" if stopped else "length",
                stop_reason=output[-1] if stopped and output[-1] not in decoding.eos_ids else None,
                cumulative_logprob=total,
                score=score,
            )
        )
    return answers


# ------------------------------------------------------------------ the same behind the scheduler


class Oracle:
    """A drafter that knows all answers, and tells some of them, or begins with them and goes on with a wrong token."""

    def __init__(self, simulator: Simulator):
        self._simulator = simulator
        self._answers: dict[str, list[Answer]] = {}

    def prepare(self, wanted: Any, gain: Any) -> bool:
        return False

    def serves(self, request: Request) -> bool:
        return True

    def ended(self, request: Request, sequence: Line) -> None:
        pass

    def propose(self, request: Request, sequence: Line, most: int) -> tuple[list[int], float]:
        assert most > 0
        choice, tokens = sequence.index, sequence.tokens.view()
        name, place = request.request_id, len(tokens) - len(request.prompt_token_ids)
        if name not in self._answers:
            self._answers[name] = solve(self._simulator.model, request)
        told = self._answers[name][choice].tokens
        assert told[:place] == tokens[len(request.prompt_token_ids) :].tolist()
        rng = np.random.default_rng([place, choice, sum(name.encode()), int(tokens.sum())])
        right, wrong = rng.integers(0, 6), rng.integers(0, 3)
        return told[place : place + right] + rng.integers(0, VOCAB, wrong).tolist(), 1.0


def small(
    *, kind: Any = None, num_pages: int = 50, block_size: int = 4, max_num_seqs: int = 8, budget: int = 64, **more: Any
) -> Any:
    """A simulator (or one of another `kind`) of few pages."""
    size = {"num_pages": num_pages, "block_size": block_size, "max_num_seqs": max_num_seqs}
    return (kind or Simulator)(**size, max_num_batched_tokens=budget, **more)


class Simulator:
    """Scheduler, pool and fake runner; checks all of them after every step.

    Use as a context manager: the scheduler's clock is `now`.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        caching: bool = True,
        model: FakeModel | None = None,
        window: int | None = None,
        drafts: bool = False,
    ):
        assert window is None or window > 1, "a token's hash is made from the one before, so that must be seen"
        self.model = model or FakeModel()
        self.size = block_size
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            enable_prefix_caching=caching,
            needs=SequenceNeeds(window=window),
        )
        self.pool = BlockPool(num_pages)
        self.scheduler = Scheduler(self.config, self.pool, drafter=Oracle(self) if drafts else None)
        self.tokens = np.full((num_pages + 1, block_size), -1, dtype=np.int64)
        self.states = np.zeros((num_pages + 1, block_size), dtype=np.uint64)
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[Answer]] = {}
        self.prompt_logprobs: dict[str, Sequence[TokenLogprobs | None]] = {}
        self.cached_tokens: dict[str, int] = {}  # of decoders
        self.over: set[str] = set()
        self.now = 0.0
        self.events = {
            "chunked": 0,
            "beam_with_others": 0,
            "mixed_draws": 0,
            "salted_hits": 0,
            "unseen": 0,
            "late_hits": 0,
            "encoded": 0,
            "encoded_for_several": 0,
            "inputs_found": 0,
            "encoded_again": 0,
            "encoded_beside_decoding": 0,
            "encoded_over_budget": 0,
            "encoder_pages_shared": 0,
            "encoder_pages_found_again": 0,
            "apart": 0,
            "all drafts right": 0,
            "some drafts right": 0,
            "no drafts right": 0,
            "drafts of several": 0,
        }
        self.inputs_seen: dict[str, int] = {}  # how often each request's encoder input was encoded
        self.inputs_found: dict[str, int] = {}  # tokens of those that were encoded already when requests first ran
        self._patch = mock.patch("engine.scheduling.scheduler.time", SimpleNamespace(monotonic=lambda: self.now))

    def __enter__(self) -> Simulator:
        self._patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.stop()

    # -------------------------------------------------------------- what a caller does

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.answers[request.request_id] = [Answer() for _ in range(request.decoding.n)]

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        done = self.scheduler.abort(request_id, choice)
        answers = self.answers[request_id]
        if done:
            for answer in answers if choice is None else [answers[choice]]:
                answer.aborted = True
        if all(answer.aborted or answer.finish_reason for answer in answers):
            self.over.add(request_id)
        self.check()
        return done

    def step(self) -> list[RequestDelta]:
        plan = self._schedule()
        if plan is None:
            deltas = self.scheduler.take_outbox()
        else:
            deltas = self.scheduler.update(self.execute(plan))
        self._deliver(deltas)
        self.check()
        return deltas

    def fail(self) -> list[RequestDelta]:
        """A step that breaks in the middle: half of the copies done, garbage in the slots."""
        plan = self._schedule()
        if plan is None:
            deltas = self.scheduler.take_outbox()
        else:
            for source, target in plan.copies[: len(plan.copies) // 2]:
                self._copy(np.array([source]), np.array([target]))
            self._garble(plan, set())
            deltas = self.scheduler.fail("it broke")
        self._deliver(deltas)
        self.check()
        return deltas

    def fail_apart(self, last_digits: Collection[str]) -> list[RequestDelta]:
        """A step that breaks, and is halved until the requests whose names end with these digits are alone: what has
        one of them breaks again, with garbage in the slots that no other part has written."""
        plan = self._schedule()
        if plan is None:
            deltas = self.scheduler.take_outbox()
        else:
            steps, written, deltas = self.scheduler.in_flight, set[int](), list[RequestDelta]()
            self._garble(plan, written)
            self._copy(*plan.copies.T)
            steps.copied()
            steps.split()
            ends = {"failed": 0, "computed": 0}
            while steps:
                if self.scheduler.skip():  # its request has ended in an earlier part
                    continue
                plan, rows = steps.plan(steps.oldest), steps.oldest.rows
                if not any(row.group.request.request_id[-1] in last_digits for row in rows):
                    deltas += self.scheduler.update(self.execute(plan, rows))
                    written.update([] if plan.encoder is None else plan.encoder.slots.tolist())
                    ends["computed"] += 1
                    continue
                self._garble(plan, written)
                if len({row.group for row in rows}) > 1:
                    assert steps.split()
                else:
                    deltas += self.scheduler.fail("it broke")
                    ends["failed"] += 1
            self.events["apart"] += all(ends.values())
        self._deliver(deltas)
        self.check()
        return deltas

    def _garble(self, plan: StepPlan, spared: set[int]) -> None:
        slots = [*plan.slots.tolist(), *([] if plan.encoder is None else plan.encoder.slots.tolist())]
        self.tokens.reshape(-1)[[slot for slot in slots if slot not in spared]] = -7

    def _rows(self) -> list[Row]:
        return self.scheduler.in_flight.newest.live() if self.scheduler.in_flight else []

    def step_bound(self) -> int:
        """Steps after which everything must be over: in each, the first in line does something."""
        bound = 10
        for group in self.scheduler.groups():
            decoding = group.request.decoding
            bound += len(group.request.prompt_token_ids) + 2 * decoding.width * decoding.max_tokens + 5
        return bound

    def drain(self) -> None:
        """Step until nothing is left, which must come to pass."""
        for _ in range(self.step_bound()):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        left = {r for r in self.requests if r not in self.over}
        assert not self.scheduler.has_unfinished(), f"requests starve: {left}"
        assert not left
        assert self.pool.num_held == 0
        assert self.pool.num_free + self.pool.num_cached == self.pool.total
        snapshot = self.scheduler.snapshot()
        assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)

    def compare(self) -> None:
        """Every request has the answer that it gets alone, or a prefix of it if it was cut short."""
        for request_id, request in self.requests.items():
            got = self.answers[request_id]
            expected = solve(self.model, request)
            assert len(got) == len(expected) == request.decoding.n
            for answer, alone in zip(got, expected, strict=True):
                where = (request_id, request)
                if answer.finish_reason in ("stop", "length"):
                    assert answer.tokens == alone.tokens, where
                    assert answer.finish_reason == alone.finish_reason, where
                    assert answer.stop_reason == alone.stop_reason, where
                    assert np.isclose(answer.cumulative_logprob, alone.cumulative_logprob, atol=1e-4), where
                    assert (answer.score is None) == (alone.score is None), where
                    assert answer.score is None or np.isclose(answer.score, alone.score, rtol=1e-4), where
                else:
                    assert answer.aborted or answer.finish_reason in ("abort", "error"), where
                    assert answer.tokens == alone.tokens[: len(answer.tokens)], where
                if request.decoding.logprobs is not None:
                    self._compare_logprobs(request, answer)
            self._compare_prompt(request)

    def _compare_logprobs(self, request: Request, answer: Answer) -> None:
        assert len(answer.logprobs) == len(answer.tokens)
        for place, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            raw = _processed(self.model, request, answer.tokens[:place])[0]
            self._compare_entry(raw, token, entry, request.decoding.logprobs or 0)

    def _compare_prompt(self, request: Request) -> None:
        wanted = request.decoding.prompt_logprobs
        got = self.prompt_logprobs.get(request.request_id)
        if wanted is None:
            assert got is None
            return
        assert self.cached_tokens.get(request.request_id, 0) == 0
        if got is None:
            assert all(not answer.tokens for answer in self.answers[request.request_id])
            return
        prompt = request.prompt_token_ids
        assert len(got) == len(prompt)
        assert got[0] is None
        for place in range(1, len(prompt)):
            entry = got[place]
            assert entry is not None
            raw = self.model.logprobs(self.model.state(request, prompt[:place]))
            self._compare_entry(raw, prompt[place], entry, wanted)

    @staticmethod
    def _compare_entry(raw: np.ndarray, token: int, entry: TokenLogprobs, wanted: int) -> None:
        assert list(entry) == list(dict.fromkeys([token, *top(raw, wanted)]))
        for other, logprob in entry.items():
            assert logprob.logprob == raw[other]
            assert logprob.rank == int((raw > raw[other]).sum()) + 1

    def _schedule(self) -> StepPlan | None:
        """Plan a step, in which something runs: the first in line, if it ran before."""
        return self._planned(self.scheduler.schedule)

    def _planned(self, schedule: Callable[[], StepPlan | None], *, ahead: bool = False) -> StepPlan | None:
        """Plan a step, and check it. If it is planned ahead of an answer, nothing need run."""
        running = {group for group in self.scheduler.groups() if group.status is Status.RUNNING}
        came_before = {group for group in self.scheduler.groups() if group.admitted and group not in running}
        plan = schedule()
        if plan is not None:
            self._check_taken_over(plan)
        in_flight = {row.group for step in self.scheduler.in_flight for row in step.live()}
        groups = list(self.scheduler.groups())
        for group in groups:
            if group.encoder_input is not None and group.encoder_input.pages:
                known = self.pool.match(group.encoder_input.hashes) == group.encoder_input.pages
                self.events["encoder_pages_found_again"] += known and group in came_before
                self.inputs_found.setdefault(group.request.request_id, len(group.encoder_input.tokens) if known else 0)
                assert known or group in in_flight, "encoded for nobody in the step"
        if groups and not ahead:
            assert plan is not None, "a step in which nothing runs"
            first = min(groups, key=lambda group: group.key)
            if first in running:
                waits = first.request.pooling is not None and self.scheduler._pools_last  # others have their turn
                assert first.status is Status.RUNNING, "the first in line was preempted"
                assert waits or any(row.group is first for row in self._rows()), "the first in line got nothing"
        return plan

    # -------------------------------------------------------------- what a runner does

    def execute(self, plan: StepPlan, rows: list[Row] | None = None, computed: list[Row] | None = None) -> StepResult:
        """Run a plan on the memory, and check that it is one; `rows` are its rows if it is a part of a step; `computed`
        what they compute, if that is known here only."""
        rows = self._rows() if rows is None else rows
        computed = rows if computed is None else computed
        assert 0 < plan.num_rows == len(rows) <= self.config.max_num_seqs
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        self._check_groups(rows)
        sources, targets = plan.copies.T
        assert len(set(targets.tolist())) == len(targets)
        assert not set(targets.tolist()) & set(sources.tolist())
        self._copy(sources, targets)
        assert len(set(plan.slots.tolist())) == plan.num_tokens
        assert plan.query_start[0] == 0
        assert plan.query_start[-1] == plan.num_tokens
        self._encode(plan, rows)
        for i, row in enumerate(computed):
            self._check_memory(plan, i, row, row.start)
            self._check_cross(plan, i, row)
        for i, row in enumerate(rows):
            self._write(plan, i, row)
        for i, row in enumerate(computed):
            self._check_memory(plan, i, row, row.start + row.count)
        states = self.states.reshape(-1)[plan.slots]
        result = self._result(plan, [int(state) for state in states], sum(row.sampled for row in rows))
        return replace(result, accepted=self._accepted(plan, rows, result.tokens))

    def _accepted(self, plan: StepPlan, rows: list[Row], tokens: np.ndarray) -> np.ndarray | None:
        """How many tokens of each sampled row count."""
        if not any(row.drafts for row in rows):
            return None
        self.events["drafts of several"] += sum(bool(row.drafts) for row in rows) > 1
        accepted, first = [], 0
        for i, row in enumerate(rows):
            if not row.sampled:
                continue
            last, count = int(plan.query_start[i + 1]) - 1, 1
            given = plan.token_ids[last - len(row.drafts) + 1 : last + 1].tolist()
            assert tuple(given) == row.drafts
            while count < row.sampled and int(tokens[first + count - 1, 0]) == given[count - 1]:
                count += 1
            if row.drafts:
                how = {1: "no", row.sampled: "all"}.get(count, "some")
                self.events[f"{how} drafts right"] += 1
            accepted.append(count)
            first += row.sampled
        return np.array(accepted, dtype=np.int32)

    def _encode(self, plan: StepPlan, rows: list[Row]) -> None:
        """Run the encoder, over inputs of requests that have rows and into pages that are only theirs."""
        batch = plan.encoder
        if batch is None:
            return
        most = self.config.max_num_batched_tokens
        assert 0 < len(batch.token_ids) == batch.starts[-1] <= most
        assert len({*batch.slots.tolist(), *plan.slots.tolist()}) == len(batch.slots) + plan.num_tokens
        groups = {row.group for row in rows}
        decoding = sum(group.started and group.fork_point is None for group in groups)
        self.events["encoded_beside_decoding"] += decoding > 0
        if len(batch.token_ids) + plan.num_tokens > most:
            # Only the first prompt of a step may, and it is the last one then.
            self.events["encoded_over_budget"] += 1
            assert len(batch.starts) == 2
            # A row with one token left, also one that forks after it, is none of the prompts.
            last = [row.sampled or row.start + row.count == row.group.fork_point for row in rows]
            chunks = {r.group for r, done in zip(rows, last, strict=True) if r.count > 1 + len(r.drafts) or not done}
            owners = [
                group
                for group in groups
                if group.encoder_input and group.encoder_input.pages[0] * self.size == batch.slots[0]
            ]
            assert chunks <= set(owners)
            assert len(owners) == 1
        for first, last in itertools.pairwise(batch.starts.tolist()):
            tokens, slots = batch.token_ids[first:last].tolist(), batch.slots[first:last]
            pages = dict.fromkeys((slots // self.size).tolist())
            in_order = [page * self.size + place for page in pages for place in range(self.size)]
            assert slots.tolist() == in_order[: last - first]
            assert not any(is_published(self.pool, page) for page in pages), "a published page is written"
            holders = [group for group in groups if group.encoder_input and group.encoder_input.pages == list(pages)]
            assert {group.request.encoder_token_ids for group in holders} == {tuple(tokens)}
            assert len({group.request.cache_salt for group in holders}) == 1
            assert [self.pool.references(page) for page in pages] == [
                sum(
                    g.encoder_input is not None and g.encoder_input.pages == list(pages)
                    for g in self.scheduler._running
                )
            ] * len(pages)
            self.events["encoded"] += 1
            self.events["encoded_for_several"] += len(holders) > 1
            self.tokens.reshape(-1)[slots] = tokens
            self.states.reshape(-1)[slots] = self.model.encode(holders[0].request.cache_salt, tokens)
            for group in holders:
                name = group.request.request_id
                self.inputs_seen[name] = self.inputs_seen.get(name, 0) + 1
                self.events["encoded_again"] += self.inputs_seen[name] > 1

    def _cross_slots(self, plan: StepPlan, i: int) -> np.ndarray:
        if plan.cross is None:
            return np.zeros(0, dtype=np.int64)
        positions = np.arange(plan.cross.lens[i])
        return plan.cross.tables[i][positions // self.size] * self.size + positions % self.size

    def _check_cross(self, plan: StepPlan, i: int, row: Row) -> None:
        """The pages that row i names for its encoder's input hold exactly that."""
        slots, expected = self._cross_slots(plan, i), list(row.group.request.encoder_token_ids)
        assert self.tokens.reshape(-1)[slots].tolist() == expected
        if plan.cross is not None:
            assert not plan.cross.tables[i][-(-len(expected) // self.size) :].any()

    def _check_taken_over(self, plan: StepPlan) -> None:
        """What a plan has of the step before is what would be made anew."""
        unknown = {row.sequence: 0 for row in self._rows() if row.start >= row.sequence.num_tokens}
        searches = self.scheduler.in_flight.newest.searches
        anew = build_plan(self._rows(), [], self.size, pending=unknown, searches=searches)
        for found, expected in ((plan.sampling, anew.sampling), (plan.cross, anew.cross)):
            assert (found is None) == (expected is None)
            for part in () if found is None else fields(found):
                if part.name not in ("table", "version", "edits_version"):
                    np.testing.assert_array_equal(getattr(found, part.name), getattr(expected, part.name), part.name)
        if plan.sampling is not None and anew.sampling is not None:
            found, expected = plan.sampling.table, anew.sampling.table
            for name in TABLE.names or ():
                # Where nothing is drawn, positions do not count.
                if name != "position" or any(row.group.draws for row in self._rows()):
                    np.testing.assert_array_equal(found[name], expected[name], name)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self.tokens[targets] = self.tokens[sources]
        self.states[targets] = self.states[sources]

    def _check_groups(self, rows: list[Row]) -> None:
        """Groups sample whole or not at all; running ones fit into the rows."""
        sampled: dict[str, set[bool]] = {}
        for row in rows:
            sampled.setdefault(row.group.request.request_id, set()).add(row.sampled > 0)
            if row.sampled:
                before = 0  # tokens that steps before this one sample
                for step in self.scheduler.in_flight:
                    if row in step.rows:
                        break
                    before += sum(r.sampled for r in step.live() if r.sequence is row.sequence)
                assert row.start + row.count == row.sequence.num_tokens + before + len(row.drafts)
                assert row.sampled == 1 + len(row.drafts)
                members = [r.sequence for r in rows if r.group is row.group]
                assert members == row.group.sequences
            elif row.start + row.count < row.sequence.num_tokens:
                self.events["chunked"] += 1
        assert all(len(kinds) == 1 for kinds in sampled.values())
        kinds = {row.group.beam is not None for row in rows if row.sampled}
        self.events["beam_with_others"] += len(kinds) == 2
        assert sum(group.rows for group in self.scheduler._running) <= self.config.max_num_seqs

    def _slots(self, plan: StepPlan, i: int, end: int) -> np.ndarray:
        positions = np.arange(end)
        return plan.block_tables[i][positions // self.size] * self.size + positions % self.size

    def _first_seen(self, position: int) -> int:
        """The first token that a query at `position` sees."""
        return 0 if self.config.window is None else max(0, position + 1 - self.config.window)

    def _check_memory(self, plan: StepPlan, i: int, row: Row, end: int) -> None:
        """The pages that row i names hold exactly its sequence's tokens up to end - 1, from the first one on that
        any of its queries sees; pages before that one are not named."""
        expected = row.sequence.tokens.view(0, min(end, row.sequence.num_tokens)).tolist()
        if len(expected) < end:  # the last ones are drafted, or the last one is not known to the scheduler
            assert end - len(expected) == max(len(row.drafts), 1)
            last = plan.query_start[i + 1]
            expected += plan.token_ids[last - (end - len(expected)) : last].tolist()
        slots = self._slots(plan, i, end)
        first = self._first_seen(row.start)
        assert (slots[first:] >= self.size).all(), "page 0 is nobody's"
        assert self.tokens.reshape(-1)[slots[first:]].tolist() == expected[first:]
        if row.sequence.num_in_flight == row.count:  # else the answer of the step before lets go of it
            assert not plan.block_tables[i][: first // self.size].any(), "a page that no query sees is named"
        if end:
            state = self.model.state(row.group.request, expected)
            assert int(self.states.reshape(-1)[slots[-1]]) == state

    def _write(self, plan: StepPlan, i: int, row: Row) -> None:
        first, last = plan.query_start[i], plan.query_start[i + 1]
        start, end = int(plan.context_lens[i] - (last - first)), int(plan.context_lens[i])
        assert (start, end) == (row.start, row.start + row.count)
        assert end > start
        assert plan.positions[first:last].tolist() == list(range(start, end))
        slots = self._slots(plan, i, end)
        assert plan.slots[first:last].tolist() == slots[start:].tolist()
        for page in set((slots[start:] // self.size).tolist()):
            assert self.pool.references(page) == 1, "a shared page is written"
            assert not is_published(self.pool, page), "a published page is written"
        salt = row.group.request.cache_salt
        state = int(self.states.reshape(-1)[slots[start - 1]]) if start else self.model.root(salt)
        digest = self.model.digest(self.states.reshape(-1)[self._cross_slots(plan, i)].tolist())
        for slot, token in zip(slots[start:].tolist(), plan.token_ids[first:last].tolist(), strict=True):
            state = self.model.decode(state, token, digest)
            self.tokens.reshape(-1)[slot] = token
            self.states.reshape(-1)[slot] = state

    def _result(self, plan: StepPlan, states: list[int], count: int) -> StepResult:
        batch = plan.sampling
        assert count == (0 if batch is None else len(batch.rows))
        width = (
            1
            if batch is None
            else int(max(batch.table["num_draws"].max(), min(batch.table["beam_width"].max(), VOCAB), 1))
        )
        number = 0 if batch is None else max(int(batch.table["num_logprobs"].max()), 0)
        tokens = np.zeros((count, width), dtype=np.int32)
        scores = np.full((count, width), _LOG_ZERO, dtype=np.float32)
        logprobs = np.zeros((count, width), dtype=np.float32)
        ranks = np.zeros((count, width), dtype=np.int32)
        top_ids = np.zeros((count, number), dtype=np.int32)
        top_logprobs = np.zeros((count, number), dtype=np.float32)
        if batch is not None:
            self.events["mixed_draws"] += len(set(batch.table["num_draws"].tolist())) > 1
            for i in range(count):
                raw = self.model.logprobs(states[batch.rows[i]])
                processed = raw.copy()
                own, how = batch.edits[batch.edits["row"] == i], batch.table[i]
                processed[own["token"][own["kind"] == Kind.BAN]] = _LOG_ZERO
                if how["beam_width"]:
                    chosen = top(processed, min(int(how["beam_width"]), VOCAB))
                    scores[i, : len(chosen)] = processed[chosen]
                else:
                    temperature = float(how["temperature"])
                    chosen = [draw(processed, temperature, u) for u in batch.uniforms[i, : how["num_draws"]]]
                tokens[i, : len(chosen)] = chosen
                logprobs[i, : len(chosen)] = raw[chosen]
                ranks[i, : len(chosen)] = [int((raw > raw[token]).sum()) + 1 for token in chosen]
                top_ids[i] = top(raw, number)
                top_logprobs[i] = raw[top_ids[i]]
        return StepResult(
            tokens=tokens,
            scores=scores,
            logprobs=logprobs,
            ranks=ranks,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            prompt_logprobs=self._prompt_scores(plan, states),
        )

    def _prompt_scores(self, plan: StepPlan, states: list[int]) -> TokenScores | None:
        wanted = plan.prompt_logprobs
        if wanted is None:
            return None
        number = int(wanted.num_logprobs.max())
        raw = np.stack([self.model.logprobs(states[row]) for row in wanted.rows])
        chosen = raw[np.arange(len(raw)), wanted.targets]
        top_ids = np.array([top(line, number) for line in raw], dtype=np.int32).reshape(len(raw), number)
        return TokenScores(
            logprobs=chosen,
            ranks=((raw > chosen[:, None]).sum(axis=1) + 1).astype(np.int32),
            top_ids=top_ids,
            top_logprobs=np.take_along_axis(raw, top_ids, axis=1),
        )

    # -------------------------------------------------------------- after every step

    def check(self) -> None:
        """Nothing is lost, nothing is shared across salts; freed pages are poisoned."""
        self.scheduler.check_integrity()
        assert self.pool.num_free + self.pool.num_held + self.pool.num_cached == self.pool.total
        owners: dict[int, object] = {}
        waiting = 0
        for group in self.scheduler.groups():
            assert group.status is not Status.FINISHED
            waiting += group.status is Status.WAITING
            if group.beam is not None:
                scores = [sequence.score for sequence in group.sequences]
                assert scores == sorted(scores, reverse=True), "beams are kept best first"
            for sequence in group.sequences:
                assert group.status is Status.RUNNING or not len(sequence.table), "a waiting request holds pages"
                unseen = self._first_seen(sequence.num_computed) // self.size if len(sequence.table) else 0
                assert [place for place, page in enumerate(sequence.table) if not page] == list(range(unseen))
                self.events["unseen"] += unseen
                for page in filter(None, sequence.table):
                    root = (group.request.cache_salt, group.request.encoder_token_ids)
                    assert owners.setdefault(page, root) == root, "a page is shared across salts or encoder inputs"
            self._check_encoder_pages(group, owners)
        assert self.scheduler.snapshot().num_waiting == waiting
        pinned = self.scheduler.in_flight.pinned()
        for page in range(1, self.pool.total + 1):
            if not self.pool.references(page) and not is_published(self.pool, page) and page not in pinned:
                self.tokens[page] = -1
                self.states[page] = 0

    def _check_encoder_pages(self, group: SequenceGroup, owners: dict[int, object]) -> None:
        """A running request holds its input's pages, all findable; none is used for something else."""
        memory, request = group.encoder_input, group.request
        assert (memory is None) == (not request.encoder_token_ids)
        if memory is None:
            return
        running = group.status is Status.RUNNING
        assert len(memory.pages) == (-(-len(memory.tokens) // self.size) if running else 0)
        who = "encoder", request.cache_salt, request.encoder_token_ids
        who += () if self.config.enable_prefix_caching else (request.request_id,)
        for page in memory.pages:
            self.events["encoder_pages_shared"] += page in owners
            assert owners.setdefault(page, who) == who, "an encoder input's page is somebody else's"
        if running and not self.scheduler.in_flight.encodes(memory):
            assert self.pool.match(memory.hashes) == memory.pages
            assert self.inputs_seen.get(request.request_id) or self.config.enable_prefix_caching

    def _deliver(self, deltas: Sequence[RequestDelta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.over, "news after the end"
            answers = self.answers[delta.request_id]
            for choice in delta.choices:
                self._take(answers[choice.index], choice)
            cached = delta.num_cached_tokens
            if cached:
                found = self.inputs_found.get(delta.request_id, 0)
                self.events["inputs_found"] += found > 0
                cached -= found
            assert 0 <= cached < len(self.requests[delta.request_id].prompt_token_ids)
            assert cached % self.size == 0
            if cached:
                self.events["late_hits"] += self._first_seen(cached) >= self.size
                self.cached_tokens[delta.request_id] = cached
                self.events["salted_hits"] += self.requests[delta.request_id].cache_salt is not None
            if delta.prompt_logprobs is not None:
                assert delta.request_id not in self.prompt_logprobs, "prompt log-probabilities come once"
                self.prompt_logprobs[delta.request_id] = list(delta.prompt_logprobs)
            if delta.finished:
                self.over.add(delta.request_id)
                assert all(answer.finish_reason or answer.aborted for answer in answers)
            else:
                assert not all(answer.finish_reason or answer.aborted for answer in answers)

    @staticmethod
    def _take(answer: Answer, choice: ChoiceDelta) -> None:
        assert answer.finish_reason is None, "tokens after the end"
        assert not answer.aborted
        answer.tokens.extend(choice.token_ids)
        answer.logprobs.extend(choice.logprobs or ())
        answer.finish_reason, answer.stop_reason = choice.finish_reason, choice.stop_reason
        answer.cumulative_logprob, answer.score = choice.cumulative_logprob, choice.score


def make_request(request_id: str, prompt: Sequence[int], **decoding: object) -> Request:
    """A request; keywords of `Request` and of `Decoding` together."""
    names = ("priority", "cache_salt", "deadline", "encoder_token_ids", "tenant")
    outer = {name: decoding.pop(name) for name in names if name in decoding}
    decoding.setdefault("max_tokens", 4)
    decoding.setdefault("temperature", 0.0)
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        decoding=Decoding(**decoding),  # type: ignore[arg-type]
        **outer,  # type: ignore[arg-type]
    )
