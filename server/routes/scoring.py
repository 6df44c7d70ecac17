"""POST /v1/score and /v1/rerank, also at the other paths that vLLM, Jina and Cohere use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Body, Request, Response

from engine import EngineInfo, Pooled
from engine.pooled import comparison_of, is_cross_encoder, longest
from engine.text.processor import Tokenizer
from server.answering.endpoints import NO_TOKENIZER, kind_of
from server.answering.pooling import listed
from server.answering.scoring import ScoringRun, Side
from server.api import examples
from server.api.scoring_schemas import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from server.api.text_embeddings_schemas import EitherRerankRequest
from server.context import ServiceDep
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter
from server.routes.text_embeddings import cut_of

router = TaskRouter("pooling")


def _lacks(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if comparison_of(info) is None and not is_cross_encoder(info):
        if "classify" in info.tasks:
            return f"it has {len(info.labels)} classes, but scoring pairs needs a model with one class, or vectors"
        return f"{kind_of(info)}, but scoring pairs needs a classifier with one class, or vectors"
    return None if tokenizer is not None else NO_TOKENIZER


@router.endpoint(
    "/v1/score",
    "/score",
    response_model=ScoreResponse,
    examples=examples.SCORE,
    lacks=_lacks,
    summary="Score pairs of texts",
)
async def create_score(call: TaskCall[ScoreRequest]) -> Response:
    """Score how well texts match: one text against many, or pair by pair. A cross-encoder reads both texts together;
    with other models, the score is the cosine of the two vectors. Also at /score."""
    (name, firsts), (other, seconds) = call.body.sides()
    return await _compare(call, _ScoreRun, (name, firsts), (other, seconds))


async def _compare(
    call: TaskCall[ScoreRequest] | TaskCall[RerankRequest],
    run: type[_ScoreRun | _RerankRun],
    first: tuple[str, Sequence[str]],
    second: tuple[str, Sequence[str]],
) -> Response:
    """The answer to a comparison of two sides. A side is the name of a field and its texts."""
    body = call.body
    return await call.respond(
        run,
        first=Side(*first, body.max_tokens_per_query),
        second=Side(*second, body.max_tokens_per_doc),
        truncate=longest(body.truncate_prompt_tokens, call.service.client.info),
        use_activation=body.activates(),
    )


@router.post("/rerank", include_in_schema=False)
async def create_either_rerank(
    body: Annotated[EitherRerankRequest, Body()], request: Request, service: ServiceDep
) -> Response:
    """Serve /v1/rerank for documents, and text-embeddings-inference's endpoint for texts."""
    if body.texts is None:
        known = body.model_dump(exclude_unset=True)
        if body.documents is None:
            message = "documents or texts is required."
            raise ApiError(400, message, param="documents", code="missing_required_parameter")
        asked = RerankRequest.model_validate(known)
        return await create_rerank(TaskCall.begin(service, asked, request, "/v1/rerank"))
    call = TaskCall.begin(service, body, request, "/v1/rerank")
    if body.documents is not None:
        message = "documents and texts are two names of the same field. Send only one of them."
        raise ApiError(400, message, param="documents", code="invalid_value")
    return await call.respond(
        _TextsRun,
        first=Side("query", [body.query], body.max_tokens_per_query),
        second=Side("texts", body.texts, body.max_tokens_per_doc),
        truncate=cut_of(body.truncate, body.truncation_direction, service),
        use_activation=not body.raw_scores,
    )


@router.endpoint(
    "/v1/rerank",
    "/v2/rerank",
    response_model=RerankResponse,
    examples=examples.RERANK,
    lacks=_lacks,
    summary="Rerank documents for a query",
)
async def create_rerank(call: TaskCall[RerankRequest]) -> Response:
    """Sort documents by how well they match a query, best first. The scores are the same as for /v1/score. Also at
    /rerank and /v2/rerank."""
    return await _compare(call, _RerankRun, ("query", [call.body.query]), ("documents", call.body.documents))


@dataclass(slots=True)
class _ScoreRun(ScoringRun):
    id_prefix = "score"
    body: ScoreRequest

    def render(self, answers: Sequence[Pooled]) -> bytes:
        scores = enumerate(self.scores(answers))
        return listed(self, ({"index": index, "object": "score", "score": score} for index, score in scores))


@dataclass(slots=True)
class _TextsRun(ScoringRun):
    id_prefix = "tei"
    advice = "send truncate: true"
    body: EitherRerankRequest

    def render(self, answers: Sequence[Pooled]) -> bytes:
        scores, texts = self.scores(answers), self.body.texts or []
        found = []
        for index in sorted(range(len(scores)), key=lambda index: -scores[index]):
            text = {"text": texts[index]} if self.body.return_text else {}
            found.append({"index": index, **text, "score": scores[index]})
        return json.dumps(found, separators=(",", ":"), allow_nan=False).encode()


@dataclass(slots=True)
class _RerankRun(ScoringRun):
    id_prefix = "rerank"
    body: RerankRequest

    def render(self, answers: Sequence[Pooled]) -> bytes:
        body = self.body
        scores = self.scores(answers)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])  # equal scores keep the request's order
        shown = body.return_documents is not False
        results: list[dict[str, Any]] = []
        for index in order[: body.top_n or None]:
            document = {"document": {"text": body.documents[index]}} if shown else {}
            results.append({"index": index, **document, "relevance_score": scores[index]})
        return listed(self, results, "results")
