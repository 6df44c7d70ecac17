"""The HTTP bodies of /v1/score and /v1/rerank, in the shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.pooling_schemas import TEXT_SCHEMA, ActivatedBody, ListAnswer, check_each, several
from server.errors import ApiError

# The names for the two sides of the pairs: vLLM's, oldest first.
SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


def _check_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("texts", "must be a string or a non-empty list of strings")
    return check_each(texts, alone=texts is not value)


def _check_documents(value: Any) -> list[str]:
    texts = [item.get("text") if isinstance(item, dict) else item for item in value] if isinstance(value, list) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        message = 'must be a non-empty list of strings, or of objects such as {"text": "..."}'
        raise PydanticCustomError("documents", message)
    return check_each(texts, alone=False)


_DOCUMENT_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"text": TEXT_SCHEMA}, "required": ["text"]}


Texts = Annotated[Any, PlainValidator(_check_texts), WithJsonSchema({"anyOf": [TEXT_SCHEMA, several(TEXT_SCHEMA)]})]
Documents = Annotated[
    Any, PlainValidator(_check_documents), WithJsonSchema(several({"anyOf": [TEXT_SCHEMA, _DOCUMENT_SCHEMA]}))
]


class ScoringBody(ActivatedBody):
    """The common fields of both bodies."""

    max_tokens_per_query: int | None = Field(
        None, ge=0, description="Cut the query to this many tokens, not counting special tokens; 0 means no limit (0)."
    )
    max_tokens_per_doc: int | None = Field(None, ge=0, description="Cut each document in the same way (0).")


class ScoreRequest(ScoringBody):
    """Body of POST /v1/score: text_1 and text_2, or one of the other pairs of names. Null means the default."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": list(pair)} for pair in SIDES]})

    text_1: Texts | None = Field(None, description="First text of each pair: one for all pairs, or one per pair.")
    text_2: Texts | None = Field(None, description="Second text of each pair.")
    data_1: Texts | None = Field(None, description="Another name of text_1; used with data_2.")
    data_2: Texts | None = Field(None, description="Another name of text_2; used with data_1.")
    queries: Texts | None = Field(None, description="Another name of text_1; used with documents or items.")
    documents: Texts | None = Field(None, description="Another name of text_2; used with queries.")
    items: Texts | None = Field(None, description="Another name of text_2; used with queries.")

    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """The first texts (one for all, or as many as second ones) and the second texts of all pairs, with the field
        names that were used. Raises ApiError if a side is missing, a side was sent under several names, or the numbers
        do not match."""
        given = {name for pair in SIDES for name in pair if getattr(self, name) is not None}
        names = next((pair for pair in SIDES if given == set(pair)), None)
        if names is None:
            param = next((name for name in SIDES[0] if name not in given), "text_1")
            got = ", ".join(sorted(given)) or "neither"
            lacking = any(given < set(pair) for pair in SIDES)
            code = "missing_required_parameter" if lacking else "invalid_value"
            message = f"Send text_1 and text_2, or queries and documents, and nothing else; got {got}."
            raise ApiError(400, message, param=param, code=code)
        first: list[str] = getattr(self, names[0])
        second: list[str] = getattr(self, names[1])
        if len(first) not in (1, len(second)):
            message = (
                f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: send one {names[0]} for all, or "
                "equally many of both."
            )
            raise ApiError(400, message, param=names[0], code="invalid_value")
        return (names[0], first), (names[1], second)


class RerankRequest(ScoringBody):
    """Body of POST /v1/rerank. All fields but query and documents may be null, which means the default."""

    query: str = Field(min_length=1, description="The query that the documents are compared with.")
    documents: Documents = Field(description="The documents to sort.")
    top_n: int | None = Field(
        None, ge=0, description="Return only this many documents, the best ones; 0 means all (all)."
    )
    return_documents: bool | None = Field(None, description="Include the text of each document in the result (true).")


class ScoreData(BaseModel):
    """The score of one pair: a cosine from -1 to 1, or the output of a cross-encoder."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(ListAnswer):
    """Answer of POST /v1/score."""

    data: list[ScoreData]


class RerankDocument(BaseModel):
    """A document as sent."""

    text: str


class RerankResult(BaseModel):
    """A document in the result; `index` is its position in the request."""

    index: int
    document: RerankDocument | None = None
    relevance_score: float


class RerankResponse(ListAnswer):
    """Answer of POST /v1/rerank: best first, documents with equal scores in the order of the request."""

    results: list[RerankResult]
