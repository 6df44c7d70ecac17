"""The HTTP bodies of /v1/answer; names and values are those of transformers' question-answering pipeline."""

from __future__ import annotations

from pydantic import BaseModel, Field

from engine.pooled import DEFAULT_ANSWER_LENGTH, DEFAULT_ANSWERS, MAX_ANSWER_LENGTH, MAX_ANSWERS, AnswerTerms
from server.api.pooling_schemas import ListAnswer, NumbersBody
from server.api.scoring_schemas import Texts


class AnswerRequest(NumbersBody):
    """Body of POST /v1/answer. All fields but question and context may be null, which means the default."""

    question: Texts = Field(description="One question for all contexts, or one per context.")
    context: Texts = Field(description="The text that contains the answer: one for all questions, or one per question.")
    top_k: int | None = Field(
        None, ge=1, le=MAX_ANSWERS, description=f"Number of answers to return, best first ({DEFAULT_ANSWERS})."
    )
    max_answer_len: int | None = Field(
        None, ge=1, le=MAX_ANSWER_LENGTH, description=f"Maximum tokens of an answer ({DEFAULT_ANSWER_LENGTH})."
    )
    max_seq_len: int | None = Field(
        None,
        ge=1,
        description="Maximum tokens of a window, including question and special tokens. Longer contexts are read in "
        "several windows (384, or the model's limit if that is lower).",
    )
    doc_stride: int | None = Field(
        None, ge=0, description="Tokens by which neighbouring windows overlap (128, at most half of max_seq_len)."
    )
    handle_impossible_answer: bool | None = Field(
        None, description="Allow the empty answer, which means that the context has no answer (false)."
    )
    align_to_words: bool | None = Field(None, description="Extend answers to whole words (true).")

    def terms(self) -> AnswerTerms:
        """The request's terms, for the engine."""
        given = {name: getattr(self, name) for name in AnswerTerms.__dataclass_fields__}
        return AnswerTerms(**{name: value for name, value in given.items() if value is not None})


class FoundAnswer(BaseModel):
    """An answer with its score and position in the context: characters (Unicode code points) from start to end
    (exclusive)."""

    answer: str
    score: float
    start: int
    end: int


class Answers(BaseModel):
    """The answers to one question, best first."""

    index: int
    answers: list[FoundAnswer]


class AnswerResponse(ListAnswer):
    """Answer of POST /v1/answer."""

    data: list[Answers]
