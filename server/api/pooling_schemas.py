"""The common fields of bodies whose answers are numbers."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.schemas import IDS_SCHEMA, ServedBody, is_ids
from server.errors import ApiError

MAX_INPUTS = 2048  # maximum inputs in one request, as at OpenAI
TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}

_MESSAGES = "messages is not supported here; send input, as text that is ready for the model."


class NumbersBody(ServedBody):
    """The common fields of all these endpoints. Null means the default."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not supported. Raises ApiError: names the first such
        field."""
        extra = self.model_extra or {}
        if extra.get("messages") is not None:
            raise ApiError(400, _MESSAGES, param="messages", code="unsupported_parameter")
        ServedBody.refuse_unsupported(self)


class PoolingBody(NumbersBody):
    """The common fields of endpoints that may truncate their inputs."""

    truncate_prompt_tokens: int | None = Field(
        None,
        description="Cut each input to this many tokens, including special tokens; -1 cuts to the model's limit. "
        "Without it, longer inputs are refused.",
    )


def several(item: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a list of such items."""
    return {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": item}


def _check_boxes(value: Any) -> list[list[list[int]] | None]:
    """The boxes in either form, as a list of each input's boxes."""
    boxes = [value] if _are_boxes(value) else value
    if not isinstance(boxes, list) or not boxes or not all(item is None or _are_boxes(item) for item in boxes):
        message = (
            "must be a list with one box [left, upper, right, lower] per token; for several inputs, a list of such "
            "lists, with null for an input without boxes"
        )
        raise PydanticCustomError("boxes", message)
    return boxes


def _are_boxes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_ids(box) and len(box) == 4 for box in value)


_BOX_SCHEMA = {"type": "array", "minItems": 4, "maxItems": 4, "items": {"type": "integer", "minimum": 0}}
_BOXES_SCHEMA = {"type": "array", "minItems": 1, "items": _BOX_SCHEMA}


class BoxedBody(PoolingBody):
    """The common fields of endpoints whose inputs may be tokens with boxes on a page."""

    bbox: (
        Annotated[
            Any,
            PlainValidator(_check_boxes),
            WithJsonSchema({"anyOf": [_BOXES_SCHEMA, several({"anyOf": [_BOXES_SCHEMA, {"type": "null"}]})]}),
        ]
        | None
    ) = Field(
        None,
        description="For models that read boxes: the position of each token on its page, [left, upper, right, "
        "lower], for inputs of token ids. For several inputs, a list of these, with null for an input without "
        "boxes (all zeros).",
    )


class ActivatedBody(PoolingBody):
    """The common fields of endpoints that can return a head's raw numbers."""

    use_activation: bool | None = Field(
        None,
        description="Apply the activation of the model's config, which usually gives probabilities (true). Cosines do "
        "not change.",
    )
    activation: bool | None = Field(None, description="Older name of use_activation.")

    def activates(self) -> bool | None:
        """The activation switch, a field with two names. Raises ApiError if the two names have different values."""
        value: bool | None = either(self, "use_activation", "activation")
        return value


def either(body: BaseModel, name: str, other: str) -> Any:
    """The value of a field with two names. Raises ApiError if the two names have different values."""
    first, second = getattr(body, name), getattr(body, other)
    if first is not None and second is not None and first != second:
        message = f"{other} is another name of {name}, and the two contradict each other; send one."
        raise ApiError(400, message, param=other, code="invalid_value")
    return second if first is None else first


class PoolingUsage(BaseModel):
    """Tokens of all inputs, including special tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ListAnswer(BaseModel):
    """The fields of an answer beside its list of results."""

    id: str
    object: str = "list"
    created: int
    model: str
    usage: PoolingUsage


def check_each(inputs: list[Any], *, alone: bool) -> list[Any]:
    """Refuse too many inputs and empty inputs. `alone`: the input came by itself, not in a list. Raises
    PydanticCustomError: names the input."""
    if len(inputs) > MAX_INPUTS:
        raise PydanticCustomError("limit", f"may have at most {MAX_INPUTS} inputs, got {len(inputs)}")
    empty = next((place for place, item in enumerate(inputs) if item in ("", [])), None)
    if empty is not None:
        where = "" if alone else f": item {empty} is"
        raise PydanticCustomError("limit", f"must not be empty{where}")
    return inputs


class Image(str):
    """An image as sent: a data: URL, or base64."""

    __slots__ = ()


IMAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"image": TEXT_SCHEMA},
    "required": ["image"],
    "additionalProperties": False,
}
_OBJECT_SCHEMA = {"type": "object", "properties": {"text": TEXT_SCHEMA}, "required": ["text"]}


def read_image(item: dict[Any, Any]) -> Image | None:
    image = item.get("image")
    return Image(image) if isinstance(image, str) and set(item) == {"image"} else None


def _read_object(item: dict[Any, Any]) -> Image | str | None:
    """An object's image or text, in the form of Jina's embeddings."""
    text = item.get("text")
    return text if isinstance(text, str) and set(item) == {"text"} else read_image(item)


def _check_input(value: Any) -> list[str | Image | list[int]]:
    given = [value] if isinstance(value, str | dict) or is_ids(value) else value
    if isinstance(given, list) and given:
        inputs: list[Any] = [_read_object(item) if isinstance(item, dict) else item for item in given]
        check_each(inputs, alone=given is not value)
        if all(isinstance(item, str) or is_ids(item) for item in inputs):
            return inputs
    message = (
        'must be a string, an object such as {"text": "..."} or {"image": "data:..."}, a list of token ids, or a list '
        "of these, none empty"
    )
    raise PydanticCustomError("input", message)


_ITEMS = [TEXT_SCHEMA, _OBJECT_SCHEMA, IMAGE_SCHEMA, IDS_SCHEMA]
_INPUT_SCHEMA = {"anyOf": [*_ITEMS, several({"anyOf": _ITEMS})]}
Inputs = Annotated[Any, PlainValidator(_check_input), WithJsonSchema(_INPUT_SCHEMA)]
