"""POST /v1/entities, for models that find entities by labels in the request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from fastapi import Response
from pydantic import BaseModel, Field

from engine import InvalidRequestError, Pooled
from engine.pooled import (
    DEFAULT_THRESHOLD,
    MAX_LABELS,
    MAX_WINDOWS,
    EntityReading,
    EntityTerms,
    entities_of,
    read_entities,
)
from server.admission import estimate_tokens
from server.answering.encoding import compact_input, need_tokenizer
from server.answering.endpoints import lacks_task
from server.answering.packing import packed, unpacked
from server.answering.pooling import PoolingInput, PoolingRun, listed
from server.api.examples import example
from server.api.fields import at_most
from server.api.pooling_schemas import ListAnswer, NumbersBody
from server.api.scoring_schemas import Texts
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter

MAX_CHARACTERS = 2**20  # maximum characters of a text: a tokenizer takes seconds for more
router = TaskRouter("pooling")


Label = Annotated[str, Field(min_length=1)]


class EntitiesRequest(NumbersBody):
    """Body of POST /v1/entities. All fields but input and labels may be null, which means the default."""

    input: Texts = Field(description="One text or several.")
    labels: Annotated[list[Label], at_most(MAX_LABELS, "labels"), Field(min_length=1, max_length=MAX_LABELS)] = Field(
        description='Labels of the entities, such as "person" or "date of birth".'
    )
    threshold: float | None = Field(None, ge=0, le=1, description=f"Minimum score of an entity ({DEFAULT_THRESHOLD}).")
    flat_ner: bool | None = Field(
        None, description="Do not return overlapping entities (true). False allows nested entities."
    )
    multi_label: bool | None = Field(None, description="Allow several labels per span, as separate entities (false).")
    stride: int | None = Field(
        None,
        ge=0,
        description="Words by which neighbouring windows of a long text overlap (64, at most half a window).",
    )

    def terms(self) -> EntityTerms:
        """The request's terms, for the engine."""
        names = ("threshold", "flat_ner", "multi_label", "stride")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return EntityTerms(labels=tuple(self.labels), **given)


class FoundEntity(BaseModel):
    """An entity with its label, score and position in the text: characters (Unicode code points) from start to end
    (exclusive)."""

    text: str
    label: str
    start: int
    end: int
    score: float


class Entities(BaseModel):
    """The entities of one text, in the order of their start."""

    index: int
    entities: list[FoundEntity]


class EntitiesResponse(ListAnswer):
    """Answer of POST /v1/entities."""

    data: list[Entities]


_EXAMPLES: dict[str, Any] = {
    "simple": example("One text", input="Anna Bergen lives in Oslo.", labels=["person", "city"], threshold=0.4),
    "several": example(
        "Several texts, nested entities",
        input=["Anna lives in Oslo.", "The choir of Bergen is late."],
        labels=["person", "city", "group of people"],
        flat_ner=False,
        multi_label=True,
    ),
}


@router.endpoint(
    "/v1/entities",
    "/entities",
    response_model=EntitiesResponse,
    examples=_EXAMPLES,
    lacks=lacks_task("entities", "find entities by label"),
    summary="Find entities by label",
)
async def create_entities(call: TaskCall[EntitiesRequest]) -> Response:
    """Find the parts of each text that match one of the labels. Long texts are read in overlapping windows. Also at
    /entities."""
    if (longest := max(map(len, call.body.input))) > MAX_CHARACTERS:
        message = f"a text may have at most {MAX_CHARACTERS} characters, but one has {longest}. Split it."
        raise ApiError(400, message, param="input", code="context_length_exceeded")
    return await call.respond(_EntitiesRun, entity_terms=call.body.terms())


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
