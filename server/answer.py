"""Answering a request for generated text, at once or as a stream: what all such endpoints share."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic

from fastapi import Request, Response
from pydantic import BaseModel

from engine import EngineInfo, InvalidRequestError, SamplingParams
from server.context import Service
from server.errors import ApiError
from server.generation import Update, run_prompts
from server.pieces import Choice, Piece, PieceMaker, Shape, keep_best
from server.prompt import Prompt
from server.schemas import GenerationBody, Usage
from server.streaming import ClientGoneError, EventStream, run_while_connected, sse

STREAM_DOC = {"text/event-stream": {"schema": {"type": "string"}}}
_SENDABLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_IGNORED_NAMES_SHOWN = 32
# What beam search does not use, with the values that ask for nothing.
_NOT_WITH_BEAMS: dict[str, tuple[float, ...]] = {"temperature": (0,), "top_k": (0, -1), "top_p": (1,), "min_p": (0,)}


def shape_of(body: GenerationBody, info: EngineInfo, *, echo: bool = False) -> Shape:
    """What the body asks of the engine, and of the answer.

    Raises:
        ApiError, InvalidRequestError: fields that contradict each other, are out of range or not supported.
    """
    body.refuse_unsupported()
    if body.stream_options is not None and not body.stream:
        message = "stream_options is only allowed when stream is true."
        raise ApiError(400, message, param="stream_options", code="invalid_value")
    fields = body.sampling()
    asked = SamplingParams(**fields)  # also checks what was given, before anything is computed with it
    best_of = body.best_of if body.best_of is not None else asked.n
    if best_of < asked.n:
        message = f"best_of ({best_of}) must be at least n ({asked.n})."
        raise ApiError(400, message, param="best_of", code="invalid_value")
    if body.use_beam_search:
        fields["num_beams"] = max(asked.num_beams or 0, best_of, 2)
    elif (asked.num_beams or 1) > 1:
        fields["num_beams"] = max(asked.num_beams or 0, best_of)
    elif best_of > asked.n:
        if body.stream:
            message = f"best_of ({best_of}) above n ({asked.n}) cannot be streamed: the best are known at the end."
            raise ApiError(400, message, param="best_of", code="invalid_value")
        fields["n"] = best_of
        fields["logprobs"] = asked.logprobs or 0  # what the choice among them goes by
    if fields.get("num_beams", 1) > 1:
        _refuse_sampling(fields)
    if fields.get("n", 1) > info.max_num_seqs:  # the engine says so too, but here memory would be spent before
        name = "n" if asked.n > info.max_num_seqs else "best_of"
        message = f"{name} is {fields['n']}, but a step holds at most {info.max_num_seqs} sequences (max_num_seqs)."
        raise ApiError(400, f"{message} Ask for fewer, or raise --max-num-seqs.", param=name, code="invalid_value")
    if echo and asked.logprobs is not None:
        fields["prompt_logprobs"] = max(asked.prompt_logprobs or 0, asked.logprobs)
    return Shape(
        params=SamplingParams(**fields),
        n=asked.n,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        echo=echo,
        return_token_ids=bool(body.return_token_ids),
    )


def _refuse_sampling(fields: Mapping[str, Any]) -> None:
    for name, nothing in _NOT_WITH_BEAMS.items():
        if name in fields and fields[name] not in nothing:
            message = (
                f"{name} ({fields[name]}) cannot be used with beam search (num_beams is {fields['num_beams']}), "
                f"which does not sample; leave it out or send {nothing[0]}."
            )
            raise ApiError(400, message, param=name, code="invalid_value")


async def encode_prompts(service: Service, given: Sequence[str | list[int]], param: str = "prompt") -> list[Prompt]:
    """Prompts as token ids; texts are tokenised in a thread.

    Raises:
        ApiError: a text where there is no tokenizer, or ids outside the vocabulary.
    """
    tokenizer, vocab_size = service.tokenizer, service.client.info.vocab_size
    for prompt in given:
        if isinstance(prompt, str):
            if tokenizer is None:
                message = f"{service.model_id} has no tokenizer: send the prompt as token ids."
                raise ApiError(400, message, param=param, code="no_tokenizer")
        else:
            check_token_ids(prompt, vocab_size, param)
    if tokenizer is None:
        return [Prompt(prompt) for prompt in given if not isinstance(prompt, str)]
    encode = tokenizer.encode
    return await asyncio.to_thread(
        lambda: [Prompt(encode(item), item) if isinstance(item, str) else Prompt(item) for item in given]
    )


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        ApiError: names the range and a wrong id.
    """
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        message = f"{param}: token ids must be from 0 to {vocab_size - 1}, got {wrong}."
        raise ApiError(400, message, param=param, code="invalid_value")


