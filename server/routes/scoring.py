"""POST /v1/score and /v1/rerank, also at the other paths that vLLM, Jina and Cohere use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from engine import Pooled
from engine.pooled import longest
from server.answering.endpoints import begin
from server.answering.pooling import listed
from server.answering.scoring import ScoringRun, Side
from server.api import examples
from server.api.reading import StrictJsonRoute
from server.api.scoring_schemas import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from server.api.text_embeddings_schemas import EitherRerankRequest
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError
from server.routes.text_embeddings import cut_of

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", response_model=ScoreResponse, responses=ERROR_RESPONSES, summary="Score pairs of texts")
async def create_score(
    body: Annotated[ScoreRequest, Body(openapi_examples=examples.SCORE)], request: Request, service: ServiceDep
) -> Response:
    """Score how well texts match: one text against many, or pair by pair. A cross-encoder reads both texts together;
    with other models, the score is the cosine of the two vectors. Also at /score."""
    arrival = begin(service, body, "/v1/score")
    (name, firsts), (other, seconds) = body.sides()
    first = Side(name, firsts, body.max_tokens_per_query)
    second = Side(other, seconds, body.max_tokens_per_doc)
    truncate, activates = longest(body.truncate_prompt_tokens, service.client.info), body.activates()
    return await _ScoreRun(
        service, body, arrival, first=first, second=second, truncate=truncate, use_activation=activates
    ).respond(request)


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
        return await create_rerank(RerankRequest.model_validate(known), request, service)
    arrival = begin(service, body, "/v1/rerank")
    if body.documents is not None:
        message = "documents and texts are two names of the same field. Send only one of them."
        raise ApiError(400, message, param="documents", code="invalid_value")
    run = _TextsRun(
        service,
        body,
        arrival,
        first=Side("query", [body.query], body.max_tokens_per_query),
        second=Side("texts", body.texts, body.max_tokens_per_doc),
        truncate=cut_of(body.truncate, body.truncation_direction, service),
        use_activation=not body.raw_scores,
    )
    return await run.respond(request)


@router.post("/v2/rerank", include_in_schema=False)
@router.post(
    "/v1/rerank", response_model=RerankResponse, responses=ERROR_RESPONSES, summary="Rerank documents for a query"
)
async def create_rerank(
    body: Annotated[RerankRequest, Body(openapi_examples=examples.RERANK)], request: Request, service: ServiceDep
) -> Response:
    """Sort documents by how well they match a query, best first. The scores are the same as for /v1/score. Also at
    /rerank and /v2/rerank."""
    arrival = begin(service, body, "/v1/rerank")
    first = Side("query", [body.query], body.max_tokens_per_query)
    second = Side("documents", body.documents, body.max_tokens_per_doc)
    truncate, activates = longest(body.truncate_prompt_tokens, service.client.info), body.activates()
    return await _RerankRun(
        service, body, arrival, first=first, second=second, truncate=truncate, use_activation=activates
    ).respond(request)


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
