"""POST /v1/answer, for models that find the answer to a question in a text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from pydantic import BaseModel, Field

from engine import InvalidRequestError, Pooled, PoolingParams
from engine.pooled import (
    DEFAULT_ANSWER_LENGTH,
    DEFAULT_ANSWERS,
    MAX_ANSWER_LENGTH,
    MAX_ANSWERS,
    MAX_WINDOWS,
    AnswerTerms,
    answers_of,
    read_question,
    windows_of,
)
from engine.text.processor import Encoding
from server.admission import estimate_tokens
from server.answering.encoding import compact_input, need_tokenizer
from server.answering.endpoints import lacks_task
from server.answering.packing import packed, unpacked
from server.answering.pooling import PoolingInput, PoolingRun, listed
from server.api.examples import example
from server.api.pooling_schemas import ListAnswer, NumbersBody
from server.api.scoring_schemas import Texts
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter

MAX_CHARACTERS = 2**20  # maximum characters of a question or a context: a tokenizer takes seconds for more
router = TaskRouter("pooling")


class AnswerRequest(NumbersBody):
    """Body of POST /v1/answer. All fields but question and context may be null, which means the default."""

    question: Texts = Field(description="One question for all contexts, or one per context.")
    context: Texts = Field(description="The text that contains the answer: one for all questions, or one per question.")
    top_k: int | None = Field(
        None, ge=1, le=MAX_ANSWERS, description=f"Number of answers to return, best first ({DEFAULT_ANSWERS})."
    )
    max_answer_len: int | None = Field(
        None, ge=1, le=MAX_ANSWER_LENGTH, description=f"Maximum tokens of an answer ({DEFAULT_ANSWER_LENGTH})."
    )
    max_seq_len: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens of a window, including question and special tokens. Longer contexts are read in "
        "several windows (384, or the model's limit if that is lower).",
    )
    doc_stride: int | None = Field(
        None, ge=0, description="Tokens by which neighbouring windows overlap (128, at most half of max_seq_len)."
    )
    handle_impossible_answer: bool | None = Field(
        None, description="Allow the empty answer, which means that the context has no answer (false)."
    )
    align_to_words: bool | None = Field(None, description="Extend answers to whole words (true).")

    def terms(self) -> AnswerTerms:
        """The request's terms, for the engine."""
        given = {name: getattr(self, name) for name in AnswerTerms.__dataclass_fields__}
        return AnswerTerms(**{name: value for name, value in given.items() if value is not None})


class FoundAnswer(BaseModel):
    """An answer with its score and position in the context: characters (Unicode code points) from start to end
    (exclusive)."""

    answer: str
    score: float
    start: int
    end: int


class Answers(BaseModel):
    """The answers to one question, best first."""

    index: int
    answers: list[FoundAnswer]


class AnswerResponse(ListAnswer):
    """Answer of POST /v1/answer."""

    data: list[Answers]


_EXAMPLES: dict[str, Any] = {
    "simple": example("One question", question="Where does Anna live?", context="Anna Bergen lives in Oslo.", top_k=2),
    "several": example(
        "Several questions about one text",
        question=["Where does Anna live?", "Who lives in Oslo?"],
        context="Anna Bergen lives in Oslo.",
        handle_impossible_answer=True,
    ),
}


@router.endpoint(
    "/v1/answer",
    "/answer",
    response_model=AnswerResponse,
    examples=_EXAMPLES,
    lacks=lacks_task("answer", "find answers in texts"),
    summary="Find answers in a text",
)
async def create_answer(call: TaskCall[AnswerRequest]) -> Response:
    """Find the parts of a context that answer a question. Long contexts are read in overlapping windows. Also at
    /answer."""
    terms = call.body.terms()
    window = terms.window(call.service.client.info)
    return await call.respond(_AnswerRun, asked=_paired(call.body), answer_terms=terms, window=window)


def _paired(body: AnswerRequest) -> list[tuple[str, str]]:
    """Each question with its context. Raises ApiError if the numbers do not match, or a text is too long."""
    questions, contexts = body.question, body.context
    count = max(len(questions), len(contexts))
    if {len(questions), len(contexts)} - {1, count}:
        message = (
            f"send one question and one or several contexts, or the same number of both; got "
            f"{len(questions)} and {len(contexts)}."
        )
        raise ApiError(400, message, param="context", code="invalid_value")
    for name, texts in (("question", questions), ("context", contexts)):
        if (longest := max(map(len, texts))) > MAX_CHARACTERS:
            message = f"a {name} may have at most {MAX_CHARACTERS} characters, but one has {longest}. Split it."
            raise ApiError(400, message, param=name, code="context_length_exceeded")
    questions, contexts = (texts * count if len(texts) == 1 else texts for texts in (questions, contexts))
    return list(zip(questions, contexts, strict=True))


@dataclass(slots=True)
class _AnswerRun(PoolingRun):
    id_prefix = "answer"
    body: AnswerRequest
    asked: list[tuple[str, str]] = field(kw_only=True)
    answer_terms: AnswerTerms = field(kw_only=True)
    window: tuple[int, int] = field(kw_only=True)  # tokens of a window, and tokens that two windows share
    windows: list[bytes] = field(default_factory=list)  # the encoding of each context, packed

    def size(self) -> int:
        size, overlap = self.window
        total = 0
        for question, context in self.asked:
            first, second = estimate_tokens(question), estimate_tokens(context)
            step = max(size - first - overlap, 1)
            total += first + second if first + second <= size else size * min(-(-second // step), MAX_WINDOWS)
        return total

    async def inputs(self) -> list[PoolingInput]:
        inputs: list[PoolingInput] = []
        for index in range(len(self.asked)):
            inputs += await asyncio.to_thread(self._cut, index)
            if len(inputs) > MAX_WINDOWS:
                message = (
                    f"the contexts make more than {MAX_WINDOWS} windows, the limit for a request. Send fewer, "
                    f"raise max_seq_len, or lower doc_stride."
                )
                raise ApiError(400, message, param="context", code="context_length_exceeded")
        return inputs

    def _cut(self, index: int) -> list[PoolingInput]:
        tokenizer = need_tokenizer(self.service, "context")
        try:
            encoding = read_question(tokenizer, *self.asked[index])
            windows = windows_of(encoding, *self.window, tokenizer.truncation_side)
        except InvalidRequestError as problem:
            where = f"{problem.param}[{index}]: " if len(self.asked) > 1 else ""
            raise ApiError(400, f"{where}{problem}", param=problem.param, code=problem.code) from problem
        self.windows.append(packed(windows))
        params = PoolingParams(task="answer")
        return [PoolingInput(compact_input(self.service, window, self.asked[index]), params) for window in windows]

    def render(self, answers: Sequence[Pooled]) -> bytes:
        rest = iter(answers)
        return listed(self, (self._item(index, rest) for index in range(len(self.windows))))

    def _item(self, index: int, answers: Iterator[Pooled]) -> dict[str, Any]:
        windows = unpacked(self.windows[index], list[Encoding])
        pooled = [next(answers) for _ in windows]
        cls = need_tokenizer(self.service, "context").cls_token_id
        found = answers_of(pooled, windows, self.asked[index][1], self.answer_terms, cls)
        return {
            "index": index,
            "answers": [
                {"answer": each.answer, "score": each.score, "start": each.start, "end": each.end} for each in found
            ],
        }
