"""The HTTP bodies of /v1/decisions, in OpenAI's shape, and of /v1/systemone, in vLLM's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    StrictBool,
    StrictStr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.api.fields import Name, at_most
from server.api.schemas import MAX_MESSAGES, ServedBody
from server.api.structure import check_value
from server.api.template_fields import TemplateVariables
from server.errors import ApiError

MAX_QUESTIONS = 400
MAX_SPECS = 64  # questions of /v1/systemone, as in vLLM
MAX_CHOICES = 255
MAX_LEVELS = 10
_ROLES = ("user", "system", "developer", "assistant")


def _json(value: Any) -> str:
    try:
        check_value(value, "data")
    except ApiError as problem:
        raise PydanticCustomError("json", "holds {problem}", {"problem": str(problem.detail)}) from problem
    return json.dumps(value, ensure_ascii=False)


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "input_json" and isinstance(part.get("data"), dict | list):
        return _json(part["data"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind == "input_image":
        raise PydanticCustomError("text_only", "may hold text input only; images are not supported")
    raise PydanticCustomError("part", "must hold parts of type input_text (text) or input_json (data)")


def _parts(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("parts", "must be a string or a list of parts")
    return "\n".join(map(_part, value))


def _item(item: Any) -> str:
    """An item of the input as the model reads it, with its role unless it is the user's."""
    if not isinstance(item, dict):
        raise PydanticCustomError("item", "must hold messages, calls and outputs")
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") in _ROLES:
        text = _parts(item.get("content"))
        return text if item["role"] == "user" else f"{item['role']}: {text}"
    if kind in ("function_call", "custom_tool_call"):
        given = item.get("arguments" if kind == "function_call" else "input")
        return f"call of {item.get('name')}: {given}"
    if kind in ("function_call_output", "custom_tool_call_output"):
        return f"output: {_parts(item.get('output'))}"
    message = f"must hold messages of role {', '.join(_ROLES)}, calls and outputs"
    raise PydanticCustomError("item", message)


def _check_input(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("input", "Input should be a string or a list of messages")
    if len(value) > MAX_MESSAGES:
        raise PydanticCustomError("limit", f"may have at most {MAX_MESSAGES} items, got {len(value)}")
    return "\n\n".join(map(_item, value))


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "input_text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_PARTS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]}
_ITEM_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "message"}, "role": {"enum": [*_ROLES]}, "content": _PARTS_SCHEMA},
    "required": ["role", "content"],
}
_INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_MESSAGES, "items": _ITEM_SCHEMA}]}
Evidence = Annotated[str, PlainValidator(_check_input), WithJsonSchema(_INPUT_SCHEMA)]
Instructions = Annotated[str, PlainValidator(_parts), WithJsonSchema(_PARTS_SCHEMA)]


class _Part(BaseModel):
    """A part of a request. It keeps unknown fields in order to name them."""

    model_config = ConfigDict(extra="allow")

    def unknown(self, where: str) -> list[str]:
        return [f"{where}.{name}" for name in self.model_extra or ()]


class PredicateQuestion(_Part):
    """The probability that a statement about the input is true."""

    type: Literal["predicate"]
    instructions: Instructions
    name: Name | None = None


class DecisionChoice(_Part):
    """One option of a choice. A string and a boolean of the same text differ."""

    value: StrictStr | StrictBool
    description: str = ""


class ChoiceQuestion(_Part):
    """The option that fits the input best."""

    type: Literal["choice"]
    instructions: Instructions
    name: Name | None = None
    choices: Annotated[list[DecisionChoice], at_most(MAX_CHOICES, "choices")] = Field(min_length=2)

    @model_validator(mode="after")
    def _distinct(self) -> ChoiceQuestion:
        values = {(type(choice.value), choice.value) for choice in self.choices}
        if len(values) < len(self.choices):
            raise PydanticCustomError("distinct", "choices must have values that differ")
        return self


class ScoreLevel(_Part):
    """One level of a scale."""

    label: str
    description: str = ""


class ScoreQuestion(_Part):
    """The position of the input on a scale."""

    type: Literal["score"]
    instructions: Instructions
    name: Name | None = None
    levels: Annotated[list[ScoreLevel], at_most(MAX_LEVELS, "levels")] = Field(min_length=2)


