"""The code that all endpoints for generated text share: answering a request at once or as a stream."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from engine import DEFAULT_MAX_TOKENS, InvalidRequestError, chat_max_tokens, tokens_to_keep_free
from server.admission import estimate_tokens
from server.answering.events import Events
from server.answering.generation import Generation, Update
from server.answering.observation import RequestRecord
from server.answering.pieces import AnswerShape, Choice, Piece, PieceMaker, keep_best
from server.answering.prompt import Prompt, Room, Truncation, check_length, check_token_ids, encode_fitting
from server.answering.size import AnswerSize
from server.answering.streaming import ClientGoneError, EventStream, KeepAlive, Wanted, failure
from server.answering.terms import Terms, read_terms
from server.answering.timings import timings_of
from server.api.fields import IGNORED_HEADER, ignored_header
from server.api.schemas import GenerationBody, Usage
from server.context import Service
from server.errors import ApiError
from server.gates import Reservation

T = TypeVar("T")

_SMALL_ANSWER = 1024 * 1024  # bytes of memory; a larger answer is built in a thread


async def encode_prompts(
    service: Service,
    given: Sequence[str | list[int]],
    param: str = "prompt",
    *,
    add_special_tokens: bool = True,
    src_lang: str | None = None,
    truncation: Truncation | None = None,
) -> list[Prompt]:
    """Prompts as token ids; texts are tokenised in a thread. Raises ApiError if a prompt is a text and there is no
    tokenizer, if a text is far too long, or if ids are outside the vocabulary.

    Args:
        src_lang: the language of the texts, for tokenizers that mark it.
        truncation: the rule that cuts longer prompts.
    """
    tokenizer, info = service.tokenizer, service.client.info
    vocab_size = info.vocab_size if info.encoder_vocab_size is None else info.encoder_vocab_size
    room = Room.of_prompt(info, param)
    for prompt in given:
        if isinstance(prompt, str):
            if tokenizer is None:
                message = f"{service.model_id} has no tokenizer: send the prompt as token ids."
                raise ApiError(400, message, param=param, code="no_tokenizer")
        else:
            if truncation is None:
                check_length(len(prompt), room)
            check_token_ids(prompt, vocab_size, param)
    ids = [prompt if truncation is None else truncation.ids(prompt) for prompt in given if not isinstance(prompt, str)]
    if tokenizer is None or len(ids) == len(given):
        return [Prompt(prompt) for prompt in ids]

    to_ids = functools.partial(tokenizer.encode, add_special_tokens=add_special_tokens, src_lang=src_lang)

    def encode(text: str) -> list[int]:
        if truncation is None:
            return encode_fitting(to_ids, text, room)
        ids = truncation.encode(tokenizer, text, room, add_special_tokens=add_special_tokens)
        if src_lang is None or not add_special_tokens:
            return ids
        return tokenizer.languages.marked(ids, tokenizer.languages.id(src_lang, "src_lang"))

    texts = [prompt for prompt in given if isinstance(prompt, str)]
    return await asyncio.to_thread(lambda: [Prompt(encode(text), text) for text in texts])


def estimate_size(given: Sequence[str | list[int]], longest: int) -> int:
    """An estimate of the tokens in the prompts, each at most `longest`: a longer prompt will be refused, and must not
    block others until then."""
    sizes = (estimate_tokens(item) if isinstance(item, str) else len(item) for item in given)
    return sum(min(size, longest) for size in sizes)


@dataclass(slots=True)
class Run(ABC, Generic[Piece, Choice]):
    """A request being answered. A subclass defines the prompts and the format of the answer."""

    id_prefix: ClassVar[str]
    bytes_per_logprob: ClassVar[int]  # bytes of memory, from the engine's results to the answer's JSON
    usual_answer: ClassVar[int] = DEFAULT_MAX_TOKENS  # default tokens, if neither the request nor the model sets them
    stream_keeps_answer: ClassVar[bool] = False  # a stream's last events repeat the whole answer
    stream_type: ClassVar[str] = EventStream.media_type

    service: Service
    body: GenerationBody
    shape: AnswerShape
    arrival: float
    request_id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    record: RequestRecord = field(init=False)
    terms: Terms = field(init=False)
    shown_special: frozenset[int] = frozenset()  # special tokens needed to parse the answer
    headers: dict[str, str] = field(default_factory=dict)  # of the answer
    _left_out: list[str] = field(default_factory=list)
    _reservation: Reservation | None = None
    _size: int = 0  # bytes of memory that the answer may use
    _stream: Events[Piece] | None = None  # once the prompts are known
    _streamed: Generation | None = None

    def __post_init__(self) -> None:
        self.request_id = f"{self.id_prefix}{uuid.uuid4().hex}"

    @abstractmethod
    def size(self) -> tuple[int, int]:
        """The number of prompts in the request, and an estimate of their tokens."""

    @abstractmethod
    async def prompts(self) -> list[Prompt]:
        """The prompts as token ids; this may still change `shape`."""

    @abstractmethod
    def maker(self, prompts: list[Prompt]) -> PieceMaker[Piece]:
        """The object that turns updates into pieces."""

    @abstractmethod
    def join(self, pieces: list[Piece]) -> list[Choice]:
        """Whole choices, in the order of their index."""

    @abstractmethod
    def whole(self, choices: list[Choice], usage: Usage) -> BaseModel:
        """The body of an unstreamed answer."""

    @abstractmethod
    def events(self, maker: PieceMaker[Piece]) -> Events[Piece]:
        """The object that writes the events of a streamed answer."""

    def timed(self, pieces: Sequence[Any]) -> dict[str, Any]:
        """The field `timings` for these pieces or choices, if the request asks for it."""
        wanted = self.shape.timings
        if wanted is None or not (wanted == "each" or any(piece.finish_reason for piece in pieces)):
            return {}
        return {"timings": timings_of(self.record)}

    def ignored_fields(self) -> list[str]:
        """Names of ignored fields that the client may have expected to change the answer."""
        return self.body.ignored_fields()

    async def settle(self, body: str) -> str:
        """Finish an unstreamed answer's body before it is sent."""
        return body

    async def settle_stream(self, events: Events[Piece]) -> str:
        """Finish a streamed answer: its last events."""
        return await self.made(events.closing)

    async def made(self, make: Callable[[], T]) -> T:
        """The result of `make` for the answer, computed in a thread if the answer is large."""
        return make() if self._size < _SMALL_ANSWER else await asyncio.to_thread(make)

    def ended(self) -> None:
        """A hook that is called when a stream has ended, for any reason."""

    def failing(self, problem: ApiError) -> str:
        """The last events of a failing stream."""
        return failure(problem) if self._stream is None else self._stream.failing(problem)

    @property
    def truncation(self) -> Truncation | None:
        """The rule for cutting prompts, if the request has one. Raises ApiError if the limit exceeds the model's, or
        leaves no token."""
        info = self.service.client.info
        free = tokens_to_keep_free(self.shape.params, info, self.usual_answer)
        return Truncation.of(self.body.truncate_prompt_tokens, info, self.service.tokenizer, free)

    @property
    def keeps_answer(self) -> bool:
        """Whether the whole answer is in memory at its end."""
        return self.stream_keeps_answer or not self.body.stream

    def public_name(self, param: str | None) -> str | None:
        """The client's name for the engine's parameter `param`."""
        return param

    async def respond(self, request: Request) -> Response:
        """Answer in the form that the body requests."""
        headers, reservation = await self.begin(request)
        wanted = Wanted(self.service.drain, self.interrupted)
        if self.body.stream:
            events = self.record.streamed(self.events_of(reservation))
            return EventStream(
                events, wanted, headers, held=reservation, failing=self.failing, media_type=self.stream_type
            )
        try:
            with reservation:
                content = await wanted.run(request.scope, request.receive, self.record.whole(self._answer(reservation)))
        except ClientGoneError:
            return Response(status_code=499)  # nothing reads it any more
        return Response(content, media_type="application/json", headers=headers)

    async def begin(self, request: Request) -> tuple[dict[str, str], Reservation]:
        """The headers of the answer, and the request's slots. Raises ApiError, EngineDeadError if the request cannot be
        served now."""
        headers = self.prepare(request)
        # This comes before any task is created, so a refusal does not wait for a busy event loop.
        with self.record.refusals():
            return headers, await self.admitted()

    def prepare(self, request: Request) -> dict[str, str]:
        """The headers of the answer, after the request's terms and record are made."""
        self.terms = read_terms(self.body, request, self.service.settings, self.arrival, self.service.client.adapters)
        self.record = self._record(request.url.path)
        self.record.belongs_to(request)
        self.leave_out(*self.ignored_fields())
        self.record.ignored = self.headers.get(IGNORED_HEADER)
        return self.headers

    async def admitted(self, *, patient: bool = False) -> Reservation:
        """The request's slots. `patient`: the request will be tried again, so a refusal does not count. Raises
        ApiError, EngineDeadError if the request cannot be served now."""
        self._reservation = await self.service.admit(*self.size(), self.terms, patient=patient)
        return self._reservation

    def leave_out(self, *names: str) -> None:
        """Report to the client and the log that these fields of the request are ignored. The headers are sent when the
        prompts are known."""
        self._left_out += names
        self.headers.update(ignored_header(self._left_out))

    def fill_room(self, length: int) -> None:
        """If the request sets no maximum, let the answer have all tokens that a prompt of this length leaves."""
        params, info = self.shape.params, self.service.client.info
        if params.max_tokens is None:
            limit = chat_max_tokens(params, info, length)
            if limit is not None and self.keeps_answer:
                limit = min(
                    limit, AnswerSize(self.shape, self.bytes_per_logprob, info).most_tokens(self.service.settings)
                )
            self.shape = replace(self.shape, params=replace(params, max_tokens=limit))

    def _record(self, path: str) -> RequestRecord:
        return RequestRecord(
            id=self.request_id,
            path=path,
            model=self.service.name_of(self.terms),
            stream=bool(self.body.stream),
            n=self.shape.n,
            arrival=self.arrival,
            log_prompts=self.service.settings.log_prompts,
        )

    async def _answer(self, reservation: Reservation) -> str:
        with self._working(reservation):
            prompts = await self._prompts(reservation)
            maker = self.maker(prompts)
            with self._public_names(), self._generation(prompts, reservation) as generation:
                updates = await generation.whole()
                await generation.settled()
        return await self.settle(await self.made(functools.partial(self._body, maker, updates, len(prompts))))

    def _body(self, maker: PieceMaker[Piece], updates: Sequence[Update], num_prompts: int) -> str:
        pieces: list[Piece] = []
        width = self.shape.params.n
        scores = [float("-inf")] * (width * num_prompts)
        for update in updates:
            pieces += maker.pieces(update)
            for choice in update.choices:
                if choice.cumulative_logprob is not None:
                    scores[update.prompt_index * width + choice.index] = choice.cumulative_logprob
        choices = self.join(pieces)
        if width > self.shape.n:
            choices = keep_best(choices, scores, width, self.shape.n)
        return self.whole(choices, maker.usage()).model_dump_json(exclude_unset=True)

    async def events_of(self, reservation: Reservation) -> AsyncGenerator[str, None]:
        """The answer as events (see `EventStream`). The first item opens the answer, and may be empty; it comes once
        the engine has accepted the request."""
        try:
            with self._working(reservation):
                prompts = await self._prompts(reservation)
                events = self._stream = self.events(self.maker(prompts))
                with self._public_names(), self._generation(prompts, reservation) as generation:
                    self._streamed = generation
                    await generation.accepted()
                    with KeepAlive(self.service.settings.stream_keepalive, generation.nudge) as keep_alive:
                        yield events.opening()
                        while not generation.finished:
                            if news := events.news(await generation.news()):
                                yield news
                            elif keep_alive.due:
                                yield events.silence
                            else:
                                continue
                            keep_alive.sent()
                    await generation.settled()
            yield await self.settle_stream(events)
        finally:
            self.ended()

    @contextmanager
    def _working(self, reservation: Reservation) -> Iterator[None]:
        """A context that holds the request's slots. They are released however the request ends. It counts failures of
        the server."""
        with reservation:
            try:
                yield
            except (ApiError, InvalidRequestError):  # refused
                raise
            except Exception:
                self._aborted("error")
                raise

    def stop(self, reason: str) -> None:
        """End a stream now: send the text generated so far and the last events."""
        if self._streamed is not None and not self._streamed.finished:
            self.interrupted(reason)
            self._streamed.stop()

    def interrupted(self, reason: str) -> None:
        """The answer was abandoned: the client left, or the service stops."""
        self._aborted(reason)
        self.record.abort(reason)

    def _aborted(self, reason: str) -> None:
        if self._reservation is None:
            return
        # A client that leaves after the last token has missed nothing; any other end cuts the answer off.
        least = 0 if reason == "disconnect" else 1
        self.service.metrics.aborted(reason, max(self._reservation.num_unfinished, least))

    async def _prompts(self, reservation: Reservation) -> list[Prompt]:
        structured = self.shape.params.structured_outputs
        if structured is not None:
            with self._public_names():
                await self.service.grammars.check(structured, self.service.settings.grammar_timeout)
        prompts = await self.prompts()
        self.record.ignored = self.headers.get(IGNORED_HEADER)
        info = self.service.client.info
        longest, begun = Room.of_prompt(info).tokens, info.max_model_len  # the engine refuses a longer prompt
        await reservation.measured(
            [min(len(p.token_ids), longest) + min(len(p.decoder_ids or ()), begun) + p.positions for p in prompts]
        )
        self._size = AnswerSize(self.shape, self.bytes_per_logprob, info).check(
            prompts, self.service.settings, stream=not self.keeps_answer
        )
        return prompts

    def _generation(self, prompts: list[Prompt], reservation: Reservation) -> Generation:
        return Generation(
            self.service,
            self.request_id,
            prompts,
            self.shape.params,
            self.terms,
            self.record,
            reservation,
            self.shown_special,
        )

    @contextmanager
    def _public_names(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequestError as problem:
            name = self.public_name(self.body.structured_name(problem.param))
            raise InvalidRequestError(str(problem), param=name, code=problem.code) from problem
