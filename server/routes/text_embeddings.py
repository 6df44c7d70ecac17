"""The endpoints of text-embeddings-inference (version 1.8), as thin layers over those of this server: POST /embed,
/embed_sparse, /embed_all, /predict and /similarity, and GET /info. Its /rerank is in `scoring`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from engine import EngineInfo, Pooled, PoolingParams, resolve_pooling
from engine.pooled import find_prompt, is_cross_encoder, labels_of
from engine.pooled.vectors import json_matrix
from server.answering.encoding import compact_input, encode_all, estimate
from server.answering.matrices import MatrixRun
from server.answering.pooling import PoolingInput, PoolingRun
from server.answering.scoring import ScoringRun, Side
from server.api.embedding_schemas import EmbeddingRequest
from server.api.fields import ignored_header
from server.api.pooling_schemas import MAX_INPUTS, NumbersBody
from server.api.text_embeddings_schemas import (
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    SimilarityParameters,
    SimilarityRequest,
)
from server.context import Service, ServiceDep
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter

router = TaskRouter("pooling")
facts = APIRouter()


def cut_of(truncate: bool | None, direction: str | None, service: Service) -> int | None:
    """The number of tokens to which texts are cut; None if they are not cut. Raises ApiError if they are to be cut at a
    side where the tokenizer does not cut."""
    if not truncate:
        return None
    side = "right" if service.tokenizer is None else service.tokenizer.truncation_side
    if direction is not None and direction.lower() != side:
        message = (
            f"truncation_direction must be {side}, the side on which this model's tokenizer cuts, got {direction}."
        )
        raise ApiError(400, message, param="truncation_direction", code="unsupported_parameter")
    return service.client.info.max_model_len


def own_fields(body: NumbersBody) -> dict[str, Any]:
    """The fields of another server's body that Octavo's body also has."""
    names = ("model", "cache_salt", "priority", "request_timeout")
    unknown = dict.fromkeys(body.ignored_fields())  # the answer's header names them
    return {**unknown, **{name: getattr(body, name) for name in names}}


@router.post("/embed", include_in_schema=False)
async def embed(body: Annotated[EmbedRequest, Body()], request: Request, service: ServiceDep) -> Response:
    """A list of vectors."""
    arrival = time.monotonic()
    service.check_model(body.model)
    service.require("/v1/embeddings")
    normalize = body.normalize is not False
    params = PoolingParams(task="embed", normalize=normalize, dimensions=body.dimensions)
    return await _answer(body, params, request, service, arrival)


@router.post("/embed_sparse", include_in_schema=False)
async def embed_sparse(body: Annotated[EmbedSparseRequest, Body()], request: Request, service: ServiceDep) -> Response:
    """A list of lists of tokens' ids and weights."""
    arrival = time.monotonic()
    service.check_model(body.model)
    return await _answer(body, PoolingParams(task="sparse_embed"), request, service, arrival)


@router.post("/embed_all", include_in_schema=False)
async def embed_all(body: Annotated[EmbedSparseRequest, Body()], request: Request, service: ServiceDep) -> Response:
    """A list of lists of the tokens' vectors."""
    arrival = time.monotonic()
    service.check_model(body.model)
    return await _answer(body, PoolingParams(task="token_embed"), request, service, arrival)


async def _answer(
    body: EmbedSparseRequest, params: PoolingParams, request: Request, service: Service, arrival: float
) -> Response:
    info = service.client.info
    resolve_pooling(params, info, prompt_len=1)
    body.refuse_unsupported()
    run = _VectorsRun(
        service,
        EmbeddingRequest(input=body.inputs, prompt_name=body.prompt_name, **own_fields(body)),
        arrival,
        params=params,
        asked=None,
        prompt=find_prompt(info, body.prompt_name),
        truncate=cut_of(body.truncate, body.truncation_direction, service),
        shape=b"",
        headers=ignored_header(body.ignored_fields()),
    )
    return await run.respond(request)


@dataclass(slots=True)
class _VectorsRun(MatrixRun):
    id_prefix = "tei"
    advice = "send truncate: true"
    param = "inputs"

    def public_name(self, param: str | None) -> str | None:
        return "inputs" if param == "input" else param

    def render(self, answers: Sequence[Pooled]) -> bytes:
        if self.params.task == "sparse_embed":
            written = self.sparse(answers, named=False)
        else:
            written = (json_matrix(answer.values(), rows=self.params.task == "token_embed") for answer in answers)
        return b"[%b]" % b",".join(written)


