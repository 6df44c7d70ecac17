"""What bodies share that hold texts and ask for scores of them."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_core import PydanticCustomError

from server.api.pooling_schemas import MAX_INPUTS, PoolingBody
from server.errors import ApiError

TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}


def several(item: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a list of such items."""
    return {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": item}


def check_each(inputs: list[Any], *, alone: bool) -> list[Any]:
    """Refuse too many inputs, and empty texts among them.

    Args:
        alone: the only input came by itself, not in a list.

    Raises:
        PydanticCustomError: says which.
    """
    if len(inputs) > MAX_INPUTS:
        raise PydanticCustomError("limit", f"may hold at most {MAX_INPUTS} inputs, got {len(inputs)}")
    if "" in inputs:
        where = "" if alone else f": item {inputs.index('')} is"
        raise PydanticCustomError("limit", f"must not be empty{where}")
    return inputs


class ActivatedBody(PoolingBody):
    """What the bodies of endpoints share that may ask for a head's own numbers."""

    use_activation: bool | None = Field(
        None,
        description="Make probabilities of the head's numbers, or what the model's config asks for (true). Changes no "
        "cosine.",
    )
    activation: bool | None = Field(None, description="The older name of use_activation.")

    def activates(self) -> bool | None:
        """What the two names say.

        Raises:
            ApiError: they contradict each other.
        """
        new, old = self.use_activation, self.activation
        if new is not None and old is not None and new != old:
            message = "activation is the older name of use_activation, and the two contradict each other; send one."
            raise ApiError(400, message, param="activation", code="invalid_value")
        return old if new is None else new