@dataclass(slots=True)
class Run(ABC, Generic[Piece, Choice]):
    """One request being answered. A subclass says what the prompts are and how the answer looks."""

    id_prefix: ClassVar[str]

    service: Service
    body: GenerationBody
    shape: Shape
    arrival: float
    request_id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.request_id = f"{self.id_prefix}-{uuid.uuid4().hex}"

    @abstractmethod
    async def prompts(self) -> list[Prompt]:
        """The prompts as token ids; may still adapt `shape` to them."""

    @abstractmethod
    def maker(self, prompts: list[Prompt]) -> PieceMaker[Piece]:
        """What turns updates into pieces."""

    @abstractmethod
    def join(self, pieces: list[Piece]) -> list[Choice]:
        """Whole choices, in the order of their index."""

    @abstractmethod
    def whole(self, choices: list[Choice], usage: Usage) -> BaseModel:
        """The body of an unstreamed answer."""

    @abstractmethod
    def chunk(self, pieces: list[Piece], usage: dict[str, Usage | None]) -> BaseModel:
        """The data of one event; where `usage` is empty the field is left out, as OpenAI does."""

    def public_name(self, param: str | None) -> str | None:
        """The name under which the client sent what the engine calls `param`."""
        return param

    async def respond(self, request: Request) -> Response:
        """The answer, as the body asks for it."""
        headers = _ignored_header(self.body)
        if self.body.stream:
            return EventStream(self._events(), headers)
        try:
            answer = await run_while_connected(request.receive, self._answer())
        except ClientGoneError:
            return Response(status_code=499)  # nobody will read it
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json", headers=headers)

    async def _answer(self) -> BaseModel:
        prompts = await self.prompts()
        maker = self.maker(prompts)
        pieces: list[Piece] = []
        width = self.shape.params.n
        scores = [float("-inf")] * (width * len(prompts))
        async with aclosing(self._updates(prompts)) as updates:
            async for update in updates:
                pieces += maker.pieces(update)
                for choice in update.choices:
                    if choice.cumulative_logprob is not None:
                        scores[update.prompt_index * width + choice.index] = choice.cumulative_logprob
        choices = self.join(pieces)
        if width > self.shape.n:
            choices = keep_best(choices, scores, width, self.shape.n)
        return self.whole(choices, maker.usage())

    async def _events(self) -> AsyncGenerator[str, None]:
        """The answer as events, one choice each."""
        prompts = await self.prompts()
        maker = self.maker(prompts)
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        async with aclosing(self._updates(prompts)) as updates:
            async for update in updates:
                for piece in maker.pieces(update):
                    yield self._event([piece], {"usage": None} if with_usage else {})
        if with_usage:
            yield self._event([], {"usage": maker.usage()})
        yield sse("[DONE]")

    def _event(self, pieces: list[Piece], usage: dict[str, Usage | None]) -> str:
        return sse(self.chunk(pieces, usage).model_dump_json(exclude_unset=True))

    async def _updates(self, prompts: list[Prompt]) -> AsyncGenerator[Update, None]:
        runs = run_prompts(self.service, self.request_id, prompts, self.shape.params, self.arrival)
        try:
            async with aclosing(runs) as updates:
                async for update in updates:
                    yield update
        except InvalidRequestError as problem:
            name = self.public_name(problem.param)
            raise InvalidRequestError(str(problem), param=name, code=problem.code) from problem


def _ignored_header(body: GenerationBody) -> dict[str, str]:
    names = [name for name in body.ignored_fields() if _SENDABLE_NAME.fullmatch(name)]
    return {"X-Octavo-Ignored-Fields": ", ".join(names[:_IGNORED_NAMES_SHOWN])} if names else {}
