"""The HTTP bodies of /v1/entities; names and values are those of GLiNER's library."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from engine.pooled import DEFAULT_THRESHOLD, MAX_LABELS, EntityTerms
from server.api.fields import at_most
from server.api.pooling_schemas import NumbersBody, PoolingUsage
from server.api.scoring_schemas import Texts

Label = Annotated[str, Field(min_length=1)]


class EntitiesRequest(NumbersBody):
    """Body of POST /v1/entities. Null means the default, for every field but input and labels."""

    input: Texts = Field(description="A text, or several.")
    labels: Annotated[list[Label], at_most(MAX_LABELS, "labels"), Field(min_length=1, max_length=MAX_LABELS)] = Field(
        description='What entities there may be, in words: "person", "date of birth".'
    )
    threshold: float | None = Field(
        None, ge=0, le=1, description=f"An entity's score is above this ({DEFAULT_THRESHOLD})."
    )
    flat_ner: bool | None = Field(
        None, description="Entities do not overlap (true). False: one may lie within another."
    )
    multi_label: bool | None = Field(None, description="A span may have several labels, as one entity each (false).")
    stride: int | None = Field(
        None,
        ge=0,
        description="Words that two neighbouring windows of a long text share (64, or half a window if less).",
    )

    def terms(self) -> EntityTerms:
        """What is asked for."""
        names = ("threshold", "flat_ner", "multi_label", "stride")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return EntityTerms(labels=tuple(self.labels), **given)


class FoundEntity(BaseModel):
    """An entity with its label and score, and where it stands in the text: characters (Unicode code points) from start
    to end, which is exclusive."""

    text: str
    label: str
    start: int
    end: int
    score: float


class Entities(BaseModel):
    """The entities of one text, in the order in which they begin."""

    index: int
    entities: list[FoundEntity]


class EntitiesResponse(BaseModel):
    """Answer of POST /v1/entities."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Entities]
    usage: PoolingUsage
