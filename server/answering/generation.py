"""Sends several prompts through the engine at once, as one stream of updates."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from engine import BeamMoves, InvalidRequestError, OctavoError, RequestDelta, SamplingParams, TokenLogprobs, parse_bytes
from engine.text.processor import ChoiceText, OutputProcessor
from server.answering.observation import RequestRecord
from server.answering.prompt import Prompt
from server.answering.terms import DeadlineError, Terms
from server.context import Service
from server.errors import ApiError
from server.gates import Reservation
from server.metrics.times import PromptTimes

# Estimated bytes of memory.
BYTES_PER_TOKEN = 64  # its id and its text
BYTES_PER_LOGPROB = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """New results for one prompt."""

    prompt_index: int  # the index of the prompt
    choices: Sequence[ChoiceText]  # its answers with new results, one item each
    prompt_logprobs: list[TokenLogprobs | None] | None  # as in `RequestDelta`, with texts, once known
    num_cached_tokens: int  # as in `RequestDelta`
    # num_draft_tokens, num_accepted_draft_tokens: as in `RequestDelta`, of all steps so far
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    beams: Sequence[BeamMoves] = ()  # the decisions of each step of a beam search, if the stream reports them


class Generation:
    """The prompts of one HTTP request while the engine processes them.

    A context: entering submits the prompts, leaving aborts those that still run. The results of a step are detokenised,
    counted and acted upon when they arrive, whether the client reads or not. For example, a stop string ends its
        choice. Unread results are merged, so they take no more memory than the answer itself.

    Args:
        request_id: prefix of the engine's request ids, one per prompt.
        shown_special: special tokens whose text is always shown.

    Raises:
        InvalidRequestError: a prompt was refused; the others are aborted.
        DeadlineError: the deadline passed before the first token of any prompt.
        RequestFailedError, EngineDeadError: from the engine.
    """

    def __init__(
        self,
        service: Service,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        terms: Terms,
        record: RequestRecord,
        reservation: Reservation,
        shown_special: frozenset[int] = frozenset(),
    ):
        self._client, self._failure = service.client, service.failure
        self._metrics = service.metrics
        self._params = params
        self._terms = terms.keywords()
        self._record = record  # is notified of what happens
        self._reservation = reservation  # its slots are released as the prompts end
        self._runs = [
            _Run(
                index=index,
                request_id=f"{request_id}-{index}",
                prompt=prompt,
                times=record.prompt(prompt, params.n),
                processor=OutputProcessor(
                    service.tokenizer,
                    prompt.continued,
                    params,
                    keep_logprobs=not record.stream,
                    shown_special=shown_special,
                ),
                unfinished=set(range(params.n)),
            )
            for index, prompt in enumerate(prompts)
        ]
        self._num_unheard = self._num_unfinished = len(prompts)
        self._pending: dict[int, dict[int, ChoiceText]] = {}  # by prompt, by choice
        self._beams: dict[int, list[BeamMoves]] = {}  # by prompt
        self._problem: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._cut_short = False
        values = 0 if params.logprobs is None else 1 + params.logprobs
        self._bytes_per_token = BYTES_PER_TOKEN + BYTES_PER_LOGPROB * values
        self._most_unread = parse_bytes(service.settings.max_answer_size, "max_answer_size") if record.stream else None
        self._unread = 0  # bytes of results that the stream has not sent

    def __enter__(self) -> Self:
        try:
            for run in self._runs:
                self._metrics.watch(run.request_id, run.times)
                deliver = functools.partial(self._deliver, run)
                self._client.submit(run.request_id, run.prompt.source, self._params, deliver, **self._terms)
                run.submitted = True
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *problem: object) -> None:
        self._close()

    @property
    def finished(self) -> bool:
        """Whether all answers are complete and all results have been read."""
        return not self._num_unfinished and not self._has_news and self._problem is None

    @property
    def _has_news(self) -> bool:
        return bool(self._pending or self._beams)

    async def accepted(self) -> None:
        """Wait until the engine has accepted every prompt."""
        while self._num_unheard:
            await self._wait()

    async def news(self) -> list[Update]:
        """The results since the last call; waits until there are some, or for `nudge`."""
        if not self._has_news:
            await self._wait()
        return self._take()

    async def whole(self) -> list[Update]:
        """All results at once, when the answers are complete."""
        while self._num_unfinished or self._problem is not None:
            await self._wait()
        return self._take()

    async def settled(self) -> None:
        """Wait until the engine has ended all answers that a stop string cut short, so that its counters are final."""
        if self._cut_short:
            await self._client.settled()

    def stop(self) -> None:
        """End the answers now."""
        self._close()
        self._num_unfinished = 0
        self.nudge()

    def nudge(self) -> None:
        """Let `news` return, even without results."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self._problem is not None:
            raise self._problem
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _take(self) -> list[Update]:
        pending, self._pending, self._unread = self._pending, {}, 0
        beams, self._beams = self._beams, {}
        return [
            Update(
                prompt_index=index,
                choices=list(pending.get(index, {}).values()),
                beams=beams.get(index, ()),
                prompt_logprobs=self._runs[index].processor.prompt_logprobs,
                num_cached_tokens=self._runs[index].processor.num_cached_tokens,
                num_draft_tokens=self._runs[index].processor.num_draft_tokens,
                num_accepted_draft_tokens=self._runs[index].processor.num_accepted_draft_tokens,
            )
            for index in {**pending, **beams}
        ]

    def _deliver(self, run: _Run, item: RequestDelta | OctavoError) -> None:
        """Take the engine client's results. No exception leaves this method."""
        try:
            if isinstance(item, Exception):
                run.ended = True
                raise item
            self._receive(run, item)
        except Exception as problem:
            run.outcome = None if isinstance(problem, InvalidRequestError) else "error"
            self._problem = self._problem or problem
        self.nudge()

    def _receive(self, run: _Run, delta: RequestDelta) -> None:
        if not run.heard:
            run.heard = True
            self._num_unheard -= 1
        run.ended = delta.finished
        if delta.error is not None:
            raise self._failure(delta.error, self._terms.get("adapter"))
        if delta.beams is not None and self._record.stream:
            self._beams.setdefault(run.index, []).append(delta.beams)
        for choice in run.processor.process(delta):
            if choice.token_ids and not run.started:
                run.started = True
                self._reservation.started(run.index)
            self._record.answer(run.times, run.index, choice)
            if choice.finish_reason is not None:
                run.unfinished.discard(choice.index)
                self._metrics.finished(choice.finish_reason)
                if choice.finish_reason == "abort":  # initiated by the engine
                    run.aborted = "deadline" if choice.stop_reason == "deadline" else "error"
            if choice.stopped_by_text and not delta.finished:
                self._cut_short = True
                if run.unfinished:
                    self._client.abort(run.request_id, choice=choice.index)
            self._merge(run.index, choice)
            self._unread += self._bytes_per_token * len(choice.token_ids)
        if self._most_unread is not None and self._unread > self._most_unread:
            message = (
                f"The stream is read too slowly: {self._unread} bytes are waiting, but the limit is "
                f"{self._most_unread} (max_answer_size). Read faster, request less, or raise --max-answer-size."
            )
            raise ApiError(400, message, code="stream_too_slow")
        if not run.unfinished:
            self._finish(run)

    def _merge(self, prompt_index: int, choice: ChoiceText) -> None:
        pending = self._pending.setdefault(prompt_index, {})
        if choice.index in pending:
            pending[choice.index].extend(choice)
        else:
            pending[choice.index] = choice

    def _finish(self, run: _Run) -> None:
        self._num_unfinished -= 1
        self._reservation.finished(run.index)
        self._metrics.prompt_done(run.times)
        if run.aborted is not None:
            self._metrics.aborted(run.aborted)
        late = any(run.aborted == "deadline" for run in self._runs)
        if late and not self._num_unfinished and not any(run.started for run in self._runs):
            self._pending.clear()  # there is no answer whose end could be reported
            self._problem = self._problem or DeadlineError()
        if not run.ended:
            run.ended = True
            self._client.abandon(run.request_id)

    def _close(self) -> None:
        for run in self._runs:
            self._metrics.unwatch(run.request_id)
            if run.submitted and not run.ended:
                run.ended = True
                self._client.abandon(run.request_id)
            if run.submitted and run.unfinished and run.outcome is not None:
                self._metrics.finished(run.outcome, len(run.unfinished))
                run.unfinished.clear()


@dataclass(slots=True, kw_only=True)
class _Run:
    index: int
    request_id: str
    prompt: Prompt
    times: PromptTimes
    processor: OutputProcessor
    unfinished: set[int] = field(default_factory=set)  # its incomplete answers
    submitted: bool = False
    heard: bool = False  # whether the engine has accepted it
    started: bool = False
    ended: bool = False  # whether the engine's client delivers nothing more
    aborted: str | None = None  # the reason if the engine ended it
    # how its unfinished answers are counted; None if it was never accepted and does not count
    outcome: str | None = "abort"
