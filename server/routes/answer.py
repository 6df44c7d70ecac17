"""POST /v1/answer, for models that find the answer to a question in a text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from engine import InvalidRequestError, Pooled, PoolingParams
from engine.pooled import MAX_WINDOWS, AnswerTerms, answers_of, read_question, windows_of
from engine.text.processor import Encoding
from server.admission import estimate_tokens
from server.answering.encoding import compact_input, need_tokenizer
from server.answering.endpoints import begin
from server.answering.packing import packed, unpacked
from server.answering.pooling import PoolingInput, PoolingRun, listed
from server.api import examples
from server.api.answer_schemas import AnswerRequest, AnswerResponse
from server.api.reading import StrictJsonRoute
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError

MAX_CHARACTERS = 2**20  # maximum characters of a question or a context: a tokenizer takes seconds for more

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/answer", include_in_schema=False)
@router.post("/v1/answer", response_model=AnswerResponse, responses=ERROR_RESPONSES, summary="Find answers in a text")
async def create_answer(
    body: Annotated[AnswerRequest, Body(openapi_examples=examples.ANSWER)], request: Request, service: ServiceDep
) -> Response:
    """Find the parts of a context that answer a question. Long contexts are read in overlapping windows. Also at
    /answer."""
    arrival = begin(service, body, "/v1/answer")
    terms = body.terms()
    window = terms.window(service.client.info)
    return await _AnswerRun(service, body, arrival, asked=_paired(body), answer_terms=terms, window=window).respond(
        request
    )


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
