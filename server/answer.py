"""Answering a request for generated text, at once or as a stream: what all such endpoints share."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ClassVar, Generic

from fastapi import Request, Response
from pydantic import BaseModel

from engine import InvalidRequestError
from server.context import Service
from server.errors import ApiError, shown
from server.fields import ignored_header
from server.generation import Update, run_prompts
from server.pieces import Choice, Piece, PieceMaker, Shape, keep_best
from server.prompt import Prompt
from server.schemas import GenerationBody, Usage
from server.streaming import ClientGoneError, EventStream, run_while_connected, sse


async def encode_prompts(
    service: Service, given: Sequence[str | list[int]], param: str = "prompt", *, add_special_tokens: bool = True
) -> list[Prompt]:
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

    def encode(prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt)
        return Prompt(prompt)

    return await asyncio.to_thread(lambda: [encode(prompt) for prompt in given])


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        ApiError: names the range and a wrong id.
    """
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        message = f"{param}: token ids must be from 0 to {vocab_size - 1}, got {shown(wrong)}."
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
        headers = ignored_header(self.body.ignored_fields())
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
        continuous = with_usage and options is not None and bool(options.continuous_usage_stats)
        async with aclosing(self._updates(prompts)) as updates:
            async for update in updates:
                for piece in maker.pieces(update):
                    usage = {"usage": maker.usage() if continuous else None} if with_usage else {}
                    yield self._event([piece], usage)
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