DecisionQuestion = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Discriminator("type")]


class DecisionRequest(ServedBody):
    """Body of POST /v1/decisions. All fields but input and questions may be null, which means the default."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    input: Evidence = Field(
        description="The subject of the questions: a text, or messages, function calls and their outputs."
    )
    questions: Annotated[list[DecisionQuestion], Field(min_length=1), at_most(MAX_QUESTIONS, "questions")] = Field(
        description="Predicates, choices and scores."
    )
    joint: Literal[False] | None = Field(None, description="vLLM's field for diffusion models; only false is allowed.")

    def ignored_fields(self) -> list[str]:
        """Names of unknown fields, including those of questions, choices and levels."""
        names = ServedBody.ignored_fields(self)
        for place, question in enumerate(self.questions):
            names += question.unknown(f"questions.{place}")
            for name in ("choices", "levels"):
                for number, part in enumerate(getattr(question, name, ())):
                    names += part.unknown(f"questions.{place}.{name}.{number}")
        return names


class PredicateAnswer(BaseModel):
    """The probability that the statement is true."""

    type: Literal["predicate"] = "predicate"
    name: str | None
    probability: float


class ChoiceProbability(BaseModel):
    """An option's share of the probability of all options."""

    value: str | bool
    probability: float


class ChoiceAnswer(BaseModel):
    """The likeliest option. `confidence` is its probability over the whole vocabulary."""

    type: Literal["choice"] = "choice"
    name: str | None
    choice: str | bool
    probabilities: list[ChoiceProbability]
    confidence: float


class LevelProbability(BaseModel):
    """A level's share of the probability of all levels; `value` is its number, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(BaseModel):
    """The expected level. `confidence` is the likeliest level's probability over the whole vocabulary."""

    type: Literal["score"] = "score"
    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class DecisionInputDetails(BaseModel):
    """Part of `DecisionUsage`."""

    cached_tokens: int
    cache_write_tokens: int = 0


class DecisionOutputDetails(BaseModel):
    """Part of `DecisionUsage`."""

    reasoning_tokens: int = 0


class DecisionUsage(BaseModel):
    """Tokens of the whole request. The input counts once per question; from the second question on, it is cached."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    output_tokens: int
    output_tokens_details: DecisionOutputDetails
    total_tokens: int


class DecisionResponse(BaseModel):
    """Answer of POST /v1/decisions, in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage


class QuestionSpec(BaseModel):
    """A question of /v1/systemone: a choice (criteria: option to description or null), a noul, which is yes or no
    (criteria: what true and false mean), or a score (criteria: the levels in order)."""

    model_config = {"extra": "allow"}

    type: str
    instructions: Any = ""
    criteria: Any = None


class SystemOneRequest(ServedBody):
    """Body of POST /v1/systemone. All fields but state and questions may be null, which means the default."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    state: Any = Field(description="The subject of the questions: text or JSON.")
    questions: dict[str, QuestionSpec] = Field(description="The questions by id.")
    instructions: str | None = Field(None, description="A system message before the state.")
    chat_template_kwargs: TemplateVariables | None = Field(None, description="Variables for the chat template.")
    images: list[str] | None = Field(None, max_length=0, description="Not supported.")
    audio: list[str] | None = Field(None, max_length=0, description="Not supported.")
    videos: list[str] | None = Field(None, max_length=0, description="Not supported.")
    joint: Literal[False] | None = Field(None, description="For diffusion models; only false is allowed.")


class QuestionDiagnostics(BaseModel):
    """`label_mass` is the probability of all labels over the whole vocabulary; `argmax_is_label`: the most probable
    token is one of them."""

    label_mass: float
    argmax_is_label: bool


class SystemOneUsage(BaseModel):
    """Tokens of the whole request."""

    input_tokens: int
    output_tokens: int


class SystemOneResponse(BaseModel):
    """Answer of POST /v1/systemone, by the questions' ids."""

    id: str
    object: Literal["structured_decision"] = "structured_decision"
    created: int
    model: str
    answers: dict[str, dict[str, Any]]
    usage: SystemOneUsage
    diagnostics: dict[str, QuestionDiagnostics]
    joint: None = None