@router.post("/predict", include_in_schema=False)
async def predict(body: Annotated[PredictRequest, Body()], request: Request, service: ServiceDep) -> Response:
    """Classes of a text or a pair with their scores, best first; of several, a list of these."""
    arrival = time.monotonic()
    service.check_model(body.model)
    resolve_pooling(PoolingParams(task="classify"), service.client.info, prompt_len=1)
    body.refuse_unsupported()
    truncate = cut_of(body.truncate, body.truncation_direction, service)
    return await _PredictRun(service, body, arrival, truncate=truncate).respond(request)


@dataclass(slots=True)
class _PredictRun(PoolingRun):
    id_prefix = "tei"
    advice = "send truncate: true"
    body: PredictRequest
    truncate: int | None = field(kw_only=True)

    @property
    def _sequences(self) -> list[str | tuple[str, str]]:
        found: list[str | tuple[str, str]] = self.body.inputs[0]
        return found

    def size(self) -> int:
        return estimate(self._sequences, self.service.client.info)

    async def inputs(self) -> list[PoolingInput]:
        params = PoolingParams(task="classify", use_activation=not self.body.raw_scores)
        return await encode_all(
            self.service,
            self._sequences,
            lambda encoding, item: PoolingInput(compact_input(self.service, encoding, item), params),
            "inputs",
            truncate=self.truncate,
            advice=self.advice,
        )

    def render(self, answers: Sequence[Pooled]) -> bytes:
        found = []
        for answer in answers:
            ranked = sorted(labels_of(answer, self.service.client.info), key=lambda entry: -entry.score)
            found.append([{"score": entry.score, "label": entry.label} for entry in ranked])
        return json.dumps(found if self.body.inputs[1] else found[0], separators=(",", ":"), allow_nan=False).encode()


@router.endpoint("/similarity", needs="/v1/score")
async def similarity(call: TaskCall[SimilarityRequest]) -> Response:
    """Score how similar each sentence is to the first one: a list of the scores of /v1/score."""
    body = call.body
    how = body.parameters or SimilarityParameters()
    if how.prompt_name is not None:
        message = "parameters.prompt_name is not supported: scores are made with the model's default prompt."
        raise ApiError(400, message, param="parameters", code="unsupported_parameter")
    return await call.respond(
        _SimilarityRun,
        first=Side("inputs", [body.inputs.source_sentence], name="inputs.source_sentence"),
        second=Side("inputs", body.inputs.sentences, name="inputs.sentences"),
        truncate=cut_of(how.truncate, how.truncation_direction, call.service),
        use_activation=None,
    )


@dataclass(slots=True)
class _SimilarityRun(ScoringRun):
    id_prefix = "tei"
    advice = "send truncate: true among the parameters"

    def render(self, answers: Sequence[Pooled]) -> bytes:
        return json.dumps(self.scores(answers), separators=(",", ":"), allow_nan=False).encode()


@facts.get("/info", include_in_schema=False)
async def info(service: ServiceDep) -> dict[str, Any]:
    """Describe the served model."""
    service.require("/pooling")
    found = service.client.info
    return {
        "model_id": service.model_id,
        "model_sha": None,
        "model_dtype": found.dtype,
        "model_type": _model_type(found),
        "max_concurrent_requests": found.max_num_seqs + service.settings.max_num_queued_reqs,
        "max_input_length": found.max_model_len,
        "max_batch_tokens": found.max_num_batched_tokens,
        "max_batch_requests": found.max_num_seqs,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "tokenization_workers": 1,
        "version": service.version,
        "sha": None,
        "docker_label": None,
    }


def _model_type(found: EngineInfo) -> dict[str, Any]:
    if found.labels:
        names = {str(index): label for index, label in enumerate(found.labels)}
        labels = {"id2label": names, "label2id": {label: int(index) for index, label in names.items()}}
        return {"reranker" if is_cross_encoder(found) else "classifier": labels}
    if "embed" not in found.tasks and found.sparse == "vocabulary":
        return {"embedding": {"pooling": "splade"}}
    names_of = {"last": "last_token"}
    modes = [names_of.get(mode, str(mode)) for mode in found.pooling_modes]
    return {"embedding": {"pooling": "+".join(modes) or "none"}}
