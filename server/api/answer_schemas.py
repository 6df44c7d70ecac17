"""The HTTP bodies of /v1/answer; names and values are those of transformers' question-answering pipeline."""

from __future__ import annotations

from pydantic import BaseModel, Field

from engine.pooled import DEFAULT_ANSWER_LENGTH, DEFAULT_ANSWERS, MAX_ANSWER_LENGTH, MAX_ANSWERS, AnswerTerms
from server.api.pooling_schemas import NumbersBody, PoolingUsage
from server.api.scoring_schemas import Texts


class AnswerRequest(NumbersBody):
    """Body of POST /v1/answer. Null means the default, for every field but question and context."""

    question: Texts = Field(description="One question or several: one for all contexts, or as many as there are.")
    context: Texts = Field(description="The text that holds the answer, or several: one for all questions, or as many.")
    top_k: int | None = Field(
        None, ge=1, le=MAX_ANSWERS, description=f"Name so many of the likeliest answers ({DEFAULT_ANSWERS})."
    )
    max_answer_len: int | None = Field(
        None, ge=1, le=MAX_ANSWER_LENGTH, description=f"Tokens of an answer at most ({DEFAULT_ANSWER_LENGTH})."
    )
    max_seq_len: int | None = Field(
        None,
        ge=1,
        description="Tokens that are read at once, question and special tokens included; a longer context is read in "
        "windows (384, or what the model takes if that is less).",
    )
    doc_stride: int | None = Field(
        None, ge=0, description="Tokens that two neighbouring windows share (128, or half of max_seq_len if less)."
    )
    handle_impossible_answer: bool | None = Field(
        None, description="The empty answer is one of the answers: that the context holds none (false)."
    )
    align_to_words: bool | None = Field(None, description="Answers begin and end with whole words (true).")

    def terms(self) -> AnswerTerms:
        """What is asked for."""
        given = {name: getattr(self, name) for name in AnswerTerms.__dataclass_fields__}
        return AnswerTerms(**{name: value for name, value in given.items() if value is not None})


class FoundAnswer(BaseModel):
    """An answer with its score, and where it stands in the context: characters (Unicode code points) from start to end,
    which is exclusive."""

    answer: str
    score: float
    start: int
    end: int


class Answers(BaseModel):
    """The answers to one question, best first."""

    index: int
    answers: list[FoundAnswer]


class AnswerResponse(BaseModel):
    """Answer of POST /v1/answer."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Answers]
    usage: PoolingUsage
