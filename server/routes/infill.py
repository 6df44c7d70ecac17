"""POST /infill, in llama.cpp's shape, for fill-in-the-middle models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Response
from pydantic import BaseModel, Field

from engine import EngineInfo, InvalidRequestError
from engine.text.processor import Tokenizer
from server.admission import estimate_tokens
from server.answering.completion import TextRun
from server.answering.endpoints import lacks_generation
from server.answering.events import Events
from server.answering.generation import Update
from server.answering.infilling import Infilling
from server.answering.pieces import PieceMaker
from server.answering.prompt import Prompt, Room
from server.answering.public_names import public_name, public_names
from server.answering.streaming import sse
from server.answering.timings import timings_of
from server.api import examples
from server.api.examples import example
from server.api.fields import Name, at_most
from server.api.parameters import shape_of
from server.api.schemas import CompletionChoice, GenerationBody, Timings, Usage
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter

router = TaskRouter("generating", one_text=True)


MAX_FILES = 256


class InfillFile(BaseModel):
    """A further file, as context."""

    filename: Name = ""
    text: str


class InfillRequest(GenerationBody):
    """Body of POST /infill. All fields but the first two may be null, which means the default."""

    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after the gap.")
    input_extra: Annotated[list[InfillFile], at_most(MAX_FILES, "files")] | None = Field(
        None, description="Other files that the model should know."
    )
    prompt: str | None = Field(None, description="Continues the prefix: the beginning of the filled-in text.")
    n_predict: int | None = Field(None, ge=-1, description="llama.cpp's name of max_tokens; -1: as many as fit.")


class InfillResponse(BaseModel):
    """Answer of POST /infill, and one event of its stream; fields after the first four come only at the end."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    stop_type: str | None = None
    stopping_word: str | None = None
    timings: Timings | None = None


_EXAMPLES: dict[str, Any] = {
    "simple": example(
        "The body of a function",
        input_prefix="def add(a, b):\n    ",
        input_suffix="\n\nprint(add(1, 2))\n",
        n_predict=16,
    )
}


# Fields that have no counterpart in the answer.
_NO_EFFECT = (
    "logprobs", "prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids", "truncate_prompt_tokens",
    "timings_per_token",
)  # fmt: skip


def _lacks(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if (reason := lacks_generation(info, tokenizer)) is not None:
        return reason
    return (
        None if Infilling.of(tokenizer) is not None else "its tokenizer has no tokens to fill in the middle of a text"
    )


@router.endpoint(
    "/infill",
    response_model=InfillResponse,
    examples=_EXAMPLES,
    events=examples.EVENT_STREAM,
    lacks=_lacks,
    refuses=False,  # `shape_of` refuses unsupported fields
    summary="Fill in the middle of a text",
)
async def infill(call: TaskCall[InfillRequest]) -> Response:
    """Return the text between a prefix and a suffix, at once or as a stream."""
    service, body = call.service, call.body
    infilling = Infilling.need(service, "input_prefix")
    if body.n_predict is not None and body.n_predict != -1:
        if body.n_predict == 0:
            message = "n_predict must be -1 or at least 1, got 0."
            raise ApiError(400, message, param="n_predict", code="invalid_value")
        body = body.model_copy(update={"max_tokens": body.n_predict})
    unused = [name for name in _NO_EFFECT if getattr(body, name) not in (None, False)]
    body = body.model_copy(update=dict.fromkeys(unused))
    with public_names(_names(body)):
        shape = shape_of(body, service)
    if shape.params.n > 1:
        name = "n" if shape.n > 1 else "best_of"
        raise ApiError(400, f"{name} must be 1: /infill gives one text.", param=name, code="invalid_value")
    shape = replace(shape, params=infilling.ending(shape.params), return_token_ids=True)
    run = _InfillRun(service, body, shape, call.arrival, infilling=infilling, unused=unused)
    return await run.respond(call.request)


def _names(body: InfillRequest) -> dict[str, str]:
    """The client's names by those of `SamplingParams`."""
    return {} if body.n_predict is None else {"max_tokens": "n_predict"}


@dataclass(slots=True)
class _InfillRun(TextRun):
    id_prefix = "infill-"
    body: InfillRequest
    infilling: Infilling = field(kw_only=True)
    unused: list[str] = field(kw_only=True)

    def size(self) -> tuple[int, int]:
        body = self.body
        texts = [
            body.input_prefix,
            body.prompt or "",
            body.input_suffix,
            *(file.text for file in body.input_extra or ()),
        ]
        return 1, min(sum(map(estimate_tokens, texts)), self.service.client.info.max_model_len)

    async def prompts(self) -> list[Prompt]:
        body = self.body
        room = Room.of_prompt(self.service.client.info, "input_prefix")
        files = [(file.filename, file.text) for file in body.input_extra or ()]
        prompt = await self.infilling.prompt_in_thread(
            body.input_prefix + (body.prompt or ""), body.input_suffix, room, files
        )
        self.fill_room(len(prompt.token_ids))
        return [prompt]

    def whole(self, choices: list[CompletionChoice], usage: Usage) -> BaseModel:
        (choice,) = choices
        return self.last(choice, choice.text, choice.token_ids or [], usage)

    def last(self, choice: CompletionChoice, text: str, tokens: list[int], usage: Usage) -> InfillResponse:
        """The whole answer, or a stream's last event."""
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        kind = "limit" if choice.finish_reason == "length" else "word" if word else "eos"
        return InfillResponse(
            index=0,
            content=text,
            tokens=tokens,
            stop=True,
            model=self.service.name_of(self.terms),
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            tokens_cached=usage.prompt_tokens_details.cached_tokens,
            truncated=False,
            stop_type=kind if choice.finish_reason in ("stop", "length") else "none",
            stopping_word=word,
            timings=timings_of(self.record),
        )

    def events(self, maker: PieceMaker[CompletionChoice]) -> Events[CompletionChoice]:
        return _InfillEvents(maker, self)

    def ignored_fields(self) -> list[str]:
        return [*self.body.ignored_fields(), *self.unused]

    def public_name(self, param: str | None) -> str | None:
        return public_name(param, _names(self.body))

    @contextmanager
    def _public_names(self) -> Iterator[None]:
        try:
            with TextRun._public_names(self):
                yield
        except InvalidRequestError as problem:
            if problem.param != "n_predict":
                raise
            message = str(problem).replace("max_tokens", "n_predict")
            raise InvalidRequestError(message, param=problem.param, code=problem.code) from problem


class _InfillEvents(Events[CompletionChoice]):
    def __init__(self, maker: PieceMaker[CompletionChoice], run: _InfillRun):
        super().__init__(maker)
        self._run, self._end = run, CompletionChoice(index=0, text="")

    def news(self, updates: Sequence[Update]) -> str:
        written = []
        for piece in (piece for update in updates for piece in self.maker.pieces(update)):
            made = InfillResponse(index=0, content=piece.text, tokens=piece.token_ids or [], stop=False)
            written.append(sse(made.model_dump_json(exclude_unset=True)))
            self._end = piece
        return "".join(written)

    def closing(self) -> str:
        return sse(self._run.last(self._end, "", [], self.maker.usage()).model_dump_json())
