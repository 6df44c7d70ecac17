"""The HTTP bodies of /v1/entities; names and values are those of GLiNER's library."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from engine.pooled import DEFAULT_THRESHOLD, MAX_LABELS, EntityTerms
from server.api.fields import at_most
from server.api.pooling_schemas import ListAnswer, NumbersBody
from server.api.scoring_schemas import Texts

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
