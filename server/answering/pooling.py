"""The code that all endpoints without generated text share (vectors, classes, answers, masked tokens).

An endpoint is a subclass of `PoolingRun`. `server.answering.encoding` turns its texts into tokens, and
`server.answering.endpoints` refuses what the model cannot serve.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from fastapi import Request, Response

from engine import (
    MAX_PRIORITY,
    EngineInfo,
    InvalidRequestError,
    OctavoError,
    PixelInput,
    Pooled,
    PoolingParams,
    RequestDelta,
    TokenInput,
    parse_bytes,
)
from server.answering.encoding import ADVICE, expanded
from server.answering.observation import PoolingRecord
from server.answering.streaming import ClientGoneError, Wanted
from server.answering.terms import DeadlineError, Terms, read_terms
from server.answering.turns import Lane
from server.api.fields import ignored_header
from server.api.pooling_schemas import NumbersBody, PoolingUsage
from server.context import Service
from server.errors import ApiError
from server.gates import Reservation
from server.metrics.times import PromptTimes

# Tasks that may give many numbers for each token, and what the numbers are.
_WIDE = {"token_embed": "vectors", "sparse_embed": "vectors", "entities": "scores"}


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One input in the engine's form, with its parameters."""

    source: TokenInput | PixelInput  # the input; its `text` is only for the log
    params: PoolingParams
    positions: int = 0  # for an image, the number of tokens that it counts as

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the engine reads."""
        return self.positions if isinstance(self.source, PixelInput) else len(self.source.token_ids)


def image_input(image: PixelInput, params: PoolingParams, info: EngineInfo) -> PoolingInput:
    assert info.signal is not None
    return PoolingInput(image, params, info.signal.positions)


@dataclass(slots=True)
class PoolingRun(ABC):
    """A request being answered. A subclass defines the inputs and the format of the answer.

    `respond` admits the request, gets its inputs, lets the engine answer them, and sends the result of `render`. If the
    client leaves, an input fails or the service stops, the inputs that still run are aborted.
    """

    id_prefix: ClassVar[str]
    advice: ClassVar[str] = ADVICE  # what a client may do about a text that is too long, besides shortening it

    service: Service
    body: NumbersBody
    arrival: float  # seconds of time.monotonic()
    request_id: str = field(init=False)  # the answer's id: `id_prefix` and a random part
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    num_tokens: int = 0  # the tokens of all inputs, once known
    media_type: str = "application/json"
    # headers of the answer, besides those of every answer; `render` may add some
    headers: dict[str, str] = field(default_factory=dict)
    record: PoolingRecord = field(init=False)
    terms: Terms = field(init=False)
    _answers: _Answers | None = None
    _reservation: Reservation | None = None

    def __post_init__(self) -> None:
        self.request_id = f"{self.id_prefix}-{uuid.uuid4().hex}"

    @abstractmethod
    def size(self) -> int:
        """An estimate of the tokens in the inputs, without tokenising them (see `encoding.estimate`)."""

    @abstractmethod
    async def inputs(self) -> Sequence[PoolingInput]:
        """The inputs; texts are tokenised off the event loop."""

    @abstractmethod
    def render(self, answers: Sequence[Pooled]) -> bytes:
        """The body, from one answer for each input. It runs in a thread, because it may take long."""

    def public_name(self, param: str | None) -> str | None:
        """The client's name for the engine's parameter `param`."""
        return param

    @property
    def usage(self) -> PoolingUsage:
        """The tokens that were read."""
        return PoolingUsage(prompt_tokens=self.num_tokens, total_tokens=self.num_tokens)

    async def respond(self, request: Request) -> Response:
        headers = ignored_header(self.body.ignored_fields())
        self.terms = read_terms(self.body, request, self.service.settings, self.arrival, self.service.client.adapters)
        self.record = PoolingRecord(
            id=self.request_id,
            path=request.url.path,
            model=self.service.name_of(self.terms),
            arrival=self.arrival,
            log_prompts=self.service.settings.log_prompts,
        )
        self.record.belongs_to(request)
        # This comes before any task is created, so a refusal does not wait for a busy event loop.
        with self.record.refusals():
            self._reservation = reservation = await self.service.admit_pooling(self.size(), self.terms)
        wanted = Wanted(self.service.drain, self._interrupted)
        try:
            with reservation:
                content = await wanted.run(
                    request.scope, request.receive, self.record.whole(self._in_time(reservation))
                )
        except ClientGoneError:
            return Response(status_code=499)  # the client has gone
        return Response(content, media_type=self.media_type, headers=self.headers | headers)

    async def _in_time(self, reservation: Reservation) -> bytes:
        try:
            async with asyncio.timeout(self.terms.seconds_left) as limit:
                return await self._answer(reservation)
        except (TimeoutError, DeadlineError) as problem:
            if not limit.expired() and not isinstance(problem, DeadlineError):
                raise
            self._interrupted("deadline")
            raise DeadlineError from None

    async def _answer(self, reservation: Reservation) -> bytes:
        with self._working(reservation):
            inputs = await self.inputs()
            sizes = [item.num_tokens for item in inputs]
            longest = self.service.client.info.max_model_len  # the engine refuses a longer text
            await reservation.measured([sum(item.positions or min(item.num_tokens, longest) for item in inputs)])
            self.num_tokens = sum(sizes)
            answers = _Answers(self.service, self.request_id, inputs, self.terms, self.record, reservation)
            with self._public_names(), answers:
                self._answers = answers
                pooled = await answers.all()
            return await asyncio.to_thread(self.render, pooled)

    @contextmanager
    def _working(self, reservation: Reservation) -> Iterator[None]:
        """A context that holds the request's slot. The slot is released however the request ends. The context counts
        failures of the server."""
        with reservation:
            try:
                yield
                reservation.finished(0)
            except (ApiError, InvalidRequestError):  # refused
                raise
            except Exception:
                self._aborted("error")
                raise

    def _interrupted(self, reason: str) -> None:
        self._aborted(reason)
        self.record.abort(reason)

    def _aborted(self, reason: str) -> None:
        if self._reservation is not None:
            self.service.metrics.aborted(reason, max(self._answers.num_unfinished if self._answers else 1, 1))

    @contextmanager
    def _public_names(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequestError as problem:
            name = self.public_name(problem.param)
            raise InvalidRequestError(str(problem), param=name, code=problem.code) from problem


class _Answers(Lane):
    """The inputs of one HTTP request while the engine processes them.

    A context: entering queues them, leaving aborts those that still run.

    Args:
        request_id: prefix of the engine's request ids, one per input.
        record: is notified of what happens.
        reservation: with every answer, fewer of its tokens wait.
    """

    def __init__(
        self,
        service: Service,
        request_id: str,
        inputs: Sequence[PoolingInput],
        terms: Terms,
        record: PoolingRecord,
        reservation: Reservation,
    ):
        self._service = service
        self._reservation = reservation
        self._turns = service.turns.behind if terms.priority >= MAX_PRIORITY else service.turns
        self._terms = terms.keywords()
        self.tenant = terms.tenant
        self._runs = [
            _Run(f"{request_id}-{index}", item, record.input(item.source, item.num_tokens))
            for index, item in enumerate(inputs)
        ]
        self._next = 0
        self._found: list[Pooled | None] = [None] * len(inputs)
        self._problem: Exception | None = None
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_unfinished = len(inputs)  # inputs without an answer
        self._size = 0  # bytes of answers with many numbers per input

    def __enter__(self) -> Self:
        self._turns.join(self)
        return self

    def __exit__(self, *problem: object) -> None:
        turns, metrics = self._turns, self._service.metrics
        turns.leave(self)
        self._over.cancel()
        given_up = [run for run in self._runs[: self._next] if run.running]
        for run in given_up:  # all are abandoned before other requests take their turns
            run.running = False
            self._service.client.abandon(run.request_id)
            metrics.unwatch(run.request_id)
        metrics.finished("abort", len(given_up))
        for run in given_up:
            turns.ended(run.num_tokens)

    async def all(self) -> list[Pooled]:
        """One answer for each input, in order, when all are known. Raises InvalidRequestError if an input was refused;
        RequestFailedError, EngineDeadError: from the engine."""
        self._settle()
        await self._over
        if self._problem is not None:
            raise self._problem
        return [answer for answer in self._found if answer is not None]

    @property
    def num_waiting(self) -> int:
        return 0 if self._problem is not None else len(self._runs) - self._next

    def submit_next(self) -> None:
        index, run = self._next, self._runs[self._next]
        self._next += 1
        try:
            self._service.metrics.watch(run.request_id, run.times)
            deliver = functools.partial(self._deliver, index)
            source = expanded(run.input.source) if isinstance(run.input.source, TokenInput) else run.input.source
            self._service.client.submit(run.request_id, source, run.input.params, deliver, **self._terms)
        except Exception as problem:
            self._service.metrics.unwatch(run.request_id)
            self._fail(problem)
        else:
            run.running = True
            self._turns.began(run.num_tokens)

    def _deliver(self, index: int, item: RequestDelta | OctavoError) -> None:
        """Take the engine client's results. No exception escapes into its loop."""
        run = self._runs[index]
        if isinstance(item, RequestDelta) and not item.finished:
            return  # the engine accepted it
        run.running = False
        metrics = self._service.metrics
        metrics.unwatch(run.request_id)
        if isinstance(item, Exception):
            if not isinstance(item, InvalidRequestError):
                metrics.finished("error")
            self._fail(item)
        elif item.pooled is None:
            late = item.error == "deadline"
            metrics.finished("abort" if late else "error")
            reason = item.error or "the engine ended the request"
            self._fail(DeadlineError() if late else self._service.failure(reason, self._terms.get("adapter")))
        elif (problem := self._too_much(run, item.pooled)) is not None:
            metrics.finished("error")
            self._fail(problem)
        else:
            self._found[index] = item.pooled
            self.num_unfinished -= 1
            metrics.input_done(run.times)
            self._reservation.progressed(0, run.num_tokens)
        self._settle()
        self._turns.ended(run.num_tokens)

    def _too_much(self, run: _Run, answer: Pooled) -> ApiError | None:
        """The error for answers whose size depends on more than the number of inputs, if they exceed the limit of one
        HTTP answer."""
        if run.input.params.task not in _WIDE:
            return None
        self._size += len(answer.data) + len(answer.ids or b"")
        limit = parse_bytes(self._service.settings.max_answer_size, "max_answer_size")
        if self._size <= limit:
            return None
        message = (
            f"The {_WIDE[run.input.params.task]} of tokens need more than {limit} bytes of memory "
            f"(max_answer_size). Send fewer or shorter texts, or raise --max-answer-size."
        )
        return ApiError(400, message, code="answer_too_large")

    def _fail(self, problem: Exception) -> None:
        self._problem = self._problem or problem
        self._settle()

    def _settle(self) -> None:
        if (self._problem is not None or not self.num_unfinished) and not self._over.done():
            self._over.set_result(None)


@dataclass(slots=True)
class _Run:
    """The state of one input in the engine; `running` from its submission to its last delta."""

    request_id: str
    input: PoolingInput
    times: PromptTimes
    running: bool = False

    @property
    def num_tokens(self) -> int:
        return self.input.num_tokens


_write = functools.partial(json.dumps, separators=(",", ":"), allow_nan=False)


def listed(run: PoolingRun, items: Iterable[Mapping[str, Any]], name: str = "data") -> bytes:
    """The body of an answer with these items under that name.

    Each item is written separately. So a thread that writes thousands of items lets other threads run in between, and
    has at most one item that is not yet text.
    """
    return joined(run, (_write(item).encode() for item in items), name)


def joined(run: PoolingRun, written: Iterable[bytes], name: str = "data") -> bytes:
    """`join` for items that are JSON already."""
    rest = {
        "id": run.request_id,
        "object": "list",
        "created": run.created,
        "model": run.service.name_of(run.terms),
        "usage": run.usage.model_dump(),
    }
    return b'%b,"%b":[%b]}' % (_write(rest)[:-1].encode(), name.encode(), b",".join(written))
