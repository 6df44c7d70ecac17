"""The fields of a body that set the format of an answer: OpenAI's, vLLM's newer and older ones, llama.cpp's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine import InvalidRequestError, StructuredOutputsParams
from server.api.base import JsonBody
from server.api.fields import at_most
from server.errors import ApiError

MAX_CHOICES = 1000
_SAY_NOTHING = ("disable_additional_properties", "disable_fallback")  # vLLM's fields


def _check_schema(value: Any) -> Any:
    if isinstance(value, dict | bool | str):
        return value
    raise PydanticCustomError("schema", "must be a JSON schema: an object or a boolean, or that as a string")


_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}
Schema = Annotated[Any, PlainValidator(_check_schema), WithJsonSchema(_SCHEMA)]
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1), at_most(MAX_CHOICES, "strings")]
Tags = Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})]


class JsonSchemaFormat(JsonBody):
    """Part of `ResponseFormat`. The schema is always enforced, whether strict is set or not."""

    name: str | None = Field(None, max_length=256, description="Has no effect.")
    description: str | None = Field(None, description="Has no effect.")
    schema_: Schema = Field(alias="schema", description="The JSON schema.")
    strict: bool | None = None


class ResponseFormat(JsonBody):
    """Format of the answer, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="For type json_schema.")
    schema_: Schema | None = Field(None, alias="schema", description="For type json_object: a schema, as in llama.cpp.")
    structures: list[Any] | None = Field(
        None, description="For type structural_tag: begin, schema and end of each tag."
    )
    triggers: list[Any] | None = Field(None, description="For type structural_tag: texts that start a tag.")


class StructuredOutputs(JsonBody):
    """Format of the answer, as in vLLM: exactly one of the first six fields."""

    choice: Choices | None = Field(None, description="The answer is one of these texts.")
    grammar: str | None = Field(
        None, description="The answer follows this grammar, in llguidance's variant of Lark or in GBNF."
    )
    json_: Schema | None = Field(None, alias="json", description="The answer is JSON with this schema.")
    json_object: bool | None = Field(None, description="The answer is any JSON object.")
    regex: str | None = Field(None, description="The whole answer matches this regular expression, in Rust's syntax.")
    structural_tag: Tags | None = Field(
        None, description="Free text with tags that contain JSON; triggers start the tags."
    )
    around: str | None = Field(None, description="Lark grammar of the text around the answer, as /render writes it.")
    disable_any_whitespace: bool | None = Field(None, description="No white space between the parts of JSON.")
    whitespace_pattern: str | None = Field(None, description="White space that is allowed between the parts of JSON.")
    disable_additional_properties: Literal[False] | None = Field(
        None, description="Not supported; use additionalProperties in the schema."
    )
    disable_fallback: bool | None = Field(None, description="Has no effect, because there is only one backend.")

    def given(self) -> dict[str, Any]:
        """The requested formats by the engine's names. Schemas may be large, so nothing is copied."""
        fields = type(self).model_fields.items()
        values = {field.alias or name: getattr(self, name) for name, field in fields if name not in _SAY_NOTHING}
        return {name: value for name, value in values.items() if value is not None}


class StructuredBody(JsonBody):
    """The format fields; at most one of them may be set."""

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, json_schema, or vLLM's structural_tag; see docs/structured-output.md."
    )
    structured_outputs: StructuredOutputs | None = None
    guided_choice: Choices | None = Field(None, description="Older name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, description="Older name of structured_outputs.grammar.")
    guided_json: Schema | None = Field(None, description="Older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, description="Older name of structured_outputs.regex.")
    json_schema: Schema | None = Field(None, description="llama.cpp's name of structured_outputs.json.")
    grammar: str | None = Field(
        None, description="llama.cpp's name of structured_outputs.grammar. An empty text means none."
    )

    def structured(self) -> StructuredOutputsParams | None:
        """The answer's format, for the engine. Raises ApiError, InvalidRequestError: fields contradict each other, or a
        field is invalid."""
        asked = self._asked()
        if not asked:
            return None
        if len(asked) > 1:
            names = " and ".join(name for name, _ in asked)
            message = f"{names} cannot be used together: each says what the whole answer must look like."
            raise ApiError(400, message, param=asked[1][0], code="invalid_value")
        ((_, given),) = asked
        try:
            return StructuredOutputsParams(**given)
        except InvalidRequestError as problem:
            raise InvalidRequestError(
                str(problem), param=self.structured_name(problem.param), code=problem.code
            ) from problem

    def structured_name(self, param: str | None) -> str | None:
        """The client's field for the engine's `structured_outputs` or a part of it."""
        if param is None or param.partition(".")[0] != "structured_outputs":
            return param
        ((name, _), *_) = self._asked() or [(param, {})]
        if name == "response_format":
            assert self.response_format is not None
            part = "schema" if self.response_format.schema_ is not None else "json_schema"
            return f"response_format.{part}" if param.endswith(".json") else name
        return param if name == "structured_outputs" else name

    def format_fields(self) -> list[str]:
        """Names of the fields that set the answer's format."""
        return [name for name, _ in self._asked()]

    def _asked(self) -> list[tuple[str, dict[str, Any]]]:
        asked: list[tuple[str, dict[str, Any]]] = []
        wanted = self.response_format
        if wanted is not None and (wanted.type != "text" or wanted.schema_ is not None):
            asked.append(("response_format", _read_format(wanted)))
        if self.structured_outputs is not None:
            asked.append(("structured_outputs", self.structured_outputs.given()))
        for name in ("guided_choice", "guided_grammar", "guided_json", "guided_regex"):
            value = getattr(self, name)
            if value is not None:
                asked.append((name, {name.removeprefix("guided_"): value}))
        if self.json_schema is not None:
            asked.append(("json_schema", {"json": self.json_schema}))
        if self.grammar:
            asked.append(("grammar", {"grammar": self.grammar}))
        return asked


def _read_format(given: ResponseFormat) -> dict[str, Any]:
    if given.schema_ is not None and given.type != "json_object":
        message = (
            f"response_format.schema is only allowed with type json_object, and this is {given.type}; send json_schema."
        )
        raise ApiError(400, message, param="response_format.schema", code="invalid_value")
    if given.type == "json_object":
        return {"json_object": True} if given.schema_ is None else {"json": given.schema_}
    if given.type == "json_schema":
        if given.json_schema is None:
            message = "response_format of type json_schema needs json_schema, an object that holds the schema."
            raise ApiError(400, message, param="response_format.json_schema", code="invalid_value")
        return {"json": given.json_schema.schema_}
    return {"structural_tag": {"structures": given.structures or [], "triggers": given.triggers or []}}
