"""POST /v2/embed, in Cohere's shape (version 2 of its API)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Response
from pydantic import Field

from engine import EngineInfo, Pooled, PoolingParams
from engine.pooled import find_prompt, longest
from engine.pooled.vectors import json_base64, json_matrix, json_signs, json_steps, packed
from server.answering.matrices import MatrixRun
from server.answering.pooling import PoolingInput
from server.api.embedding_schemas import EmbeddingRequest
from server.api.fields import ignored_header
from server.api.pooling_schemas import NumbersBody
from server.api.scoring_schemas import Texts
from server.context import Service
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter
from server.routes.text_embeddings import own_fields

router = TaskRouter("pooling")


EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]
MAX_IMAGES = 96  # texts or images in one request, as at Cohere


class CohereEmbedRequest(NumbersBody):
    """Body of POST /v2/embed. Null means the default."""

    texts: Texts | None = Field(None, description="The texts to embed.")
    images: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=MAX_IMAGES, description="Images as data: URLs, for models that read them."
    )
    input_type: InputType | None = Field(
        None,
        description="Chooses the model's prompt: query, document, classification or clustering, if the model "
        "has that one.",
    )
    embedding_types: list[EmbeddingType] | None = Field(
        None, min_length=1, max_length=6, description="Number formats of the vectors in the answer (float)."
    )
    output_dimension: int | None = Field(None, ge=1, description="Keep only this many features, the first ones.")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None,
        description="Where to cut long texts: NONE (not at all), or the side on which the model's tokenizer cuts "
        "(END).",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Cut each text to this many tokens; if truncate is NONE, refuse longer texts."
    )


_PROMPTS = {"search_query": "query", "search_document": "document"}  # the others equal their prompts' names


@router.endpoint("/v2/embed", needs="/v1/embeddings")
async def embed(call: TaskCall[CohereEmbedRequest]) -> Response:
    """Return vectors of texts or images in the requested formats."""
    service, body, info = call.service, call.body, call.service.client.info
    kinds: list[EmbeddingType] = list(dict.fromkeys(body.embedding_types or ("float",)))
    params = PoolingParams(task="embed", dimensions=body.output_dimension)
    if (body.output_dimension or 0) > info.embedding_size:
        message = f"output_dimension is {body.output_dimension}, but this model's vectors have {info.embedding_size}."
        raise ApiError(400, message, param="output_dimension", code="invalid_value")
    if body.output_dimension is not None and body.output_dimension % 8 and {"binary", "ubinary"} & set(kinds):
        message = f"output_dimension must be a multiple of 8 for binary vectors, got {body.output_dimension}."
        raise ApiError(400, message, param="output_dimension", code="invalid_value")
    run = _CohereRun(
        service,
        EmbeddingRequest(input=_given(body), **own_fields(body)),
        call.arrival,
        params=params,
        asked=None,
        prompt=find_prompt(info, _prompt_name(body, info)),
        truncate=_cut(body, service),
        shape=b"",
        headers=ignored_header(body.ignored_fields()),
        kinds=kinds,
        most=body.max_tokens if body.truncate == "NONE" and body.texts else None,
        asked_texts=body.texts or [],
    )
    return await run.respond(call.request)


def _given(body: CohereEmbedRequest) -> list[Any]:
    """The inputs in the form of /v1/embeddings. Raises ApiError if there are texts and images, or neither."""
    if (body.model_extra or {}).get("inputs") is not None:
        message = "inputs is not supported. Send texts or images."
        raise ApiError(400, message, param="inputs", code="unsupported_parameter")
    if (body.texts is None) == (body.images is None):
        message = "Send texts or images" + (", and not both." if body.texts is not None else ".")
        raise ApiError(400, message, param="texts", code="invalid_value")
    return body.texts if body.texts is not None else [{"image": image} for image in body.images or ()]


def _prompt_name(body: CohereEmbedRequest, info: EngineInfo) -> str | None:
    """The prompt for this kind of input; None, which means the default, if the model has none for it."""
    name = None if body.input_type is None else _PROMPTS.get(body.input_type, body.input_type)
    return name if name in info.prompts else None


def _cut(body: CohereEmbedRequest, service: Service) -> int | None:
    """The number of tokens to which texts are cut. As at Cohere, they are cut unless truncate is NONE. Raises ApiError
    if texts are to be cut at a side where the tokenizer does not cut; InvalidRequestError if max_tokens exceeds the
    model's limit."""
    if body.truncate == "NONE":
        return None
    side = "right" if service.tokenizer is None else service.tokenizer.truncation_side
    ours = "END" if side == "right" else "START"
    if body.truncate not in (None, ours):
        message = (
            f"truncate must be NONE or {ours}, the side on which this model's tokenizer cuts, got {body.truncate}."
        )
        raise ApiError(400, message, param="truncate", code="unsupported_parameter")
    limit = service.client.info.max_model_len
    return longest(-1 if body.max_tokens is None else min(body.max_tokens, limit), service.client.info)


@dataclass(slots=True)
class _CohereRun(MatrixRun):
    id_prefix = "embed"
    advice = "leave truncate out"
    param = "texts"
    kinds: list[EmbeddingType] = field(kw_only=True)  # the requested formats of the vectors
    most: int | None = field(kw_only=True)  # maximum tokens of a text; longer ones are refused
    asked_texts: list[str] = field(kw_only=True)  # the texts; empty if there are images

    async def inputs(self) -> Sequence[PoolingInput]:
        with self._public_names():
            found = await MatrixRun.inputs(self)
        for place, item in enumerate(found):
            if self.most is not None and item.num_tokens > self.most:
                message = (
                    f"texts[{place}] is too long: it has {item.num_tokens} tokens, but max_tokens is "
                    f"{self.most}. Shorten it, raise max_tokens, or {self.advice}."
                )
                raise ApiError(400, message, param="texts", code="context_length_exceeded")
        return found

    def public_name(self, param: str | None) -> str | None:
        inputs = "texts" if self.asked_texts else "images"
        return {"input": inputs, "dimensions": "output_dimension"}.get(param or "", param)

    def render(self, answers: Sequence[Pooled]) -> bytes:
        vectors = [answer.values() for answer in answers]
        forms = (b'"%b":[%b]' % (kind.encode(), b",".join(map(_FORMS[kind], vectors))) for kind in self.kinds)
        rest = {
            "id": self.request_id,
            "response_type": "embeddings_by_type",
            "texts": self.asked_texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": self.num_tokens}},
        }
        return b'%b,"embeddings":{%b}}' % (json.dumps(rest, separators=(",", ":")).encode()[:-1], b",".join(forms))


_FORMS: dict[EmbeddingType, Callable[..., bytes]] = {
    "float": json_matrix,
    "int8": json_steps,
    "uint8": partial(json_steps, moved=128),
    "binary": partial(json_signs, moved=-128),
    "ubinary": json_signs,
    "base64": lambda values: json_base64(packed(values, "float32")),
}
