"""POST /v1/entities, for models that find entities by labels in the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from engine import InvalidRequestError, Pooled
from engine.pooled import MAX_WINDOWS, EntityReading, EntityTerms, entities_of, read_entities
from server.admission import estimate_tokens
from server.answering.encoding import compact_input, need_tokenizer
from server.answering.endpoints import begin
from server.answering.packing import packed, unpacked
from server.answering.pooling import PoolingInput, PoolingRun, listed
from server.api import examples
from server.api.entities_schemas import EntitiesRequest, EntitiesResponse
from server.api.reading import StrictJsonRoute
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError

MAX_CHARACTERS = 2**20  # maximum characters of a text: a tokenizer takes seconds for more

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/entities", include_in_schema=False)
@router.post(
    "/v1/entities", response_model=EntitiesResponse, responses=ERROR_RESPONSES, summary="Find entities by label"
)
async def create_entities(
    body: Annotated[EntitiesRequest, Body(openapi_examples=examples.ENTITIES)], request: Request, service: ServiceDep
) -> Response:
    """Find the parts of each text that match one of the labels. Long texts are read in overlapping windows. Also at
    /entities."""
    arrival = begin(service, body, "/v1/entities")
    if (longest := max(map(len, body.input))) > MAX_CHARACTERS:
        message = f"a text may have at most {MAX_CHARACTERS} characters, but one has {longest}. Split it."
        raise ApiError(400, message, param="input", code="context_length_exceeded")
    return await _EntitiesRun(service, body, arrival, entity_terms=body.terms()).respond(request)


@dataclass(slots=True)
class _EntitiesRun(PoolingRun):
    id_prefix = "entities"
    body: EntitiesRequest
    entity_terms: EntityTerms = field(kw_only=True)
    readings: list[bytes] = field(default_factory=list)  # the encoding of each text, packed

    def size(self) -> int:
        limit = self.service.client.info.max_model_len
        labels = sum(estimate_tokens(label) + 1 for label in self.entity_terms.labels)
        total = 0
        for text in self.body.input:
            count = estimate_tokens(text)
            windows = min(-(-count // max(limit - labels, 1)), MAX_WINDOWS)
            total += min(count + windows * labels, windows * limit)
        return total

    async def inputs(self) -> list[PoolingInput]:
        inputs: list[PoolingInput] = []
        for index in range(len(self.body.input)):
            inputs += await asyncio.to_thread(self._read, index)
            if len(inputs) > MAX_WINDOWS:
                message = (
                    f"the texts make more than {MAX_WINDOWS} windows, the limit for a request. Send fewer, or "
                    f"lower stride."
                )
                raise ApiError(400, message, param="input", code="context_length_exceeded")
        return inputs

    def _read(self, index: int) -> list[PoolingInput]:
        tokenizer, info = need_tokenizer(self.service, "input"), self.service.client.info
        try:
            reading = read_entities(tokenizer, self.body.input[index], self.entity_terms, info)
        except InvalidRequestError as problem:
            where = f"input[{index}]: " if len(self.body.input) > 1 and problem.param == "input" else ""
            raise ApiError(400, f"{where}{problem}", param=problem.param, code=problem.code) from problem
        self.readings.append(packed(reading))
        return [
            PoolingInput(
                compact_input(self.service, window.encoding, reading.text), window.params(self.entity_terms.threshold)
            )
            for window in reading.windows
        ]

    def render(self, answers: Sequence[Pooled]) -> bytes:
        return listed(self, self._items(answers))

    def _items(self, answers: Sequence[Pooled]) -> Iterator[dict[str, Any]]:
        rest, how = iter(answers), self.service.client.info.entities
        assert how is not None  # the endpoint was checked
        for index, data in enumerate(self.readings):
            reading = unpacked(data, EntityReading)
            pooled = [next(rest) for _ in reading.windows]
            found = entities_of(pooled, reading, self.entity_terms, how)
            yield {"index": index, "entities": [asdict(entity) for entity in found]}
